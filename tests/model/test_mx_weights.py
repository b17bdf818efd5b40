"""Weights in MXFP4: every code and scale, a folder as gpt-oss is published, and files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import load_config, read_config
from model.formats import Mx, QuantisedWeight
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.model.oracle import Oracle, random_model
from tests.model.test_dense_families import CACHE, IDS, PROMPT, assert_equal, load
from tests.model.tiny_families import COMMON

torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

STACKS = ("gate_up_proj", "down_proj")


def element(code: int) -> float:
    """Decode a code by its fields: a sign, two bits of exponent with a bias of 1, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def weight_of(blocks: np.ndarray, scales: np.ndarray) -> QuantisedWeight:
    """Return a weight [in, out] in its stored tensors."""
    tensors = {"elements": blocks, "scales": scales}
    shape = (len(scales), 32 * scales.shape[1])
    return QuantisedWeight.from_tensors(Mx(), tensors, shape, np.dtype(ml_dtypes.bfloat16)).T


def test_every_code_with_every_scale() -> None:
    """Each scale has two blocks that hold all 16 codes in both halves of a byte."""
    codes = np.array([(low, 15 - low) for low in range(16)], np.uint8)
    block = codes[:, 0] | codes[:, 1] << 4
    blocks = np.broadcast_to(block, (256, 1, 16)).copy()
    scales = np.arange(256, dtype=np.uint8)[:, None]
    weight = weight_of(blocks, scales)
    widened = np.asarray(weight)
    assert widened.shape == weight.shape == (32, 256) and widened.dtype == ml_dtypes.bfloat16
    exact = np.array([element(int(code)) for code in codes.ravel()])
    for scale in range(255):
        wanted = np.ldexp(exact, scale - 127)
        finite = np.abs(wanted) < 2.0**128
        assert np.array_equal(widened[:, scale].astype(np.float64)[finite], wanted[finite])
        assert np.array_equal(
            widened[:, scale].astype(np.float64)[~finite], np.sign(wanted[~finite]) * np.inf
        )
    assert np.isnan(widened[:, 255].astype(np.float32)).all()


def test_a_tensor_is_widened_as_transformers_does() -> None:
    """More rows than are widened at a time."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (2, 300, 3, 16), np.uint8)
    scales = random.integers(90, 160, (2, 300, 3), np.uint8)
    wanted = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    for expected, *stored in zip(wanted.float().numpy(), blocks, scales):
        assert np.array_equal(np.asarray(weight_of(*stored)).astype(np.float32), expected)


def packed_and_plain(shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return random blocks and scales of a stack [experts, in, out], and the stack."""
    experts, inputs, outputs = shape
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    scales = random.integers(121, 125, (experts, outputs, inputs // 32), np.uint8)
    plain = [np.asarray(weight_of(*pair)).astype(np.float32) for pair in zip(blocks, scales)]
    return blocks, scales, torch.from_numpy(np.stack(plain))


@cache
def written() -> tuple[Any, dict[str, Any]]:
    """Return a model of transformers with experts of MXFP4 values, and its published tensors."""
    fields = dict(hidden_size=64, intermediate_size=96, head_dim=12, num_local_experts=4)
    fields |= dict(num_experts_per_tok=2, sliding_window=5, num_hidden_layers=2)
    model = random_model("GptOss", {**COMMON, **fields}, 11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
        tensors: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            if name.endswith(STACKS):
                blocks, scales, plain = packed_and_plain(tuple(parameter.shape), len(tensors))
                parameter.copy_(plain)
                tensors |= {f"{name}_blocks": torch.from_numpy(blocks)}
                tensors |= {f"{name}_scales": torch.from_numpy(scales)}
            else:
                tensors[name] = parameter.detach().bfloat16()
    return model, tensors


def write(folder: Path, change: Callable[[dict[str, Any]], object] = lambda tensors: None) -> Path:
    from safetensors.torch import save_file

    model, tensors = written()
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"architectures": ["GptOssForCausalLM"]}
    path.write_text(json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}}))
    changed = dict(tensors)
    change(changed)
    save_file(changed, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_a_published_folder_equals_transformers(tmp_path: Path) -> None:
    config, weights = load(write(tmp_path))
    assert {weight.dtype for weight in weights.values()} == {np.dtype(ml_dtypes.bfloat16)}
    oracle = Oracle(written()[0], IDS, PROMPT)
    assert_equal(ReferenceModel(config, weights), oracle)
    shards = shard_weights(config, weights, 2)
    assert_equal(KernelModel(config, shards, SimulatedDevice("trn2", 2), CACHE), oracle)


def test_what_is_not_read_is_not_widened(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    checkpoint = open_checkpoint(tmp_path, config)
    name = "model.layers.1.mlp.experts.down_proj[3]"
    first, again = np.asarray(checkpoint[name]), np.asarray(checkpoint[name])
    assert first.shape == (96, 64) and not np.shares_memory(first, again)
    plain = checkpoint["model.layers.1.mlp.router.weight"]
    assert np.shares_memory(plain, checkpoint["model.layers.1.mlp.router.weight"])


NAME = "model.layers.0.mlp.experts.gate_up_proj"


def without(suffix: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(NAME + suffix)


def cut(suffix: str, *slices: slice) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({NAME + suffix: tensors[NAME + suffix][slices].contiguous()})


def words(tensors: dict[str, Any]) -> None:
    tensors[NAME + "_scales"] = tensors[NAME + "_scales"].float()


def both(tensors: dict[str, Any]) -> None:
    tensors[NAME] = torch.zeros((4, 64, 192), dtype=torch.bfloat16)


def bytes_elsewhere(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.router.weight"
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("_scales"), f"tensor {NAME}_scales is missing"),
        (without("_blocks"), f"tensor {NAME}_blocks is missing"),
        (
            cut("_scales", slice(None), slice(191)),
            f"{NAME}_scales has shape (191, 2); a weight (64, 192) has (192, 2)",
        ),
        (
            cut("_blocks", slice(None), slice(None), slice(None), slice(8)),
            f"{NAME}_blocks has shape (192, 2, 8)",
        ),
        (words, f"{NAME}_scales has dtype float32, not uint8"),
        (both, f"{NAME}_blocks is not a tensor of GptOssForCausalLM"),
        (bytes_elsewhere, "router.weight has dtype 'U8'; known are F32, F16, BF16"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    config = load_config(write(tmp_path, change))
    with pytest.raises(ModelError) as refused:
        open_checkpoint(tmp_path, config)
    assert message in str(refused.value)


def test_other_methods_clamps_and_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "config.json"
    fields = json.loads(path.read_text())
    for name, value, message in (
        (
            "quantization_config",
            {"quant_method": "hqq"},
            "by hqq; fp8, compressed-tensors, ",
        ),
        ("swiglu_limit", 8.0, "swiglu_limit: 8.0; experts are computed with 7.0"),
        ("swiglu_alpha", 1.0, "swiglu_alpha: 1.0; experts are computed with 1.702"),
    ):
        path.write_text(json.dumps({**fields, name: value}))
        with pytest.raises(ModelError, match=message):
            load_config(tmp_path)
        assert read_config(tmp_path).refusals
    path.write_text(json.dumps({**fields, "num_local_experts": 3}))
    with pytest.raises(ModelError, match="for 3 experts"):
        open_checkpoint(tmp_path, load_config(tmp_path))
    path.write_text(json.dumps({**fields, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}))
    assert load_config(tmp_path).weight_format == Mx()
