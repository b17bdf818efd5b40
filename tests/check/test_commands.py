"""The commands check, lint, doctor and explain: exit status, formats, and switches for codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from simulate.cli import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    rows = {rows}
    nisa.dma_copy(dst=out[0:rows], src=nl.load(x)[0:rows])
    return out

kernel(np.ones((4, 4), np.float32))
"""


SHARED = """
@nki.jit
def clears(first, second):
    out = nl.ndarray((4, 4), dtype=first.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=nl.load(first))
    zeros = nl.ndarray((1, 4), dtype=first.dtype)
    nisa.memset(zeros, value=0)
    nisa.dma_copy(dst=second[0:1], src=zeros)
    return out, second

whole = np.ones((8, 4), np.float32)
clears(whole[0:4], whole[3:7])
"""


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def simulate(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command of `python -m simulate` in the folder with the scripts."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)

    def run(*arguments: str) -> Done:
        status = main(arguments)
        return Done(status, *capsys.readouterr())

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.py").write_text(SCRIPT.format(rows=4))
    (tmp_path / "half.py").write_text(SCRIPT.format(rows=3))
    (tmp_path / "past.py").write_text(SCRIPT.format(rows=5))
    (tmp_path / "raises.py").write_text("raise ValueError('no kernel here')\n")
    (tmp_path / "empty.py").write_text("")
    return tmp_path


def test_check_is_silent_on_a_healthy_script(simulate: Any) -> None:
    done = simulate("check", "good.py")
    assert (done.returncode, done.stdout) == (0, "0 errors, 0 warnings\n")


def test_check_reports_what_a_launch_leaves(simulate: Any) -> None:
    done = simulate("check", "half.py")
    assert done.returncode == 1
    assert done.stdout == (
        "warning[NKW-OUTPUT-PARTIAL] 16 of 64 bytes of the output out (4, 4) float32 were never written\n"
        "  rank 0 core 0 #1 dma_copy writes out rows 0:3 bytes 0:16 of shared_hbm at half.py:10 in kernel\n"
        "  out was allocated at half.py:8 in kernel\n"
        "  try: write the rest, often the last, ragged tile\n"
        "  at half.py:8 in kernel\n"
        "0 errors, 1 warning\n"
    )


def test_check_and_memory_take_a_kernel_by_name_with_shapes(simulate: Any, folder: Path) -> None:
    for name, rows in (("whole", 4), ("part", 3)):
        kernel = SCRIPT.format(rows=rows).rpartition("kernel(np")[0]  # the script without its launch
        (folder / f"{name}.py").write_text(kernel)
    assert simulate("check", "whole.py:kernel", "f32[4,4]").returncode == 0
    partial = simulate("check", "part.py:kernel", "f32[4,4]")
    assert partial.returncode == 1 and "NKW-OUTPUT-PARTIAL" in partial.stdout
    refused = simulate("check", "whole.py:nothing", "f32[4,4]")
    assert refused.returncode == 2 and "whole.py has no kernel nothing" in refused.stderr
    assert "SBUF: fits" in simulate("memory", "whole.py:kernel", "f32[4,4]").stdout


def test_orders_and_seeds_are_tried_on_every_launch(simulate: Any, folder: Path) -> None:
    done = simulate("check", "--orders", "3", "--seeds", "3", "good.py")
    assert (done.returncode, done.stdout) == (0, "0 errors, 0 warnings\n")
    (folder / "shared.py").write_text(SCRIPT.format(rows=4) + SHARED)
    assert simulate("check", "shared.py").returncode == 0
    done = simulate("check", "--orders", "3", "shared.py")
    assert done.returncode == 1
    assert (
        "legal order 1 of 3 changes 8 bytes of out (4, 4) float32 of rank 0, the first in row 3"
        in done.stdout
    )
    assert simulate("check", "--orders", "3", "shared.py") == done


@pytest.mark.parametrize("count", ["-1", "many"])
def test_a_count_of_orders_that_is_none_is_refused(simulate: Any, count: str) -> None:
    with pytest.raises(SystemExit) as end:
        simulate("check", "--orders", count, "good.py")
    assert end.value.code == 2


def test_check_reports_what_stops_a_launch(simulate: Any) -> None:
    done = simulate("check", "--format", "json", "past.py")
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["code"], finding["severity"]) == ("NKW-INDEX", "error")
    assert finding["where"] == {"file": "past.py", "line": 10, "function": "kernel"}


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ("empty.py", 2, "no kernel was launched"),
        ("missing.py", 2, "missing.py is not a file"),
        ("raises.py", 3, "raises.py failed before its end: ValueError"),
    ],
)
def test_check_tells_its_own_failure_from_the_script_s(
    simulate: Any, script: str, status: int, message: str
) -> None:
    done = simulate("check", script)
    assert (done.returncode, done.stdout) == (status, "")
    assert f"error: {message}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("raise GeneratorExit", 3, "error: it.py failed before its end: GeneratorExit\n"),
        ("raise BaseException('x')", 3, "error: it.py failed before its end: BaseException: x\n"),
        ("import sys\nsys.stdout.close()", 2, "error: no kernel was launched\n"),
        ("import sys\nsys.__stdout__.close()", 2, "error: no kernel was launched\n"),
        ("import os\nos.close(1)", 2, "error: no kernel was launched\n"),
        ("import os\nos.close(2)", 2, ""),
        ("import os\nos.close(1)\nos.close(2)", 2, ""),
        ("import sys\nsys.path = None", 2, "error: no kernel was launched\n"),
    ],
)
def test_a_script_that_takes_its_process_apart_is_no_finding(
    tmp_path: Path, source: str, status: int, message: str
) -> None:
    (tmp_path / "it.py").write_text(source + "\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "simulate", "check", "it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(message) and "simulate/" not in done.stderr


@pytest.mark.parametrize("source", ["def f(:", "x = " + "(" * 3000 + "1" + ")" * 3000, "x = 'a"])
def test_a_script_that_does_not_parse_shows_no_frames(simulate: Any, folder: Path, source: str) -> None:
    (folder / "unparsed.py").write_text(source + "\n")
    done = simulate("check", "unparsed.py")
    assert done.returncode == 3
    assert 'File "unparsed.py", line 1' in done.stderr
    assert "runpy" not in done.stderr and "commands.py" not in done.stderr


@pytest.mark.parametrize(("rows", "reported"), [(4, "0 warnings"), (3, "NKW-OUTPUT-PARTIAL")])
@pytest.mark.parametrize(
    ("end", "message"), [("1 / 0", "ZeroDivisionError: division by zero"), ("exit(7)", "it exited with 7")]
)
def test_launches_before_a_script_fails_are_reported(
    simulate: Any, folder: Path, rows: int, reported: str, end: str, message: str
) -> None:
    (folder / "fails.py").write_text(SCRIPT.format(rows=rows) + f"\n{end}\n")
    done = simulate("check", "fails.py")
    assert done.returncode == 3
    assert reported in done.stdout
    assert f"error: fails.py failed before its end: {message}\n" in done.stderr


@pytest.mark.parametrize(
    ("line", "message", "status"),
    [("for _ in nl.dynamic_range(1): pass", "error[NKI044]", 1), ("a = TABLE", "warning[NKI031]", 0)],
)
@pytest.mark.parametrize("launched", [True, False])
def test_check_lints_the_functions_that_issued_instructions(
    simulate: Any, folder: Path, line: str, message: str, status: int, launched: bool
) -> None:
    helper = f"TABLE = []\n\ndef helper(tile):\n    {line}\n    nisa.memset(tile, value=2)\n"
    kernel = SCRIPT.format(rows=4).replace("@nki.jit", f"{helper}\n@nki.jit")
    call = f"    if {launched}:\n        helper(nl.ndarray((4, 4), dtype=nl.int32))\n    return out"
    (folder / "fills.py").write_text(kernel.replace("    return out", call))
    done = simulate("check", "fills.py")
    assert done.returncode == (status if launched else 0)
    assert (message in done.stdout) == launched


def test_what_a_script_prints_is_not_mixed_with_the_report(simulate: Any, folder: Path) -> None:
    (folder / "prints.py").write_text("print('hello')\n" + SCRIPT.format(rows=4) + "\nraise SystemExit(0)\n")
    done = simulate("check", "--format", "json", "prints.py")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"findings": []})
    assert "hello" in done.stderr


