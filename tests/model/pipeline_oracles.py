"""Images that pipelines of diffusers make with random weights, stored for tests.

`python -m tests.model.pipeline_oracles` writes `pipeline_oracles.npz` with diffusers 0.42.1. Tests read this file where
diffusers is not installed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from model.loading.shipped import SHAPES
from tests.model.denoiser_oracles import PIXART, draw_weight

STORED = Path(__file__).with_suffix(".npz")
CLIP = {
    "architectures": ["CLIPTextModel"],
    "model_type": "clip_text_model",
    "bos_token_id": 125,
    "eos_token_id": 126,
    "pad_token_id": 126,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 127,
}
AUTOENCODER = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 16,
    "scaling_factor": 0.5,
    "mid_block_add_attention": False,
}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
SOLVER = {"_class_name": "DPMSolverMultistepScheduler", "beta_schedule": "linear", "solver_order": 2}
PROMPTS = ("a red circle above a blue square", "a green cross")
NEGATIVE_PROMPT = "a black square"
LATENT_SHAPE = (4, 8, 8)


@dataclass(frozen=True)
class Case:
    """Scheduler, number of steps and guidance of a case."""

    scheduler: dict[str, Any]
    steps: int = 3
    guidance: float = 3.0


CASES = {"flow": Case(FLOW), "solver": Case(SOLVER), "unguided": Case(FLOW, guidance=1.0)}


def draw_noise() -> np.ndarray:
    """Return the noise that images begin with, float32 [prompts, channels, rows, columns]."""
    return np.random.default_rng(5).standard_normal((len(PROMPTS), *LATENT_SHAPE), np.float32)


def write_pipeline(
    folder: Path, scheduler: Mapping[str, Any], shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> Path:
    """Write a folder of a PixArt pipeline with random weights, and return it.

    Args:
        folder: The folder.
        scheduler: scheduler_config.json.
        shapes: Shapes of the tensors of `text_encoder`, `transformer` and `vae` by name.
    """
    index = {
        "_class_name": "PixArtAlphaPipeline",
        "_diffusers_version": "0.42.1",
        "scheduler": ["diffusers", scheduler["_class_name"]],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    configs = {
        "text_encoder": CLIP,
        "transformer": {"_class_name": "PixArtTransformer2DModel"} | PIXART,
        "vae": AUTOENCODER,
    }
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        stem = "model" if name == "text_encoder" else "diffusion_pytorch_model"
        weights = {tensor: draw_weight(tensor, shape) for tensor, shape in shapes[name].items()}
        safetensors.numpy.save_file(weights, folder / name / f"{stem}.safetensors")
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps(index))
    shutil.copytree(SHAPES / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    return folder


def list_shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of all tensors of the components as diffusers and transformers have them."""
    from diffusers import AutoencoderKL, PixArtTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel

    modules = {
        "text_encoder": CLIPTextModel(CLIPTextConfig(**CLIP)),
        "transformer": PixArtTransformer2DModel.from_config(PIXART),
        "vae": AutoencoderKL.from_config(AUTOENCODER),
    }
    shapes = {
        name: {tensor: tuple(parameter.shape) for tensor, parameter in module.named_parameters()}
        for name, module in modules.items()
    }
    # transformers 5 leaves the prefix out in memory and writes it to files.
    prefix = "text_model."
    shapes["text_encoder"] = {
        prefix + name.removeprefix(prefix): shape for name, shape in shapes["text_encoder"].items()
    }
    return shapes


def record(case: Case, folder: Path) -> np.ndarray:
    """Return the images that diffusers makes of a folder, uint8 [prompts, rows, columns, 3]."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, PixArtAlphaPipeline

    # PixArt's pipeline asks a scheduler for these two, which that of flows lacks.
    FlowMatchEulerDiscreteScheduler.init_noise_sigma = 1.0
    FlowMatchEulerDiscreteScheduler.scale_model_input = lambda self, sample, timestep: sample
    pipeline = PixArtAlphaPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        list(PROMPTS),
        negative_prompt=[NEGATIVE_PROMPT] * len(PROMPTS),
        num_inference_steps=case.steps,
        guidance_scale=case.guidance,
        latents=torch.from_numpy(draw_noise()),
        max_sequence_length=16,
        use_resolution_binning=False,
        clean_caption=False,
        output_type="np",
    )
    return (made.images * 255).round().astype(np.uint8)


def read_recordings() -> dict[str, np.ndarray]:
    """Return the stored images by name of the case."""
    with np.load(STORED) as stored:
        return {name: stored[name] for name in stored.files}


if __name__ == "__main__":
    recordings = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            recordings[name] = record(case, write_pipeline(Path(folder), case.scheduler, list_shapes()))
    np.savez_compressed(STORED, **recordings)
