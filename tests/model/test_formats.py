"""Formats of weights: their stored tensors, parts of them, the way back, and models of several dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import load_config
from model.formats import Format, Int4, Mx, Plain, QuantisedWeight, Scaled
from model.llm.engine_args import EngineArgs, set_up_engine
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = [
    Plain(np.dtype(np.float32)),
    Plain(BFLOAT16),
    Scaled("fp8", 16, 24),
    Scaled("fp8", None, None),
    Scaled("compressed-tensors", 1, None),
    Int4("compressed-tensors"),
    Int4("compressed-tensors", 32),
    Mx(),
]
SHAPES = [(127, 96), (128, 128), (129, 160), (1, 32)]


def numbers(shape: tuple[int, int], seed: int = 1) -> np.ndarray:
    """Return numbers of very different magnitudes."""
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) * np.exp2(random.integers(-8, 9, (shape[0], 1)))).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_tensors_are_as_described_and_numbers_that_the_format_has_come_back(
    format: Format, shape: tuple[int, int]
) -> None:
    packed = format.pack(numbers(shape))
    specs = format.describe_tensors(shape)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in packed.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    wide = format.widen(packed)
    assert wide.dtype == np.float32 and wide.shape == shape
    # Seven steps of a scale, divided by seven, may be another float32 than the scale.
    step = 2.0**-22 if isinstance(format, Int4) else 0.0
    assert np.allclose(format.widen(format.pack(wide)), wide, rtol=step, atol=0)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_packing_takes_the_nearest_number(format: Format) -> None:
    """No element of the format lies closer: half a step of the coarsest elements bounds the error."""
    array = numbers((32, 64), 2)
    error = np.abs(format.widen(format.pack(array)) - array)
    if isinstance(format, Plain):
        step = 0.0 if format.dtype == np.float32 else 2.0**-8
        assert (error <= step * np.abs(array)).all()
    elif isinstance(format, Scaled):
        # e4m3fn has 3 bits of fraction, and subnormal numbers 2^-9 apart; scales and quotients round by 2^-24.
        scales = np.array(format.pack(array)["scales"])
        rows, columns = format.describe_tensors(array.shape)["scales"].block
        wide = np.repeat(np.repeat(scales, rows, 0), columns, 1)[: array.shape[0], : array.shape[1]]
        assert (error <= np.maximum(np.abs(array) * 2.0**-4, wide * 2.0**-10) * (1 + 2.0**-20)).all()
    elif isinstance(format, Int4):
        scales = format.pack(array)["scales"]
        steps = np.repeat(scales, 64 // scales.shape[1], axis=1)
        assert (error <= steps * 0.5 * (1 + 2.0**-18)).all()
    else:
        # The largest magnitude is 4 to 8 times the scale, of which 6 is the largest that the format has.
        most = np.abs(array).reshape(32, 2, 32).max(axis=2, keepdims=True)
        assert (error.reshape(32, 2, 32) <= most / 4).all()


def test_mxfp4_rounds_to_the_nearest_element_and_ties_to_even_codes() -> None:
    """The scale of the block is 1, because its largest magnitude is 4."""
    row = np.zeros((1, 32), np.float32)
    row[0, :12] = [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 0.24, 0.26, -0.75, -2.4, -2.6]
    expected = [4, 0, 1, 1, 2, 2, 4, 0, 0.5, -1, -2, -3]
    assert Mx().widen(Mx().pack(row))[0, :12].tolist() == expected


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_part_of_a_weight_is_the_part_of_its_numbers(format: Format) -> None:
    shape = (96, 160)
    weight = QuantisedWeight.from_tensors(format, format.pack(numbers(shape)), shape, np.dtype(np.float32))
    widened = format.widen(weight.tensors)
    random = np.random.default_rng(3)
    for _ in range(40):
        slices = tuple(slice(*sorted(random.integers(0, size + 1, 2).tolist())) for size in shape)
        assert np.array_equal(np.asarray(weight[slices]), widened[slices])
        assert np.array_equal(np.asarray(weight.T[slices[::-1]]), widened[slices].T)
        assert weight[slices].shape == widened[slices].shape and weight[slices].size == widened[slices].size


@pytest.mark.parametrize(
    ("first", "end", "fits"), [(15, 17, False), (16, 17, True), (17, 32, True), (17, 33, False)]
)
def test_the_stored_tensors_of_a_part_begin_with_a_block_or_are_inside_one(
    first: int, end: int, fits: bool
) -> None:
    format = Scaled("fp8", 16, 24)
    tensors = format.pack(numbers((48, 48)))
    if not fits:
        with pytest.raises(
            ModelError, match=f"elements {first} to {end} .* begin inside a block of 16 elements"
        ):
            format.shard(tensors, (48, 48), range(first, end), range(48))
        return
    shard = format.shard(tensors, (48, 48), range(first, end), range(48))
    assert np.array_equal(format.widen(shard), format.widen(tensors)[first:end])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_several_dtypes_is_computed_as_its_reference(
    write_model, random_weights, dtype: str, ranks: int
) -> None:
    """Norms and keys in float32 beside bfloat16 and float16: what ranks concatenate has a dtype that holds all."""
    folder = Path(write_model())
    weights = {}
    for index, (name, tensor) in enumerate(random_weights().items()):
        is_single = "norm" in name or "k_proj" in name
        kept = np.float32 if is_single else np.float16 if index % 3 == 0 else BFLOAT16
        weights[name] = np.ascontiguousarray(tensor.astype(kept))
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    config = load_config(folder)
    checkpoint = open_checkpoint(folder, config)
    shards = shard_weights(config, checkpoint, ranks, dtype=dtype)
    dtypes = {array.dtype for array in shards[0].arrays.values()}
    assert len(dtypes) == (1 if dtype == "bfloat16" else 3)
    ids = [5, 3, 9, 1]
    (output,) = KernelModel(config, shards, SimulatedDevice("trn2", ranks), 128).prefill([ids])
    (expected,) = ReferenceModel(config, checkpoint, dtype, ranks=ranks).prefill([ids])
    bound = 2.0**-12 if dtype == "float32" else 2.0**-4
    assert np.abs(output.logits - expected.logits).max() <= bound * np.abs(expected.logits).max()
    assert json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("quantization", "is_taken"), [(None, True), ("fp8", True), ("awq", False)])
def test_a_quantization_asked_for_is_that_of_the_folder(
    write_model: Callable[..., Path], quantization: str | None, is_taken: bool
) -> None:
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    args = EngineArgs(write_model(quantization_config=method), quantization=quantization)
    if is_taken:
        assert set_up_engine(args).config.quant_method == "fp8"
    else:
        with pytest.raises(
            ModelError, match=r"quantization is 'awq', and the weights are quantised by fp8; "
        ):
            set_up_engine(args)
