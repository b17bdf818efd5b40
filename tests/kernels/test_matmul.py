"""matmul at ragged sizes, in both dtypes, on every chip."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.testing import KernelChecker
from tests.kernels.accuracy import ODD_SIZES, TARGETS, compare_all, normal, run, whole_numbers
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    KernelCase,
    KernelTests,
    Undefined,
    limit,
    refuse,
    together,
    vary,
)

matmul = importlib.import_module("nki_kernels.matmul")  # the package's own `matmul` is the kernel


def factors(
    rows: int = 24,
    depth: int = 40,
    columns: int = 20,
    dtype: Any = F32,
    weights: Any = None,
    a_transposed: bool = False,
) -> list[Any]:
    a = normal(1, *((depth, rows) if a_transposed else (rows, depth)), dtype=dtype)
    return [a, normal(2, depth, columns, dtype=weights or dtype), a_transposed]


class TestMatmulOnTwoCores(KernelTests):
    """Cores divide columns, or rows; sums of whole numbers are exact."""

    case = KernelCase(
        kernels.matmul,
        factors,
        two_cores=[
            dict.fromkeys("ab", lambda factor: np.round(4 * factor)) | settings
            for settings in (
                *together(
                    "rows columns a_transposed",
                    *((3, 127, False), (3, 129, False), (129, 129, False), (257, 20, True), (3, 1025, False)),
                    depth=140,
                    dtype=BF16,
                ),
                dict(rows=3, columns=2),
            )
        ],
        seeds=64,
    )


class TestMatmul(KernelTests):
    """Rows that share one pass over the weights; columns around a bank and a column group; several weight tiles."""

    case = KernelCase(
        kernels.matmul,
        factors,
        values=[
            *vary(rows=[*ODD_SIZES]),
            *vary(depth=[*ODD_SIZES]),
            *vary(columns=[*ODD_SIZES]),
            *vary(rows=[1, 511, 512, 513], depth=136),
            *vary(rows=5, depth=130, columns=[511, 512, 513, 2049]),
            dict(rows=3, depth=1300, columns=2048, weights=BF16),
            *vary(rows=130, depth=[127, 128, 129], a_transposed=True),
            # row tiles after those that accumulate together
            *together("rows columns", (769, 513), (1030, 30), depth=130, a_transposed=[False, True]),
        ],
        refusals=[
            refuse("matmul contracts 40 columns of a with 9 rows of b", b=normal(2, 9, 20)),
            refuse(
                "matmul has no parameter tiles; it has ['resident_bytes', ",
                dict(tuning={"group_tiles": 4}),
                tuning={"tiles": 4},
            ),
            refuse(
                "2 cores divide at least 2 columns, not 1",
                dict(rows=3, columns=2),
                cores=2,
                rows=3,
                columns=1,
            ),
            refuse("group_tiles of matmul is one of (1, ", tuning={"group_tiles": 3}),
        ],
        limits=[
            limit("depth", 16384, "matmul contracts at most 16384, not 16385", rows=1, columns=1),
        ],
        fits=vary(rows=[1, 512], depth=16384, columns=2600, dtype=[*DTYPES], weights=BF16),
        undefined=[
            Undefined(dict(a=129), dict(rows=130, columns=24), rows=[129], chips=TARGETS),
            Undefined(dict(a=7), dict(rows=130, columns=24), np.inf, rows=[7], chips=TARGETS),
        ],
    )


@pytest.mark.nki_targets(*TARGETS)
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)])
def test_dtypes_on_every_chip(check_kernel: KernelChecker, a_dtype: type, b_dtype: type) -> None:
    a, b = normal(1, 129, 172, dtype=a_dtype), normal(2, 172, 72, dtype=b_dtype)
    partial_sums = float((np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))).max())
    check_kernel(kernels.matmul, kernels.matmul_reference, a, b, magnitude=partial_sums, contraction=172)


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
    arguments = tuple(factors(660, 200, 520))
    results = [run(kernels.matmul, (*arguments, {name: value}), "trn2") for value in domain]
    assert len({result.tobytes() for result in results}) == 1
    compare_all((results[0],), kernels.matmul_reference, arguments)


@pytest.mark.parametrize("rows", [1, 512, 1400])
def test_loaded_columns_serve_all_rows(rows: int) -> None:
    arguments = np.empty((rows, 256), BF16), np.empty((256, 1100), BF16)
    traffic = simulate.profile(kernels.matmul, *arguments, target="trn1").traffic
    assert {tensor.name: tensor.reads for tensor in traffic if tensor.argument} == {"a": 1, "b": 1}


@pytest.mark.parametrize("target", TARGETS)
def test_an_undefined_row_reaches_no_other_row(target: str) -> None:
    """Products of whole numbers are exact."""
    a, b = whole_numbers(1, 130, 40), whole_numbers(2, 40, 24)
    a[129] = np.nan
    a[7] = np.inf
    finite_rows = np.delete(np.arange(130), (7, 129))
    assert np.array_equal(run(kernels.matmul, (a, b), target)[finite_rows], (a[finite_rows] @ b))
