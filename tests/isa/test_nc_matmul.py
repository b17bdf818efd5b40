"""nc_matmul: exact products, PSUM accumulation element by element, and the limits of the array on every chip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import launch
from tests.isa.reference import STORAGE, assert_same, assert_same_bits, every_bit_pattern, sample
from tests.isa.tiles import PSUM, TARGETS, Fresh, execute, healthy, plan, refuses, tile

_MODE = nisa.matmul_perf_mode


def _whole_numbers(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw whole numbers that every input dtype holds, and whose float32 sums of products are exact in any order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(STORAGE[dtype])


def _product(stationary: np.ndarray, moving: np.ndarray) -> np.ndarray:
    k = stationary.shape[0]
    left, right = (x.astype(np.float64).astype(np.int64).reshape(k, -1) for x in (stationary, moving))
    return np.einsum("km,kn->mn", left, right)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize(("k", "m", "n"), [(1, 1, 1), (127, 128, 33), (128, 127, 512), (64, 5, 129)])
def test_whole_numbers_are_multiplied_exactly(target: str, dtype: str, k: int, m: int, n: int) -> None:
    stationary, moving = _whole_numbers(dtype, (k, m), 1), _whole_numbers(dtype, (k, n), 2)
    done = execute(target, "nc_matmul", dst=Fresh((m, n), buffer=PSUM), stationary=stationary, moving=moving)
    assert_same(done["dst"], _product(stationary, moving))


def test_sums_stay_within_the_error_of_float32_summation() -> None:
    stationary, moving = sample("float32", (128, 64), "s"), sample("float32", (128, 96), "m")
    done = execute(
        "trn2", "nc_matmul", dst=Fresh((64, 96), buffer=PSUM), stationary=stationary, moving=moving
    )["dst"]
    left, right = stationary.astype(np.float64), moving.astype(np.float64)
    # Summing k products in any order errs by at most k * 2**-24 / (1 - k * 2**-24) of the sum of magnitudes.
    bound = 128 * 2.0**-24 / (1 - 128 * 2.0**-24) * (np.abs(left).T @ np.abs(right))
    assert (np.abs(done - left.T @ right) <= bound).all()


def test_free_dims_are_flattened() -> None:
    stationary, moving = _whole_numbers("bfloat16", (6, 2, 4), 1), _whole_numbers("bfloat16", (6, 3, 5), 2)
    done = execute(
        "trn1", "nc_matmul", dst=Fresh((8, 5, 3), buffer=PSUM), stationary=stationary, moving=moving
    )["dst"]
    assert_same(done, _product(stationary, moving).reshape(8, 5, 3))


@pytest.mark.parametrize("target", TARGETS)
def test_dtypes_of_the_operands(target: str) -> None:
    narrow = ["bfloat16", "float16", "float8_e4m3", "float8_e5m2"]
    wide = ["float32", "tfloat32"]
    gen4 = ["float8_e4m3fn"] if target == "trn3" else []
    for first in [*narrow, *wide, "float8_e4m3fn", "int8", "uint32", "float8_e8m0fnu"]:
        for second in [*narrow, *wide, "float8_e4m3fn", "int8"]:
            pair = {first, second}
            known = pair <= {*narrow, *gen4} or pair <= set(wide)
            call = healthy("nc_matmul", stationary=tile((8, 8), first), moving=tile((8, 16), second))
            if known and pair != {"float8_e4m3", "float8_e4m3fn"}:
                plan(target, "nc_matmul", **call)
            else:
                refuses("NKW-MATMUL-DTYPE", target, "nc_matmul", **call)


@pytest.mark.parametrize("target", TARGETS)
def test_dtypes_of_the_result(target: str) -> None:
    for dtype in ("float32", "bfloat16", "float16", "int32"):
        call = healthy("nc_matmul", dst=tile((8, 16), dtype, PSUM))
        if dtype == "float32" or (dtype == "bfloat16" and target == "trn3"):
            plan(target, "nc_matmul", **call)
        else:
            refuses("NKW-MATMUL-RESULT-DTYPE", target, "nc_matmul", **call)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [127, 128, 129])
def test_columns_of_the_stationary_tile(target: str, columns: int) -> None:
    call = {"stationary": tile((8, columns)), "moving": tile((8, 16))}
    if columns <= 128:
        plan(target, "nc_matmul", dst=tile((columns, 16), buffer=PSUM), **call)
    else:
        refuses("NKW-MATMUL-STATIONARY", target, "nc_matmul", dst=tile((128, 16), buffer=PSUM), **call)


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize(("target", "limit"), [("trn1", 512), ("trn2", 512), ("trn3", 4096)])
def test_columns_of_the_moving_tile(target: str, limit: int, beyond: int) -> None:
    columns = limit + beyond
    call = {
        "stationary": tile((8, 8)),
        "moving": tile((8, columns)),
        "dst": tile((8, min(columns, limit)), buffer=PSUM),
    }
    if beyond <= 0:
        plan(target, "nc_matmul", **call)
    else:
        refuses("NKW-MATMUL-MOVING", target, "nc_matmul", **call)


def test_the_result_has_the_shape_of_the_product() -> None:
    for shape in ((7, 16), (9, 16), (8, 15), (8, 17), (16, 8)):
        refuses("NKW-MATMUL-SHAPE", "trn2", "nc_matmul", **healthy("nc_matmul", dst=tile(shape, buffer=PSUM)))
    refuses("NKW-PARTITIONS-AGREE", "trn2", "nc_matmul", **healthy("nc_matmul", moving=tile((7, 16))))
    refuses("NKW-BUFFER", "trn2", "nc_matmul", **healthy("nc_matmul", stationary=tile((8, 8), buffer=PSUM)))
    refuses("NKW-BUFFER", "trn2", "nc_matmul", **healthy("nc_matmul", dst=tile((8, 16))))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("start", "end"), [(0, 512), (512, 1024), (511, 1023), (1, 513), (500, 513)])
def test_a_result_lies_in_one_bank_before_gen4(target: str, start: int, end: int) -> None:
    dst = tile((8, 1024), buffer=PSUM)[:, start:end]
    call = {"dst": dst, "stationary": tile((8, 8)), "moving": tile((8, end - start))}
    if start // 512 == (end - 1) // 512 or target == "trn3":
        plan(target, "nc_matmul", **call)
    else:
        refuses("NKW-PSUM-BANK", target, "nc_matmul", **call)


def _accumulated(target: str, writes: list[tuple[slice, bool | None]]) -> np.ndarray:
    """Return a (4, 6) PSUM tile after matmuls that each add 1 to some of its columns."""

    def kernel(identity, ones):
        stationary, row = nl.load(identity), nl.load(ones)
        total = nl.ndarray((4, 6), nl.float32, nl.psum)
        for columns, accumulate in writes:
            accumulator = total[:, columns]
            nisa.nc_matmul(
                dst=accumulator,
                stationary=stationary,
                moving=row[:, 0 : accumulator.shape[1]],
                accumulate=accumulate,
            )
        out = nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
        tile_ = nl.ndarray((4, 6), nl.float32)
        nisa.tensor_copy(dst=tile_, src=total)
        nl.store(out, tile_)
        return out

    arguments = (np.eye(4, dtype=np.float32), np.ones((4, 6), np.float32))
    done = launch(kernel, [(arguments, {})], hardware(target)).outputs[0]
    assert (done == done[:1]).all()
    return done[0]


ALL = slice(0, 6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([(ALL, None)], [1] * 6),
        ([(ALL, None), (ALL, None), (ALL, None)], [3] * 6),
        ([(ALL, None), (ALL, False)], [1] * 6),
        ([(ALL, False), (ALL, True), (ALL, True)], [3] * 6),
        ([(slice(0, 4), None), (slice(2, 6), None)], [1, 1, 2, 2, 1, 1]),
        ([(slice(0, 4), None), (slice(2, 6), None), (ALL, None)], [2, 2, 3, 3, 2, 2]),
        ([(slice(0, 6, 2), None), (ALL, None)], [2, 1, 2, 1, 2, 1]),
        ([(ALL, None), (slice(1, 3), False), (ALL, True)], [2, 2, 2, 2, 2, 2]),
        ([(slice(0, 3), False), (slice(3, 6), None), (slice(0, 6), True)], [2] * 6),
    ],
)
def test_accumulation_is_decided_element_by_element(
    target: str, writes: list[tuple[slice, bool | None]], expected: list[int]
) -> None:
    assert _accumulated(target, writes).tolist() == expected


@pytest.mark.parametrize("target", TARGETS)
def test_refuses_to_add_where_no_matmul_has_written(target: str) -> None:
    for writes in ([(ALL, True)], [(slice(0, 5), None), (ALL, True)]):
        with pytest.raises(RuleViolation, match="NKW-PSUM-UNSTARTED"):
            _accumulated(target, writes)
    assert _accumulated(target, [(ALL, False), (ALL, True)]).tolist() == [2] * 6


@pytest.mark.parametrize("target", TARGETS)
def test_adding_to_what_another_instruction_wrote_is_warned_of_before_gen4(target: str) -> None:
    def kernel(identity, accumulate):
        total = nl.zeros((4, 4), nl.float32, nl.psum)
        stationary = nl.load(identity)
        nisa.nc_matmul(dst=total, stationary=stationary, moving=stationary, accumulate=accumulate)

    for accumulate, warned in ((True, target != "trn3"), (None, target != "trn3"), (False, False)):
        arguments = ((np.eye(4, dtype=np.float32), accumulate), {})
        done = launch(kernel, [arguments], hardware(target))
        assert any("NKW-PSUM-INIT" in warning for warning in done.warnings) == warned


def test_accumulate_is_true_false_or_none() -> None:
    for accumulate in (True, False, None, np.bool_(True)):
        plan("trn2", "nc_matmul", **healthy("nc_matmul", accumulate=accumulate))
    for accumulate in (1, 0, "yes"):
        refuses("NKW-MATMUL-ACCUMULATE", "trn2", "nc_matmul", **healthy("nc_matmul", accumulate=accumulate))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_transpose_mode_moves_bits_from_gen3_on(dtype: str) -> None:
    stationary = every_bit_pattern(dtype, (128, 33))
    call = {"stationary": stationary, "moving": np.eye(128).astype(STORAGE[dtype]), "is_transpose": True}
    for target in ("trn2", "trn3"):
        done = execute(target, "nc_matmul", dst=Fresh((33, 128), dtype, PSUM), **call)["dst"]
        assert_same_bits(done, stationary.T)
    on_chip = {key: tile(value.shape, dtype) for key, value in call.items() if key != "is_transpose"}
    wrong = {
        "dst": tile((33, 128), "float16" if dtype == "float32" else "float32", PSUM),
        "is_transpose": True,
    }
    refuses("NKW-SAME-DTYPE", "trn2", "nc_matmul", **on_chip, **wrong)
    finite = sample(dtype, (128, 33))
    done = execute("trn1", "nc_matmul", **{**call, "stationary": finite}, dst=Fresh((33, 128), buffer=PSUM))
    assert_same(done["dst"], finite.T)


def test_transpose_mode_needs_an_identity() -> None:
    data = _whole_numbers("float32", (8, 4), 1)
    for moving in (2 * np.eye(8, dtype=np.float32), np.eye(8, dtype=np.float32)[::-1].copy()):
        with pytest.raises(RuleViolation, match="NKW-TRANSPOSE-IDENTITY"):
            execute(
                "trn2",
                "nc_matmul",
                dst=Fresh((4, 8), buffer=PSUM),
                stationary=data,
                moving=moving,
                is_transpose=True,
            )


@pytest.mark.parametrize("target", TARGETS)
def test_double_row_contracts_two_rows_per_partition(target: str) -> None:
    stationary, moving = (
        _whole_numbers("float8_e4m3", (16, 2, 5), 1),
        _whole_numbers("float8_e4m3", (16, 2, 7), 2),
    )
    for mode in (_MODE.double_row, "double_row"):
        planned = {
            "dst": tile((5, 7), buffer=PSUM),
            "stationary": tile((16, 2, 5), "float8_e4m3"),
            "moving": tile((16, 2, 7), "float8_e4m3"),
            "perf_mode": mode,
        }
        if target == "trn1":
            refuses("NKW-MATMUL-DOUBLE-ROW", target, "nc_matmul", **planned)
            continue
        done = execute(
            target,
            "nc_matmul",
            dst=Fresh((5, 7), buffer=PSUM),
            stationary=stationary,
            moving=moving,
            perf_mode=mode,
        )
        assert_same(done["dst"], _product(stationary.reshape(32, 5), moving.reshape(32, 7)))
        for changes in (
            {"stationary": tile((16, 3, 5), "float8_e4m3")},
            {"stationary": tile((16, 2, 5), "bfloat16")},
            {"moving": tile((16, 14), "float8_e4m3")},
            {"is_transpose": True},
        ):
            refuses("NKW-MATMUL-DOUBLE-ROW", target, "nc_matmul", **{**planned, **changes})


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_double_row_takes_row_tiles_and_whole_columns_of_the_array(target: str) -> None:
    planned = {
        "dst": tile((5, 7), buffer=PSUM),
        "stationary": tile((16, 2, 5), "float8_e4m3"),
        "moving": tile((16, 2, 7), "float8_e4m3"),
        "perf_mode": _MODE.double_row,
    }
    plan(target, "nc_matmul", **planned, tile_position=(64, 0), tile_size=(64, 128))
    halves = {"tile_position": (64, 0), "tile_size": (64, 64)}
    refuses("NKW-MATMUL-DOUBLE-ROW-TILE", target, "nc_matmul", **planned, **halves)
    one = {"stationary": tile((16, 5), "float8_e4m3"), "moving": tile((16, 7), "float8_e4m3")}
    plan(target, "nc_matmul", dst=planned["dst"], **one, **halves)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("position", "size", "least_generation"),
    [
        ((0, 0), (128, 128), 2),
        ((64, 64), (64, 64), 2),
        ((0, 64), (128, 64), 2),
        ((32, 96), (32, 32), 3),
        ((32, 0), (64, 64), 9),
        ((96, 0), (64, 64), 9),
        ((128, 0), (64, 64), 9),
        ((0, 0), (16, 128), 9),
        ((0,), (128,), 9),
        ((0, 0), (), 9),
        ((), (64, 64), 9),
    ],
)
def test_tiles_of_the_array(target: str, position: Any, size: Any, least_generation: int) -> None:
    call = healthy("nc_matmul", tile_position=position, tile_size=size)
    if hardware(target).generation >= least_generation:
        plan(target, "nc_matmul", **call)
    else:
        refuses("NKW-MATMUL-ARRAY-TILE", target, "nc_matmul", **call)


def test_an_operand_fits_its_tile_of_the_array() -> None:
    halves = {"tile_position": (0, 0), "tile_size": (64, 64)}
    for k, m in ((64, 64), (65, 64), (64, 65)):
        call = {
            "dst": tile((m, 4), buffer=PSUM),
            "stationary": tile((k, m)),
            "moving": tile((k, 4)),
            **halves,
        }
        if k == m == 64:
            plan("trn1", "nc_matmul", **call)
        else:
            refuses("NKW-MATMUL-ARRAY-TILE", "trn1", "nc_matmul", **call)


def test_tiling_and_hints_do_not_change_values() -> None:
    ones = [_whole_numbers("bfloat16", (32, columns), columns) % 2 for columns in (5, 7)]
    stationary, moving = (np.abs(values).astype(values.dtype) for values in ones)
    call = {"dst": Fresh((5, 7), buffer=PSUM), "stationary": stationary, "moving": moving}
    for changes in (
        {"tile_position": (32, 64), "tile_size": (32, 32)},
        {"is_stationary_onezero": True, "is_moving_onezero": True},
    ):
        assert_same(execute("trn2", "nc_matmul", **call, **changes)["dst"], _product(stationary, moving))


def test_the_message_of_a_product_that_is_too_wide() -> None:
    error = refuses(
        "NKW-MATMUL-MOVING",
        "trn2",
        "nc_matmul",
        dst=tile((8, 513), buffer=PSUM),
        stationary=tile((8, 8)),
        moving=tile((8, 513)),
    )
    assert str(error) == (
        "[NKW-MATMUL-MOVING] nc_matmul: The moving tile has at most 512 columns, on gen4 4096 into float32 and 8192 "
        "into bfloat16 PSUM.\n"
        "  seen:  513 columns\n"
        "  limit: 512 on trn2\n"
        "  dst = (8, 513) float32 in psum\n"
        "  stationary = (8, 8) float32 in sbuf\n"
        "  moving = (8, 513) float32 in sbuf\n"
        "  try:   loop over blocks of 512 columns (nl.tile_size.gemm_moving_fmax)"
    )
