"""The fit finds changed numbers among many, names what it cannot tell apart, and does not follow one wild time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulate.calibrate.fit import FEWEST, Problem, solve

KERNELS, NUMBERS = 24, 12


def problem(changes: dict[int, float], noise: float = 0.0, seed: int = 0, kernels: int = KERNELS) -> Problem:
    """Return ratios that the changes explain up to noise, with elasticities of which two thirds are zero."""
    generator = np.random.default_rng(seed)
    elasticities = generator.uniform(0.05, 0.6, (kernels, NUMBERS)) * (
        generator.random((kernels, NUMBERS)) < 1 / 3
    )
    elasticities[:FEWEST, :] = np.maximum(
        elasticities[:FEWEST, :], generator.uniform(0.05, 0.3, (FEWEST, NUMBERS))
    )
    truth = np.zeros(NUMBERS)
    truth[list(changes)] = list(changes.values())
    ratios = elasticities @ truth + noise * generator.standard_normal(kernels)
    return Problem(ratios, elasticities, np.zeros(kernels), np.full(NUMBERS, 0.5), np.full(NUMBERS, 4.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_two_changed_numbers_are_found_and_no_others(seed: int) -> None:
    ladder = problem({3: 0.4, 7: -0.3}, noise=0.01, seed=seed)
    solution = solve(ladder)
    assert sorted(solution.numbers) == [3, 7] and solution.outliers == ()
    changes = dict(zip(solution.numbers, solution.changes))
    errors = dict(zip(solution.numbers, solution.errors))
    for number, truth in ((3, 0.4), (7, -0.3)):
        # The Student weights cost little precision, so five standard errors hold for these 12 estimates.
        assert abs(changes[number] - truth) < 5 * errors[number] < 0.15
    assert solution.instead == ((), ())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.15])
def test_times_that_differ_by_chance_contradict_no_number(noise: float, seed: int) -> None:
    solution = solve(problem({}, noise, seed))
    assert solution.numbers == () and len(solution.changes) == 0


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-3, 10.0])
@pytest.mark.parametrize("changes", [{}, {3: 0.4, 7: -0.3}])
def test_one_absurd_time_is_named_and_decides_nothing(changes: dict[int, float], factor: float) -> None:
    clean = problem(changes, noise=0.005)
    wild = replace(clean, ratios=clean.ratios + np.log(factor) * (np.arange(KERNELS) == 10))
    before, after = solve(clean), solve(wild)
    assert after.outliers == (10,) and before.outliers == ()
    assert sorted(after.numbers) == sorted(before.numbers) == sorted(changes)
    for number in changes:
        one, other = (dict(zip(solution.numbers, solution.changes))[number] for solution in (before, after))
        assert one == pytest.approx(other, abs=0.01)


def test_numbers_that_act_alike_cannot_be_told_apart() -> None:
    alike = problem({3: 0.4})
    alike.elasticities[:, 5] = alike.elasticities[:, 3] * 1.001
    solution = solve(replace(alike, ratios=0.4 * alike.elasticities[:, 3]))
    assert len(solution.numbers) == 1
    assert {*solution.numbers, *solution.instead[0]} == {3, 5}


@pytest.mark.parametrize(("kernels", "is_determined"), [(1, False), (2, True)])
def test_a_number_needs_kernels_that_agree(kernels: int, is_determined: bool) -> None:
    alone = problem({})
    alone.elasticities[:, 4] = 0.0
    alone.elasticities[:kernels, 4] = 0.5
    alone.ratios[:] = 0.3 * alone.elasticities[:, 4]
    # What one kernel alone says may be its own fault.
    assert (solve(alone).numbers == (4,)) is is_determined


def test_times_that_scatter_contradict_less() -> None:
    scattered = problem({3: 0.4})
    assert solve(scattered).numbers == (3,)
    assert solve(replace(scattered, spreads=np.full(KERNELS, 1.0))).numbers == ()


def test_a_share_does_not_grow_above_one() -> None:
    limited = problem({3: 0.4})
    solution = solve(replace(limited, most=np.full(NUMBERS, 0.1)))
    assert all(change <= 0.1 for change in solution.changes)


def test_a_fit_of_the_fewest_kernels_ends() -> None:
    assert len(solve(problem({3: 0.4}, kernels=FEWEST)).numbers) <= 1
