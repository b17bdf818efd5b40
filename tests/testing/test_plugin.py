"""The pytest plugin, seen from test suites that use it.

Most suites run in this process, which has loaded what they use: pytester takes modules back that a suite loads first,
and a second copy of a module with rules would register them twice.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nki.collectives
import nki.isa  # noqa: F401
import pytest

import simulate.occupancy
import simulate.testing
import simulate.timing  # noqa: F401

pytest_plugins = ("pytester",)

ROOT = Path(__file__).resolve().parents[2]

KERNELS = """
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

X = np.arange(12, dtype=np.float32).reshape(3, 4)

@nki.jit
def doubled(x, rows=3, factor=2.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out[0:rows], src=tile[0:rows])
    return out

def reference(x, *_):
    return 2 * x
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a suite with `nki` bound to the simulator, in this process or in one of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    pytester.makeconftest("import simulate\nsimulate.install('simulate')\n")

    def run(tests: str, *options: str, apart: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_suite=KERNELS + tests)
        how = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        return how("-p", "simulate.pytest_plugin", "--basetemp=base", *options)

    return run


def test_a_right_kernel_passes_on_every_marked_target(suite) -> None:
    tests = """
@pytest.mark.nki_targets("trn1", "inf2", "trn2", "trn3")
def test_doubled(check_kernel, nki_target):
    checked = check_kernel(doubled, reference, X)
    assert checked.launches[0].hardware.name == nki_target
    assert checked.output.tolist() == (2 * X).tolist()
    assert X[0, 1] == 1
"""
    suite(tests, "-v").stdout.fnmatch_lines(
        [f"*test_doubled?{t}? PASSED*" for t in ("trn1", "inf2", "trn2", "trn3")]
    )


def test_the_target_of_the_command_line_goes_before_the_environment_and_the_default(
    suite, monkeypatch
) -> None:
    tests = """
def test_doubled(check_kernel):
    check_kernel(doubled, reference, X)
"""
    suite(tests, "-v").stdout.fnmatch_lines(["*test_doubled?trn2? PASSED*"])
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    suite(tests, "-v").stdout.fnmatch_lines(["*test_doubled?trn3? PASSED*"])
    done = suite(tests, "-v", "--nki-target", "trn1,inf2")
    done.stdout.fnmatch_lines(["*test_doubled?trn1? PASSED*", "*test_doubled?inf2? PASSED*"])


def test_the_command_line_leaves_out_targets_of_a_marker(suite) -> None:
    tests = """
@pytest.mark.nki_targets("trn1", "trn2")
def test_doubled(check_kernel):
    check_kernel(doubled, reference, X)
"""
    suite(tests, "--nki-target", "trn2").assert_outcomes(passed=1)
    done = suite(tests, "--nki-target", "trn3", "-rs")
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["*for trn1, trn2, not for --nki-target trn3*"])


@pytest.mark.parametrize(
    "options", [("--nki-target", "trn9"), ("-o", "nki_target=trn9"), ("-o", "nki_check=some")]
)
def test_unknown_names_are_refused(suite, options: tuple[str, ...]) -> None:
    done = suite("", *options)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*known are *"])


def test_a_wrong_answer_leaves_files_and_says_where(suite, pytester: pytest.Pytester) -> None:
    tests = """
def test_tripled(check_kernel):
    check_kernel(doubled, reference, X, 3, 3.0)
"""
    done = suite(tests)
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        ["*rank 0 output 0: error 11, allowed *; worst at (2, 3): 33 for 22; 11 of 12 elements*"]
    )
    (named,) = set(re.findall(r"artefacts: (\S+)", done.stdout.str()))
    folder = Path(named)
    assert folder.parent == pytester.path / "base"
    assert {file.name for file in folder.iterdir()} == {
        "report.txt",
        "arrays.npz",
        "stream.txt",
        "memory.txt",
        "memory.svg",
        "trace.json",
    }
    assert "worst at (2, 3)" in (folder / "report.txt").read_text()
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "tensor_scalar" in (folder / "stream.txt").read_text()


