"""The examples in the help of commands, and the documents of `--json`, held against the tables of docs/json.md."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nkw.commands import main
from nkw.files import RUNNING
from nkw.verbs import SIMULATOR_VERBS
from tests.bundle.returns import bring_back
from tests.calibrate.measured import SMALL, entries
from tests.deep import deep_except
from tests.model.folders import write_folder
from tests.profile.device_profiles import write_profile
from tests.profile.test_profile_text import SCRIPT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"
SHARED = {"Launches of run, time, memory, check": ("run", "time", "memory", "check")}
SHARED["Findings of check, lint and verify"] = ("check", "lint", "verify")
SHARED["Sweeps of time and memory"] = ("time", "memory")
SHARED["Every command"] = tuple(SIMULATOR_VERBS)
SHARED["Outcomes of commands that run kernels"] = RUNNING
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}
PLACE = {"file", "line", "function"}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Write the files that the examples name into a new folder and make it the working folder."""
    (tmp_path / "script.py").write_text(SCRIPT)
    if "calibrate" in request.node.name:
        measurements = [*entries(SMALL, {"dma_completion_ns": 2.0}), {"family": "kernel"}]
        (tmp_path / "measured.json").write_text(json.dumps(measurements))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def documented() -> dict[str, dict[str, set[str]]]:
    """Return for each command its keys with their types."""
    keys_by_verb: dict[str, dict[str, set[str]]] = {verb: {} for verb in SIMULATOR_VERBS}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        head = section.split("\n")[0]
        rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE)
        assert rows, head
        for verb in SHARED.get(head, (head,)):
            keys_by_verb[verb] |= {key: set(types.split(" or ")) for key, types in rows}
    return keys_by_verb


