"""matmul at ragged sizes, in both dtypes, on every chip."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.testing import KernelChecker
from tests.kernels.accuracy import ODD_SIZES, TARGETS, check, compare_all, normal, run, whole_numbers

matmul = importlib.import_module("nki_kernels.matmul")  # the package's own `matmul` is the kernel
BF16 = ml_dtypes.bfloat16
CASE = (kernels.matmul, kernels.matmul_reference)


@pytest.mark.nki_targets(*TARGETS)
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(np.float32, np.float32), (np.float32, BF16), (BF16, BF16)])
def test_dtypes_on_every_chip(check_kernel: KernelChecker, a_dtype: type, b_dtype: type) -> None:
    a, b = normal(1, 129, 172, dtype=a_dtype), normal(2, 172, 72, dtype=b_dtype)
    partial_sums = float((np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))).max())
    check_kernel(*CASE, a, b, magnitude=partial_sums, contraction=172)


@pytest.mark.parametrize("size", ODD_SIZES)
def test_ragged_rows_contraction_and_columns(size: int) -> None:
    check(*CASE, (normal(1, size, 40), normal(2, 40, 24)))
    check(*CASE, (normal(1, 24, size), normal(2, size, 40)))
    check(*CASE, (normal(1, 24, 40), normal(2, 40, size)))


@pytest.mark.parametrize("rows", [1, 511, 512, 513])
def test_rows_that_share_one_pass_over_the_weights(rows: int) -> None:
    check(*CASE, (normal(1, rows, 136), normal(2, 136, 20)))


@pytest.mark.parametrize("columns", [511, 512, 513, 2049])
def test_columns_around_a_bank_and_around_a_column_group(columns: int) -> None:
    check(*CASE, (normal(1, 5, 130), normal(2, 130, columns)))


def test_contraction_over_several_weight_tiles() -> None:
    check(*CASE, (normal(1, 3, 1300), normal(2, 1300, 2048, dtype=BF16)))


@pytest.mark.parametrize("depth", [127, 128, 129])
def test_a_given_transposed(depth: int) -> None:
    check(*CASE, (normal(1, depth, 130), normal(2, depth, 20), True))


def test_whole_numbers_are_exact() -> None:
    a, b = whole_numbers(1, 130, 200), whole_numbers(2, 200, 600)
    assert np.array_equal(run(kernels.matmul, (a, b)), a @ b)


def test_target_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = whole_numbers(1, 8, 8), whole_numbers(2, 8, 8)
    for target in TARGETS:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        with simulate.recorded() as launches:
            assert np.array_equal(kernels.matmul(a, b), a @ b)
        assert launches[0].hardware.name == target


@pytest.mark.parametrize(("name", "domain"), [(name, domain) for name, _, domain in matmul.PARAMETERS])
def test_parameters_do_not_change_a_result(name: str, domain: tuple[object, ...]) -> None:
    arguments = (normal(1, 660, 200), normal(2, 200, 520), False)
    results = [run(kernels.matmul, (*arguments, {name: value}), "trn2") for value in domain]
    assert len({result.tobytes() for result in results}) == 1
    compare_all((results[0],), kernels.matmul_reference, arguments)


def test_refuses_a_parameter_and_a_value_that_are_not_declared() -> None:
    ones = np.ones((8, 8), np.float32)
    assert run(kernels.matmul, (ones, ones, False, {"group_tiles": 4}))[0, 0] == 8
    with pytest.raises(AssertionError, match=r"matmul has no parameter tiles; it has \['resident_bytes', "):
        run(kernels.matmul, (ones, ones, False, {"tiles": 4}))
    with pytest.raises(AssertionError, match=r"group_tiles of matmul is one of \(1, .*\), not 3"):
        run(kernels.matmul, (ones, ones, False, {"group_tiles": 3}))


def test_refuses_contractions_that_differ() -> None:
    run(kernels.matmul, (normal(1, 4, 8), normal(2, 8, 4)))
    with pytest.raises(AssertionError, match="matmul contracts 8 columns of a with 9 rows of b"):
        run(kernels.matmul, (normal(1, 4, 8), normal(2, 9, 4)))


def test_refuses_a_contraction_beyond_sbuf() -> None:
    ones = np.ones((1, 16384), np.float32)
    assert run(kernels.matmul, (ones, ones.T.copy()))[0, 0] == 16384
    with pytest.raises(AssertionError, match="matmul contracts at most 16384, not 16385"):
        run(kernels.matmul, (np.ones((1, 16385), np.float32), np.ones((16385, 1), np.float32)))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("rows", [1, 512])
def test_the_largest_contraction_fits_on_the_smallest_chip(rows: int, dtype: type) -> None:
    """Planned and placed without computing numbers; a launch refuses tiles that do not fit."""
    arguments = np.empty((rows, 16384), dtype), np.empty((16384, 2600), BF16)
    simulate.World("trn1").launch(kernels.matmul, [(arguments, {})], mode=simulate.Mode.dry)


@pytest.mark.parametrize("rows", [1, 512, 1400])
def test_loaded_columns_serve_all_rows(rows: int) -> None:
    arguments = np.empty((rows, 256), BF16), np.empty((256, 1100), BF16)
    traffic = simulate.profile(kernels.matmul, *arguments, target="trn1").traffic
    assert {each.name: each.reads for each in traffic if each.argument} == {"a": 1, "b": 1}


@pytest.mark.parametrize(("rows", "columns"), [(769, 513), (1030, 30)])
def test_row_tiles_after_those_that_accumulate_together(rows: int, columns: int) -> None:
    check(*CASE, (normal(1, rows, 130), normal(2, 130, columns)))
    check(*CASE, (normal(1, 130, rows), normal(2, 130, columns), True))


@pytest.mark.parametrize("target", TARGETS)
def test_an_undefined_row_reaches_no_other_row(target: str) -> None:
    a, b = whole_numbers(1, 130, 40), whole_numbers(2, 40, 24)
    a[129] = np.nan
    a[7] = np.inf
    others = np.delete(np.arange(130), (7, 129))
    assert np.array_equal(run(kernels.matmul, (a, b), target)[others], (a[others] @ b))
