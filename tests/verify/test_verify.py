"""`verify`: what it tries, what it finds wrong, and what it refuses to judge."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument
from simulate.verification import Outcome, Verdict, verify
from simulate.verification.bound import longest_chain

ROWS = np.zeros((128, 8), np.float32)


def stored(tile: Any, rows: int | None = None) -> Any:
    """Store a tile in an output of its shape; of `rows` rows only, the others are never written."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0:rows] if rows else out, src=tile[0:rows] if rows else tile)
    return out


@nki.jit
def doubled(x):
    """Return 2 x, of one tile."""
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    return stored(tile)


def doubled_reference(x: np.ndarray) -> np.ndarray:
    """Return 2 x."""
    return 2 * x


def outcome(verdict: Verdict, name: str) -> Outcome:
    """Return what came of one trial."""
    (trial_outcome,) = [trial.outcome for trial in verdict.trials if trial.name == name]
    return trial_outcome


def test_a_right_kernel_is_tried_on_values_and_sizes() -> None:
    verdict = simulate.verify(doubled, [ROWS])
    assert verdict.right and verdict.clean and verdict.status == 0 and verdict.reason == ""
    values = ["random", "other random", "rms error", "slope - 1", "large", "zeros", "half zeros", "NaN"]
    assert [trial.name for trial in verdict.trials] == [*values, "127", "129", "7", "9"]
    assert outcome(verdict, "129") is Outcome.not_taken  # a tile has 128 partitions
    assert outcome(verdict, "127") is Outcome.right
    assert verdict.speed is not None
    low, high = verdict.speed.bracket_ns
    assert 0 < verdict.speed.floor_ns < low <= verdict.speed.time_ns <= high
    assert verdict.speed.floor_bound == "HBM"


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_the_chip_is_the_one_asked_for(target: str) -> None:
    assert verify(doubled, [ROWS], target=target).target == target


def test_the_size_that_a_kernel_refuses_itself_is_not_wrong() -> None:
    def even(x):
        assert x.shape[0] % 2 == 0, "an even number of rows"
        return stored(nl.load(x))

    verdict = verify(even, [np.zeros((64, 8), np.float32)], lambda x: x)
    assert verdict.right
    (odd, other, *_) = [trial for trial in verdict.trials if trial.ragged]
    assert (odd.name, odd.outcome, other.outcome) == ("63", Outcome.not_taken, Outcome.not_taken)
    assert (
        odd.reason
        == f"AssertionError: an even number of rows at {__file__}:{even.__code__.co_firstlineno + 1}"
    )


def test_a_kernel_that_leaves_the_last_row_of_odd_sizes_out_is_wrong() -> None:
    def pairs(x):
        return stored(nl.load(x), x.shape[0] // 2 * 2)

    verdict = verify(pairs, [np.zeros((64, 8), np.float32)], lambda x: x)
    assert [trial.name for trial in verdict.trials if trial.outcome is Outcome.wrong] == ["63", "65"]
    assert verdict.status == 1 and verdict.reason.startswith("63: unwritten bytes")


@pytest.mark.slow
def test_nan_has_to_come_out_where_it_does_of_the_reference() -> None:
    def spreads(x: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x).any(axis=1, keepdims=True), np.nan, 2 * x)

    def selects(x: np.ndarray) -> np.ndarray:
        return np.where(np.arange(8) == 4, 2 * x[:, 4:5], 2 * np.nan_to_num(x))

    lost = verify(doubled, [ROWS], spreads)
    assert lost.reason == "NaN: output 0 has no NaN in 7 elements from (64, 1), where the reference has one"
    assert outcome(verify(doubled, [ROWS], lambda x: np.nan_to_num(2 * x)), "NaN") is Outcome.open
    assert outcome(verify(doubled, [ROWS]), "NaN") is Outcome.right
    assert verify(doubled, [ROWS], selects).right


def test_nan_that_reaches_more_elements_is_told_and_not_wrong() -> None:
    def row_sum(x):
        tile = nl.load(x)
        zero = nl.ndarray((x.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=zero, op=nl.add, data=tile, axis=1)
        nisa.tensor_scalar(dst=zero, data=zero, op0=nl.multiply, operand0=0.0)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=zero)
        return stored(tile)

    verdict = verify(row_sum, [ROWS], lambda x: x)
    assert verdict.right and outcome(verdict, "NaN") is Outcome.open
    assert "NaN: output 0 has NaN in 7 elements from (64, 1), where the reference has none" in str(verdict)


def test_a_tolerance_as_wide_as_the_reference_decides_nothing() -> None:
    def scaled(x):
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=1e-3)
        return stored(tile)

    x = np.zeros((8, 8), ml_dtypes.bfloat16)
    # In bfloat16 nothing is left of the sine of 10,000 x: any value of its size is as good as another.
    verdict = verify(scaled, [x], lambda x: np.sin(1e4 * x) * 1e-3)
    assert not verdict.right and verdict.status == 1
    assert outcome(verdict, "random") is Outcome.open
    assert "is as large as the reference" in verdict.reason
    assert verify(scaled, [x], lambda x: x * 1e-3).right


