"""Tiny Llamas in the containers of quantised checkpoints, with random stored tensors and the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from model.device import SimulatedDevice
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.plan.memory import compute_footprint
from model.plan.sizes import load_model
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.kernels.accuracy import last_place
from tests.model.folders import write_folder

FILE = "model.safetensors"
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
PREFILL = [5, 3, 9, 1]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Tensors = dict[str, np.ndarray]
Draw = Callable[[str, tuple[int, int], np.random.Generator], "tuple[Tensors, np.ndarray] | None"]
"""Function of a module, the shape of its weight and a generator.

It returns stored tensors by name, and the numbers, float32 [out, in]; None for a plain module.
"""


def write_container(
    folder: Path, quantization_config: Mapping[str, Any], draw: Draw, **changes: Any
) -> tuple[Tensors, Tensors]:
    """Write a folder whose projections are pair; return its tensors, and the numbers of the weights, by name."""
    write_folder(folder, **SIZES | changes, quantization_config=dict(quantization_config))
    random = np.random.default_rng(11)
    tensors: Tensors = {}
    numbers: Tensors = {}
    for name, tensor in safetensors.numpy.load_file(folder / FILE).items():
        pair = draw(name.removesuffix(".weight"), tensor.shape, random) if "_proj" in name else None
        stored, number = ({name: tensor}, tensor) if pair is None else pair
        tensors |= stored
        numbers[name] = number
    save(folder, tensors)
    return tensors, numbers


def save(folder: Path, tensors: Tensors) -> None:
    """Write the tensors of a folder."""
    kept = {name: np.ascontiguousarray(array) if array.ndim else array for name, array in tensors.items()}
    safetensors.numpy.save_file(kept, folder / FILE)


def configure(folder: Path, **changes: Any) -> None:
    """Set fields of the `quantization_config` of a folder."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"quantization_config": fields["quantization_config"] | changes}))


def check_numbers(folder: Path, numbers: Tensors, tolerance: float = 0.0) -> None:
    """Check the widened numbers of a folder's weights, to a relative tolerance."""
    checkpoint = open_checkpoint(folder, load_config(folder))
    for name, number in numbers.items():
        widened = np.asarray(checkpoint[name])
        assert widened.dtype == number.dtype and widened.shape == number.shape
        assert (np.abs(widened - number) <= tolerance * np.abs(number)).all(), name


def check_generates_in_bfloat16(folder: Path, numbers: Tensors) -> None:
    """Check logits in bfloat16 on 1 and 2 ranks: at most twice as far from float32 as those of widened weights.

    One last place of the largest logit is allowed on top, as in `tests.kernels.accuracy`. A plan counts the bytes that
    ranks hold.
    """
    config = load_config(folder)
    checkpoint = open_checkpoint(folder, config)
    for ranks in (1, 2):
        shards = [
            shard_weights(config, weights, ranks, dtype="bfloat16") for weights in (checkpoint, numbers)
        ]
        nbytes = sum(array.nbytes for array in shards[0][0].arrays.values())
        assert compute_footprint(load_model(folder), "bfloat16", ranks, 16).weight_bytes == nbytes
        device = SimulatedDevice("trn2", ranks)
        stored, widened = (KernelModel(config, shard, device, 128) for shard in shards)
        reference = ReferenceModel(config, numbers, "float32", ranks=ranks)
        for run in (lambda model: model.prefill([PREFILL])[0], lambda model: model.decode([7], [4])[0]):
            truth, *outputs = (run(model).logits.astype(np.float64) for model in (reference, stored, widened))
            error, widened_error = (np.abs(output - truth).max() for output in outputs)
            assert error <= 2 * widened_error + last_place(BFLOAT16, float(np.abs(truth).max()))


def check_generates(folder: Path, numbers: Tensors) -> set[str]:
    """Check logits of a prompt and a step on 1 and 2 ranks; return the dtypes of the ranks' arrays.

    The numpy reference computes with plain numbers. Both compute in float32, so that sums differ by their order.
    """
    config = load_config(folder)
    checkpoint = open_checkpoint(folder, config)
    dtypes: set[str] = set()
    for ranks in (1, 2):
        shards = shard_weights(config, checkpoint, ranks, dtype="float32")
        dtypes |= {array.dtype.name for array in shards[0].arrays.values()}
        model = KernelModel(config, shards, SimulatedDevice("trn2", ranks), 128)
        reference = ReferenceModel(config, numbers, "float32", ranks=ranks)
        for run in (lambda model: model.prefill([PREFILL])[0], lambda model: model.decode([7], [4])[0]):
            output, expected = run(model), run(reference)
            most = np.abs(expected.logits).max()
            assert np.abs(output.logits - expected.logits).max() <= 2.0**-12 * most
    return dtypes
