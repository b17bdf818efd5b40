"""A model's folder: links stay in it, or in the blobs of the cache whose snapshot it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from model.errors import ModelError
from model.families import load_config, read_config
from model.loading.checkpoint import open_checkpoint
from nkw.errors import shown
from tests.model.test_checkpoint import shard

FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors",
]


def moved(folder: Path, name: str, target: Path) -> None:
    """Move a file of a folder to a place, and leave a link to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    file = folder / name
    target.write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    file.symlink_to(target)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(write_model, tmp_path, name) -> None:
    folder = write_model()
    moved(folder, name, folder / "parts" / name)
    assert load_config(folder).vocab_size == 300
    moved(folder, name, tmp_path / "elsewhere" / name)
    with pytest.raises(ModelError, match="is a link out of the model's folder") as refused:
        load_config(folder)
    assert refused.value.code == "NKW-MODEL-FOLDER"


def test_a_shard_of_any_name_is_no_link_out_of_the_folder(write_model, tmp_path) -> None:
    folder = write_model()
    where = shard(folder)
    name = next(iter(where.values()))
    moved(folder, name, folder / "parts" / name)
    assert open_checkpoint(folder, load_config(folder))
    config = load_config(folder)
    moved(folder, name, tmp_path / "elsewhere" / name)
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        open_checkpoint(folder, config)


@pytest.mark.parametrize("blobs", ["blobs", "others"])
def test_a_snapshot_of_a_cache_links_to_its_blobs_alone(write_model, tmp_path, blobs) -> None:
    cache = tmp_path / "models--x--y"
    (cache / "snapshots").mkdir(parents=True)
    folder = write_model().rename(cache / "snapshots" / "0123")
    for number, name in enumerate(("config.json", "model.safetensors")):
        moved(folder, name, cache / blobs / str(number))
    if blobs == "blobs":
        assert open_checkpoint(folder, load_config(folder))
        return
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        load_config(folder)


OTHERS = [
    ({}, "is an empty folder; a model is a Hugging Face folder with config.json, "),
    (
        {"adapter_config.json": "{}", "adapter_model.safetensors": ""},
        "is a LoRA adapter, and adapters are not computed: merge it into its model (merge_and_unload",
    ),
    ({"tales-q4.gguf": "GGUF"}, "has tales-q4.gguf; GGUF is not read: give the Hugging Face folder"),
    (
        {"pytorch_model.bin": "", "tokenizer.json": "{}"},
        "has its weights in pytorch_model.bin, which is not read: load the model with transformers and save it",
    ),
    ({"refs": "", "snapshots": ""}, "is a folder of Hugging Face's cache: give a folder below its snapshots"),
    ({"model_index.json": "{}", "vae": ""}, "has a diffusion model: nkw imagine draws its images"),
    ({"README.md": ""}, "has no config.json: config.json is missing; a model is a Hugging Face folder"),
]


@pytest.mark.parametrize("read", [load_config, read_config])
@pytest.mark.parametrize(("files", "message"), OTHERS)
def test_a_folder_that_is_no_model_says_what_it_is(tmp_path, read, files, message) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError) as refused:
        read(folder)
    assert str(refused.value).startswith(f"{folder} {message}")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (load_config, "is not a folder: there is nothing at this path; models are local"),
        (
            read_config,
            "is neither a config.json, nor a folder of one, nor a published model; names begin with",
        ),
    ],
)
def test_a_path_that_is_no_folder_says_what_it_is(tmp_path, read, message) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path / "nowhere")
    file = tmp_path / "tales.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"tales.gguf is not a folder: GGUF is not read: give the Hugging"):
        read(file)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "has its weights in pytorch_model.bin, which is not read: load the model with"),
        ("adapter_model.safetensors", "is a LoRA adapter, and adapters are not computed: merge it"),
        ("tales.gguf", "has tales.gguf; GGUF is not read"),
    ],
)
def test_weights_of_another_kind_are_named(write_model, name, message) -> None:
    folder = write_model()
    config = load_config(folder)
    assert open_checkpoint(folder, config)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError) as refused:
        open_checkpoint(folder, config)
    assert str(refused.value).startswith(f"{folder} {message}")
    (folder / name).unlink()
    with pytest.raises(
        ModelError, match=r"model.safetensors is missing, and so is model.safetensors.index.json"
    ):
        open_checkpoint(folder, config)


@pytest.mark.parametrize("architecture", ["RwkvForCausalLM", "MistralForCausal", "X" * 60])
def test_known_architectures_are_not_cut_in_the_middle(write_model, architecture) -> None:
    folder = write_model(architectures=[architecture])
    path = Path("/" + "m" * (99 - len("/config.json"))) / "config.json"
    with pytest.raises(ModelError) as refused:
        load_config(folder)
    message = str(refused.value).replace(str(folder / "config.json"), str(path))
    assert shown(message) == message
    assert re.search(
        r"nown are LlamaForCausalLM, .*ForCausalLM and \d+ more, which docs/families.md lists$", message
    )
    assert ("; did you mean MistralForCausalLM? Known are" in message) == (architecture == "MistralForCausal")