def test_an_output_narrower_than_arguments_and_reference_is_wrong() -> None:
    def narrowed(x):
        tile = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=tile, src=nl.load(x))
        return stored(tile)

    assert "the output is bfloat16" in verify(narrowed, [ROWS], lambda x: x).reason
    assert verify(narrowed, [ROWS], lambda x: x.astype(ml_dtypes.bfloat16)).right
    assert verify(narrowed, [ROWS.astype(ml_dtypes.bfloat16)], lambda x: x).right


def test_outputs_are_counted_and_named() -> None:
    def both(x):
        tile = nl.load(x)
        return stored(tile), stored(tile)

    assert verify(both, [ROWS], lambda x: (x, x)).right
    assert verify(both, [ROWS], lambda x: x).reason == "random: the kernel returns 2 arrays, the reference 1"
    assert (
        verify(both, [ROWS], lambda x: (x, 2 * x)).reason
        == "random: output 1: the output is a copy of argument 0"
    )


def test_findings_make_a_right_kernel_unclean() -> None:
    @nki.jit
    def ignores(x, y):
        return stored(nl.load(x))

    verdict = verify(ignores, [ROWS, ROWS], lambda x, y: x)
    assert verdict.right and not verdict.clean and verdict.status == 1
    assert [finding.code for finding in verdict.findings] == ["NKW-INPUT-UNUSED"]
    assert "warning[NKW-INPUT-UNUSED]" in str(verdict)


@pytest.mark.parametrize("synchronized", [True, False])
def test_a_race_of_two_cores_is_a_finding(monkeypatch: pytest.MonkeyPatch, synchronized: bool) -> None:
    def exchanged(x):
        """Store each core's half of x; both then copy the half of the other."""
        assert x.shape[0] % 2 == 0, "two halves"
        rows = x.shape[0] // 2
        mine, other = nl.program_id(0) * rows, (1 - nl.program_id(0)) * rows
        halves = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=halves[mine : mine + rows], src=x[mine : mine + rows])
        nisa.core_barrier(data=halves, cores=(0, 1))
        nisa.dma_copy(dst=out[other : other + rows], src=halves[other : other + rows])
        if not synchronized:
            nisa.dma_copy(dst=out[0:1], src=x[0:1])
        return out

    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    verdict = verify(exchanged, [np.zeros((64, 8), np.float32)], lambda x: x)
    assert verdict.right and verdict.clean is synchronized
    assert verdict.status == (0 if synchronized else 1)
    assert any("RACE" in finding.code for finding in verdict.findings) is not synchronized


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (None, "there is no lonely_reference beside lonely"),
        (lambda x: np.ones(x.shape), "output 0 of the reference is the same for different arguments"),
        (lambda x: x[:, 99], "the reference fails on random values: IndexError"),
    ],
)
def test_what_cannot_be_judged_is_refused(reference: Any, message: str) -> None:
    def lonely(x):
        return stored(nl.load(x))

    with pytest.raises(InvalidArgument) as refused:
        verify(lonely, [ROWS], reference)
    assert refused.value.code == "NKW-VERIFY" and refused.value.message.startswith(message)


def test_a_kernel_that_does_not_take_the_arguments_cannot_be_judged() -> None:
    with pytest.raises(InvalidArgument, match="the kernel fails on random values"):
        verify(doubled, [ROWS, ROWS], lambda x, y: x)


def test_the_longest_chain_is_that_of_the_stream() -> None:
    with simulate.recorded() as launches:
        doubled(np.ones((4, 4), np.float32))
    assert longest_chain(launches[0].streams) == 3  # load, multiply, store
    assert longest_chain(launches[0].streams, "bfloat16") == 0


def test_only_roundings_into_a_narrow_dtype_widen_its_bound() -> None:
    def wide(x):
        tile = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    def narrow(x, y):
        tile = nl.load(x)
        for _ in range(4):
            nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(y), op=nl.add)
        return stored(tile)

    x = np.zeros((8, 8), ml_dtypes.bfloat16)
    once, often = verify(wide, [x], lambda x: 2 * x), verify(narrow, [x, x], lambda x, y: x + 4 * y)
    assert once.right and often.right
    assert once.launch is not None and often.launch is not None
    assert longest_chain(once.launch.streams, "bfloat16") == 1  # the store; the load widens
    assert longest_chain(often.launch.streams, "bfloat16") == 4
    for verdict, roundings in ((once, 1), (often, 3)):  # of four roundings, one for each argument is granted
        (allowed, largest) = verdict.trials[0].allowed, verdict.trials[0].largest
        assert allowed is not None and largest is not None
        assert roundings * 2**-8 <= allowed / largest < (roundings + 0.5) * 2**-8
