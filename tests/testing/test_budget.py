"""Budgets: what they refuse, where they bite, and what a failed one says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
import simulate.timing
from nkw.errors import InvalidArgument
from simulate.hardware import TARGETS
from simulate.testing import Budget, BudgetChecker, BudgetExceeded, Predicted

pytest_plugins = ("pytester",)

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 96
X = np.zeros((128, COLUMNS), np.float32)
HBM_BYTES = 2 * 128 * COLUMNS * 4  # read once, written once
SBUF_BYTES = COLUMNS * 4  # one tile


@nki.jit
def doubled(x, factor=2.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def summed(x, group):
    inside, total = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm) for _ in range(2))
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=inside, src=x)
    ncc.all_reduce(srcs=[inside], dsts=[total], replica_group=group, op=nl.add)
    nisa.dma_copy(dst=out, src=total)
    return out


def predict_within(**limits: Any) -> Predicted:
    return BudgetChecker(Budget(**limits), "trn2")(doubled, X)


def test_what_is_predicted_is_what_the_kernel_moves_and_holds() -> None:
    predicted = predict_within(time_us=1e6)
    assert (predicted.hbm_bytes, predicted.sbuf_bytes) == (HBM_BYTES, SBUF_BYTES)
    launch = simulate.World("trn2").launch(doubled, [((X,), {})], simulate.Mode.dry)
    assert predicted.time_us * 1000 == simulate.timing.schedule(launch.streams, launch.hardware).length_ns


@pytest.mark.parametrize("name", ["time_us", "hbm_bytes", "sbuf_bytes"])
def test_a_budget_holds_at_the_prediction_and_above_and_not_below(name: str) -> None:
    limit = getattr(predict_within(hbm_bytes=HBM_BYTES), name)
    more, less = (
        (np.nextafter(limit, np.inf), np.nextafter(limit, 0.0))
        if name == "time_us"
        else (limit + 1, limit - 1)
    )
    predict_within(**{name: limit})
    predict_within(**{name: float(more) if name == "time_us" else more})
    with pytest.raises(BudgetExceeded) as failure:
        predict_within(**{name: float(less) if name == "time_us" else less})
    assert failure.value.folder is None


def test_the_report_says_what_was_predicted_by_how_much_and_where_it_goes() -> None:
    predicted = predict_within(hbm_bytes=HBM_BYTES)
    with pytest.raises(BudgetExceeded) as failure:
        predict_within(time_us=1.0, hbm_bytes=HBM_BYTES - 8, sbuf_bytes=SBUF_BYTES // 2)
    lines = str(failure.value).splitlines()
    over = predicted.time_us - 1
    assert lines[0] == "doubled on trn2 exceeds its budget (program reading)"
    assert lines[1] == (
        f"  time: {predicted.time_us:.3f} us, budget 1: {over:.3g} us too many ({100 * over:.1f} %)"
    )
    assert lines[2] == "  HBM traffic: 98,304 bytes, budget 98,296: 8 too many (0.0 %)"
    assert lines[3] == "  SBUF: 384 bytes per partition, budget 192: 192 too many (100.0 %)"
    details = "\n".join(lines[4:])
    assert re.search(r"critical path, by line .*\n(?:.*\n)*dma_copy .*test_budget\.py:\d+", details)
    assert re.search(r"HBM tensor .*\nout .*\nx ", details)
    assert re.search(
        r"live at the peak of SBUF .*\ntile \(128, 96\) float32 +384 +1\n.*test_budget\.py", details
    )


def test_a_limit_that_holds_is_not_reported() -> None:
    with pytest.raises(BudgetExceeded) as failure:
        predict_within(time_us=1e6, hbm_bytes=0, sbuf_bytes=SBUF_BYTES)
    assert "time:" not in str(failure.value) and "SBUF" not in str(failure.value)
    assert "98,304 bytes, budget 0: 98,304 too many\n" in str(failure.value)


def test_the_reading_and_the_target_decide_the_time() -> None:
    serial, dataflow = (
        predict_within(hbm_bytes=HBM_BYTES, reading=reading) for reading in ("serial", "dataflow")
    )
    assert dataflow.time_us < serial.time_us
    names = {
        predict_within(hbm_bytes=HBM_BYTES, target=name).launch.hardware.name for name in ("trn1", "trn3")
    }
    assert names == {"trn1", "trn3"}


def test_ranks_share_the_traffic_and_not_the_memory() -> None:
    group = ncc.ReplicaGroup([[0, 1]])
    checker = BudgetChecker(Budget(sbuf_bytes=0), "trn2")
    both = checker.ranks(summed, [(X, group)] * 2)
    assert both.hbm_bytes == 2 * 6 * X.nbytes  # two copies and a sum, read and written, on two ranks
    assert both.sbuf_bytes == 0


@nki.jit
def repeated(x, n):
    def body(i):
        nisa.dma_copy(dst=nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf), src=x)

    nl.fori_loop(0, nisa.scalar_load(n), body)
    return x


def test_trip_counts_come_from_the_budget_from_the_call_or_from_the_arguments() -> None:
    count = np.array([[3]], np.int32)

    def loads(budget: Budget, **how: Any) -> list[float]:
        checker = BudgetChecker(budget, "trn2")
        predictions = checker(repeated, X, count, **how), checker.ranks(repeated, [(X, count)], **how)
        return [(prediction.hbm_bytes - count.nbytes) / X.nbytes for prediction in predictions]

    without, five = Budget(hbm_bytes=10**9), Budget(hbm_bytes=10**9, trips=5)
    assert loads(without) == [3, 3]
    assert loads(five) == [5, 5]
    assert loads(without, trips=(7, 1)) == loads(five, trips=7) == [7, 7]
    with pytest.raises(InvalidArgument, match="NKW-TRIPS"):
        loads(without, trips=1.5)


def test_a_failure_leaves_files(tmp_path: Path) -> None:
    with pytest.raises(BudgetExceeded) as failure:
        BudgetChecker(Budget(hbm_bytes=0), "trn2", lambda: tmp_path / "kept")(doubled, X)
    names = {file.name for file in (tmp_path / "kept").iterdir()}
    assert names == {"report.txt", "stream.txt", "memory.txt", "memory.svg", "trace.json"}
    assert str(failure.value).endswith(f"artefacts: {tmp_path / 'kept'}")


REFUSED = {
    "": "no limit is given; give time_us, hbm_bytes or sbuf_bytes",
    "target='trn2'": "no limit is given; give time_us, hbm_bytes or sbuf_bytes",
    "40": "the argument 40 has no name; write for instance time_us=40",
    "time=40": "a budget has no time; known are time_us, hbm_bytes, sbuf_bytes, reading, target, trips",
    "time_us=0": "time_us is 0, not a number of microseconds above 0",
    "time_us=float('nan')": "time_us is nan, not a number of microseconds above 0",
    "time_us=float('inf')": "time_us is inf, not a number of microseconds above 0",
    "time_us='4'": "time_us is '4', not a number of microseconds above 0",
    "time_us=True": "time_us is True, not a number of microseconds above 0",
    "hbm_bytes=-1": "hbm_bytes is -1, not a whole number of bytes",
    "hbm_bytes=1.5": "hbm_bytes is 1.5, not a whole number of bytes",
    "sbuf_bytes=False": "sbuf_bytes is False, not a whole number of bytes",
    "time_us=1, reading='best'": "reading is 'best'; known are serial, program, scheduled, dataflow",
    "time_us=1, reading=['serial']": "reading is ['serial']; known are serial, program, scheduled, dataflow",
    "time_us=1, target='trn9'": f"target is 'trn9'; known are {', '.join(TARGETS)}",
}


@pytest.mark.parametrize("written", REFUSED)
def test_a_marker_that_states_no_budget_is_refused(written: str) -> None:
    marker = eval(f"pytest.mark.nki_budget({written})").mark if written else pytest.mark.nki_budget().mark
    with pytest.raises(InvalidArgument) as refusal:
        Budget.from_marker(marker.args, marker.kwargs)
    assert str(refusal.value) == f"[NKW-BUDGET] nki_budget: {REFUSED[written]}"


@pytest.mark.parametrize(
    "limits",
    [{"time_us": 1e-9}, {"hbm_bytes": 0}, {"sbuf_bytes": 0, "reading": "scheduled", "target": "inf2"}],
)
def test_a_marker_that_states_one_is_taken(limits: dict[str, Any]) -> None:
    assert Budget.from_marker((), limits) == Budget(**limits)


KERNEL = """
import nki, nki.isa as nisa, nki.language as nl, numpy as np, pytest