def leaves(value: Any, key: str, known: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a document with their types, as the page writes them."""
    if known.get(key, set()) & {"place", "access"} and isinstance(value, dict):
        object_type = "place" if set(value) == PLACE else "access"
        yield key, object_type
    elif isinstance(value, dict):
        for name, member in value.items():
            inner = f"{key}.{name}".lstrip(".")
            yield from leaves(member, inner if f"{key}.*" not in known else f"{key}.*", known)
    elif isinstance(value, list):
        for element in value:
            yield from leaves(element, f"{key}[]", known)
    else:
        yield key, TYPES[type(value)]


def written(capsys: Capture, *words: str) -> tuple[int, dict[str, Any], str]:
    """Return status, document on stdout and stderr of a command with `--json -`."""
    status = main([words[0], "--json", "-", *words[1:]])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


DOCUMENTS = [verb for verb in SIMULATOR_VERBS if verb != "fidelity"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", DOCUMENTS)
def test_a_document_has_the_keys_and_types_of_the_page(
    verb: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nothing.json").write_text("{}")
    monkeypatch.setenv("NKW_HARDWARE", str(tmp_path / "nothing.json"))
    known = documented()[verb]
    words = shlex.split(SIMULATOR_VERBS[verb].example)
    seen: dict[str, set[str]] = {}
    runs = [words]
    if verb in ("check", "lint"):  # with findings
        (tmp_path / "wrong.py").write_text(WRONG)
        runs.append([verb, "wrong.py"])
    if verb == "verify":
        (tmp_path / "wrong.py").write_text(JUDGED_WRONG)
        runs += [[verb, f"wrong.py:{name}", "f32[128,64]"] for name in ("halved", "unread")]
    if verb == "time":
        runs.append([*words, "--against", *words[1:]])
        runs.append(["time", "nki_kernels.ladder:tile_by_tile", "bf16[512,512]", "bf16[512,1024]"])
        (tmp_path / "summary.json").write_text('{"total_time": 1e-6}')
        for profile in (str(write_profile(tmp_path / "profile")), "summary.json"):
            runs.append([verb, "script.py:doubled", "f32[128,64]", "--against", profile])
    if verb == "doctor":  # with something to mend
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
        monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    if verb == "compare":  # equal, and one that differs
        folder = words[1]
        assert main(shlex.split(SIMULATOR_VERBS["bundle"].example)) == 0
        bring_back(Path(folder))
        capsys.readouterr()
        differs = Path(shutil.copytree(folder, "differs"))
        np.save(differs / "result/values/matmul/output-0.npy", np.zeros((8, 8), np.float32))
        record = differs / "result" / "result.json"
        told = json.loads(record.read_text())
        told["environment"].update(packages={"nki": "0.6.0"}, instance="trn2.3xlarge")
        told.update(failures=[{"stage": "profile", "message": "no"}])
        write_profile(differs / "result" / "profiles" / "matmul")
        told["cases"][0].update(stage="time", profile="profiles/matmul")
        record.write_text(json.dumps(told))
        model = str(write_folder(tmp_path / "tiny", num_hidden_layers=1))
        assert main(["bundle", model, "--max-new-tokens", "1", "--out", "story"]) == 0
        bring_back(Path("story"))
        capsys.readouterr()
        runs += [[verb, str(differs)], [verb, "story"]]
    if verb == "bundle":  # with a kernel that is left out
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "examples.py").write_text(
            'EXAMPLES = {"one:doubled": ("f32[4,4]",), "one:two": ("f32[4,4]",)}\nRANKS = {"one:two": 2}\n'
        )
        (tmp_path / "kernels" / "one.py").write_text(SCRIPT)
        runs.append([verb, "kernels", "--catalogue", "--out", "kernels-trn2"])
    if verb == "tune":  # without buckets
        (tmp_path / "tunable.py").write_text(TUNABLE)
        runs.append([verb, "tunable.py:copied", "f32[128,64]", "--jobs", "1", "--reading", "program"])
    if verb in ("time", "memory"):
        swept = [verb, "script.py:doubled", "f32[128,N]", "--sweep"]
        runs += [[*swept, sizes] for sizes in ("N=64", "N=16384,65536", "N=64,65536")]
    for run in runs:
        status, document, _ = written(capsys, *run)
        assert status in (0, 1)
        assert (document["schema"], document["command"]) == (1, verb)
        for key, json_type in leaves(document, "", known):
            seen.setdefault(key, set()).add(json_type)
    unknown = seen.keys() - known.keys()
    assert not unknown
    for key, json_types in seen.items():
        if known[key] == {"value"}:
            assert json_types <= {"string", "boolean", "integer", "number"}
            continue
        assert all(
            json_type in known[key] or (json_type == "integer" and "number" in known[key])
            for json_type in json_types
        ), key
    empty = {"launches[].warnings[]", "findings[].callers[]", "tolerated[]"}  # lists without elements here
    empty.add("reason")  # of a document that is not complete
    if verb == "lint":  # source has no accesses
        empty.add("findings[].accesses[]")
    if verb == "calibrate":  # every kernel can be predicted
        empty |= {"chips[].skipped[].name", "chips[].skipped[].why"}
    assert known.keys() - seen.keys() <= empty


WRONG = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load(a)
    nisa.dma_copy(dst=out[0:64], src=tile[0:64])
    return out


@nki.jit
def generator(a):
    yield a


kernel(np.zeros((128, 64), np.float32))
"""


JUDGED_WRONG = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def halved(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0:64], src=nl.load(a)[0:64])
    return out


@nki.jit
def unread(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf))
    return out


def halved_reference(a):
    return a


unread_reference = halved_reference
"""


TUNABLE = """
import nki
import nki.isa as nisa
import nki.language as nl

PARAMETERS = (("columns", 64, (64, 32)),)


@nki.jit
def copied(a, tuning=None):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for first in range(0, 64, tuning["columns"]):
        end = first + tuning["columns"]
        nisa.dma_copy(dst=out[:, first:end], src=nl.load(a[:, first:end]))
    return out
