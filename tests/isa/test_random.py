"""dropout, rng, rand2 and the instructions on generator state: distribution, repeatability, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

import simulate
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import FLOATS, INTEGERS, assert_same_bits, sample
from tests.isa.tiles import PSUM, TARGETS, Fresh, execute, plan, refuses, tile

ENGINE = nisa.engine
SIGMAS = 6  # a fixed seed draws one sample; beyond six standard deviations it would be no uniform one


def run(kernel, *arrays, target="trn3"):
    return simulate.launch(kernel, [(arrays, {})], hardware(target)).outputs[0]


def out_of(tile_):
    out = nl.ndarray(tile_.shape, dtype=tile_.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile_)
    return out


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_rng_takes_integer_dtypes_on_every_chip(target, dtype):
    plan(target, "rng", dst=tile((8, 6), dtype))
    plan(target, "rng", dst=tile((8, 6), dtype, PSUM))
    refuses("NKW-DTYPE-ALLOWED", target, "rng", dst=tile((8, 6), "float32"))


def test_gpsimd_generates_from_gen3_on_and_into_sbuf():
    refuses("NKW-ENGINE", "trn1", "rng", dst=tile((8, 6), "uint32"), engine=ENGINE.gpsimd)
    for target in ("trn2", "trn3"):
        plan(target, "rng", dst=tile((8, 6), "uint32"), engine=ENGINE.gpsimd)
        refuses("NKW-GPSIMD-PSUM", target, "rng", dst=tile((8, 6), "uint32", PSUM), engine=ENGINE.gpsimd)
    refuses("NKW-ENGINE", "trn2", "rng", dst=tile((8, 6), "uint32"), engine=ENGINE.scalar)


@pytest.mark.parametrize(
    ("target", "engine"),
    [(target, ENGINE.vector) for target in TARGETS] + [("trn2", ENGINE.gpsimd), ("trn3", ENGINE.gpsimd)],
)
def test_every_bit_is_set_half_of_the_time(target, engine):
    words = execute(target, "rng", dst=Fresh((128, 64), "uint32"), engine=engine)["dst"]
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 32)
    deviation = 0.5 / math.sqrt(len(bits))
    assert np.abs(bits.mean(0) - 0.5).max() < SIGMAS * deviation
    assert len(np.unique(words)) > words.size - SIGMAS  # birthday: 0.008 repeated words expected


def test_narrow_dtypes_take_the_low_bits():
    wide = execute("trn2", "rng", dst=Fresh((4, 9), "uint32"))["dst"]
    for dtype in INTEGERS:
        narrow = execute("trn2", "rng", dst=Fresh((4, 9), dtype))["dst"]
        assert_same_bits(narrow, wide.astype(f"u{narrow.itemsize}").view(narrow.dtype))


@pytest.mark.parametrize("target", TARGETS)
def test_a_seed_repeats_its_numbers_and_another_does_not(target):
    def kernel(seeds):
        loaded = nl.load(seeds)
        tiles = []
        for index in (0, 1, 0):
            nisa.set_rng_seed(src_seeds=loaded[0:1, index : index + 1])
            bits = nl.ndarray((128, 8), dtype=nl.uint32)
            nisa.rng(dst=bits)
            tiles.append(out_of(bits))
        return tiles

    first, other, again = run(kernel, np.array([[7, 8]], np.uint32), target=target)
    assert_same_bits(first, again)
    assert (first != other).mean() > 0.9
    assert len(np.unique(first, axis=0)) == 128


def test_numbers_go_on_where_they_stopped():
    def kernel(column_slices, x):
        result = nl.ndarray((16, 10), dtype=nl.uint32)
        for columns in column_slices:
            nisa.rng(dst=result[:, columns])
        return out_of(result)

    together, parted = (
        run(
            lambda x, column_slices=column_slices: kernel(column_slices, x),
            np.zeros((1, 1), np.float32),
            target="trn2",
        )
        for column_slices in ([slice(0, 10)], [slice(0, 3), slice(3, 10)])
    )
    assert_same_bits(together, parted)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "float32"])
def test_a_seed_is_one_32_bit_element(dtype):
    plan("trn1", "set_rng_seed", src_seeds=tile((1, 1), dtype))
    for bad in (tile((1, 2), dtype), tile((2, 1), dtype), tile((1, 1), "uint16")):
        refuses("NKW-RNG-SEED", "trn1", "set_rng_seed", src_seeds=bad)


@pytest.mark.parametrize(("name", "operand"), [("rand_set_state", "src_seeds"), ("rand_get_state", "dst")])
def test_generator_state_follows_engine_and_chip(name, operand):
    gpsimd, vector = (
        {operand: tile((8, 6), "uint32")},
        {operand: tile((8, 24), "uint32"), "engine": ENGINE.vector},
    )
    refuses("NKW-RANDOM-STATE-CHIP", "trn1", name, **gpsimd)
    plan("trn2", name, **gpsimd)
    plan("trn2", name, **gpsimd, engine=ENGINE.gpsimd)
    refuses("NKW-ENGINE", "trn2", name, **vector)
    plan("trn3", name, **vector)
    for words in (5, 7, 24):
        refuses("NKW-RANDOM-STATE-SHAPE", "trn3", name, **{operand: tile((8, words), "uint32")})
    for words in (23, 25, 6):
        refuses("NKW-RANDOM-STATE-SHAPE", "trn3", name, **{**vector, operand: tile((8, words), "uint32")})
    refuses("NKW-RANDOM-STATE-SHAPE", "trn2", name, **{operand: tile((8, 6), "int32")})
    refuses("NKW-RANDOM-STATE-SHAPE", "trn2", name, **{operand: tile((8, 2, 3), "uint32")})


def test_state_goes_to_psum_on_gen4_from_vector_only():
    refuses("NKW-GPSIMD-PSUM", "trn2", "rand_get_state", dst=tile((8, 6), "uint32", PSUM))
    refuses("NKW-GPSIMD-PSUM", "trn3", "rand_get_state", dst=tile((8, 6), "uint32", PSUM))
    plan("trn3", "rand_get_state", dst=tile((8, 24), "uint32", PSUM), engine=ENGINE.vector)
    refuses("NKW-BUFFER", "trn3", "rand_set_state", src_seeds=tile((8, 6), "uint32", PSUM))


@pytest.mark.parametrize("engine", [ENGINE.gpsimd, ENGINE.vector])
def test_restoring_a_state_repeats_the_numbers(engine):
    words = 24 if engine is ENGINE.vector else 6

    def kernel(seeds):
        nisa.rand_set_state(src_seeds=nl.load(seeds), engine=engine)
        kept = nl.ndarray((32, words), dtype=nl.uint32)
        tiles = []
        for step in range(3):
            if step == 1:
                nisa.rand_get_state(dst=kept, engine=engine)
            elif step == 2:
                nisa.rand_set_state(src_seeds=kept, engine=engine)
            bits = nl.ndarray((32, 7), dtype=nl.uint32)
            nisa.rng(dst=bits, engine=engine)
            tiles.append(out_of(bits))
        return tiles

    first, second, again = run(kernel, sample("uint32", (32, words)))
    assert_same_bits(second, again)
    assert (first != second).any()


def test_rand2_exists_on_gen4_only():
    plan("trn3", "rand2", dst=tile((8, 6)), min=0.0, max=1.0)
    for target in ("trn1", "trn2"):
        refuses("NKW-RAND2-CHIP", target, "rand2", dst=tile((8, 6)), min=0.0, max=1.0)


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("NKW-RAND2-RANGE", {"min": 1.0}),
        ("NKW-RAND2-RANGE", {"min": 2.0}),
        ("NKW-RAND2-RANGE", {"max": float("nan")}),
        ("NKW-DTYPE-ALLOWED", {"min": tile((8, 1), "bfloat16")}),
        ("NKW-VECTOR-OPERAND", {"max": tile((8, 6))}),
        ("NKW-DTYPE-ALLOWED", {"dst": tile((8, 6), "float8_e4m3fn")}),
    ],
)
def test_rand2_refuses(code, bad):
    good = {"dst": tile((8, 6), "float8_e4m3"), "min": tile((8, 1)), "max": tile((8, 1))}
    plan("trn3", "rand2", **good)
    refuses(code, "trn3", "rand2", **{"dst": tile((8, 6)), "min": 0.0, "max": 1.0, **bad})


def test_rand2_refuses_an_empty_range_of_a_partition_when_it_runs():
    low, high = np.array([[0.0], [1.0]], np.float32), np.array([[1.0], [1.0]], np.float32)
    with pytest.raises(simulate.errors.RuleViolation, match="NKW-RAND2-RANGE"):
        execute("trn3", "rand2", dst=Fresh((2, 3)), min=low, max=high)
    execute("trn3", "rand2", dst=Fresh((2, 3)), min=low, max=high + 1)


def test_rand2_is_uniform_between_its_bounds():
    low, high = np.linspace(-3, 2, 128, dtype=np.float32)[:, None], 5.0
    values = execute("trn3", "rand2", dst=Fresh((128, 64)), min=low, max=high)["dst"]
    assert (values >= low).all() and (values <= high).all()
    unit = (values.astype(float) - low) / (high - low)
    deviation = 1 / math.sqrt(12 * unit.size)
    assert abs(unit.mean() - 0.5) < SIGMAS * deviation
    counts = np.histogram(unit, 16, (0, 1))[0]
    assert np.abs(counts - unit.size / 16).max() < SIGMAS * math.sqrt(unit.size / 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint32", "float16"])
def test_rand2_casts_to_dst(dtype):
    values = execute("trn3", "rand2", dst=Fresh((16, 8), dtype), min=2.0, max=100.0)["dst"].astype(float)
    assert (values >= 2).all() and (values <= 100).all()


@pytest.mark.parametrize("target", TARGETS)
def test_dropout_takes_every_chip(target):
    plan(target, "dropout", dst=tile((8, 6)), data=tile((8, 6)), prob=0.5)


@pytest.mark.parametrize(
    ("code", "bad", "good"),
    [
        ("NKW-SAME-DTYPE", {"dst": tile((8, 6), "bfloat16")}, {}),
        ("NKW-ELEMENTS-AGREE", {"dst": tile((8, 5))}, {"dst": tile((8, 3, 2))}),
        ("NKW-DROPOUT-PROBABILITY", {"prob": -0.01}, {"prob": 0}),
        ("NKW-DROPOUT-PROBABILITY", {"prob": 1.01}, {"prob": 1}),
        ("NKW-DTYPE-ALLOWED", {"prob": tile((8, 1), "int8")}, {"prob": tile((8, 1), "bfloat16")}),
        (
            "NKW-DTYPE-ALLOWED",
            {"dst": tile((8, 6), "int32"), "data": tile((8, 6), "int32"), "prob": tile((8, 1), "bfloat16")},
            {"dst": tile((8, 6), "int32"), "data": tile((8, 6), "int32"), "prob": tile((8, 1))},
        ),
    ],
)
def test_dropout_refuses_and_accepts_the_twin(code, bad, good):
    call = {"dst": tile((8, 6)), "data": tile((8, 6)), "prob": 0.5}
    plan("trn2", "dropout", **{**call, **good})
    refuses(code, "trn2", "dropout", **{**call, **bad})


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_dropout_keeps_or_drops_every_element_at_the_ends(dtype):
    data = sample(dtype, (5, 9))
    assert_same_bits(execute("trn2", "dropout", dst=Fresh((5, 9), dtype), data=data, prob=0.0)["dst"], data)
    dropped = execute("trn2", "dropout", dst=Fresh((5, 9), dtype), data=data, prob=1.0)["dst"]
    assert_same_bits(dropped, np.zeros_like(data))


def test_dropout_drops_with_the_probability_of_the_partition():
    prob = np.linspace(0, 1, 128, dtype=np.float32)[:, None]
    result = execute(
        "trn3", "dropout", dst=Fresh((128, 512)), data=np.ones((128, 512), np.float32), prob=prob
    )["dst"]
    assert set(np.unique(result)) == {0.0, 1.0}
    deviation = np.sqrt(prob * (1 - prob) / 512) + 2.0**-24
    assert (np.abs((1 - result).mean(1, keepdims=True) - prob) < SIGMAS * deviation).all()
