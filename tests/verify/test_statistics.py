"""The statistics of errors: silent on right kernels, and wrong for a count that is off by one."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nki_kernels.examples import EXAMPLES, RANKS
from nkw.errors import InvalidArgument
from simulate.kernel_by_name import build_call, load_callable
from simulate.run.environment import target_hardware
from simulate.run.launch import unwrap_kernel
from simulate.verification import Outcome, inputs
from simulate.verification.bound import call_reference, count_contractions
from simulate.verification.inputs import Call
from simulate.verification.judging import find_reference
from simulate.verification.statistical_trials import judge_statistics
from simulate.verification.statistics import Rounding, compute_statistic, find_roundings
from simulate.verification.trial import Trial, run_trial
from simulate.world import launch
from tests.deep import deep_except

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def trials_of(kernel: Any, call: Call, seeds: range, reference: Any = None) -> list[list[Trial]]:
    """Return the statistical trials of a kernel for pairs of random calls; two for each number in `seeds`."""
    function = unwrap_kernel(kernel)
    reference = reference or find_reference(function, function.__name__)
    chip = target_hardware()
    first = inputs.draw_random(call, 0)
    contractions = count_contractions(reference, first, call_reference(reference, first))

    def run(arguments: Call) -> Any:
        return launch(function, [(arguments.args, arguments.keywords)], chip)

    judge = partial(run_trial, run=run, reference=reference, contractions=contractions, is_requested=True)
    return [
        judge_statistics(
            [judge("random", call=inputs.draw_random(call, seed * 2 + index)) for index in range(2)]
        )
        for seed in seeds
    ]


def normalised(x: Any, count: int) -> Any:
    """Divide x by the root of its mean square; `count` is what the sum of squares is divided by."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows, columns = x.shape
    for row in range(0, rows, 128):
        tile = nl.load(x[row : row + 128])
        squares = nl.ndarray((128, columns), nl.float32)
        total = nl.ndarray((128, 1), nl.float32)
        nisa.activation(
            dst=squares,
            op=nl.square,
            data=tile,
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        scale = nl.ndarray((128, 1), nl.float32)
        nisa.tensor_scalar(dst=scale, data=total, op0=nl.multiply, operand0=1.0 / count)
        nisa.activation(dst=scale, op=nl.rsqrt, data=scale)
        result = nl.ndarray((128, columns), x.dtype)
        nisa.tensor_scalar(dst=result, data=tile, op0=nl.multiply, operand0=scale)
        nisa.dma_copy(dst=out[row : row + 128], src=result)
    return out


@nki.jit
def over_d(x):
    """Divide by the number of columns."""
    return normalised(x, x.shape[1])


@nki.jit
def over_d_less_one(x):
    """Divide by one less."""
    return normalised(x, x.shape[1] - 1)


def normalised_reference(x: np.ndarray) -> np.ndarray:
    """Compute the definition."""
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "dtype"), deep_except(product([64, 65, 512, 4096], [FLOAT32, BFLOAT16]), 5), ids=str
)
def test_a_count_that_is_off_by_one_is_found_and_the_right_count_passes(columns: int, dtype: Any) -> None:
    x = np.zeros((128, columns), dtype)
    assert simulate.verify(over_d, [x], normalised_reference).right
    verdict = simulate.verify(over_d_less_one, [x], normalised_reference)
    assert not verdict.right
    # Of more columns the error is smaller: the bound on one element lets it pass, in bfloat16 the RMS error does too.
    if columns == 4096:
        assert verdict.reason.startswith("slope - 1: " if dtype == BFLOAT16 else "rms error: ")


@pytest.mark.slow
def test_verify_calls_it_wrong_and_says_the_factor() -> None:
    x = np.zeros((128, 256), ml_dtypes.bfloat16)
    verdict = simulate.verify(over_d_less_one, [x], normalised_reference)
    assert not verdict.right and verdict.status == 1
    assert verdict.reason.startswith("slope - 1: the output is the reference times 0.998")
    assert "fitted to 65,536 elements; the roundings of the kernel explain 1 +- " in verdict.reason
    assert simulate.verify(over_d, [x], normalised_reference).right


