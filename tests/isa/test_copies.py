"""tensor_copy and memset: bits that stay, casts that round once, and who may do it."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from simulate.hardware import hardware
from simulate.isa import Engine
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import launch
from tests.isa.reference import (
    FLOATS,
    INTEGERS,
    STORAGE,
    as_float64,
    assert_same,
    assert_same_bits,
    every_bit_pattern,
    rounded,
    sample,
)
from tests.isa.tiles import HBM, PSUM, SBUF, TARGETS, Fresh, Given, execute, healthy, plan, refuses, tile

SHAPES = [(1, 5), (127, 3, 7), (128, 33)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_equal_dtypes_keep_every_bit(dtype: str, shape: tuple[int, ...]) -> None:
    bits = every_bit_pattern(dtype, shape)
    engines = (Engine.unknown, Engine.vector, Engine.gpsimd, Engine.scalar)
    for engine in engines:
        assert_same_bits(
            execute("trn2", "tensor_copy", dst=Fresh(shape, dtype), src=bits, engine=engine)["dst"], bits
        )
    from_psum = execute("trn1", "tensor_copy", dst=Fresh(shape, dtype, PSUM), src=Given(bits, PSUM))
    assert_same_bits(from_psum["dst"], bits)


@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS])
def test_different_dtypes_go_through_float32(source: str, target: str) -> None:
    values = sample(source, (5, 67), target)
    expected = rounded(as_float64(values), target)
    if source == target:
        expected = values.astype(np.float64)
    assert_same(execute("trn2", "tensor_copy", dst=Fresh((5, 67), target), src=values)["dst"], expected)
    stored = execute("trn1", "dma_copy", dst=Fresh((5, 67), target, HBM), src=values)["dst"]
    assert_same(stored, expected)


@pytest.mark.parametrize(
    ("target", "engine", "accepted"),
    [
        ("trn1", Engine.scalar, False),
        ("trn2", Engine.scalar, True),
        ("trn3", Engine.scalar, True),
        *((target, engine, True) for target in TARGETS for engine in (Engine.vector, Engine.gpsimd)),
        *((target, Engine.tensor, False) for target in TARGETS),
    ],
)
def test_engines_of_tensor_copy(target: str, engine: Engine, accepted: bool) -> None:
    arguments = healthy("tensor_copy", engine=engine)
    if accepted:
        assert plan(target, "tensor_copy", **arguments).engine is engine
    else:
        refuses("NKW-ENGINE", target, "tensor_copy", **arguments)


@pytest.mark.parametrize("name", ["tensor_copy", "memset"])
def test_gpsimd_does_not_reach_psum(name: str) -> None:
    in_psum = healthy(name, dst=tile((8, 8), buffer=PSUM), engine=Engine.gpsimd)
    refuses("NKW-GPSIMD-PSUM", "trn2", name, **in_psum)
    plan("trn2", name, **{**in_psum, "engine": Engine.vector})
    plan("trn2", name, **{**in_psum, "dst": tile((8, 8))})


def test_elements_are_matched_by_count_not_by_shape() -> None:
    values = sample("float32", (4, 6, 2))
    copied = execute("trn2", "tensor_copy", dst=Fresh((4, 3, 4)), src=values)["dst"]
    assert_same_bits(copied, values.reshape(4, 3, 4))
    for shape, code in (((4, 11), "NKW-ELEMENTS-AGREE"), ((4, 13), "NKW-ELEMENTS-AGREE"), ((3, 12), None)):
        refuses(code or "NKW-PARTITIONS-AGREE", "trn2", "tensor_copy", dst=tile(shape), src=tile((4, 6, 2)))


def test_packed_elements_are_copied_and_never_cast() -> None:
    words = every_bit_pattern("uint32", (4, 6))
    dtype = "float8_e4m3fn_x4"
    copied = execute("trn3", "tensor_copy", dst=Fresh((4, 6), dtype), src=Given(words, dtype=dtype))
    assert_same_bits(copied["dst"], words)
    for dst, src in ((dtype, "float32"), ("uint32", dtype)):
        refuses("NKW-PACKED-DTYPE", "trn3", "tensor_copy", dst=tile((4, 6), dst), src=tile((4, 6), src))


def test_tfloat32_rounds_to_ten_fraction_bits() -> None:
    values = sample("float32", (8, 65))
    copied = execute("trn2", "tensor_copy", dst=Fresh((8, 65), "tfloat32"), src=values)["dst"]
    assert_same(copied, rounded(values, "tfloat32"))


def test_an_engine_sees_of_a_float32_tile_viewed_as_tfloat32_what_the_format_has() -> None:
    def kernel(x):
        tile = nl.load(x)
        out = nl.ndarray((2, *x.shape), x.dtype, nl.shared_hbm)
        for index, dtype in enumerate((nl.float32, nl.tfloat32)):
            copied = nl.ndarray(x.shape, dtype)
            nisa.tensor_copy(dst=copied, src=tile.view(nl.tfloat32))
            nl.store(out[index], copied.view(nl.float32))
        return out

    values = sample("float32", (4, 9))
    upper = (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    for mode in (simulate.Mode.eager, simulate.Mode.replay, simulate.Mode.replay):
        done = simulate.World("trn2").launch(kernel, [((values,), {})], mode=mode).outputs[0]
        assert_same_bits(done[0].copy(), upper)  # another dtype: through float32
        assert_same_bits(done[1].copy(), values)  # the same dtype: bit by bit


def test_a_copy_onto_an_overlapping_view_takes_the_old_values() -> None:
    def shift(x):
        row = nl.load(x)
        nisa.tensor_copy(dst=row[:, 1:9], src=row[:, 0:8])
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        nl.store(out, row)
        return out

    values = sample("float32", (4, 9))
    shifted = launch(shift, [((values,), {})], hardware("trn2")).outputs[0]
    assert_same_bits(shifted, np.concatenate((values[:, :1], values[:, :8]), axis=1))


@pytest.mark.parametrize("buffer", [SBUF, PSUM])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_memset_fills_every_element(dtype: str, buffer) -> None:
    for shape in ((1, 1), (127, 3, 3), (128, 5)):
        for value in (0, 1, 3) if dtype in INTEGERS else (0.0, -2.5, float("inf")):
            filled = execute("trn1", "memset", dst=Fresh(shape, dtype, buffer), value=value)["dst"]
            expected = np.full(shape, rounded(np.array([value]), dtype)[0])
            assert_same(filled, expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_memset_of_an_integer_tile_takes_integers_of_its_range(dtype: str) -> None:
    limits = np.iinfo(STORAGE[dtype])
    for value in (int(limits.min), int(limits.max)):
        filled = execute("trn2", "memset", dst=Fresh((2, 3), dtype), value=value)["dst"]
        assert (filled == value).all()
    for value in (int(limits.min) - 1, int(limits.max) + 1, 0.0, 1.5, None, "1"):
        refuses("NKW-MEMSET-INTEGER", "trn2", "memset", dst=tile((2, 3), dtype), value=value)


def test_memset_of_a_bool_tile_takes_zero_and_one() -> None:
    for value in (0, 1, True):
        plan("trn2", "memset", dst=tile((2, 3), "bool_"), value=value)
    refuses("NKW-MEMSET-INTEGER", "trn2", "memset", dst=tile((2, 3), "bool_"), value=2)


def test_memset_of_a_float_tile_takes_what_float32_holds() -> None:
    largest = float(np.finfo(np.float32).max)
    to_infinity = 2.0**128 - 2.0**103  # half a unit above the largest, from where rounding gives infinity
    for value in (
        largest,
        -largest,
        np.nextafter(to_infinity, 0.0),
        float("inf"),
        float("nan"),
        np.float32(2),
        7,
    ):
        plan("trn2", "memset", dst=tile((2, 3)), value=value)
    for value in (to_infinity, -1e39, 10**400):
        refuses("NKW-FLOAT32-RANGE", "trn2", "memset", dst=tile((2, 3)), value=value)
    for value in ("1", None, [1.0]):
        refuses("NKW-NUMBER", "trn2", "memset", dst=tile((2, 3)), value=value)
    minimum = execute("trn2", "memset", dst=Fresh((2, 3), "bfloat16"), value=-largest)["dst"]
    assert (minimum == -np.inf).all()


def test_memset_of_packed_elements_takes_zero_only() -> None:
    for dtype in ("float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"):
        assert not execute("trn3", "memset", dst=Fresh((2, 3), dtype), value=0)["dst"].any()
        for value in (1, 0.5, "0", None):
            refuses("NKW-MEMSET-PACKED", "trn3", "memset", dst=tile((2, 3), dtype), value=value)


@pytest.mark.parametrize("target", TARGETS)
def test_engines_of_memset(target: str) -> None:
    for engine in (Engine.vector, Engine.gpsimd):
        assert plan(target, "memset", **healthy("memset", engine=engine)).engine is engine
    for engine in (Engine.scalar, Engine.tensor, Engine.sync, "vector"):
        refuses("NKW-ENGINE", target, "memset", **healthy("memset", engine=engine))


def test_the_message_of_a_float_in_an_integer_tile() -> None:
    error = refuses("NKW-MEMSET-INTEGER", "trn2", "memset", dst=tile((2, 3), "uint8"), value=0.0)
    assert str(error) == (
        "[NKW-MEMSET-INTEGER] memset: An integer tile is filled with an integer of its dtype's range.\n"
        "  seen:  value=0.0 for uint8\n"
        "  limit: an integer from 0 to 255\n"
        "  dst = (2, 3) uint8 in sbuf\n"
        "  value = 0.0\n"
        "  try:   write 0 instead of 0.0 for an integer tile"
    )
