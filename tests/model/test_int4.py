"""Weights of 4 bits: every code, groups and zero points, the order of kernels, folders, and files that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from model.errors import ModelError
from model.families import load_config, read_config
from model.formats import Compressed, Int4, QuantisedWeight
from model.layers.joint import join_launches
from model.layers.launch import Launch, LeastWork, Value
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from nki_kernels.nibbles import count_packed_rows, widen_nibbles_reference
from nkw.commands import main
from tests.model.folders import byte_tokenizer
from tests.model.oracle import random_model
from tests.model.test_scaled_weights import FILE, MATRICES, configure, save

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
GROUPS = [None, 32, 64, 128]
UP = "model.layers.0.mlp.up_proj.weight"
SIZES = dict(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def draw(rows: int, columns: int, group: int | None, seed: int = 1) -> tuple[np.ndarray, ...]:
    """Return nibbles [out, in], and scales and zero points [out, groups]; a row of nibbles has every code."""
    random = np.random.default_rng(seed)
    nibbles = random.integers(0, 16, (rows, columns), np.uint8)
    nibbles[0] = np.arange(columns) % 16
    groups = (rows, columns // (group or columns))
    scales = random.uniform(0.01, 0.03, groups).astype(np.float32)
    return nibbles, scales, random.integers(0, 16, groups, np.uint8)


def exact(nibbles: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """Return (nibble - zero) * scale in float64, one element at a time by its indices."""
    group = nibbles.shape[1] // scales.shape[1]
    rows, columns = np.indices(nibbles.shape)
    zero = 8.0 if zeros is None else zeros.astype(np.float64)[rows, columns // group]
    return (nibbles.astype(np.float64) - zero) * scales.astype(np.float64)[rows, columns // group]


def words(nibbles: np.ndarray) -> np.ndarray:
    """Return nibbles [n, m] as int32 [n, m / 8]: nibble 8 j + i in bits 4 i … 4 i + 3 of word j."""
    padded = np.pad(nibbles.astype(np.int64), ((0, 0), (0, -nibbles.shape[1] % 8)))
    return sum(padded[:, i::8] << (4 * i) for i in range(8)).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_every_code_is_read_with_the_scale_and_zero_point_of_its_group(
    group: int | None, symmetric: bool
) -> None:
    """A product of a code and a float32 scale has at most 28 bits, so that float32 rounds it once."""
    nibbles, scales, zeros = draw(129, 384, group)
    format = Int4("compressed-tensors", group, symmetric)
    numbers = exact(nibbles, scales, None if symmetric else zeros)
    tensors = {"w_packed": words(nibbles), "w_scale": scales, "w_shape": np.array(nibbles.shape)}
    if not symmetric:
        tensors["w_zero_point"] = words(zeros.T).T
    weight = format.from_checkpoint("w", tensors, nibbles.shape, FLOAT32)
    assert weight is not None and tensors == {}
    assert np.array_equal(np.asarray(weight), numbers.astype(np.float32))
    stored = format.store_nibbles(nibbles, scales, zeros)
    for name, array in stored.items():
        assert np.array_equal(weight.tensors[name], array), name


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("inputs", [2, 32, 34, 64, 66, 126, 128, 130, 192, 254, 256, 258, 300, 448, 642])
def test_kernels_read_the_numbers_of_the_format(inputs: int, symmetric: bool) -> None:
    """Bytes in the order of kernels, of whole runs and of all kinds of blocks behind them."""
    nibbles, scales, zeros = draw(40, inputs, None)
    format = Int4("compressed-tensors", None, symmetric)
    passed = format.pass_to_kernels(format.store_nibbles(nibbles, scales, zeros))
    elements = np.ascontiguousarray(passed["elements"].T)
    arranged = format.arrange("elements", elements)
    assert arranged.shape == format.arrange_shape("elements", elements.shape)
    assert len(arranged) == count_packed_rows(inputs, inputs)
    zeros_row = None if symmetric else np.ascontiguousarray(passed["zeros"].T)
    wide = widen_nibbles_reference(arranged, inputs, zeros_row) * passed["scales"].T
    assert np.array_equal(wide.T, exact(nibbles, scales, None if symmetric else zeros).astype(np.float32))


def write(folder: Path, group: int | None, symmetric: bool = True, **sizes: int) -> dict[str, np.ndarray]:
    """Write a Llama with projections of 4 bits and a tokenizer of bytes; return its tensors."""
    random_model("Llama", {**SIZES, **sizes}, 6).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    stored: dict[str, np.ndarray] = {}
    for index, (name, tensor) in enumerate(safetensors.numpy.load_file(folder / FILE).items()):
        if not name.endswith("proj.weight"):
            stored[name] = tensor.astype(BFLOAT16)
            continue
        nibbles, scales, zeros = draw(*tensor.shape, group, index)
        stored |= {f"{name}_packed": words(nibbles), f"{name}_scale": scales / 10}
        stored[f"{name}_shape"] = np.array(tensor.shape, np.int64)
        if not symmetric:
            stored[f"{name}_zero_point"] = words(np.clip(zeros, 6, 9).T).T
    save(folder, stored)
    configure(folder, dtype="bfloat16", quantization_config=describe(group, symmetric))
    return stored


def describe(group: int | None, symmetric: bool = True, **changes: Any) -> dict[str, Any]:
    weights = dict(type="int", num_bits=4, symmetric=symmetric, group_size=group)
    weights |= dict(strategy="channel" if group is None else "group") | changes
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize(("ranks", "hidden"), [("1", 128), ("2", 128), ("1", 256), ("2", 256)])
def test_layers_compute_with_nibbles(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    group: int | None,
    symmetric: bool,
    ranks: str,
    hidden: int,
) -> None:
    """Two ranks divide heads and intermediate size; hidden states of 256 elements stay in SBUF during a layer.

    Attention widens scales of groups. With groups of 32 two tokens are nearly equal in a fourth step.
    """
    write(tmp_path, group, symmetric, hidden_size=hidden)
    config = load_config(tmp_path)
    for rank in shard_weights(config, open_checkpoint(tmp_path, config), int(ranks), dtype="bfloat16"):
        names = {
            name
            for name, array in rank.arrays.items()
            if array.dtype == np.uint8 and not name.endswith("_zeros")
        }
        layers = (f"layers.{layer}" for layer in range(2))
        suffixes = [f"mlp.w_{matrix}" for matrix in MATRICES]
        if group is None:
            suffixes += ["attention.w_qkv", "attention.w_o"]
        assert names == {f"{layer}.{suffix}" for layer in layers for suffix in suffixes}
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "3", "--tp", ranks]
    assert main(["generate", *arguments, "--dtype", "bfloat16"]) == 0
    assert "3 of 3" in capsys.readouterr().out


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = write(tmp_path, 32, symmetric=False, num_hidden_layers=1)
    config = load_config(tmp_path)
    open_checkpoint(tmp_path, config)

    def refuse(message: str, **changes: Any) -> None:
        changed = dict(tensors)
        for suffix, change in changes.items():
            changed[f"{UP}_{suffix}"] = change
        save(tmp_path, {name: array for name, array in changed.items() if array is not None})
        with pytest.raises(ModelError, match=re.escape(message)):
            open_checkpoint(tmp_path, config)

    packed, scales, zeros = (tensors[f"{UP}_{suffix}"] for suffix in ("packed", "scale", "zero_point"))
    bits = "a weight (256, 128) of 4 bits has int32"
    refuse(f"{UP}_packed is int32 (256, 15); {bits} (256, 16)", packed=packed[:, :-1])
    refuse(f"{UP}_packed is int64 (256, 16); {bits} (256, 16)", packed=packed.astype(np.int64))
    refuse(f"{UP}_scale is float32 (256, 3);", scale=scales[:, :-1])
    refuse(f"{UP}_scale is uint8 (256, 4);", scale=scales.astype(np.uint8))
    refuse(f"tensor {UP}_scale of a weight (256, 128) of 4 bits is missing", scale=None)
    refuse(f"{UP}_zero_point is int32 (31, 4); {bits} (32, 4)", zero_point=zeros[:-1])
    refuse(f"{UP}_g_idx orders the inputs of groups", g_idx=np.zeros(128, np.int32))
    for number in (0.0, -1.0, np.inf, np.nan):
        spoiled = scales.copy()
        spoiled[3, 1] = number
        refuse(f"{UP}_scale contains {number}; scales are finite and above 0", scale=spoiled)
    save(tmp_path, tensors)
    assert isinstance(open_checkpoint(tmp_path, config)[UP], QuantisedWeight)


def test_other_groups_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 128, num_hidden_layers=1)
    for changes, message in (
        (dict(group_size=48), "group_size: 48; weights of 4 bits have groups of 32, 64, 128"),
        (dict(strategy="tensor"), "strategy: 'tensor'; known for weights of 4 bits are channel, group"),
    ):
        configure(tmp_path, quantization_config=describe(128, **changes))
        assert any(message in refusal for refusal in read_config(tmp_path / "config.json").refusals)
    configure(tmp_path, quantization_config=describe(64, symmetric=False))
    weight_format = load_config(tmp_path).weight_format
    assert isinstance(weight_format, Compressed)
    assert [group.format for group in weight_format.groups] == [
        Int4("compressed-tensors", 64, symmetric=False)
    ]
    tensors = {"w_packed": np.zeros((8, 12), np.int32)}
    with pytest.raises(ModelError, match="w has 96 inputs; groups of 64 need a multiple of 64"):
        Int4("compressed-tensors", 64).from_checkpoint("w", tensors, (8, 96), FLOAT32)


@pytest.mark.parametrize("group", GROUPS)
def test_packing_with_zero_points_is_within_a_step(group: int | None) -> None:
    """A zero point is rounded by half a step, and a number once more; a group of zeros stays zero."""
    array = np.random.default_rng(2).normal(0.3, 1, (24, 256)).astype(np.float32)
    array[3] = 0
    format = Int4("compressed-tensors", group, symmetric=False)
    stored = format.pack(array)
    error = np.abs(format.widen(stored) - array)
    assert (error <= np.repeat(stored["scales"], group or 256, axis=1) * (1 + 2.0**-18)).all()
    assert np.array_equal(error[3], np.zeros(256)) and np.unique(stored["zeros"]).size > 1


def test_layers_of_4_bits_are_one_launch() -> None:
    """Zero points are arguments of the joint kernel; an argument that it lacks keeps the launches apart."""
    x, row = Value("x", (1, 128), BFLOAT16), Value("zeros", (1, 256), np.dtype(np.uint8))
    shared = {"x": x, "eps": 1e-5, "replica_group": None}
    attention = Launch("attention_block_decode", shared, ("x",), LeastWork(0.0, 0.0), 1)
    kernels = []
    for name in ("w_up_zeros", "w_up_other"):
        up = {"w_up": Value("w_up", (64, 256), np.dtype(np.uint8)), name: row}
        mlp = Launch("mlp", shared | {"norm_weight": x, **up}, ("x",), LeastWork(0.0, 0.0), 1)
        kernels.append([launch.kernel for launch in join_launches([attention, mlp])])
    assert kernels == [["decoder_layer_decode"], ["attention_block_decode", "mlp"]]
