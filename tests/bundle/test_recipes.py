"""Operands by recipes: what a loader does, read off element numbers; drawn tensors; rounding without ml_dtypes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.commands.bundle.command import reference_weights
from model.commands.bundle.recipe import split_into_strided_boxes
from model.device.bundling import check_recipes
from model.errors import ModelError
from model.llm.loaded import LoadedModel
from model.mesh import Mesh
from simulate.bundle.chain import Origins, find_written_positions
from simulate.bundle.run_weights import draw_tensor, round_bits
from tests.model.family_folders import write_family


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129])
def test_boxes_put_an_operand_together_again(size: int) -> None:
    """Slices, transposes, interleaved rows, two tensors side by side, and zeros, each told by its numbers alone."""
    first = np.arange(1, 1 + 6 * size).reshape(6, size)
    second = np.arange(first.max() + 1, first.max() + 1 + 6 * size).reshape(6, size)
    bounds = np.array([1, second.min()])
    for operand in (
        first.T,
        first[1:5:2],
        first.reshape(3, 2, size).transpose(1, 0, 2).reshape(6, size),
        np.concatenate([first, second], axis=1),
        np.concatenate([first, second]),  # whose numbers run on from the one tensor into the other
        np.concatenate([first, np.zeros_like(first), second[:1]]),
        np.stack([second, first])[:, ::-1][:, ::-1],
        first[:1, 0],
    ):
        made = np.full(operand.shape, -1)
        count = 0
        for origin, shape, corner, steps in split_into_strided_boxes(operand, (0,) * operand.ndim, bounds):
            box = np.full(shape, corner)
            for axis, step in enumerate(steps):
                box = box + np.arange(shape[axis]).reshape(-1, *(1,) * (len(shape) - axis - 1)) * step
            labels = np.searchsorted(bounds, box, "right")
            assert (labels == labels.flat[0]).all()
            made[tuple(slice(begin, begin + length) for begin, length in zip(origin, shape))] = box
            count += 1
        np.testing.assert_array_equal(made, operand)
        assert count <= 6


def test_what_no_box_expresses_is_refused() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.permutation(np.arange(1, 5))
    boxes = list(split_into_strided_boxes(numbers, (0,), np.array([1])))
    assert sum(shape[0] for _, shape, _, _ in boxes) == 4  # single elements, at worst
    crossed = np.array([[1, 2], [3, 5]])
    assert (
        sum(
            shape[0] * shape[1] for _, shape, _, _ in split_into_strided_boxes(crossed, (0, 0), np.array([1]))
        )
        == 4
    )


@pytest.mark.parametrize("family", ["GPT2", "Phi3", "Gemma3", "Qwen2"])
def test_every_operand_comes_out_as_it_was_loaded(family: str, tmp_path: Path) -> None:
    """Transposed, fused and biased tensors; a recipe that begins one element later is noticed."""
    folder = write_family(tmp_path / family, family)
    model = LoadedModel.open(folder, "bfloat16")
    (rank,) = model.load_shards(Mesh())
    weights = reference_weights(model, rank, rank.arrays)
    assert {operand.name for operand in weights.operands} == set(rank.arrays)
    operand = weights.operands[1]
    piece = operand.pieces[0]
    moved = replace(operand, pieces=(replace(piece, start=piece.start + 1), *operand.pieces[1:]))
    with pytest.raises(ModelError, match="the recipe of a weight is wrong: the weight "):
        check_recipes(model.checkpoint.files, replace(weights, operands=(moved,)))


def test_floats_are_rounded_to_bfloat16_as_ml_dtypes_rounds_them() -> None:
    """All float16 patterns; float32 ones of every exponent with the mantissas around a tie."""
    halves = np.arange(2**16, dtype=np.uint16)
    tops = np.arange(2**16, dtype=np.uint32) << 16
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    words = (tops[:, None] | ends).reshape(-1)
    for bits, dtype in ((halves, np.float16), (words, np.float32)):
        with np.errstate(all="ignore"):
            wanted = bits.view(dtype).astype(ml_dtypes.bfloat16)
        seen = round_bits(bits, np.dtype(dtype).name, "bfloat16").view(ml_dtypes.bfloat16)
        nan = np.isnan(wanted)
        np.testing.assert_array_equal(np.isnan(seen), nan)
        np.testing.assert_array_equal(seen.view(np.uint16)[~nan], wanted.view(np.uint16)[~nan])
    for dtype in ("float16", "bfloat16"):
        narrow = halves.view(np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
        with np.errstate(all="ignore"):
            exact = narrow.astype(np.float32)
        np.testing.assert_array_equal(round_bits(halves, dtype, "float32").view(np.float32), exact)
    with pytest.raises(ValueError, match="bfloat16 cannot be converted to float16"):
        round_bits(halves, "bfloat16", "float16")


@pytest.mark.parametrize(("scale", "shift"), [(0.5, 1.0), (2.0**-5, 0.0)])
def test_a_drawn_tensor_is_what_is_documented(scale: float, shift: float) -> None:
    """By whole numbers of Python instead of float32 arithmetic; mean and variance are those of even chances."""
    about = {"name": "a", "dtype": "float32", "count": 4097, "seed": 7, "scale": scale, "shift": shift}
    bits, dtype = draw_tensor(about)
    words = np.random.PCG64(7).random_raw(4097)
    values = [np.float32(shift + scale * ((int(word) >> 40) - 2**23) / 2**23) for word in words]
    np.testing.assert_array_equal(bits.view(np.float32), np.array(values, np.float32))
    assert dtype == "float32"
    seen = bits.view(np.float32).astype(np.float64)
    assert shift - scale <= seen.min() and seen.max() <= shift + scale
    # Six standard deviations of the mean and of the variance of so many draws.
    deviation = scale / 3**0.5
    assert abs(seen.mean() - shift) < 6 * deviation / 4097**0.5
    assert abs(seen.var() - deviation**2) < 6 * deviation**2 * (4 / 5 / 4097) ** 0.5
    narrow, _ = draw_tensor({**about, "dtype": "bfloat16"})
    wanted = bits.view(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(narrow, wanted.view(np.uint16))


def test_places_written_are_along_the_axis_with_the_fewest() -> None:
    before = np.zeros((2, 128, 3), np.float32)
    for axis, positions in ((1, [5]), (1, [0, 127]), (2, [1]), (0, [1])):
        after = before.copy()
        np.moveaxis(after, axis, 0)[positions] = 1.0
        seen_axis, seen = find_written_positions(before, after)
        assert (seen_axis, seen.tolist(), seen.dtype) == (axis, positions, np.int32)
    assert find_written_positions(before, before)[1].tolist() == [0]  # at least one
    signed = before.copy()
    signed[0, 9, 0] = -0.0
    assert find_written_positions(before, signed)[1].size == 1  # other bytes, an equal value


def test_an_origin_is_of_an_array_that_lives_and_is_unchanged() -> None:
    origins = Origins()
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    origins.note(array, "result", "case", 2)
    for seen in (array, array[-2:], array[-1:]):
        origin = origins.find_origin(seen)
        assert origin is not None and (origin.text, origin.output) == ("case", 2)
    for other in (array[:2], array.copy(), array.T, array.view(np.int32), array.reshape(3, 4)):
        assert origins.find_origin(other) is None
    array[0, 0] = 7.0
    assert origins.find_origin(array) is None


def test_an_instance_halves_every_number_of_e4m3fn_as_the_loader_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    halves = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2
    expected = halves.astype(ml_dtypes.float8_e4m3)
    made = round_bits(codes, "float8_e4m3fn", "float8_e4m3").view(ml_dtypes.float8_e4m3)
    assert np.array_equal(made, expected, equal_nan=True)
    finite = ~np.isnan(halves)
    assert np.array_equal(made.view(np.uint8)[finite], expected.view(np.uint8)[finite])
    with pytest.raises(ValueError, match="int8 cannot be converted to bfloat16; wider floats become"):
        round_bits(codes, "int8", "bfloat16")
