"""quantize_mx and nc_matmul_mx: formats against a scalar reference, layouts, and what they refuse."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import simulate
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same, rounded, sample
from tests.isa.tiles import PSUM, SBUF, plan, refuses, tile, twins

FP8 = {"float8_e4m3fn": 8, "float8_e5m2": 15}
LAST = 2.0**-24


def run(kernel, *arrays):
    return simulate.launch(kernel, [(arrays, {})], hardware("trn3")).outputs[0]


def out_of(tile_, dtype=None):
    bits = tile_.view(dtype) if dtype else tile_
    out = nl.ndarray(bits.shape, dtype=bits.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=bits)
    return out


# -- quantize_mx


def quantizing(p=64, f=16, **changes):
    base = {"dst": tile((p, f // 4), "float8_e4m3fn_x4"), "src": tile((p, f), "bfloat16")}
    return {**base, "dst_scale": tile((p, f // 4), "uint8"), **changes}


def test_mx_exists_on_gen4_only():
    plan("trn3", "quantize_mx", **quantizing())
    plan("trn3", "nc_matmul_mx", **matmul())
    for target in ("trn1", "trn2"):
        refuses("NKW-MX-CHIP", target, "quantize_mx", **quantizing())
        refuses("NKW-MX-CHIP", target, "nc_matmul_mx", **matmul())


test_quantize_refuses_and_accepts_the_twin = twins(
    "trn3",
    "quantize_mx",
    dict,
    ("NKW-MX-PARTITIONS", quantizing(31), quantizing(32)),
    ("NKW-MX-PARTITIONS", quantizing(127), quantizing(128)),
    ("NKW-DTYPE-ALLOWED", quantizing(src=tile((64, 16))), quantizing(src=tile((64, 16), "float16"))),
    (
        "NKW-DTYPE-ALLOWED",
        quantizing(dst=tile((64, 4), "float4_e2m1fn_x4")),
        quantizing(dst=tile((64, 4), "float8_e5m2_x4")),
    ),
    (
        "NKW-DTYPE-ALLOWED",
        quantizing(dst_scale=tile((64, 4), "int8")),
        quantizing(dst_scale=tile((64, 4), "float8_e8m0fnu")),
    ),
    ("NKW-QUANTIZE-SIZE", quantizing(dst=tile((64, 3), "float8_e4m3fn_x4")), quantizing()),
    (
        "NKW-QUANTIZE-SIZE",
        quantizing(src=tile((64, 15), "bfloat16")),
        quantizing(src=tile((64, 4, 4), "bfloat16")),
    ),
    ("NKW-PARTITIONS-AGREE", quantizing(dst=tile((32, 4), "float8_e4m3fn_x4")), quantizing()),
    ("NKW-BUFFER", quantizing(src=tile((64, 16), "bfloat16", PSUM)), quantizing()),
    (
        "NKW-MX-SCALE-SHAPE",
        quantizing(dst_scale=tile((35, 4), "uint8")),
        quantizing(dst_scale=tile((36, 4), "uint8")),
    ),
    ("NKW-MX-SCALE-SHAPE", quantizing(dst_scale=tile((64, 3), "uint8")), quantizing()),
    (
        "NKW-MX-SCALE-SHAPE",
        quantizing(dst_scale=tile((64, 2, 3), "uint8")),
        quantizing(dst_scale=tile((64, 2, 2), "uint8")),
    ),
    (
        "NKW-MX-SCALE-SHAPE",
        quantizing(32, dst_scale=tile((3, 4), "uint8")),
        quantizing(32, dst_scale=tile((4, 4), "uint8")),
    ),
    (
        "NKW-MX-SCALE-START",
        quantizing(32, dst_scale=tile((4, 4), "uint8", start_partition=16)),
        quantizing(32, dst_scale=tile((4, 4), "uint8", start_partition=12)),
    ),
    (
        "NKW-MX-SCALE-START",
        quantizing(32, dst_scale=tile((4, 4), "uint8", start_partition=2)),
        quantizing(32, dst_scale=tile((4, 4), "uint8", start_partition=36)),
    ),
)


def quantized(src, element, scale_dtype="uint8"):
    p, f = src.shape

    def kernel(x):
        packed = nl.ndarray((p, f // 4), dtype=f"{element}_x4")
        scale = nl.full((p, f // 4), 77, nl.uint8)
        nisa.quantize_mx(dst=packed, src=nl.load(x), dst_scale=scale.view(scale_dtype))
        return out_of(packed, nl.uint8), out_of(scale)

    return run(kernel, src)


def test_the_free_dims_of_a_scale_tile_count_together():
    src = sample("bfloat16", (64, 16)).astype(ml_dtypes.bfloat16)

    def kernel(x):
        results = []
        for free in ((4,), (2, 2)):
            packed = nl.ndarray((64, 4), dtype="float8_e4m3fn_x4")
            scale = nl.full((64, *free), 0, nl.uint8)
            nisa.quantize_mx(dst=packed, src=nl.load(x), dst_scale=scale)
            product = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul_mx(product, packed, packed, scale, scale)
            results += [out_of(scale.reshape((64, 4))), out_of(nl.copy(product))]
        return tuple(results)

    scale, product, other_scale, other_product = run(kernel, src)
    assert_same(scale, other_scale)
    assert_same(product, other_product)


def row_of(group):
    return 32 * (group // 4) + group % 4


@pytest.mark.parametrize("p", [32, 64, 128])
@pytest.mark.parametrize("element", FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantizes_groups_of_32(p, element, dtype):
    src = (sample(dtype, (p, 12)).astype(np.float64) * 2.0 ** (np.arange(p)[:, None] % 13 - 8)).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    )
    src[8:16, 4:8] = 0
    octets, scales = quantized(src, element)
    used = set()
    for group in range(p // 8):
        for column in range(3):
            block = src[8 * group : 8 * group + 8, 4 * column : 4 * column + 4].astype(np.float64)
            amax = np.abs(block).max()
            exponent = -127 if amax == 0 else math.floor(math.log2(amax)) - (FP8[element] - 1)
            assert scales[row_of(group), column] == exponent + 127
            expected = rounded(block / 2.0**exponent, element)
            got = octets[8 * group : 8 * group + 8, 4 * column : 4 * column + 4]
            assert_same(got.view(getattr(ml_dtypes, element)).astype(np.float64), expected)
        used.add(row_of(group))
    assert all((scales[row] == 77).all() for row in range(p) if row not in used)


def test_tiny_groups_clamp_their_scale_and_special_values_spread():
    src = np.zeros((32, 4), ml_dtypes.bfloat16)
    src[0, 0] = 2.0**-130
    src[8, 0], src[9, 1] = np.inf, 1
    src[16, 0], src[17, 1] = np.nan, 1
    src[24:, :] = 1
    octets, scales = quantized(src, "float8_e4m3fn")
    values = octets.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert scales[:4, 0].tolist() == [0, 255, 255, 127 - 7]
    assert values[0, 0] == 2.0**-3 and (values[1:8] == 0).all()
    assert np.isnan(values[8:24]).all()
    assert (values[24:] == 2.0**7).all()


def test_scales_are_the_same_bits_in_both_dtypes():
    src = sample("bfloat16", (32, 8))
    assert np.array_equal(
        quantized(src, "float8_e5m2")[1], quantized(src, "float8_e5m2", "float8_e8m0fnu")[1]
    )


# -- nc_matmul_mx


def matmul(k=32, m=8, n=16, left="float8_e4m3fn_x4", right="float8_e4m3fn_x4", **changes):
    base = {"dst": tile((m, n), buffer=PSUM), "stationary": tile((k, m), left), "moving": tile((k, n), right)}
    return {
        **base,
        "stationary_scale": tile((k, m), "uint8"),
        "moving_scale": tile((k, n), "uint8"),
        **changes,
    }


@pytest.mark.parametrize("left", ["float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"])
@pytest.mark.parametrize("right", ["float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"])
def test_operand_formats_may_be_mixed(left, right):
    plan("trn3", "nc_matmul_mx", **matmul(left=left, right=right))


test_matmul_refuses_and_accepts_the_twin = twins(
    "trn3",
    "nc_matmul_mx",
    dict,
    ("NKW-MX-PARTITIONS", matmul(33), matmul(64)),
    ("NKW-MX-STATIONARY", matmul(m=7), matmul(m=6)),
    ("NKW-MATMUL-STATIONARY", matmul(m=130, dst=tile((128, 16), buffer=PSUM)), matmul(m=128)),
    ("NKW-MATMUL-MOVING", matmul(n=4097, dst=tile((8, 4096), "float32", PSUM)), matmul(n=4096)),
    (
        "NKW-MATMUL-MOVING",
        matmul(n=8193, dst=tile((8, 8192), "bfloat16", PSUM)),
        matmul(n=8192, dst=tile((8, 8192), "bfloat16", PSUM)),
    ),
    (
        "NKW-MATMUL-RESULT-DTYPE",
        matmul(dst=tile((8, 16), "float16", PSUM)),
        matmul(dst=tile((8, 16), "bfloat16", PSUM)),
    ),
    ("NKW-MATMUL-SHAPE", matmul(dst=tile((8, 15), buffer=PSUM)), matmul(dst=tile((8, 4, 4), buffer=PSUM))),
    ("NKW-BUFFER", matmul(dst=tile((8, 16))), matmul()),
    ("NKW-DTYPE-ALLOWED", matmul(left="uint32"), matmul()),
    ("NKW-PARTITIONS-AGREE", matmul(moving=tile((64, 16), "float8_e4m3fn_x4")), matmul()),
    (
        "NKW-MX-SCALE-SHAPE",
        matmul(stationary_scale=tile((3, 8), "uint8")),
        matmul(stationary_scale=tile((4, 8), "uint8")),
    ),
    (
        "NKW-MX-SCALE-SHAPE",
        matmul(128, moving_scale=tile((99, 16), "uint8")),
        matmul(128, moving_scale=tile((100, 16), "uint8")),
    ),
    (
        "NKW-MX-SCALE-SHAPE",
        matmul(moving_scale=tile((4, 15), "uint8")),
        matmul(moving_scale=tile((4, 17), "uint8")),
    ),
    (
        "NKW-MX-SCALE-SHAPE",
        matmul(moving_scale=tile((4, 3, 5), "uint8")),
        matmul(moving_scale=tile((4, 4, 4), "uint8")),
    ),
    ("NKW-MX-ROW-TILE", matmul(tile_size=(32, 128)), matmul(tile_size=(32, 128), tile_position=(96, 0))),
    (
        "NKW-MX-ROW-TILE",
        matmul(64, tile_size=(32, 128), tile_position=(0, 0)),
        matmul(64, tile_size=(64, 128), tile_position=(64, 0)),
    ),
    (
        "NKW-MX-ROW-TILE",
        matmul(tile_size=(32, 64), tile_position=(0, 0)),
        matmul(tile_size=(128, 128), tile_position=(0, 0)),
    ),
    ("NKW-MX-ROW-TILE", matmul(tile_size=(32, 128), tile_position=(0, 32)), matmul()),
    ("NKW-MX-ROW-TILE", matmul(tile_size=(32, 128), tile_position=(128, 0)), matmul()),
    ("NKW-MATMUL-ACCUMULATE", matmul(accumulate=1), matmul(accumulate=True)),
)


def packed_operand(fmt, k, columns, seed):
    """Return random packed bytes without NaN and infinity, and the values (k, columns, 4) they stand for."""
    random = np.random.default_rng(seed)
    if fmt == "float4_e2m1fn":
        codes = random.integers(0, 16, (k, columns, 4))
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        values = np.array(table + [-v for v in table])[codes]
        bits = (codes << (4 * np.arange(4))).sum(-1).astype(np.uint16)
        return bits, values
    octets = (
        random.integers(0, 0x38, (k, columns, 4)).astype(np.uint8)
        | random.integers(0, 2, (k, columns, 4)).astype(np.uint8) << 7
    )
    values = octets.view(getattr(ml_dtypes, fmt)).astype(np.float64)
    bits = (octets.astype(np.uint32) << (8 * np.arange(4, dtype=np.uint32))).sum(-1).astype(np.uint32)
    return bits, values


@pytest.mark.parametrize("k", [32, 64, 128])
@pytest.mark.parametrize(
    ("left", "right"),
    [("float8_e4m3fn", "float8_e5m2"), ("float4_e2m1fn", "float8_e4m3fn"), ("float4_e2m1fn",) * 2],
)
def test_matmul_applies_scales_and_unpacks_four_values(k, left, right):
    m, n = 6, 10
    (a_bits, a), (b_bits, b) = packed_operand(left, k, m, 1), packed_operand(right, k, n, 2)
    random = np.random.default_rng(3)
    a_scale, b_scale = (random.integers(120, 132, (128, columns)).astype(np.uint8) for columns in (m, n + 3))

    def kernel(x, y, sx, sy):
        acc = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(
            dst=acc,
            stationary=nl.load(x).view(f"{left}_x4"),
            moving=nl.load(y).view(f"{right}_x4"),
            stationary_scale=nl.load(sx),
            moving_scale=nl.load(sy),
        )
        result = nl.ndarray((m, n), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=acc)
        return out_of(result)

    result = run(kernel, a_bits, b_bits, a_scale, b_scale).astype(np.float64)
    expected, magnitude = np.zeros((m, n)), np.zeros((m, n))
    for row in range(k):
        scale = row_of(row // 8)
        for q in range(4):
            x = a[row, :, q] * 2.0 ** (a_scale[scale].astype(int) - 127)
            y = b[row, :, q] * 2.0 ** (b_scale[scale, :n].astype(int) - 127)
            expected += np.outer(x, y)
            magnitude += np.abs(np.outer(x, y))
    assert (np.abs(result - expected) <= 4 * k * LAST * magnitude).all()


def test_quantized_operands_multiply_back_within_their_rounding():
    k, m, n = 64, 4, 8
    x, y = sample("bfloat16", (k, 4 * m)), sample("bfloat16", (k, 4 * n))

    def kernel(a, b):
        operands, scales = [], []
        for data, columns in ((a, m), (b, n)):
            packed = nl.ndarray((k, columns), dtype=nl.float8_e4m3fn_x4)
            scale = nl.ndarray((k, columns), dtype=nl.uint8)
            nisa.quantize_mx(dst=packed, src=nl.load(data), dst_scale=scale)
            operands.append(packed)
            scales.append(scale)
        acc = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.psum)
        for _ in range(2):
            nisa.nc_matmul_mx(acc, *operands, *scales)
        result = nl.ndarray((m, n), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=acc)
        return out_of(result)

    left, right = (v.astype(np.float64).reshape(k, -1, 4) for v in (x, y))
    exact = 2 * np.einsum("kmq,knq->mn", left, right)
    magnitude = 2 * np.einsum("kmq,knq->mn", np.abs(left), np.abs(right))
    # A factor is rounded to 4 significant bits, or by half a step below 2^-6 of its scale, amax / 2^7.
    step = 2.0**-4
    largest = 2 * 4 * k * np.abs(left).max() * np.abs(right).max() * 2.0**-16
    assert (np.abs(run(kernel, x, y) - exact) <= (2 * step + step**2) * magnitude + largest).all()


def test_scale_255_is_nan_and_runs_with_low_precision_kept_as_float32(monkeypatch):
    src = sample("bfloat16", (32, 8))

    def kernel(x):
        packed = nl.ndarray((32, 2), dtype=nl.float8_e5m2_x4)
        scale = nl.ndarray((32, 2), dtype=nl.float8_e8m0fnu)
        nisa.quantize_mx(dst=packed, src=nl.load(x), dst_scale=scale)
        acc = nl.ndarray((2, 2), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul_mx(acc, packed, packed, scale, scale)
        result = nl.ndarray((2, 2), dtype=nl.float32)
        nisa.tensor_copy(dst=result, src=acc)
        return out_of(result)

    exact = run(kernel, src)
    assert np.isfinite(exact).all()
    spoilt = src.copy()
    spoilt[0, 0] = np.inf
    assert np.isnan(run(kernel, spoilt)[0]).all()
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    assert np.array_equal(run(kernel, src), exact)
    assert np.isnan(run(kernel, spoilt)[0]).all()


def test_four_times_the_operations_in_the_time_of_a_matmul():
    mx = plan("trn3", "nc_matmul_mx", **matmul(128, 128, 512)).cost
    plain = plan(
        "trn3",
        "nc_matmul",
        dst=tile((128, 512), buffer=PSUM),
        stationary=tile((128, 128), "bfloat16", SBUF),
        moving=tile((128, 512), "bfloat16", SBUF),
    ).cost
    assert mx.interval_cycles == plain.interval_cycles
    assert mx.flops == 4 * plain.flops
