"""Writes docs/commands.md from the table of commands in nkw/verbs.py.

python -m tools.command_page [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from nkw.verbs import MODEL_VERBS, SIMULATOR_VERBS, Verb

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"

_GUIDES = {
    "bench": "model/serving.md",
    "bundle": "bundle.md",
    "calibrate": "calibrate.md",
    "check": "checks.md",
    "compare": "bundle.md",
    "compile": "device.md",
    "doctor": "an-hour-on-the-chip.md",
    "explain": "checks.md",
    "fidelity": "../benchmarks/fidelity/README.md",
    "generate": "model/engine.md",
    "imagine": "diffusion.md",
    "peer": "device.md",
    "plan": "model/planning.md",
    "quantize": "quantize.md",
    "serve": "model/serving.md",
    "time": "profiles.md",
    "traffic": "model/planning.md",
    "transcribe": "model/engine.md",
    "tune": "tune.md",
    "verify": "verify.md",
}
"""The page in docs/ that says more about a command."""

_INTRODUCTION = """\
<!-- Written by `make docs` from nkw/verbs.py; edit that file. -->

# Commands

`nkw COMMAND --help` lists the options of a command with an example. Options cannot be abbreviated. Most commands write
their result as JSON with `--json FILE` ([fields](json.md)); [functions](python.md) return the same in Python.

A kernel by name is `MODULE:FUNCTION` or `FILE.py:FUNCTION`, followed by its arguments: `f32[128,512]` is an array of
random numbers, anything else a Python literal.

Every command ends with exit status 130 if it is interrupted and 143 if it is terminated.
"""


def write_page() -> str:
    """Return the content of docs/commands.md."""
    lines = [_INTRODUCTION, *_write_section("Models, servers and plans", MODEL_VERBS)]
    lines += ["", *_write_section("Kernels and chips", SIMULATOR_VERBS)]
    note = "`python -m simulate` has the commands of this table; it does not import the models."
    return "\n".join([*lines, "", note]) + "\n"


def _write_section(title: str, verbs: Mapping[str, Verb]) -> Iterator[str]:
    """Yield a heading and the Markdown table of some commands."""
    yield from (f"## {title}", "", "| command | meaning | example | exit status |", "|---|---|---|---|")
    for name, verb in verbs.items():
        yield _write_row(name, verb, verb.example)
        for second, second_verb in (verb.verbs or {}).items():
            yield _write_row(f"{name} {second}", second_verb, f"{name} {second_verb.example}")


def _write_row(name: str, verb: Verb, example: str) -> str:
    """Return the table row of a command; `example` is a command line that calls it."""
    guide = _GUIDES.get(name.split()[0])
    meaning = verb.sentence if guide is None else f"{verb.sentence} ([guide]({guide}))"
    return f"| `nkw {name}` | {meaning} | `nkw {example}` | {verb.ends} |"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(write_page(), encoding="utf-8")
