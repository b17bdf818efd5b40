"""Images that diffusers makes with random DiT models, stored for tests.

`python -m tests.model.dit_oracles` writes `dit_oracles.npz` with diffusers 0.42.1. Tests read this file where diffusers
is not installed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.model.denoiser_oracles import DIT, write_folder
from tests.model.pipeline_oracles import AUTOENCODER, SOLVER, draw_noise

STORED = Path(__file__).with_suffix(".npz")
CLASSES = 1000
"""Classes of the denoisers; diffusers takes this number for no class."""
TRANSFORMER: dict[str, Any] = (
    {"_class_name": "DiTTransformer2DModel"} | DIT | {"num_embeds_ada_norm": CLASSES}
)
VAE = AUTOENCODER | {"scaling_factor": 0.18215}
DDIM = {
    "_class_name": "DDIMScheduler",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": True,
    "steps_offset": 0,
    "trained_betas": None,
}
"""Scheduler of the published DiT-XL-2-256."""
NAMES = {
    "2": "great white shark, white shark, man-eater",
    "207": "golden retriever",
    "134": "crane",
    "517": "crane ,, 207",
    "263": "Pembroke, Pembroke Welsh corgi",
}
"""Names of classes; the crane of class 517 replaces that of class 134, and a name of it is a number."""
LABELS = ("golden retriever", "crane")


@dataclass(frozen=True)
class Case:
    """DiT model: its scheduler, fields of its denoiser, whether classes have names, and how images are sampled."""

    scheduler: dict[str, Any]
    transformer: dict[str, Any] = field(default_factory=dict)
    has_names: bool = True
    steps: int = 3
    guidance: float = 4.0

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """config.json of the components by name."""
        return {"transformer": TRANSFORMER | self.transformer, "vae": VAE}

    @property
    def prompts(self) -> tuple[str, ...]:
        """Names of two classes, or their numbers."""
        return LABELS if self.has_names else ("207", "517")


GENERAL = {
    "_class_name": "Transformer2DModel",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "out_channels": 4,
    "patch_size": 4,
}
"""Denoiser in diffusers' older class, without learned variances."""
CASES = {
    "ddim": Case(DDIM),
    "solver": Case(SOLVER, GENERAL, has_names=False, steps=4),
    "unguided": Case(DDIM, guidance=1.0, steps=2),
}


def write_pipeline(folder: Path, case: Case, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Path:
    """Write a folder of a DiT pipeline with random weights, and return it.

    Args:
        folder: The folder.
        case: Configs of its components.
        shapes: Shapes of the tensors of each component by name.
    """
    index: dict[str, Any] = {"_class_name": "DiTPipeline", "_diffusers_version": "0.42.1"}
    if case.has_names:
        index["id2label"] = NAMES
    for name, config in case.configs.items():
        index[name] = ["diffusers", config["_class_name"]]
        write_folder(folder / name, config, shapes[name])
    index["scheduler"] = ["diffusers", case.scheduler["_class_name"]]
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(case.scheduler))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def list_shapes(case: Case) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of all tensors of the components as diffusers has them."""
    import diffusers

    return {
        name: {
            tensor: tuple(parameter.shape)
            for tensor, parameter in getattr(diffusers, config["_class_name"])
            .from_config(config)
            .named_parameters()
        }
        for name, config in case.configs.items()
    }


def record(case: Case, folder: Path) -> np.ndarray:
    """Return the images that diffusers makes of a folder, uint8 [prompts, rows, columns, 3]."""
    import torch
    from diffusers import DiTPipeline

    pipeline = DiTPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    labels = pipeline.get_label_ids(list(case.prompts)) if case.has_names else [*map(int, case.prompts)]
    noise = torch.from_numpy(draw_noise())
    with patch("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda **arguments: noise):
        made = pipeline(
            labels, guidance_scale=case.guidance, num_inference_steps=case.steps, output_type="np"
        )
    return (made.images * 255).round().astype(np.uint8)


def record_labels(folder: Path) -> dict[str, int]:
    """Return the class of each name as diffusers reads them of a folder."""
    from diffusers import DiTPipeline

    labels: dict[str, int] = DiTPipeline.from_pretrained(folder).labels
    return labels


if __name__ == "__main__":
    recordings = {}
    for case_name, recorded_case in CASES.items():
        with tempfile.TemporaryDirectory() as parent:
            path = write_pipeline(Path(parent) / "dit", recorded_case, list_shapes(recorded_case))
            recordings[case_name] = record(recorded_case, path)
    np.savez_compressed(STORED, **recordings)