def test_a_refused_launch_leaves_its_stream_up_to_there(suite) -> None:
    tests = """
import nki.collectives as ncc

@nki.jit
def stops(x, group):
    tile = nl.load(x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    sums = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=total, src=tile)
    if group:
        ncc.all_reduce(srcs=[total], dsts=[sums], replica_group=group, op=nl.add)
    unwritten = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=total, src=unwritten)
    return total

def test_one(check_kernel):
    check_kernel(stops, reference, X, None)

def test_first_rank_waits_for_one_that_was_refused(check_kernel):
    group = ncc.ReplicaGroup([[0, 1]])
    check_kernel.ranks(stops, reference, [(X, group), (X, None)])
"""
    done = suite(tests)
    done.assert_outcomes(failed=2)
    folders = re.findall(r"artefacts: (\S+)", done.stdout.str())
    assert len(set(folders)) == 2
    for folder in map(Path, dict.fromkeys(folders)):
        assert "NKW-UNWRITTEN" in (folder / "report.txt").read_text()
        stream = (folder / "stream.txt").read_text()
        assert stream.startswith("# stops #0 rank 0 core 0 on ")
        assert stream.count("dma_copy") == (4 if "rank 1" in stream else 2)  # the refused one has no event
        assert "sbuf" in (folder / "memory.txt").read_text().lower()
        assert {"trace.json", "trace.txt"} & {file.name for file in folder.iterdir()}


@pytest.mark.slow
def test_a_finding_fails_unless_it_is_allowed_or_nobody_looks(suite) -> None:
    tests = """
@pytest.mark.parametrize("allow", [(), ("nkw-output-partial",)])
def test_part(check_kernel, allow):
    checked = check_kernel(doubled, lambda x, rows: np.zeros((3, 4)), np.zeros((3, 4), np.float32), 2, allow=allow)
    assert [finding.code for finding in checked.findings] == ["NKW-OUTPUT-PARTIAL"]
"""
    done = suite(tests)
    assert done.parseoutcomes()["failed"] >= 1
    done.stdout.fnmatch_lines(["*warning?NKW-OUTPUT-PARTIAL? 16 of 48 bytes*", "*artefacts: *"])
    looked_away = """
def test_part(check_kernel):
    check_kernel(doubled, lambda x, rows: np.concatenate([2 * x[:2], got[2:]]), X, 2)

got = np.zeros((3, 4))
"""
    assert "NKW-OUTPUT-PARTIAL" not in suite(looked_away, "--nki-check", "off").stdout.str()


def test_a_broken_rule_is_reported_with_its_line_and_files(suite, pytester: pytest.Pytester) -> None:
    tests = """
def test_past_the_end(check_kernel):
    check_kernel(doubled, reference, X, 4)
"""
    done = suite(tests, "--nki-artifacts", "kept")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*NKW-INDEX*", "*at *test_suite.py:*in doubled*"])
    (findings,) = (pytester.path / "kept").glob("*/findings.json")
    assert json.loads(findings.read_text())["findings"][0]["code"] == "NKW-INDEX"
    suite(tests, "--nki-artifacts", "kept")
    assert len(list((pytester.path / "kept").iterdir())) == 2


@pytest.mark.parametrize("who", ["kernel", "reference"])
def test_a_kernel_or_reference_that_ends_the_program_fails_its_test_alone(suite, who: str) -> None:
    tests = """
import sys

def leaves(x):
    sys.exit(0)

def test_leaves(check_kernel):
    check_kernel({}, X)

def test_doubled(check_kernel):
    check_kernel(doubled, reference, X)
"""
    done = suite(tests.format("nki.jit(leaves), reference" if who == "kernel" else "doubled, leaves"))
    done.assert_outcomes(failed=1, passed=1)
    done.stdout.fnmatch_lines(["*NKW-EXIT*called sys.exit(0) before it returned*"])


def test_check_all_tries_other_orders(suite) -> None:
    tests = """
@nki.jit
def clears(first, second):
    out = nl.ndarray(first.shape, dtype=first.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=nl.load(first))
    nisa.memset(zeros := nl.ndarray((1, 4), dtype=first.dtype), value=0)
    nisa.dma_copy(dst=second[0:1], src=zeros)
    return out

@nki.jit
def unordered(x):
    core = nl.program_id(0)
    out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.memset(tile := nl.ndarray((4, 4), dtype=nl.float32), value=core + 1.0)
    nisa.dma_copy(dst=out, src=tile)
    return out

def test_races(check_kernel):
    check_kernel(unordered, lambda x: np.full((4, 4), 2.0), X, cores=2, allow=["NKW-RACE", "NKW-CONSTANT-OUTPUT"])
"""
    codes = set(re.findall(r"(?:error|warning)\[([A-Z0-9-]+)\]", suite(tests).stdout.str()))
    done = suite(tests, "--nki-check", "all")
    done.assert_outcomes(failed=1)
    all_codes = set(re.findall(r"(?:error|warning)\[([A-Z0-9-]+)\]", done.stdout.str()))
    assert all_codes - codes == {"NKW-ORDER", "NKW-CORE-SCHEDULE"}