@nki.jit
def doubled(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=tile)
    return out

X = np.zeros((128, 96), np.float32)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a suite with `nki` bound to the simulator, in this process, which has it loaded."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    pytester.makeconftest("import simulate\nsimulate.install('simulate')\n")

    def run(tests: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_suite=KERNEL + tests)
        return pytester.runpytest_inprocess("-p", "simulate.pytest_plugin", "--basetemp=base", *options)

    return run


@pytest.mark.slow
def test_a_marked_test_passes_at_its_budget_and_fails_one_byte_below(suite) -> None:
    tests = f"""
@pytest.mark.nki_budget(hbm_bytes={HBM_BYTES}, sbuf_bytes={SBUF_BYTES}, time_us=1000)
def test_at(nki_budget):
    assert nki_budget(doubled, X).hbm_bytes == {HBM_BYTES}

@pytest.mark.parametrize("x", [
    pytest.param(X, marks=pytest.mark.nki_budget(hbm_bytes={HBM_BYTES + 1}), id="above"),
    pytest.param(X, marks=pytest.mark.nki_budget(hbm_bytes={HBM_BYTES - 1}), id="below"),
])
def test_near(nki_budget, x):
    nki_budget(doubled, x)
"""
    done = suite(tests, "-v")
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(
        [
            "*test_near?trn2-below? FAILED*",
            "*doubled on trn2 exceeds its budget (program reading)*",
            "*98,304 bytes, budget 98,303: 1 too many*",
            "*artefacts: *base*",
        ]
    )