def test_codes_can_be_left_out_and_raised(simulate: Any) -> None:
    assert simulate("check", "--ignore", "NKW-OUTPUT-PARTIAL", "half.py").returncode == 0
    for option, raised in (("--as-error", "NKW-OUTPUT-PARTIAL"), ("--as-error", "all"), ("--error", "ALL")):
        done = simulate("check", option, raised, "half.py")
        assert done.stdout.endswith("1 error, 0 warnings\n")


HELPED = """import nki.isa as nisa, nki.language as nl, numpy as np, nki

def narrowed(tile):
    small = nl.ndarray(tile.shape, dtype=nl.float8_e4m3)
    cast(small, tile)
    return small

def cast(dst, src):
    nisa.tensor_copy(dst=dst, src=src)

@nki.jit
def kernel(x):
    small = narrowed(nl.load(x))
    out = nl.ndarray(x.shape, dtype=small.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=small)
    return out

kernel(np.full((4, 8), 1000, np.float32))
"""


def test_a_finding_in_a_helper_names_the_callers_and_the_allocation(simulate: Any, folder: Path) -> None:
    (folder / "helped.py").write_text(HELPED)
    lines = simulate("check", "helped.py").stdout.splitlines()
    assert "  small was allocated at helped.py:4 in narrowed" in lines
    assert lines[lines.index("  at helped.py:9 in cast") :][:3] == [
        "  at helped.py:9 in cast",
        "  called at helped.py:5 in narrowed",
        "  called at helped.py:13 in kernel",
    ]
    (finding,) = json.loads(simulate("check", "--format", "json", "helped.py").stdout)["findings"]
    above = [(caller["line"], caller["function"]) for caller in finding["callers"]]
    assert above == [(5, "narrowed"), (13, "kernel")]
    (access,) = finding["accesses"]
    assert access["allocated"] == {"file": "helped.py", "line": 4, "function": "narrowed"}
    assert access["callers"] == finding["callers"]
    ((run,),) = [json.loads(simulate("check", "--format", "sarif", "helped.py").stdout)["runs"]]
    related = run["results"][0]["relatedLocations"]
    lines_named = [location["physicalLocation"]["region"]["startLine"] for location in related]
    assert lines_named == [9, 4, 5, 13]
    assert related[1]["message"]["text"] == "small was allocated here"