def test_ranks_are_compared_one_by_one(suite) -> None:
    tests = """
import nki.collectives as ncc

@nki.jit
def summed(x, group):
    inside, total = (
        nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name=name) for name in ("inside", "total")
    )
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=inside, src=x)
    ncc.all_reduce(srcs=[inside], dsts=[total], replica_group=group, op=nl.add)
    nisa.dma_copy(dst=out, src=total)
    return out

GROUP = ncc.ReplicaGroup([[0, 1, 2]])

def totals(given):
    total = sum(x for x, _ in given)
    return [total] * len(given)

def test_sum(check_kernel):
    checked = check_kernel.ranks(summed, totals, [(X + rank / 3, GROUP) for rank in range(3)], contraction=3)
    assert len(checked.outputs) == len(checked.comparisons) == 3

def test_wrong_sum(check_kernel):
    check_kernel.ranks(summed, lambda given: [given[0][0]] * 3, [(X, GROUP)] * 3)
"""
    done = suite(tests)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*rank 0 output 0: error 22*"])


@pytest.mark.slow
def test_a_backend_that_is_not_there_stops_the_run(suite, pytester: pytest.Pytester) -> None:
    (pytester.path / "conftest.py").unlink()
    done = suite("", "--nki-backend", "neuron", apart=True)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*no usable nki package is installed*"])


@pytest.mark.slow
def test_the_backend_option_stands_in_for_a_conftest(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tests = """
def test_doubled(check_kernel):
    check_kernel(doubled, reference, X)
"""
    pytester.makepyfile(test_suite=KERNELS + tests)
    done = pytester.runpytest_subprocess("-p", "simulate.pytest_plugin", "--nki-backend", "simulate")
    done.assert_outcomes(passed=1)


_UNWRITTEN = """
@nki.jit
def empty(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.ndarray(x.shape, dtype=x.dtype))
    return out

def test_empty(check_kernel):
    check_kernel(empty, lambda x: np.full_like(x, 4), X.astype(np.int32))

def test_version():
    assert nki.__version__ == LEVEL
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::simulate.run.launcher.ToleratedRule")
def test_level_and_rules_are_options_and_entries_of_the_configuration(suite, pytester, monkeypatch) -> None:
    monkeypatch.delenv("NKI_LEVEL", raising=False)
    monkeypatch.delenv("NKI_RULES", raising=False)
    newest = "\nLEVEL = '0.7.0'\n" + _UNWRITTEN
    suite(newest).assert_outcomes(passed=1, failed=1)
    suite(newest, "--nki-rules", "simulator").assert_outcomes(passed=2)
    older = newest.replace("0.7.0", "0.5.0")
    suite(older, "--nki-rules", "simulator", "--nki-level", "0.5").assert_outcomes(passed=2)
    pytester.makeini("[pytest]\nnki_level = 0.5\nnki_rules = simulator\n")
    suite(older).assert_outcomes(passed=2)
    assert "NKI_LEVEL" not in os.environ and "NKI_RULES" not in os.environ
    done = suite(older, "--nki-level", "9")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*NKI_LEVEL is '9'; known are 0.2*"])


def test_a_suite_without_kernels_loads_neither_numpy_nor_the_simulator(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Of the plugins of this environment, only ours: others may load numpy or hypothesis.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
import sys

def test_plain():
    assert "simulate.pytest_plugin" in sys.modules
    loaded = {name for name in sys.modules if name.startswith(("simulate", "nkw"))}
    assert loaded == {"simulate", "simulate.pytest_plugin", "nkw", "nkw.targets"}
    assert "numpy" not in sys.modules
    assert "hypothesis" not in sys.modules
"""
    )
    done = pytester.runpytest_subprocess("-p", "simulate.pytest_plugin", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=1)


def test_the_marker_is_registered(suite) -> None:
    suite("", "--markers").stdout.fnmatch_lines(["@pytest.mark.nki_targets(*targets)*"])


def test_the_entry_point_names_the_module_that_options_name() -> None:
    """With -p and installed, pytest would else refuse to register one module under two names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "[project.entry-points.pytest11]" in text
    assert '"simulate.pytest_plugin" = "simulate.pytest_plugin"' in text


def test_importing_the_package_imports_nothing() -> None:
    program = "import sys, simulate; print([n for n in sys.modules if n.partition('.')[0] in ('simulate', 'numpy')])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['simulate']\n"