@pytest.mark.slow
def test_the_target_of_a_budget_is_the_one_it_is_checked_on(suite) -> None:
    tests = """
@pytest.mark.nki_budget(time_us=1000, target="trn3")
def test_one(nki_budget, nki_target):
    assert nki_budget(doubled, X).launch.hardware.name == nki_target == "trn3"

@pytest.mark.nki_targets("trn1", "trn2")
@pytest.mark.nki_budget(hbm_bytes=10**6)
def test_several(nki_budget, nki_target):
    assert nki_budget(doubled, X).launch.hardware.name == nki_target
"""
    suite(tests).assert_outcomes(passed=3)
    done = suite(tests, "--nki-target", "trn1", "-rs")
    done.assert_outcomes(passed=1, skipped=1)
    done.stdout.fnmatch_lines(["*for trn3, not for --nki-target trn1*"])


@pytest.mark.slow
def test_a_bad_marker_is_one_sentence(suite) -> None:
    tests = """
@pytest.mark.nki_budget(time=40)
def test_one(nki_budget):
    nki_budget(doubled, X)
"""
    done = suite(tests)
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(
        ["*InvalidArgument: ?NKW-BUDGET? nki_budget: a budget has no time; known are *"]
    )


@pytest.mark.slow
def test_a_fixture_without_a_marker_and_a_marker_without_the_fixture_are_refused(suite) -> None:
    done = suite("def test_one(nki_budget):\n    nki_budget(doubled, X)\n")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*the test has no marker nki_budget with a budget"])
    done = suite("@pytest.mark.nki_budget(time_us=40)\ndef test_one():\n    pass\n")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(
        ["*test_one has the marker nki_budget and not its fixture; add the parameter nki_budget"]
    )


def test_the_marker_is_registered(suite) -> None:
    suite("", "--markers").stdout.fnmatch_lines(["@pytest.mark.nki_budget(time_us, *"])