"""


# `bundle` writes a new folder each time, `compare` reads one that has come back.
@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", deep_except([verb for verb in DOCUMENTS if verb not in ("bundle", "compare")], ("time", "check"))
)
def test_a_file_gets_what_stdout_gets_and_the_text_is_printed_as_without_it(
    verb: str, capsys: Capture, tmp_path: Path
) -> None:
    words = shlex.split(SIMULATOR_VERBS[verb].example)
    status = main(words)
    plain = capsys.readouterr()
    shown, document, err = written(capsys, *words)
    assert shown == status
    assert err.replace(plain.err, "", 1) == plain.out  # what stdout had
    assert main([verb, "--json", "out.json", *words[1:]]) == status
    assert capsys.readouterr() == plain
    assert json.loads((tmp_path / "out.json").read_text()) == document
    written_files = {"measured.json", "overlay.json"} if verb == "calibrate" else set()
    assert {path.name for path in tmp_path.iterdir()} == {"out.json", "script.py"} | written_files


@pytest.mark.parametrize("verb", DOCUMENTS)
def test_a_document_that_cannot_be_written_is_refused(verb: str, capsys: Capture, tmp_path: Path) -> None:
    words = shlex.split(SIMULATOR_VERBS[verb].example)
    path = tmp_path / "no" / "out.json"
    assert main([verb, "--json", str(path), *words[1:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"[NKW-JSON-PATH] the document cannot be written to {path}: No such file" in captured.err
    if "script.py" in words:
        assert main([verb, "--json", "script.py", *words[1:]]) == 2
        assert "this command reads that file" in capsys.readouterr().err
        assert (tmp_path / "script.py").read_text() == SCRIPT


def test_launches_of_a_script_that_fails_are_written(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{SCRIPT}\nprint('by the script')\nraise SystemExit(3)\n")
    with pytest.raises(SystemExit):
        main(["run", "--json", "-", "script.py"])
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["launches"]) == 1
    assert "by the script" in captured.err


def test_without_a_launch_the_lists_are_empty(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import nki\n")
    status, document, err = written(capsys, "time", "script.py")
    assert (status, document["launches"], document["profiles"]) == (0, [], [])
    assert err == "target trn2\nno kernel was launched\n"


@pytest.mark.parametrize("command", ["time", "memory", "check"])
def test_kernels_of_a_file_that_launches_nothing_are_named(
    command: str, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(WRONG.partition("\nkernel(np")[0])
    assert main([command, "script.py"]) == (0 if command == "time" else 2)
    assert capsys.readouterr().err.endswith(
        "no kernel was launched; script.py defines kernel and generator: call it there, or give script.py:kernel and "
        "its arguments\n"
    )


def test_the_example_of_fidelity_runs_in_a_checkout(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    words = shlex.split(SIMULATOR_VERBS["fidelity"].example)
    assert main(words) == 0
    table = capsys.readouterr().out
    assert main([*words, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.err == table
    assert {row["family"] for row in json.loads(captured.out)} == {"instr"}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "plan"])
def test_the_examples_of_the_model_run_and_print_a_document(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    with pytest.raises(SystemExit):
        main([command, "--help"])
    (example,) = re.findall(r"^  nkw (.*)$", capsys.readouterr().out, re.MULTILINE)
    words = shlex.split(example)
    assert words[0] == command
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json", "-"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == text
    assert (document["schema"], document["command"]) == ({"generate": 3, "plan": 1}[command], command)
    page = PAGE.parent / "model" / {"generate": "engine.md", "plan": "planning.md"}[command]
    section = page.read_text(encoding="utf-8").partition("\n## JSON\n")[2]
    assert [key for key in document if f"`{key}`" not in section] == []


RANKS = """
import numpy as np
import nki
import nki.collectives as ncc
from nki_kernels import all_reduce

given = np.ones((128, 64), np.float32)
print(all_reduce(given, ncc.ReplicaGroup([[0, 1]]))[0, 0])
"""


@pytest.mark.parametrize("command", ["run", "time", "memory", "check"])
def test_a_script_and_a_kernel_by_name_run_on_several_ranks(
    command: str, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    status, document, err = written(capsys, command, "--ranks", "2", "script.py")
    assert (status, document["launches"][0]["ranks"]) == (0, 2)
    assert "\n2.0\n" in err
    late = ["nki_kernels:all_reduce", "f32[128,64]", "group", "--ranks", "2"]
    status, document, _ = written(capsys, command, *late)
    assert (status, document["launches"][0]["ranks"], document["launches"][0]["cores"]) == (0, 2, 2)


def test_refuses_what_is_no_number_of_ranks(capsys: Capture) -> None:
    for text, status in (("0", 2), ("1", 0), ("1000", 2), ("-1", 2), ("two", 2)):
        try:
            got = main(["time", f"--ranks={text}", "script.py"])
        except SystemExit as left:
            got = left.code
        assert got == status, text
        assert (f"'{text}' is no number of ranks; give 1 to 999" in capsys.readouterr().err) == bool(status)
