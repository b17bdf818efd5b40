"""Proofs of exact integer sums: at the limit and one above, of 4-bit numbers, silent without proof, never wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import simulate
from nkw.commands import main as nkw
from simulate.check import gathered
from simulate.check.integer_products import format_lines, list_lines
from simulate.check.integer_sums import find_integer_sums
from simulate.check.possible_values import Codes, Words, describe_bits, find_integers
from simulate.check.value_flow import follow_values
from simulate.run import Launch
from tests.check.launched import codes, findings
from tests.faults.data import copied_out
from tests.isa.tiles import TARGETS

LIMIT = 2**24
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3


def run(kernel: Callable[..., Any], *arguments: Any, target: str = "trn2", cores: int = 1) -> Launch:
    return simulate.World(target, 1, cores).launch(kernel, [(arguments, {})])


def statements(kernel: Callable[..., Any], *arguments: Any, target: str = "trn2") -> list[dict[str, Any]]:
    """Return the lines of `nkw check` about products."""
    with gathered() as seen:
        run(kernel, *arguments, target=target)
    ((launch, evidence),) = seen.launches
    simulate.check.detect(launch, evidence)
    return list_lines(seen.launches)


def in_groups(group: int) -> Callable[..., Any]:
    """Return a kernel a.T @ b that ends its accumulation groups after `group` of K."""

    def kernel(a, b):
        shape = a.shape[1], b.shape[1]
        total = nl.full(shape, 0.0, dtype=nl.float32)
        for first in range(0, a.shape[0], group):
            sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
            for k in range(first, min(first + group, a.shape[0]), 128):
                end = min(k + 128, first + group, a.shape[0])
                stationary, moving = (nl.load(x[k:end], dtype=nl.bfloat16) for x in (a, b))
                nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=k > first)
            nisa.tensor_tensor(dst=total, data1=total, data2=sums, op=nl.add)
        return copied_out(total)

    return kernel


def extremes(depth: int, dtype: Any = np.int8) -> tuple[np.ndarray, np.ndarray]:
    return np.full((depth, 3), np.iinfo(dtype).min or 255, dtype), np.full((depth, 5), -128, np.int8)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("depth", "group", "groups", "exact"),
    [(1024, 1024, 1, 1), (1025, 2048, 1, 0), (1152, 1152, 1, 0), (1152, 1024, 2, 2), (127, 128, 1, 1)],
)
def test_bytes_are_exact_up_to_1024_products(
    target: str, depth: int, group: int, groups: int, exact: int
) -> None:
    (line,) = statements(in_groups(group), *extremes(depth), target=target)
    assert (line["groups"], line["exact"], line["unproven"], line["limit"]) == (groups, exact, 0, LIMIT)
    assert line["depth"] == min(depth, group)
    assert line["bound"] == line["depth"] * 128 * 128
    assert line["where"]["function"] == "kernel"


def test_the_finding_names_the_first_group_and_what_fits() -> None:
    ones = np.ones((1152, 3), np.int8), np.ones((1152, 5), np.int8)
    (finding,) = findings(in_groups(1152), *ones)
    assert finding.code == "NKW-INT-PRODUCT"
    assert "K=1,152" in finding.message and "18,874,368" in finding.message
    assert "after 1,024 products" in finding.hint
    assert codes(in_groups(1024), *ones) == []


def test_unsigned_bytes_reach_the_limit_earlier() -> None:
    a, b = extremes(1024, np.uint8)
    (line,) = statements(in_groups(1024), a, b)
    assert (line["bound"], line["exact"]) == (1024 * 255 * 128, 0)
    (line,) = statements(in_groups(512), a, b)
    assert (line["groups"], line["exact"]) == (2, 2)


def unpacked(rows, words):
    """Multiply rows by the upper and the lower 4 bits of every byte, read as float8_e4m3."""
    stationary = nl.load(rows, dtype=nl.bfloat16)
    packed, low, high = (nl.ndarray(words.shape, dtype=words.dtype, buffer=nl.sbuf) for _ in range(3))
    nisa.dma_copy(dst=packed, src=words)
    nisa.tensor_scalar(dst=low, data=packed, op0=nl.bitwise_and, operand0=0x0F0F0F0F)
    nisa.tensor_scalar(
        dst=high, data=packed, op0=nl.right_shift, operand0=4, op1=nl.bitwise_and, operand1=0x0F0F0F0F
    )
    out = nl.ndarray((2, rows.shape[1], 4 * words.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for half, numbers in ((0, low), (1, high)):
        sums = nl.ndarray(out.shape[1:], dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=stationary, moving=numbers.view(nl.float8_e4m3))
        wide = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=wide, src=sums)
        nisa.dma_copy(dst=out[half], src=wide)
    return out


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_numbers_of_4_bits_are_integers_times_a_power_of_two(dtype: Any) -> None:
    rng = np.random.default_rng(36)
    rows = rng.integers(-128, 128, (128, 3)).astype(np.int8)
    words = rng.integers(0, 256, (128, 16)).astype(np.uint8).view(dtype)
    (line,) = statements(unpacked, rows, words)
    assert (line["groups"], line["exact"], line["bound"]) == (2, 2, 128 * 128 * 15)
    product = run(unpacked, rows, words).outputs[0]
    numbers = words.view(np.uint8).astype(np.int64)
    for half, digits in ((0, numbers & 15), (1, numbers >> 4)):
        np.testing.assert_array_equal(product[half] * 512, rows.astype(np.int64).T @ digits)


def shift_a_number(words):
    """Return 1 shifted by the lower 4 bits of every word."""
    tile = nl.load(words)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=0xF)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.left_shift, operand0=1, reverse0=True)
    return copied_out(tile)


def shift_words(words):
    """Return every word without its upper and lower 12 bits, the others moved to the top."""
    tile = nl.load(words)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.right_shift, operand0=12, op1=nl.left_shift, operand1=24)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_xor, operand0=3, op1=nl.bitwise_or, operand1=8)
    return copied_out(tile)


@pytest.mark.parametrize("kernel", [shift_a_number, shift_words])
def test_possible_words_contain_every_word(kernel: Callable[..., Any]) -> None:
    words = np.random.default_rng(7).integers(-(2**31), 2**31, (8, 64)).astype(np.int32)
    launch = run(kernel, words)
    seen: list[Any] = []
    follow_values(launch, lambda stream, event, template, tensors, operands: seen.append(operands))
    returned = launch.outputs[0].view(np.uint32)
    (possible,) = seen[-1]
    bits = describe_bits(possible)
    assert bits is not None and ((returned & ~np.uint32(bits.varying)) == bits.constant).all()
    if kernel is shift_words:
        assert bits == Words(0xFF000000, 0xB)
    else:
        assert set(np.unique(returned)) == {1 << shift for shift in range(16)}


def constants(x):
    """Multiply an iota up to 127 by a memset of -3, transposed on the Tensor engine."""
    numbers = nl.ndarray((128, 128), dtype=nl.bfloat16)
    nisa.iota(dst=numbers, pattern=[[0, 128]], offset=0, channel_multiplier=1)
    flipped = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(dst=flipped, data=numbers)
    rows = nl.ndarray((128, 128), dtype=nl.bfloat16)
    nisa.tensor_copy(dst=rows, src=flipped)
    factor = nl.full((128, 8), -3.0, dtype=nl.bfloat16)
    sums = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=rows, moving=factor)
    wide = nl.ndarray((128, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=sums)
    nisa.tensor_tensor(dst=wide, data1=wide, data2=nl.load(x), op=nl.add)
    return copied_out(wide)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_constants_and_transposes_are_followed(target: str) -> None:
    (line,) = statements(constants, np.zeros((128, 8), np.float32), target=target)
    assert (line["exact"], line["bound"]) == (1, 128 * 127 * 3)


@pytest.mark.parametrize(
    ("first", "second"),
    [(np.float32, np.int8), (BF16, np.int8), (FP8, FP8), (np.int8, FP8), (np.int16, np.int8)],
)
def test_other_data_gives_no_statement(first: Any, second: Any) -> None:
    a, b = np.ones((128, 3), first), np.ones((128, 5), second)

    def kernel(a, b):
        tiles = [nl.load(x, dtype=nl.bfloat16) if x.dtype != nl.float8_e4m3 else nl.load(x) for x in (a, b)]
        sums = nl.ndarray((3, 5), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=tiles[0], moving=tiles[1])
        return copied_out(sums)

    (line,) = statements(kernel, a, b)
    assert (line["groups"], line["exact"], line["unproven"]) == (0, 0, 1)
    assert format_lines([line], False) == ""
    assert format_lines([line], True).startswith("no statement: 1 matmuls at ")
    assert codes(kernel, a, b) == []


def test_a_group_with_one_unproven_matmul_gives_no_statement() -> None:
    def kernel(a, b, rows):
        sums = nl.ndarray((3, 5), dtype=nl.float32, buffer=nl.psum)
        moving = nl.load(b, dtype=nl.bfloat16)
        nisa.nc_matmul(dst=sums, stationary=nl.load(a, dtype=nl.bfloat16), moving=moving, accumulate=False)
        nisa.nc_matmul(dst=sums, stationary=nl.load(rows), moving=moving, accumulate=True)
        return copied_out(sums)

    lines = statements(kernel, *extremes(64), np.ones((64, 3), BF16))
    assert sum(line["groups"] for line in lines) == 0


@pytest.mark.parametrize("step", [1, 2])
def test_a_write_between_other_elements_ends_no_group(step: int) -> None:
    """Of two parts of a tile, one between the columns of the other or beside it, the first keeps its sums."""

    def kernel(a, b):
        stationary, moving = (nl.load(x, dtype=nl.bfloat16) for x in (a, b))
        sums = nl.ndarray((3, 9), dtype=nl.float32, buffer=nl.psum)
        columns = [sums[:, 1:8:2], sums[:, 0:9:2]] if step == 2 else [sums[:, 0:4], sums[:, 4:9]]
        nisa.nc_matmul(dst=columns[0], stationary=stationary, moving=moving[:, 0:4], accumulate=False)
        for k in range(3):
            nisa.nc_matmul(dst=columns[1], stationary=stationary, moving=moving, accumulate=k > 0)
        nisa.nc_matmul(dst=columns[0], stationary=stationary, moving=moving[:, 0:4], accumulate=True)
        return copied_out(sums)

    sums = find_integer_sums(run(kernel, *extremes(128))).sums
    assert max(group.depth for group in sums) >= 2 * 128
    assert [group.depth for group in sums] == ([3 * 128, 2 * 128] if step == 1 else [4 * 128])
    assert len(sums) == 3 - step


@pytest.mark.parametrize(("columns", "groups"), [(3, 1), (2, 0)])
def test_a_tile_filled_anew_has_its_new_values_and_one_filled_in_part_has_both(
    columns: int, groups: int
) -> None:
    def kernel(a, b, x):
        tile = nl.ndarray((64, 3), dtype=nl.bfloat16)
        nisa.dma_copy(dst=tile, src=x)
        first = copied_out(tile)
        nisa.tensor_copy(dst=tile[:, 0:columns], src=nl.load(a[:, 0:columns]))
        sums = nl.ndarray((3, 5), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=tile, moving=nl.load(b, dtype=nl.bfloat16))
        return copied_out(sums), first

    (line,) = statements(kernel, *extremes(64), np.ones((64, 3), BF16))
    assert (line["groups"], line["unproven"]) == (groups, 1 - groups)


def chain(steps: list[tuple[str, Any, Any]]) -> Callable[..., Any]:
    """Return a kernel that passes a tile through tensor_scalar, copies and casts, and returns it."""

    def kernel(x):
        tile = nl.load(x)
        for operation, dtype, operand in steps:
            wide = nl.ndarray(x.shape, dtype=dtype)
            if operation == "copy":
                nisa.tensor_copy(dst=wide, src=tile)
            elif operation == "activation":
                nisa.activation(dst=wide, op=nl.copy, data=tile, scale=operand)
            elif operation == "square":
                nisa.tensor_tensor(dst=wide, data1=tile, data2=tile, op=nl.multiply)
            elif operation == "fused":
                nisa.scalar_tensor_tensor(
                    dst=wide, data=tile, op0=nl.multiply, operand0=operand, op1=nl.add, operand1=tile
                )
            else:
                nisa.tensor_scalar(dst=wide, data=tile, op0=getattr(nl, operation), operand0=operand)
            tile = wide
        return copied_out(tile)

    return kernel


STEPS = [
    ("copy", None),
    ("activation", 0.5),
    ("square", None),
    ("fused", -2.5),
    ("add", -3.0),
    ("multiply", 1.25),
    ("maximum", 7.0),
    ("bitwise_and", 0x3C),
    ("right_shift", 2),
    ("left_shift", 1),
]


@pytest.mark.parametrize("seed", range(24))
def test_possible_values_contain_every_value_of_a_chain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype, steps = nl.int8, []
    for _ in range(4):
        operation, operand = STEPS[rng.integers(len(STEPS))]
        if operation in ("bitwise_and", "right_shift", "left_shift"):
            if dtype not in (nl.int8, nl.int32):
                continue
        else:
            dtype = [nl.int8, nl.int32, nl.bfloat16, nl.float32, nl.float8_e5m2][rng.integers(5)]
        steps.append((operation, dtype, operand))
    launch = run(chain(steps), np.arange(-128, 128).astype(np.int8).reshape(16, 16))
    seen: list[Any] = []

    def keep(stream, event, template, tensors, operands):
        if event == len(stream) - 1:
            seen.extend(operands)

    follow_values(launch, keep)
    returned = launch.outputs[0]
    if isinstance(seen[0], Codes):
        assert np.isin(
            returned.reshape(-1).view(f"u{returned.itemsize}"), seen[0].array.view(f"u{returned.itemsize}")
        ).all()
    narrow = all(width != nl.int32 for _, width, _ in steps)
    assert isinstance(seen[0], Codes) or not narrow


def test_integers_of_float32_values_are_those_of_exact_arithmetic() -> None:
    assert find_integers(np.array([0.0, 1.5, -3.0], np.float32)) == (-1, 6)
    assert find_integers(np.array([2.0**-9, 15 * 2.0**-9], np.float32)) == (-9, 15)
    assert find_integers(np.array([256.0, 1024.0], np.float32)) == (8, 4)
    assert find_integers(np.zeros(3, np.float32)) == (0, 0)
    assert find_integers(np.array([1.0, np.nan], np.float32)) is None
    assert find_integers(np.array([np.inf], np.float32)) is None


def test_two_cores_see_what_the_other_one_writes() -> None:
    def kernel(a, x):
        core = nl.program_id(0)
        shared = nl.ndarray((64, 3), dtype=nl.bfloat16, buffer=nl.shared_hbm)
        if core == 1:
            nisa.dma_copy(dst=shared, src=nl.load(x))
        nisa.core_barrier(data=shared, cores=(0, 1))
        out = nl.ndarray((2, 3, 3), dtype=nl.float32, buffer=nl.shared_hbm)
        if core == 0:
            nisa.dma_copy(dst=shared[:, 0:1], src=nl.load(a, dtype=nl.bfloat16)[:, 0:1])
        nisa.core_barrier(data=shared, cores=(0, 1))
        tile = nl.load(shared)
        sums = nl.ndarray((3, 3), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=tile, moving=nl.load(a, dtype=nl.bfloat16))
        wide = nl.ndarray((3, 3), dtype=nl.float32)
        nisa.tensor_copy(dst=wide, src=sums)
        nisa.dma_copy(dst=out[core], src=wide)
        return out

    a, x = np.ones((64, 3), np.int8), np.ones((64, 3), BF16)
    launch = run(kernel, a, x, cores=2)
    assert not find_integer_sums(launch).sums
    assert sum(find_integer_sums(launch).unproven_lines.values()) == 2


def test_the_command_prints_and_writes_what_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = """
import nki.isa as nisa, nki.language as nl

def product(a, b):
    tiles = []
    for x in (a, b):
        tile, wide = (nl.ndarray(x.shape, dtype=d, buffer=nl.sbuf) for d in (x.dtype, nl.bfloat16))
        nisa.dma_copy(dst=tile, src=x)
        nisa.tensor_copy(dst=wide, src=tile)
        tiles.append(wide)
    sums = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=tiles[0], moving=tiles[1])
    wide = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=sums)
    out = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=wide)
    return out
"""
    Path("mine.py").write_text(source)
    words = ["check", "mine.py:product", "i8[128,16]", "i8[128,32]", "--target", "trn2", "--json", "out.json"]
    assert nkw(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "exact: sums of 1 group of products of integers at" in text
    assert "K up to 128, magnitude up to 2,097,152 of 16,777,216" in text
    (line,) = json.loads(Path("out.json").read_text())["integer_products"]
    assert (line["kernel"], line["exact"], line["bound"]) == ("product", 1, 128**3)
    words[2] = "bf16[128,16]"
    assert nkw(words) == 0 and "statement" not in capsys.readouterr().out
    assert nkw([*words, "--products"]) == 0 and "no statement: 1 matmuls" in capsys.readouterr().out
