"""Folders of every dense family without transformers: a random config, random weights of its tensors, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from model.families import FAMILIES, compose, load_config
from tests.model.folders import byte_tokenizer
from tests.model.random_families import FAMILIES as DRAWN
from tests.model.random_families import drawn

ARCHITECTURES = {
    name: next(row.architecture for row in FAMILIES.values() if row.architecture.startswith(f"{name}For"))
    if name != "GPT2"
    else FAMILIES["gpt2"].architecture
    for name in DRAWN
}


def family_config(family: str, seed: int = 0) -> dict[str, Any]:
    """Return the fields of a config.json, with room for the tokenizer's ids in the vocabulary."""
    architecture = ARCHITECTURES[family]
    (model_type,) = (name for name, row in FAMILIES.items() if row.architecture == architecture)
    fields = drawn(family, seed) | {"architectures": [architecture], "model_type": model_type}
    return fields | {"vocab_size": 300, "dtype": "float32"}


def write_family(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a folder that `nkw generate` takes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(family_config(family, seed)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "do_sample": False}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    generator = np.random.default_rng(seed)
    weights = {
        name: (generator.standard_normal(shape) / max(shape[-1], 1) ** 0.5).astype(np.float32)
        for name, shape in compose(load_config(folder)).list_tensor_shapes().items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder
