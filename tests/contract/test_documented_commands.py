"""Every command that a page shows exists with its options, and docs/commands.md lists all commands."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from nkw.commands import build_parser, load
from nkw.verbs import IS_MODEL, MODEL_BUNDLE, MODEL_VERBS, SIMULATOR_VERBS
from simulate.cli import _parse_options
from tools import command_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("*/*.md"),
        *ROOT.glob("docs/model/*.md"),
        *ROOT.glob("benchmarks/*/*.md"),
    ]
    if path.parts[-2] not in ("decisions", "instructions") and ".venv" not in path.parts
)
SHELLS = r"```(?:sh|bash)\n(.*?)```"
FOREIGN = {
    "aws",
    "curl",
    "docker",
    "export",
    "kubectl",
    "neuron-explorer",
    "neuron-profile",
    "pip",
    "ray",
    "set",
    "tar",
    "umask",
}
"""Programs of others, which need a network, a chip or a cluster. Their words are not checked."""


def read_commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command in the shell listings of a page, without comments and assignments."""
    for listing in re.findall(SHELLS, page, re.DOTALL):
        for line in re.sub(r"\$\(.*?\)", "OUTPUT", listing.replace("\\\n", " ")).splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words and not words[0].startswith("-"):
                yield words


COMMANDS = [
    pytest.param(words, id=f"{path.relative_to(ROOT).as_posix()}: {' '.join(words)[:60]}")
    for path in PAGES
    for words in read_commands(path.read_text(encoding="utf-8"))
]


def check_nkw(words: list[str]) -> None:
    """Parse the words after `nkw`; a wrong option or command ends in SystemExit."""
    if words[0] == "bundle" and load(IS_MODEL)(words[1:]):
        build_parser(words, {"bundle": MODEL_BUNDLE}).parse_args(words)
    elif words[0] in SIMULATOR_VERBS:
        _parse_options(words, "nkw")
    else:
        build_parser(words).parse_args(words)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_a_page_exists(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("script.py", "mine.py", "kernel.py", "doubled.py", "mine_test.py"):
        (tmp_path / name).write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    program, *arguments = words
    if program == "torchrun":
        arguments = arguments[arguments.index("-m") + 2 :]
        program = "nkw"
    if program == "nkw":
        check_nkw([word for word in arguments if word != "..."])
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in arguments)
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
    elif program == "python":
        assert (ROOT / arguments[0]).is_file() or arguments[0].endswith("/run.py")  # which a bundle has
    else:
        assert program in FOREIGN


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        (
            ["plan", "config.json", "--instances", "trn2.48xlarge"],
            ["plan", "config.json", "--instance", "trn2.48xlarge"],
        ),
        (["lint", "--no-such-option", "script.py"], ["lint", "script.py"]),
        (["bench", "server"], ["bench", "serve"]),
    ],
)
def test_a_wrong_command_is_noticed(words: list[str], accepted: list[str]) -> None:
    check_nkw(accepted)
    with pytest.raises(SystemExit):
        check_nkw(words)


def test_finds_the_commands_of_a_listing() -> None:
    page = "```sh\nA=1 nkw time x \\\n  --target trn2   # why\n\nmake test\n```\n"
    assert list(read_commands(page)) == [["nkw", "time", "x", "--target", "trn2"], ["make", "test"]]


def test_the_page_of_commands_is_up_to_date() -> None:
    page = command_page.PAGE.read_text(encoding="utf-8")
    assert page == command_page.write_page(), "run `make docs`"
    assert all(f"| `nkw {name}` |" in page for name in (*MODEL_VERBS, *SIMULATOR_VERBS))
