"""Files of a model folder, and the check that a link stays inside the folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from model.errors import ModelError

_FILES = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja "
    "model.safetensors.index.json hf_quant_config.json"
).split()

PIPELINE_INDEX = "model_index.json"
"""File of a diffusion model's folder that names its components."""


def find_config_file(path: Path) -> Path:
    """Return `<path>/config.json` for a folder, present or not; any other path unchanged."""
    return path / "config.json" if os.path.isdir(path) else path


def list_model_files(path: Path) -> list[Path]:
    """Return the paths of a model's files, which no output may replace; some may not exist.

    These are the config.json of the folder `path` (or the file `path` itself), and in its folder the tokenizer's and
    other JSON files of a model and all .safetensors files.
    """
    config = find_config_file(path)
    return [config, *(config.with_name(name) for name in _FILES), *config.parent.glob("*.safetensors")]


def check_inside(path: Path) -> None:
    """Raise ModelError if `path` is a symbolic link to a file outside its folder.

    In Hugging Face's cache the files of a folder below `snapshots` may be links into the cache's `blobs`.
    """
    if not os.path.islink(path):
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not target.is_relative_to(folder) and not target.is_relative_to(blobs):
        raise ModelError(
            f"{path} is a link out of the model's folder, to {target}; put the file itself there",
            "NKW-MODEL-FOLDER",
        )


_MODEL_FOLDER = (
    "a model is a Hugging Face folder with config.json, tokenizer.json and model.safetensors in it"
)
_SAVE_AGAIN = (
    "load the model with transformers and save it with save_pretrained, which writes model.safetensors"
)
_GGUF = "GGUF is not read: give the Hugging Face folder that it was made of"


def check_model_folder(path: Path) -> None:
    """Raise ModelError, with what the path is and what to do, unless it is a folder with a config.json."""
    if os.path.isdir(path):
        if not os.path.lexists(path / "config.json"):
            raise ModelError(f"{path} {_describe_without_config(path)}", "NKW-MODEL-CONFIG")
    elif not os.path.exists(path):
        raise ModelError(
            f"{path} is not a folder: there is nothing at this path; models are local folders, which hf download NAME "
            "--local-dir DIR writes",
            "NKW-MODEL-CONFIG",
        )
    else:
        advice = _GGUF if path.suffix == ".gguf" else f"give its folder; {_MODEL_FOLDER}"
        raise ModelError(f"{path} is not a folder: {advice}", "NKW-MODEL-CONFIG")


def _describe_without_config(folder: Path) -> str:
    """Return what a folder without config.json is, and what the user should do, as the end of a sentence.

    The caller puts the path before it, as in "is an empty folder; a model is …".
    """
    names = sorted(os.listdir(folder))
    if not names:
        return f"is an empty folder; {_MODEL_FOLDER}"
    if PIPELINE_INDEX in names:
        return "has a diffusion model: nkw imagine draws its images, and nkw serve answers requests for them"
    if "snapshots" in names:
        return "is a folder of Hugging Face's cache: give a folder below its snapshots"
    return describe_other_weights(names) or f"has no config.json: config.json is missing; {_MODEL_FOLDER}"


def describe_other_weights(names: Iterable[str]) -> str:
    """Return what a folder with files of these names is, and what to do, if its weights are not safetensors; else "".

    The text is the end of a sentence about the folder, such as "has x.gguf; GGUF is not read: …".
    """
    files = set(names)
    if files & {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}:
        return (
            "is a LoRA adapter, and adapters are not computed: merge it into its model (merge_and_unload and "
            "save_pretrained of peft) and give that folder"
        )
    gguf = min((name for name in files if name.endswith(".gguf")), default=None)
    if gguf is not None:
        return f"has {gguf}; {_GGUF}"
    other = min(
        (name for name in files if name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack"))), default=None
    )
    return f"has its weights in {other}, which is not read: {_SAVE_AGAIN}" if other is not None else ""
