"""Checkpoints with static scales of rows: every container that has them generates on one and two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import compose, load_config
from model.formats import QuantisedWeight
from model.layers.arithmetic import Arithmetic
from model.layers.projection import Projection
from model.llm.loaded import LoadedModel
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import find_row_formats
from model.mesh import Mesh
from model.plan.sizes import load_model
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.containers import PREFILL, Draw, Tensors, check_numbers, save, write_container
from tests.model.test_compressed_tensors import FP8, INT8, UP, describe, draw_fp8, draw_int8

E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
GATE, DOWN = UP.replace("up_proj", "gate_proj"), UP.replace("up_proj", "down_proj")
SCALES = {"gate_proj": 0.0048, "up_proj": 0.006, "down_proj": 0.001}
"""Static scales of fp8 rows by module. Of the rows of the norm a few are clipped, as they exceed 448 * 0.006."""

STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def draw_with_input_scale(draw: Draw, has_one_scale: bool, factor: float = 1.0) -> Draw:
    """Return a `Draw` that adds a static scale to each module; with `has_one_scale` a weight has one scale."""

    def draw_module(module: str, shape: tuple[int, int], random: np.random.Generator) -> Any:
        pair = draw(module, shape, random)
        assert pair is not None
        tensors, numbers = pair
        if has_one_scale:
            name, scale = f"{module}.weight_scale", np.float32(1 / 64)
            numbers = tensors[f"{module}.weight"].astype(np.float32) * scale
            tensors[name] = np.array(scale)
        scale = SCALES.get(module.rpartition(".")[2], 0.01) * factor
        return tensors | {f"{module}.input_scale": np.array([scale], np.float32)}, numbers

    return draw_module


FP8_ROWS = {"input_activations": STATIC}
INT8_ROWS = {"input_activations": STATIC | {"type": "int"}}
CONTAINERS: dict[str, tuple[dict[str, Any], Draw]] = {
    "compressed-tensors": (
        describe("float-quantized", FP8, **FP8_ROWS),
        draw_with_input_scale(draw_fp8, False),
    ),
    "compressed-tensors of int8": (
        describe("int-quantized", INT8, **INT8_ROWS),
        draw_with_input_scale(draw_int8, False, 448 / 127),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, draw_with_input_scale(draw_fp8, True)),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, draw_with_input_scale(draw_fp8, True)),
}
pytestmark = pytest.mark.filterwarnings("ignore:config.json quantises input rows")


def write(folder: Path, container: str) -> tuple[Tensors, Tensors]:
    """Write a tiny Llama in a container; return its tensors, and the numbers of its weights, by name."""
    return write_container(folder, *CONTAINERS[container])


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("ranks", "target"), [(1, "trn2"), (2, "trn2"), (2, "trn3")])
def test_every_container_generates_with_static_rows(
    tmp_path: Path, container: str, ranks: int, target: str
) -> None:
    """Kernels and reference round rows, so they differ by less than half of what the rounding changes."""
    folder = tmp_path / "m"
    _, numbers = write(folder, container)
    check_numbers(folder, numbers)
    loaded = LoadedModel.open(folder, target=target)
    config, checkpoint = loaded.config, loaded.checkpoint
    shards = loaded.load_shards(Mesh(ranks))
    factor = 1 if "int8" in container or target == "trn3" else 2
    for name in ("gate", "up", "down"):
        stored = checkpoint[f"model.layers.0.mlp.{name}_proj.weight"]
        assert isinstance(stored, QuantisedWeight) and stored.input_scale is not None
        for shard in shards:
            scale = shard.arrays[f"layers.0.mlp.w_{name}_input_scale"]
            assert scale.shape == (1, 1) and scale == stored.input_scale * np.float32(factor)
    model = KernelModel(config, shards, SimulatedDevice(target, ranks), 128)
    reference = loaded.create_reference(ranks)
    plain = ReferenceModel(config, numbers, "float32", ranks=ranks)
    runs: list[Callable[[Any], Any]] = [
        lambda model: model.prefill([PREFILL])[0].logits,
        lambda model: model.decode([7], [4])[0].logits,
    ]
    for run in runs:
        output, expected, unrounded = run(model), run(reference), run(plain)
        change = np.abs(unrounded - expected).max()
        assert change > 2.0**-10 * np.abs(expected).max()
        assert np.abs(output - expected).max() <= change / 2


@pytest.mark.parametrize("container", CONTAINERS)
def test_rows_are_rounded_with_the_largest_scale_of_the_weights_that_multiply_them(
    tmp_path: Path, container: str
) -> None:
    """The rows are those of a checkpoint's dtype but for odd multiples of 2^-9 below 2^-5, see `Scaled`."""
    folder = tmp_path / "m"
    write(folder, container)
    checkpoint = open_checkpoint(folder, config := load_config(folder))
    formats = find_row_formats(compose(config).weights, checkpoint, 1)
    numpy = Arithmetic(checkpoint, np.dtype(np.float32), 0, row_formats=formats)
    up, gate, head = (Projection(f"{name}.weight", 1, 1) for name in (UP, GATE, "lm_head"))
    rows = np.random.default_rng(3).normal(size=(64, 128)).astype(np.float32)
    is_integer = "int8" in container
    for projections, module in (((up,), "up_proj"), ((gate,), "gate_proj"), ((up, gate), "up_proj")):
        scale = np.float32(SCALES[module] * (448 / 127 if is_integer else 1))
        ratios = np.clip(rows / scale, -128 if is_integer else -448, 127 if is_integer else 448)
        expected = (np.rint(ratios) if is_integer else ratios.astype(E4M3FN)).astype(np.float32) * scale
        rounded = numpy.quantise_rows(rows, *projections)
        # 1 / scale is rounded, so that a few numbers are on the other side of a boundary between two codes.
        tiny = np.where(np.abs(ratios) < 2.0**-5, scale * 2.0**-9, 0)
        is_near = np.abs(rounded - expected) <= np.abs(expected) * 2.0**-22 + tiny
        assert is_near.mean() > 0.999 and (np.abs(rounded) < np.abs(rows) - scale).any()
    assert numpy.quantise_rows(rows, head) is rows


def test_a_checkpoint_without_a_static_scale_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tensors, _ = write(folder, "fp8")
    name = f"{DOWN}.input_scale"
    save(folder, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ModelError) as refused:
        open_checkpoint(folder, load_config(folder))
    assert str(refused.value).endswith(
        f"{DOWN}.weight has no static scale of its rows, which quantization_config asks for; tensor {name} is missing"
    )
    save(
        folder,
        {key: tensor for key, tensor in tensors.items() if key != name}
        | {f"{DOWN}.activation_scale": tensors[name]},
    )
    open_checkpoint(folder, load_config(folder))


def test_static_rows_beside_blocks_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder, "fp8")
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["quantization_config"]["weight_block_size"] = [128, 128]
    path.write_text(json.dumps(fields))
    with pytest.raises(
        ModelError, match="activation_scheme: 'static' with weight_block_size; weights of blocks have"
    ):
        load_config(folder)
    fields["quantization_config"]["activation_scheme"] = "dynamic"
    path.write_text(json.dumps(fields))
    load_config(folder)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_plan_has_the_launches_of_static_rows(
    tmp_path: Path, container: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    write(folder, container)
    assert "mlp" in load_model(folder / "config.json").list_quantised_readers()
    assert main(["plan", str(folder / "config.json"), "--instance", "trn2.48xlarge", "--tp", "2"]) == 0
    assert "as stored" in capsys.readouterr().out
