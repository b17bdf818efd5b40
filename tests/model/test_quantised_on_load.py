"""The option --quantization: plain weights of decoder layers are quantised when they are loaded, and planned so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.config.quantization import quantise_config
from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import compose, load_config, read_config
from model.formats import SCHEMES, QuantisedWeight
from model.layers.arithmetic import Arithmetic
from model.layers.projection import Projection
from model.llm import LLM
from model.loading.checkpoint import open_checkpoint
from model.loading.shipped import PRETRAINED, find_config_path
from model.loading.weights import find_row_formats, shard_weights
from model.plan.predict import Predictor
from model.plan.sizes import load_model
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.tiny_families import write_tiny

IDS = [5, 3, 9, 1, 7, 2]


def write_plain(folder: Path) -> Path:
    """Write a tiny Qwen3 with float32 weights and return its folder."""
    return write_tiny(folder, "qwen3")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_rounded_with_a_scale_for_each_output(tmp_path: Path, scheme: str) -> None:
    folder = write_plain(tmp_path)
    plain = open_checkpoint(folder, load_config(folder))
    config = quantise_config(load_config(folder), scheme)
    quantised = open_checkpoint(folder, config)
    names = [name for name, weight in quantised.items() if isinstance(weight, QuantisedWeight)]
    assert {name for name in plain if ".mlp." in name} <= set(names)
    assert not [name for name in names if "embed" in name or "lm_head" in name or "norm" in name]
    for name in names:
        before, after = np.asarray(plain[name]), np.asarray(quantised[name])
        most = np.abs(before).max(axis=1, keepdims=True)
        # Integers: half of a step. fp8: half of the last of four binary places, or of the least subnormal.
        steps = {"int8": 127, "w8a8": 127, "int4": 7}
        if scheme in steps:
            bound = most / steps[scheme] / 2
        else:
            bound = np.maximum(np.abs(before) / 16, most / 448 * 2.0**-10)
        assert (np.abs(after - before) <= bound * 1.001).all()
        assert not np.array_equal(after, before)
    quantised.release()
    assert np.array_equal(np.asarray(quantised[names[0]]), np.asarray(quantised[names[0]]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_have_the_elements_and_scales_of_the_whole_weight(tmp_path: Path, ranks: int) -> None:
    folder = write_plain(tmp_path)
    config = quantise_config(load_config(folder), "int8")
    shards = shard_weights(config, open_checkpoint(folder, config), ranks)
    elements = np.concatenate([shard.arrays["layers.0.mlp.w_down"] for shard in shards])
    assert elements.dtype == np.int8 and shards[0].arrays["layers.0.mlp.w_down_scales"].dtype == np.float32
    for shard in shards[1:]:
        name = "layers.0.mlp.w_down_scales"
        assert np.array_equal(shard.arrays[name], shards[0].arrays[name])
    plain = np.asarray(open_checkpoint(folder, load_config(folder))["model.layers.0.mlp.down_proj.weight"])
    scales = np.abs(plain).max(axis=1) / np.float32(127)
    assert np.array_equal(elements, np.rint(plain / scales[:, None]).T)


def test_a_scheme_is_known_and_fits_the_folder(tmp_path: Path) -> None:
    config = load_config(write_plain(tmp_path))
    assert quantise_config(config, None) is config
    with pytest.raises(
        ModelError, match=r"'int3', and the weights are not quantised; .* by one of fp8, fp8-dynamic, int8"
    ):
        quantise_config(config, "int3")
    fp8 = replace(config, quant_method="fp8")
    assert quantise_config(fp8, "fp8") is fp8
    with pytest.raises(ModelError, match="is 'int8', and the weights are quantised by fp8; leave the option"):
        quantise_config(fp8, "int8")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_generated_with_weights_quantised_on_loading(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--dtype", "bfloat16", "--prompt", "Once upon a time", "--max-new-tokens", "3"]
    path = tmp_path / "out.json"
    assert main([*words, "--tp", "2", "--target", "trn2", "--quantization", scheme, "--json", str(path)]) == 0
    assert "3 of 3 tokens equal to the numpy reference" in capsys.readouterr().out
    assert json.loads(path.read_text())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("weights_only", "with_rows"), [("fp8", "fp8-dynamic"), ("int8", "w8a8")])
def test_rows_are_quantised_before_the_products_of_attention_and_mlp(
    tmp_path: Path, ranks: int, weights_only: str, with_rows: str
) -> None:
    """Kernels and reference agree in a prompt and in a decode step, and rows of 8 bits change the logits.

    In float32 both round rows alike. In bfloat16 they differ by no more than four times what bfloat16 costs.
    """
    folder, prompts = write_plain(tmp_path), {}
    for scheme in (weights_only, with_rows):
        config = quantise_config(load_config(folder), scheme)
        checkpoint = open_checkpoint(folder, config)
        logits = {}
        for dtype in ("float32", "bfloat16"):
            shards = shard_weights(config, checkpoint, ranks, dtype=dtype)
            models = (
                KernelModel(config, shards, SimulatedDevice("trn2", ranks), 128),
                ReferenceModel(config, checkpoint, dtype, ranks=ranks),
            )
            logits[dtype] = [
                np.stack([model.prefill([IDS])[0].logits, model.decode([7], [len(IDS)])[0].logits])
                for model in models
            ]
        kernels, exact = logits["float32"]
        # A result passes fewer than 256 roundings of 2^-24 in a row.
        assert np.abs(kernels - exact).max() <= 2.0**-16 * np.abs(exact).max()
        kernels, rounded = logits["bfloat16"]
        assert np.abs(kernels - rounded).max() <= 4 * np.abs(rounded - exact).max()
        prompts[scheme] = exact
    change = np.abs(prompts[weights_only] - prompts[with_rows]).max(axis=1)
    assert (change > 2.0**-8 * np.abs(prompts[weights_only]).max()).all()


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "w8a8"])
def test_a_decode_step_takes_the_kernels_that_quantise_rows(scheme: str) -> None:
    """attention_block_decode and decoder_layer_decode do not quantise rows, and take weights without rows of 8 bits."""
    kernels = []
    for name in (scheme.removesuffix("-dynamic").replace("w8a8", "int8"), scheme):
        config = quantise_config(read_config(PRETRAINED), name)
        step = Predictor(config, "trn2", 1, "bfloat16", 128).predict_step(2)
        kernels.append({kernel.name for kernel in step.kernels})
    joint, separate = kernels
    assert joint & {"attention_block_decode", "decoder_layer_decode"}
    assert {"qkv_projection", "attention_decode", "output_projection", "mlp"} <= separate


def create_arithmetic(folder: Path, scheme: str) -> Arithmetic:
    """Return the arithmetic of a folder whose weights are quantised by a scheme."""
    config = quantise_config(load_config(folder), scheme)
    checkpoint = open_checkpoint(folder, config)
    formats = find_row_formats(compose(config).weights, checkpoint, 1)
    return Arithmetic(checkpoint, np.dtype(np.float32), 0, row_formats=formats)


def test_a_row_is_divided_by_its_largest_magnitude(tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    numpy = create_arithmetic(folder, "fp8-dynamic")
    up = Projection("model.layers.0.mlp.up_proj.weight", 1, 1)
    rows = np.array([[240, 17, -8.4, 2.0**-9], [0, 0, 0, 0], [-120, 60, 30, 15]], np.float32)
    expected = [[240, 16, -8, 2.0**-9], [0, 0, 0, 0], [-120, 60, 30, 15]]
    assert np.allclose(numpy.quantise_rows(rows, up), expected, rtol=1e-6, atol=0)
    assert numpy.quantise_rows(rows, Projection("lm_head.weight", 1, 1)) is rows


def test_a_row_becomes_integers_of_its_largest_magnitude(tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    numpy = create_arithmetic(folder, "w8a8")
    up = Projection("model.layers.0.mlp.up_proj.weight", 1, 1)
    rows = np.array([[127, 17.4, -8.6, 0.5], [0, 0, 0, 0], [-63.5, 30.1, 1.25, -0.3]], np.float32)
    expected = [[127, 17, -9, 0], [0, 0, 0, 0], [-63.5, 30, 1, -0.5]]
    assert np.allclose(numpy.quantise_rows(rows, up), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("number", ["float", "int"])
@pytest.mark.parametrize(
    ("changes", "is_quantised"),
    [
        ({}, True),
        ({"dynamic": False}, False),
        ({"strategy": "tensor"}, False),
        ({"type": "mixed"}, False),
        ({"num_bits": 4}, False),
        ({"symmetric": False}, False),
    ],
)
def test_compressed_tensors_say_whether_rows_are_quantised(
    tmp_path: Path, changes: dict[str, object], is_quantised: bool, number: str
) -> None:
    folder = write_plain(tmp_path)
    document = json.loads((folder / "config.json").read_text())
    rows = {"num_bits": 8, "type": number, "strategy": "token", "dynamic": True} | changes
    weights = {"num_bits": 8, "type": number, "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    document["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(document))
    container = load_config(folder).weight_format
    assert container is not None and [format.quantises_rows for format in container.formats] == [is_quantised]
    (note,) = container.notes
    assert ("mlp and the projections of attention do so" in note) == is_quantised


@pytest.mark.slow
def test_an_engine_quantises_on_loading() -> None:
    llm = LLM(PRETRAINED, quantization="int8", max_model_len=64)
    (output,) = llm.generate(["Once upon a time"], use_tqdm=False)
    assert output.outputs[0].token_ids


def test_a_plan_counts_quantised_weights_as_stored() -> None:
    path = find_config_path("llama-3.1-8b")
    plain, fp8 = load_model(path), load_model(path, quantization="fp8")
    (block,), (quantised,) = plain.blocks, fp8.blocks
    saved = block.count_weight_bytes(8, 1, "bfloat16") - quantised.count_weight_bytes(8, 1, "bfloat16")
    # One byte less for each element of gate, up and down; two rows of 1,792 scales and one of 4,096 more.
    matrices = 3 * 4096 * 1792
    assert "mlp" in fp8.list_quantised_readers() and plain.list_quantised_readers() == []
    assert saved >= matrices - 4 * (2 * 1792 + 4096)
    for section in ("embedding", "head"):
        sizes = [getattr(model, section).count_weight_bytes(8, 1, "bfloat16") for model in (plain, fp8)]
        assert sizes[0] == sizes[1]
