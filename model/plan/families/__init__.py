"""Which model types a plan reads, and the function that reads each one's config.json. One row adds a family."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from model.errors import ModelError
from model.plan.families import gemma, latent, mamba, sparse, transformer, whisper
from model.plan.families.blocks import Fields
from model.plan.parameters import Model

READERS: dict[str, Callable[[Fields], Model]] = {
    "llama": transformer.llama,
    "mistral": transformer.mistral,
    "qwen2": transformer.qwen2,
    "qwen3": transformer.qwen3,
    "olmo2": transformer.olmo2,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3_text,
    "gemma3": gemma.gemma3,
    "mixtral": sparse.mixtral,
    "qwen3_moe": sparse.qwen3_moe,
    "gpt_oss": sparse.gpt_oss,
    "deepseek_v2": latent.deepseek,
    "deepseek_v3": latent.deepseek,
    "mamba": mamba.mamba,
    "whisper": whisper.whisper,
}


_MOST_PARAMETERS = 10**15
"""Far beyond any model, and far from what float64 and an array's shape cannot hold."""


def load_model(path: Path) -> Model:
    """Read a config.json, or the one of a folder; ModelError says what cannot be read or is not known."""
    file = path / "config.json" if os.path.isdir(path) else path
    fields = Fields(file)
    kind = fields.get("model_type", None)
    if not isinstance(kind, str) or kind not in READERS:
        raise fields.error("model_type", f"{kind!r} is not known; known are {', '.join(sorted(READERS))}")
    model = READERS[kind](fields)
    if model.total > _MOST_PARAMETERS:
        raise ModelError(
            f"{file} describes more than {_MOST_PARAMETERS:.0e} parameters; no plan is made for so many"
        )
    return model
