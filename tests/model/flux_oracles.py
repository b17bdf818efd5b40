"""Images that diffusers makes with random FLUX models, and its noise levels, stored for tests.

`python -m tests.model.flux_oracles` writes `flux_oracles.npz` with diffusers 0.42.1. Tests read this file where
diffusers is not installed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.denoiser_oracles import FLUX, write_folder
from tests.model.pipeline_oracles import (
    AUTOENCODER,
    CLIP,
    FLOW,
    PIECES,
    PROMPTS,
    STORED_PIECES,
    T5,
    TOKENIZER,
    PiecesTokenizer,
)
from tests.model.text_encoder_oracles import list_t5_shapes

STORED = Path(__file__).with_suffix(".npz")
CHANNELS = 16
TEXT = CLIP | {"hidden_act": "quick_gelu", "hidden_size": 20, "num_hidden_layers": 2}
ROWS_TEXT = T5 | {"d_model": 24}
TRANSFORMER = {"_class_name": "FluxTransformer2DModel"} | FLUX | {"in_channels": 4 * CHANNELS}
VAE = AUTOENCODER | {
    "latent_channels": CHANNELS,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
DYNAMIC = FLOW | {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
SCHNELL = {"guidance_embeds": False, "num_layers": 1, "num_single_layers": 1}
LEVELS = ((28, 4096), (8, 1536), (1, 16))
"""Steps and image tokens for which noise levels of `DYNAMIC` are stored."""


@dataclass(frozen=True)
class Case:
    """FLUX model and how images are sampled.

    text_rows  tokens of T5's padded texts
    guidance   guidance of all images
    scheduler  config of the scheduler
    steps      steps of the noise schedule
    fields     fields of the denoiser that differ from those of `TRANSFORMER`
    clip       fields of CLIP's text encoder that differ from those of `TEXT`
    size       rows and columns of the latent images
    """

    text_rows: int
    guidance: float
    scheduler: dict[str, Any]
    steps: int = 3
    fields: dict[str, Any] = field(default_factory=dict)
    clip: dict[str, Any] = field(default_factory=dict)
    size: tuple[int, int] = (8, 8)

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """config.json of the components by name."""
        return {
            "text_encoder": TEXT | self.clip,
            "text_encoder_2": ROWS_TEXT,
            "transformer": TRANSFORMER | self.fields,
            "vae": VAE,
        }

    def draw_noise(self) -> np.ndarray:
        """Return the noise that images begin with, float32 [prompts, channels, rows, columns]."""
        shape = (len(PROMPTS), CHANNELS, *self.size)
        return np.random.default_rng(6).standard_normal(shape, np.float32)


CASES = {
    "dev": Case(512, 3.5, DYNAMIC),
    "schnell": Case(256, 1.0, FLOW, 2, SCHNELL),
    # transformers takes 2 for the end token of older configs, and then the largest id of a text.
    "dev, other size and end": Case(512, 1.0, DYNAMIC, 2, clip={"eos_token_id": 2}, size=(6, 10)),
}


def write_pipeline(folder: Path, case: Case, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Path:
    """Write a folder of a FLUX pipeline with random weights, and return it.

    Args:
        folder: The folder.
        case: Configs of its components.
        shapes: Shapes of the tensors of each component by name.
    """
    index: dict[str, Any] = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.42.1",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "scheduler": ["diffusers", case.scheduler["_class_name"]],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    for name, config in case.configs.items():
        stem = "model" if name.startswith("text_encoder") else "diffusion_pytorch_model"
        write_folder(folder / name, config, shapes[name], stem=stem)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(case.scheduler))
    (folder / "model_index.json").write_text(json.dumps(index))
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    PIECES.write(folder / "tokenizer_2", bytes(np.load(STORED_PIECES)[PIECES.key]))
    return folder


def list_shapes(case: Case) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of all tensors of the components as diffusers and transformers have them."""
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel

    configs = case.configs
    modules = {
        "text_encoder": CLIPTextModel(CLIPTextConfig(**configs["text_encoder"])),
        "transformer": FluxTransformer2DModel.from_config(configs["transformer"]),
        "vae": AutoencoderKL.from_config(configs["vae"]),
    }
    shapes = {
        name: {tensor: tuple(parameter.shape) for tensor, parameter in module.named_parameters()}
        for name, module in modules.items()
    }
    # transformers 5 leaves the prefix out in memory and writes it to files.
    prefix = "text_model."
    clip_shapes = shapes["text_encoder"].items()
    shapes["text_encoder"] = {prefix + name.removeprefix(prefix): shape for name, shape in clip_shapes}
    return shapes | {"text_encoder_2": list_t5_shapes(configs["text_encoder_2"])}


def record(case: Case, folder: Path) -> np.ndarray:
    """Return the images that diffusers makes of a folder, uint8 [prompts, rows, columns, 3]."""
    import torch
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32, tokenizer_2=None)
    pipeline.tokenizer_2 = PiecesTokenizer(folder / "tokenizer_2", case.text_rows)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.from_numpy(case.draw_noise())
    rows, columns = case.size
    made = pipeline(
        list(PROMPTS),
        num_inference_steps=case.steps,
        guidance_scale=case.guidance,
        latents=FluxPipeline._pack_latents(noise, len(PROMPTS), CHANNELS, rows, columns),
        height=2 * rows,
        width=2 * columns,
        max_sequence_length=case.text_rows,
        output_type="np",
    )
    return (made.images * 255).round().astype(np.uint8)


def record_levels(steps: int, tokens: int) -> np.ndarray:
    """Return the noise levels of diffusers' FLUX pipeline, float32 [steps + 1]."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler.from_config(DYNAMIC)
    sigmas = np.linspace(1.0, 1 / steps, steps)
    scheduler.set_timesteps(sigmas=sigmas, mu=calculate_shift(tokens, 256, 4096, 0.5, 1.15))
    levels: np.ndarray = scheduler.sigmas.numpy()
    return levels


if __name__ == "__main__":
    recordings = {f"levels of {steps}": record_levels(steps, tokens) for steps, tokens in LEVELS}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            recordings[name] = record(case, write_pipeline(Path(folder), case, list_shapes(case)))
    np.savez_compressed(STORED, **recordings)
