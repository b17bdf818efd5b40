"""A model's folder: which files belong to it, and that none of them leads out of it."""

from __future__ import annotations

import os
from pathlib import Path

from model.errors import ModelError

_FILES = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja "
    "model.safetensors.index.json"
).split()
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
"""Folders of Hugging Face's cache: a snapshot's files are links to the blobs beside it."""


def config_file(path: Path) -> Path:
    """The config.json that a path names itself, or by its folder."""
    return path / "config.json" if os.path.isdir(path) else path


def model_files(path: Path) -> list[Path]:
    """A config.json, or that of a folder, and the files beside it that belong to a model: no output replaces them."""
    config = config_file(path)
    return [config, *(config.with_name(name) for name in _FILES), *config.parent.glob("*.safetensors")]


def check_inside(path: Path) -> None:
    """Raise ModelError for a link out of its folder; links of a snapshot into the blobs of its cache are none."""
    if not os.path.islink(path):
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    allowed = [folder]
    if folder.parent.name == _SNAPSHOTS:
        allowed.append(folder.parent.parent / _BLOBS)
    if not any(target.is_relative_to(each) for each in allowed):
        raise ModelError(f"{path} is a link out of the model's folder", "NKW-MODEL-FOLDER")