@nki.jit
def scaled_by_a_bfloat16(x):
    """Return x / 3 with the third as a bfloat16 number, which all elements share."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    third = nl.ndarray((128, 1), nl.bfloat16)
    nisa.memset(dst=third, value=1 / 3)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=nl.copy(third, nl.float32))
    nisa.dma_copy(dst=out, src=tile)
    return out


def scaled_by_a_bfloat16_reference(x: np.ndarray) -> np.ndarray:
    """Compute the definition."""
    return x / 3


def test_the_rounding_of_a_scalar_that_all_elements_share_is_allowed() -> None:
    call = Call((np.zeros((128, 512), BFLOAT16),), {})
    (trials,) = trials_of(scaled_by_a_bfloat16, call, range(1))
    assert [trial.outcome for trial in trials] == [Outcome.right, Outcome.right]
    assert trials[1].error is not None and trials[1].error > 2.0**-11  # it is there
    assert trials[1].allowed is not None and trials[1].allowed < 2.0**-7


def test_roundings_are_those_of_the_stream() -> None:
    x = np.ones((256, 64), BFLOAT16)
    done = simulate.launch(over_d.func, [((x,), {})])
    assert find_roundings(done.streams) == [Rounding(2.0**-8, 256 * 64, 1.0, False, True)]
    done = simulate.launch(over_d.func, [((x.astype(np.float32),), {})])
    assert find_roundings(done.streams) == []


def test_roundings_to_eight_bits_have_no_model() -> None:
    @nki.jit
    def narrowed(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=nl.copy(nl.copy(nl.load(x), nl.float8_e4m3), nl.float32))
        return out

    done = simulate.launch(narrowed.func, [((np.ones((128, 8), np.float32),), {})])
    assert find_roundings(done.streams) is None


@pytest.mark.parametrize("factor", [1 - 2.0**-13, 1 + 2.0**-13, 1.01])
def test_a_factor_is_measured_below_the_rounding_of_one_element(factor: float) -> None:
    generator = np.random.default_rng(5)
    truths = [generator.standard_normal((128, 2048)) for _ in range(2)]
    last = [Rounding(2.0**-8, 128 * 2048, 1.0, False, True)]
    seen = compute_statistic([(truth * factor).astype(BFLOAT16) for truth in truths], truths, last, 1.0, 1, 4)
    assert seen is not None
    assert seen.slope == pytest.approx(factor - 1, abs=2e-5)
    assert abs(seen.slope) > seen.slope_allowed
    right = compute_statistic([truth.astype(BFLOAT16) for truth in truths], truths, last, 1.0, 1, 4)
    assert right is not None and abs(right.slope) < right.slope_allowed < 2.0**-14
    assert right.rms_allowed / 9 < right.rms < right.rms_allowed


def test_few_elements_and_zeros_have_no_statistics() -> None:
    few = [np.ones((31, 1))] * 2
    assert compute_statistic(few, few, [], 1.0, 1, 1) is None
    enough = [np.ones((32, 1))] * 2
    assert compute_statistic(enough, enough, [], 1.0, 1, 1) is not None
    zeros = [np.zeros((128, 8))] * 2
    assert compute_statistic(zeros, zeros, [], 1.0, 1, 1) is None


def silent(kernel: str, seeds: range) -> None:
    words = f"nki_kernels.{kernel}" if ":" in kernel else f"nki_kernels:{kernel}"
    args, keywords = build_call(EXAMPLES[kernel])
    function = load_callable(words)
    try:
        trials_by_seed = trials_of(function, Call(args, keywords), seeds)
    except InvalidArgument as refused:  # without a reference, or one that fails on random values
        pytest.skip(str(refused))
    for seed, trials in zip(seeds, trials_by_seed):
        assert [trial.reason for trial in trials if trial.outcome is Outcome.wrong] == [], seed


SHIPPED = sorted(set(EXAMPLES) - set(RANKS))


@pytest.mark.parametrize("kernel", SHIPPED)
def test_shipped_kernels_pass(kernel: str) -> None:
    silent(kernel, range(1))


@pytest.mark.deep
@pytest.mark.parametrize("kernel", SHIPPED)
def test_shipped_kernels_pass_on_a_thousand_seeds(kernel: str) -> None:
    silent(kernel, range(1, 501))