def test_an_output_allocated_in_a_helper_names_its_callers(simulate: Any, folder: Path) -> None:
    allocation = 'nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")'
    helper = f"def made(x):\n    return {allocation}\n\n@nki.jit"
    script = SCRIPT.format(rows=3).replace(allocation, "made(x)").replace("@nki.jit", helper)
    (folder / "made.py").write_text(script)
    assert simulate("check", "made.py").stdout.splitlines()[-3:-1] == [
        "  at made.py:7 in made",
        "  called at made.py:11 in kernel",
    ]


def test_sarif_names_rules_and_places(simulate: Any) -> None:
    done = simulate("check", "--format", "sarif", "half.py")
    (run,) = json.loads(done.stdout)["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["NKW-OUTPUT-PARTIAL"]
    (result,) = run["results"]
    location = result["locations"][0]["physicalLocation"]
    assert (location["artifactLocation"]["uri"], location["region"]["startLine"]) == ("half.py", 8)
    assert result["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 10


def test_lint_reads_a_file_or_a_folder(simulate: Any, folder: Path) -> None:
    (folder / "bad.py").write_text(
        "import nki.language as nl\n\ndef k(x):\n    return nl.load(x, mask=None)\n"
    )
    assert simulate("lint", "good.py").returncode == 0
    assert simulate("lint", "bad.py").returncode == 1
    done = simulate("lint", ".", "--level", "0.7")
    assert done.returncode == 1
    assert "error[NKI021] nl.load(mask=…)" in done.stdout
    assert simulate("lint", "missing.py").returncode == 2


def test_lint_of_a_folder_reports_a_file_that_is_no_python_and_goes_on(simulate: Any, folder: Path) -> None:
    (folder / "helper.py").write_text(
        "import nki\nimport nki.language as nl\n\n@nki.jit\ndef helper(x):\n    t = nl.load(x)\n    nl.store(x, t)\n"
    )
    assert simulate("lint", "helper.py").returncode == 1
    (folder / "user.py").write_text(
        "import nki.language as nl\n\ndef k(x):\n    helper(nl.load(x))\n    return x\n"
    )
    assert simulate("lint", ".").returncode == 0  # the kernel is another file's helper
    (folder / "broken.py").write_text("def k(:\n")
    assert simulate("lint", "broken.py").returncode == 2
    done = simulate("lint", ".")
    assert done.returncode == 1 and "error[NKW-LINT-SYNTAX]" in done.stdout and "1 error" in done.stdout


def test_doctor_finds_a_working_simulator(simulate: Any) -> None:
    done = simulate("doctor")
    assert done.returncode == 0
    assert "a small kernel ran and returned the right answer" in done.stdout


@pytest.mark.parametrize(("files", "seen"), [(1, "a placeholder that cannot be used"), (9, "0.0.1\n")])
def test_doctor_tells_a_placeholder_by_its_metadata(
    simulate: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, files: int, seen: str
) -> None:
    about = folder / "site" / "neuronx_cc-0.0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: neuronx-cc\nVersion: 0.0.1\n")
    (about / "RECORD").write_text("".join(f"neuronxcc/part{i}.py,,\n" for i in range(files)))
    monkeypatch.syspath_prepend(str(folder / "site"))
    (line,) = [
        line_of_doctor
        for line_of_doctor in simulate("doctor").stdout.splitlines(True)
        if line_of_doctor.startswith("neuronx-cc")
    ]
    assert seen in line


@pytest.mark.parametrize("code", ["NKW-RACE", "nki019", "NKW-UNWRITTEN"])
def test_explain_knows_findings_lint_and_rules(simulate: Any, code: str) -> None:
    done = simulate("explain", code)
    assert done.returncode == 0
    assert done.stdout.startswith(code.upper())
    assert simulate("explain", code + "X").returncode == 2


STUCK = """
try:
    waits[2](np.ones((4, 4), np.float32))
except Exception as error:
    print("went on without", type(error).__name__)
"""

WAITS = """
@nki.jit
def waits(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    if nl.program_id(0) == 0:
        nisa.core_barrier(data=out, cores=(0, 1))
    nisa.dma_copy(dst=out, src=nl.load(x))
    return out
"""


def test_a_refused_launch_is_found_even_if_the_script_goes_on(simulate: Any, folder: Path) -> None:
    (folder / "stuck.py").write_text(SCRIPT.format(rows=4) + WAITS + STUCK)
    before = threading.active_count()
    done = simulate("check", "--format", "json", "stuck.py")
    assert done.returncode == 1
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["NKW-DEADLOCK"]
    assert "went on without Deadlock" in done.stderr
    assert threading.active_count() == before


def test_a_script_that_is_not_there_is_said_once(simulate: Any) -> None:
    assert simulate("check", "missing.py").stderr == "error: missing.py is not a file\n"


@pytest.mark.parametrize("command", ["check", "lint"])
def test_a_report_that_cannot_be_written_is_no_finding(
    simulate: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert simulate(command, "good.py").returncode == 2


def test_sarif_writes_file_names_as_uris(simulate: Any, folder: Path) -> None:
    (folder / "two words ü.py").write_text(SCRIPT.format(rows=3))
    (run,) = json.loads(simulate("check", "--format", "sarif", "two words ü.py").stdout)["runs"]
    (result,) = run["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "two%20words%20%C3%BC.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NKI_BACKEND", "bogus", "known are auto, simulate, neuron"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9", "trn1"),
    ],
)
def test_doctor_says_what_the_environment_asks_for_in_vain(
    simulate: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    healthy = simulate("doctor")
    assert healthy.returncode == 0
    assert "import nki     simulate\ntarget         trn2\n" in healthy.stdout
    monkeypatch.setenv(variable, value)
    done = simulate("doctor")
    assert done.returncode == 1
    assert message in done.stdout


@pytest.mark.parametrize(
    ("command", "statuses"),
    [("check", "0123"), ("lint", "012"), ("verify", "0123"), ("time", "123"), ("run", "123")],
)
def test_help_says_what_exit_statuses_mean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, statuses: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    statuses_text, _, ended = " ".join(text.rpartition("Exit status: ")[2].split()).partition("; 130")
    assert ended.split() == "interrupted, 143 terminated.".split()
    assert [mark for mark in statuses_text if mark.isdigit()] == list(statuses)


AFFINE = """import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray(x.shape[1:], dtype=x.dtype, buffer=nl.sbuf)
    for block in nl.affine_range(2):
        nisa.dma_copy(dst=tile, src=x[block])
        nisa.dma_copy(dst=out[block], src=tile)
    return out

kernel(np.arange(32, dtype=np.float32).reshape(2, 4, 4))
"""


def test_a_warning_that_right_kernels_get_leaves_the_status_alone(simulate: Any, folder: Path) -> None:
    (folder / "affine.py").write_text(AFFINE)
    done = simulate("check", "affine.py")
    assert "NKW-AFFINE-CARRIED" in done.stdout and done.returncode == 0
    assert simulate("check", "--as-error", "NKW-AFFINE-CARRIED", "affine.py").returncode == 1
