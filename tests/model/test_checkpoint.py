"""Weights from one file or from shards, and every way in which they can fail to be a model."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from model.errors import ModelError
from model.families import compose, load_config
from model.loading.checkpoint import open_checkpoint
from tests.hostile import mutate

NORM = "model.norm.weight"
FILE = "model.safetensors"


def opened(folder: Path) -> dict[str, np.ndarray]:
    return dict(open_checkpoint(folder, load_config(folder)))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        opened(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    weights = safetensors.numpy.load_file(folder / FILE)
    change(weights)
    safetensors.numpy.save_file(weights, folder / FILE)
    return folder


def shard(folder: Path) -> dict[str, str]:
    """Split the folder's weights over two files with an index; returns the index's map."""
    weights = safetensors.numpy.load_file(folder / FILE)
    (folder / FILE).unlink()
    where = {}
    for number in (0, 1):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        subset = {name: weights[name] for name in sorted(weights)[number::2]}
        safetensors.numpy.save_file(subset, folder / file)
        where |= dict.fromkeys(subset, file)
    write_index(folder, where)
    return where


def write_index(folder: Path, where: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_raw(path: Path, header: bytes, content: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_the_library_wrote(write_model, random_weights, dtype) -> None:
    folder = write_model(dtype=dtype)
    wanted = {name: tensor.astype(dtype) for name, tensor in random_weights().items()}
    tensors = opened(folder)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == dtype
        assert tensors[name].tobytes() == tensor.tobytes()


def test_names_and_shapes_are_those_of_transformers(write_model, transformers_llama) -> None:
    from transformers import AutoConfig

    for number, changes in enumerate(
        [{}, {"tie_word_embeddings": True}, {"head_dim": 16, "num_key_value_heads": 1}]
    ):
        folder = write_model(name=f"model{number}", **changes)
        oracle = transformers_llama.LlamaForCausalLM(AutoConfig.from_pretrained(folder))
        wanted = {name: tuple(tensor.shape) for name, tensor in oracle.named_parameters()}
        assert compose(load_config(folder)).list_tensor_shapes() == wanted


def test_shards_are_one_checkpoint(write_model) -> None:
    folder = write_model()
    unsharded = {name: tensor.copy() for name, tensor in opened(folder).items()}
    shard(folder)
    sharded = opened(folder)
    assert sharded.keys() == unsharded.keys()
    assert all(np.array_equal(sharded[name], unsharded[name]) for name in unsharded)


def test_a_header_of_any_length_is_read(write_model) -> None:
    folder = write_model()
    path = folder / FILE
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    wanted = {name: tensor.tobytes() for name, tensor in opened(folder).items()}
    for blanks in (1, 2, 3):  # then the tensors no longer lie at a multiple of their element's size
        write_raw(path, data[8 : 8 + length] + b" " * blanks, data[8 + length :])
        assert {name: tensor.tobytes() for name, tensor in opened(folder).items()} == wanted


def test_a_tied_head_may_be_absent_or_stored(write_model) -> None:
    folder = write_model(tie_word_embeddings=True)
    assert "lm_head.weight" not in opened(folder)
    head = np.ones((300, 32), np.float32)
    assert "lm_head.weight" not in opened(
        rewrite(folder, lambda weights: weights.update({"lm_head.weight": head}))
    )


def test_old_rotary_buffers_are_ignored(write_model) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = rewrite(write_model(), lambda weights: weights.update({name: np.ones(4, np.float32)}))
    assert name not in opened(folder)


def test_refuses_missing_and_surplus_tensors(write_model) -> None:
    folder = rewrite(write_model(), lambda weights: weights.pop(NORM))
    advice = "is missing; a LlamaForCausalLM has it: download the checkpoint again"
    assert refusal(folder) == f"{folder / FILE}: tensor {NORM} {advice}"
    folder = rewrite(write_model(name="untied"), lambda weights: weights.pop("lm_head.weight"))
    assert refusal(folder) == f"{folder / FILE}: tensor lm_head.weight {advice}"
    folder = rewrite(
        write_model(name="more"), lambda weights: weights.update({"model.extra": np.ones(1, np.float32)})
    )
    assert refusal(folder) == f"{folder / FILE}: model.extra is not a tensor of LlamaForCausalLM"


@pytest.mark.parametrize("size", [31, 33])
def test_refuses_another_shape(write_model, size) -> None:
    folder = rewrite(write_model(), lambda weights: weights.update({NORM: np.ones(size, np.float32)}))
    assert refusal(folder) == f"{folder / FILE}: {NORM} has shape ({size},); config.json asks for (32,)"


def test_refuses_another_dtype_and_takes_a_mixture(write_model) -> None:
    folder = rewrite(write_model(), lambda weights: weights.update({NORM: np.ones(32, np.int8)}))
    assert refusal(folder) == f"{folder / FILE}: {NORM} has dtype 'I8'; known are F32, F16, BF16"
    rewrite(folder, lambda weights: weights.update({NORM: np.ones(32, np.float16)}))
    assert {weight.dtype for weight in opened(folder).values()} == {
        np.dtype(np.float16),
        np.dtype(np.float32),
    }


def test_refuses_a_truncated_file_wherever_it_is_cut(write_model) -> None:
    folder = write_model()
    data = (folder / FILE).read_bytes()
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    for size in (0, 7, 8, header_end - 1, header_end, len(data) - 1):
        (folder / FILE).write_bytes(data[:size])
        assert f"{folder / FILE} is not a safetensors file: " in refusal(folder)
    (folder / FILE).write_bytes(data + b"\0")
    assert f"{folder / FILE} is not a safetensors file: " in refusal(folder)


def test_a_header_of_more_than_16_mib_is_refused_unread(write_model) -> None:
    folder = write_model()
    data = (folder / FILE).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    write_raw(folder / FILE, data[8:end].ljust(2**24), data[end:])
    assert opened(folder)
    write_raw(folder / FILE, data[8:end].ljust(2**24 + 1), data[end:])
    message = (
        f"{folder / FILE} is not a safetensors file: its header takes 16,777,217 bytes; at most 16,777,216"
    )
    assert refusal(folder) == message


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xfe{}",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1000000000000000000000000000000], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
    ],
)
def test_refuses_a_malformed_header(write_model, header) -> None:
    folder = write_model()
    write_raw(folder / FILE, header, bytes(4))
    assert f"{folder / FILE} is not a safetensors file: " in refusal(folder)


@pytest.mark.slow
def test_is_as_strict_as_the_library(write_model) -> None:
    folder = write_model()
    raw = (folder / FILE).read_bytes()
    wanted = {name: tensor.tobytes() for name, tensor in opened(folder).items()}
    refused = 0
    for seed in range(400):
        (folder / FILE).write_bytes(mutate.safetensors(random.Random(seed), raw))
        try:
            theirs = safetensors.numpy.load_file(folder / FILE)
        except safetensors.SafetensorError:
            refused += 1
            assert "is not a safetensors file" in refusal(folder), seed
            continue
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ):  # a dtype or a shape that numpy does not have
            refusal(folder)
            continue
        try:
            ours = opened(folder)
        except ModelError:  # sound by itself, and not the model of this config
            assert "is not a safetensors file" not in refusal(folder), seed
        else:
            assert {name: theirs[name].tobytes() for name in ours} == {
                name: tensor.tobytes() for name, tensor in ours.items()
            }, seed
            assert ours.keys() == wanted.keys(), seed
    assert 100 < refused < 400


def test_tensors_of_no_shape_that_numpy_has_are_named(write_model) -> None:
    folder = write_model()
    data = (folder / FILE).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[NORM]["shape"] = [1] * 64 + [32]
    write_raw(folder / FILE, json.dumps(header).encode(), data[8 + length :])
    assert f"{folder / FILE}: {NORM} has shape (1, 1, " in refusal(folder)


def test_refuses_a_file_of_another_format(write_model) -> None:
    folder = write_model()
    (folder / FILE).write_bytes(b"PK\x03\x04 a zip archive of some kind, long enough")
    assert "is not a safetensors file: " in refusal(folder)


@pytest.mark.parametrize("file", [FILE, "model.safetensors.index.json"])
def test_refuses_what_is_no_regular_file(write_model, file) -> None:
    folder = write_model()
    for make in (os.mkfifo, os.mkdir):
        path = folder / file
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        make(path)
        assert refusal(folder) == f"{path} cannot be read: it is not a regular file"


def test_refuses_a_shard_with_a_name_too_long_for_a_file(write_model) -> None:
    folder = write_model()
    write_index(folder, dict.fromkeys(shard(folder), "x" * 3000))
    assert "weight_map names xxx" in refusal(folder)
    assert len(refusal(folder)) < 500


def test_refuses_a_folder_without_weights(write_model) -> None:
    folder = write_model()
    (folder / FILE).unlink()
    assert refusal(folder) == f"{folder / FILE} is missing, and so is model.safetensors.index.json"


def test_refuses_an_index_that_disagrees_with_its_shards(write_model) -> None:
    folder = write_model()
    where = shard(folder)
    file = where[NORM]
    other = next(name for name in set(where.values()) if name != file)
    write_index(folder, {**where, NORM: "gone.safetensors"})
    assert "weight_map names gone.safetensors, which is missing" in refusal(folder)
    write_index(folder, {**where, NORM: other})
    assert f"holds {NORM}; the index assigns it to {other}" in refusal(folder)
    write_index(folder, {**where, "model.extra": file})
    assert f"{folder / file}: tensor model.extra is missing" in refusal(folder)
    write_index(folder, {**where, NORM: "../model.safetensors"})
    assert "which is not a file of the same folder" in refusal(folder)
    write_index(folder, [file])
    assert "weight_map is not an object" in refusal(folder)
    write_index(folder, where)
    assert NORM in opened(folder)


def test_what_was_let_go_of_is_read_again(write_model, random_weights) -> None:
    folder = write_model()
    checkpoint = open_checkpoint(folder, load_config(folder))
    wanted = {
        name: tensor.astype(checkpoint[name].dtype).tobytes() for name, tensor in random_weights().items()
    }
    for _ in range(2):
        assert {name: tensor.tobytes() for name, tensor in checkpoint.items()} == wanted
        checkpoint.release()


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="only Linux tells what a map holds in memory"
)
def test_what_was_let_go_of_takes_no_memory(write_model) -> None:
    folder = write_model()
    checkpoint = open_checkpoint(folder, load_config(folder))

    def resident_kib() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        start = next(i for i, line in enumerate(lines) if line.endswith(str(folder / FILE)))
        return int(next(line for line in lines[start:] if line.startswith("Rss:")).split()[1])

    assert sum(float(tensor.astype(np.float32).sum()) for tensor in checkpoint.values())
    assert resident_kib() > 0
    checkpoint.release()
    assert resident_kib() == 0
