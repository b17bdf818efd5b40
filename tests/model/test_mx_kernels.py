"""Weights in MXFP4 and MXFP8 that kernels of trn3 multiply as stored: order, formats by chip, logits, and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.quantization import adapt_to_chip
from model.device import SimulatedDevice
from model.families import compose, load_config, read_config
from model.formats import Format, Mx, Mx8
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import find_row_formats, shard_weights
from model.plan.memory import compute_footprint
from model.plan.predict import Predictor
from model.plan.sizes import ModelSizes
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nki_kernels.projection.mx_operands import widen_mx_reference
from tests.model.containers import PREFILL, write_container
from tests.model.test_compressed_tensors import FP8, STORAGES, describe, draw_fp8, draw_mxfp4, draw_mxfp8

MXFP4, MXFP8 = "mxfp4-pack-quantized", "mxfp8-quantized"
DRAWS = {MXFP4: draw_mxfp4, MXFP8: draw_mxfp8}
ELEMENTS = {MXFP4: "uint16", MXFP8: "uint32"}
MATRICES = ("w_gate", "w_up", "w_down")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Weights in MXFP", "ignore:config.json quantises input rows", "ignore:.* widened at load"
)


def write_mx(folder: Path, storage: str, **changes: Any) -> Path:
    """Write a tiny folder of compressed-tensors in an MX format, whose MLP adds about as much as attention."""

    def draw(module: str, *size: Any) -> Any:
        stored, numbers = DRAWS[storage](module, *size)
        if "mlp" in module:
            stored[f"{module}.weight_scale"] += np.uint8(3)
        return stored, numbers

    write_container(folder / "model", describe(storage, STORAGES[storage][0]), draw, **changes)
    return folder / "model"


@pytest.mark.parametrize("format", [Mx(is_computed=True), Mx8(is_computed=True)], ids=["mxfp4", "mxfp8"])
@pytest.mark.parametrize("inputs", [32, 96, 128, 480, 512, 544, 1184])
@pytest.mark.parametrize("outputs", [2, 64, 513, 1100])
def test_kernels_read_the_numbers_that_widen_defines(format: Format, inputs: int, outputs: int) -> None:
    """Random codes and scales, around a tile of 512 inputs, a quadrant of 128 and a panel of 512 outputs."""
    random = np.random.default_rng(inputs)
    tensors = {
        name: random.integers(100, 140, spec.shape, np.uint8).view(spec.dtype)
        if name == "scales"
        else random.integers(0, 256, spec.shape, np.uint8).view(spec.dtype)
        for name, spec in format.describe_tensors((outputs, inputs)).items()
    }
    expected = format.widen(tensors).T
    specs, stored = format.describe_kernel_tensors((outputs, inputs)), format.pass_to_kernels(tensors)
    arranged = {}
    for name, spec in specs.items():
        assert (stored[name].shape, stored[name].dtype) == (spec.shape, spec.dtype)
        arranged[name] = format.arrange(name, stored[name].T)
        assert arranged[name].shape == format.arrange_shape(name, stored[name].T.shape)
    assert np.array_equal(
        widen_mx_reference(arranged["elements"], arranged["scales"], inputs), expected, equal_nan=True
    )


@pytest.mark.parametrize("storage", DRAWS)
def test_chips_with_mx_products_compute_the_format_and_others_widen_it(tmp_path: Path, storage: str) -> None:
    config = load_config(write_mx(tmp_path, storage))
    number = storage.partition("-")[0].upper()
    for target, is_computed in (("trn1", False), ("inf2", False), ("trn2", False), ("trn3", True)):
        adapted = adapt_to_chip(config, target)
        assert adapted.weight_format is not None
        (format,), (note,) = adapted.weight_format.formats, adapted.weight_format.notes
        assert bool(format.kernel_tensors) == format.quantises_rows == is_computed
        assert (f"Weights in {number} of dense MLPs are multiplied as stored" in note) == is_computed
        assert (
            f"are widened to 16 bits or more when they are loaded: only trn3 multiplies {number}." in note
        ) == (not is_computed)
    plain = replace(config, weight_format=None)
    assert adapt_to_chip(plain, "trn3") is plain


def compute_logits(
    config: Any, folder: Path, target: str, ranks: int, dtype: str
) -> tuple[Any, Any, set[str]]:
    """Return logits of a prompt and a step by kernels and by the reference, and the dtypes of a rank's arrays."""
    checkpoint = open_checkpoint(folder, config)
    shards = shard_weights(config, checkpoint, ranks, dtype=dtype)
    kernels = KernelModel(config, shards, SimulatedDevice(target, ranks), 128)
    reference = ReferenceModel(config, checkpoint, dtype, ranks=ranks)
    outputs = [
        np.stack([model.prefill([PREFILL])[0].logits, model.decode([7], [4])[0].logits])
        for model in (kernels, reference)
    ]
    return outputs[0], outputs[1], {array.dtype.name for array in shards[0].arrays.values()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("storage", DRAWS)
def test_a_folder_computes_the_logits_of_the_reference_on_trn3(
    tmp_path: Path, storage: str, dtype: str, ranks: int
) -> None:
    """Kernels and reference round rows, and differ from products of plain rows by more than from each other."""
    folder = write_mx(tmp_path, storage, hidden_size=64, intermediate_size=192)
    config = load_config(folder)
    kernels, reference, dtypes = compute_logits(adapt_to_chip(config, "trn3"), folder, "trn3", ranks, dtype)
    widened, plain, wide_dtypes = compute_logits(adapt_to_chip(config, "trn2"), folder, "trn2", ranks, dtype)
    assert {ELEMENTS[storage], "uint8"} <= dtypes and not {"uint8", "uint16", "uint32"} & wide_dtypes
    change = np.abs(reference - plain).max()
    # Sums in another order move an element of a row, or a rounded activation, by a step at times.
    assert np.abs(kernels - reference).max() <= change / 2
    assert np.abs(widened - plain).max() <= 2.0 ** (-12 if dtype == "float32" else -5) * np.abs(plain).max()
    assert change > 2.0**-9 * np.abs(plain).max()


@pytest.mark.parametrize("storage", DRAWS)
def test_a_part_that_divides_a_scale_widens_the_whole_block(tmp_path: Path, storage: str) -> None:
    """Two ranks have 48 of 96 rows of down each, so that gate and up are widened too; one rank has all."""
    folder = write_mx(tmp_path, storage, intermediate_size=96)
    config = adapt_to_chip(load_config(folder), "trn3")
    checkpoint, weights = open_checkpoint(folder, config), list(compose(config).weights)
    matrices = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert find_row_formats(weights, checkpoint, 1).keys() == matrices
    assert not find_row_formats(weights, checkpoint, 2)
    kernels, reference, dtypes = compute_logits(config, folder, "trn3", 2, "float32")
    assert dtypes == {"float32"} and np.abs(kernels - reference).max() <= 2.0**-12 * np.abs(reference).max()


def draw_int4_rows(
    module: str, shape: tuple[int, int], random: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a weight of int4 with a scale for each row, and its numbers."""
    nibbles = random.integers(0, 16, shape, np.uint8)
    scales = random.uniform(0.5, 2, (shape[0], 1)).astype(np.float32) / np.float32(64)
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).view(np.int32)
    stored = dict(packed=packed, scale=scales, shape=np.array(shape, np.int64))
    numbers = (nibbles.astype(np.float32) - 8) * scales
    return {f"{module}.weight_{name}": tensor for name, tensor in stored.items()}, numbers


ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
INT4_ROWS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
BLOCKS = {
    "mxfp4": (MXFP4, STORAGES[MXFP4][0], draw_mxfp4, "trn3"),
    "int4": ("pack-quantized", INT4_ROWS, draw_int4_rows, "trn2"),
    "fp8-dynamic": ("float-quantized", FP8, draw_fp8, "trn2"),
}


@pytest.mark.parametrize(
    ("block", "ignored", "stored"),
    [
        ("mxfp4", None, MATRICES),
        ("mxfp4", "down", ()),
        ("mxfp4", "gate", ()),
        ("int4", None, MATRICES),
        ("int4", "down", ("w_gate", "w_up")),
        ("int4", "gate", ("w_down",)),
        ("fp8-dynamic", None, MATRICES),
        ("fp8-dynamic", "down", ("w_gate", "w_up")),
    ],
)
def test_matrices_beside_a_plain_one_are_read_as_the_kernel_takes_them(
    tmp_path: Path, block: str, ignored: str | None, stored: tuple[str, ...]
) -> None:
    """One projection may be in `ignore`: rows are rounded for all matrices, and gate and up are packed together."""
    storage, weights, draw, target = BLOCKS[block]
    folder, is_ignored = tmp_path / "model", ignored is not None
    container = describe(storage, weights, **({"input_activations": ROWS} if block == "fp8-dynamic" else {}))
    write_container(
        folder,
        container | {"ignore": ["lm_head", *([f"re:.*mlp.{ignored}_proj"] if is_ignored else [])]},
        lambda module, *size: None if module.endswith(f"mlp.{ignored}_proj") else draw(module, *size),
    )
    config = adapt_to_chip(load_config(folder), target)
    (rank,) = shard_weights(config, open_checkpoint(folder, config), 1)
    assert {name for name in MATRICES if f"layers.0.mlp.{name}" in rank.formats} == set(stored)
    assert any(format.quantises_rows for name, format in rank.formats.items() if ".mlp." in name) == (
        block != "int4" and not is_ignored
    )
    kernels, reference, _ = compute_logits(config, folder, target, 1, "float32")
    has_rounded_rows = block == "fp8-dynamic" or not (is_ignored or block == "int4")
    assert (
        np.abs(kernels - reference).max()
        <= 2.0 ** (-5 if has_rounded_rows else -12) * np.abs(reference).max()
    )


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_mx_rows_are_multiplied_at_four_times_the_rate(tmp_path: Path, target: str) -> None:
    """256 rows by 3 * 256 * 512 weights are bound by operations in bfloat16 and in MXFP4."""
    config = read_config(write_mx(tmp_path, MXFP4, hidden_size=256, intermediate_size=512))
    floors = [
        next(kernel.floor_ns for kernel in passed.kernels if kernel.name == "mlp")
        for passed in (
            Predictor(predicted, target, 1, "bfloat16", 256).predict_prompts(256)
            for predicted in (replace(config, weight_format=None), config)
        )
    ]
    assert floors[1] / floors[0] == pytest.approx(0.25 if target == "trn3" else 1.0, rel=1e-6)


@pytest.mark.parametrize(("storage", "bits"), [(MXFP4, 4.25), (MXFP8, 8.25)])
@pytest.mark.parametrize("tp", [1, 2])
def test_plans_count_stored_bytes_of_the_mlp_on_trn3(
    tmp_path: Path, storage: str, bits: float, tp: int
) -> None:
    folder = write_mx(tmp_path, storage, hidden_size=256, intermediate_size=512)
    model = ModelSizes(read_config(folder))
    elements = 3 * 256 * 512 // tp
    sizes = {
        target: compute_footprint(model.on_chip(target), "bfloat16", tp, 128).weight_bytes
        for target in ("trn2", "trn3")
    }
    assert sizes["trn2"] - sizes["trn3"] == elements * 2 - elements * bits / 8
    assert model.on_chip("trn3").list_quantised_readers() == ["mlp"]
    assert model.on_chip("trn2").list_quantised_readers() == []
