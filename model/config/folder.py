"""Files of a model folder, and the check that a link stays inside the folder."""

from __future__ import annotations

import os
from pathlib import Path

from model.errors import ModelError

_FILES = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja "
    "model.safetensors.index.json"
).split()


def find_config_file(path: Path) -> Path:
    """Return the config.json of a folder; another path unchanged."""
    return path / "config.json" if os.path.isdir(path) else path


def list_model_files(path: Path) -> list[Path]:
    """Return the config.json of a path and the model files beside it. No output may replace them."""
    config = find_config_file(path)
    return [config, *(config.with_name(name) for name in _FILES), *config.parent.glob("*.safetensors")]


def check_inside(path: Path) -> None:
    """Raise ModelError for a link that leaves its folder.

    In Hugging Face's cache the files of a folder below `snapshots` may be links into the cache's `blobs`.
    """
    if not os.path.islink(path):
        return
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not target.is_relative_to(folder) and not target.is_relative_to(blobs):
        raise ModelError(f"{path} is a link out of the model's folder", "NKW-MODEL-FOLDER")
