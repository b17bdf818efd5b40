"""Images that diffusers makes with random SD3 models, stored for tests.

`python -m tests.model.sd3_oracles` writes `sd3_oracles.npz` with diffusers 0.42.1. Tests read this file where diffusers
is not installed.
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

from tests.model.denoiser_oracles import SD3, write_folder
from tests.model.pipeline_oracles import (
    AUTOENCODER,
    CLIP,
    FLOW,
    NEGATIVE_PROMPT,
    PIECES,
    PROMPTS,
    STORED_PIECES,
    T5,
    TOKENIZER,
    PiecesTokenizer,
    draw_noise,
)
from tests.model.text_encoder_oracles import list_t5_shapes

STORED = Path(__file__).with_suffix(".npz")
LATENT_SHAPE = (16, 8, 8)
T5_ROWS = 256
_PROJECTED = {"architectures": ["CLIPTextModelWithProjection"], "hidden_act": "quick_gelu"}
ENCODERS: dict[str, dict[str, Any]] = {
    # transformers takes 2 for the end token of older configs, and then the largest id of a text.
    "text_encoder": CLIP
    | _PROJECTED
    | {"hidden_size": 16, "num_hidden_layers": 2, "projection_dim": 12, "eos_token_id": 2},
    "text_encoder_2": CLIP | _PROJECTED | {"hidden_size": 24, "projection_dim": 8, "hidden_act": "gelu"},
    "text_encoder_3": T5 | {"d_model": 48},
}
TRANSFORMER = {"_class_name": "SD3Transformer2DModel"} | SD3
TRANSFORMER |= {"in_channels": 16, "out_channels": 16, "joint_attention_dim": 48, "pooled_projection_dim": 20}
VAE = AUTOENCODER | {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609}
VAE |= {"use_quant_conv": False, "use_post_quant_conv": False}
SHIFTED = FLOW | {"shift": 3.0}


@dataclass(frozen=True)
class Case:
    """SD3 model: its scheduler, fields of its denoiser, whether it has a T5, and how images are sampled."""

    scheduler: dict[str, Any]
    transformer: dict[str, Any] = field(default_factory=dict)
    has_t5: bool = True
    steps: int = 3
    guidance: float = 3.0

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """config.json of the components by name."""
        encoders = {
            name: config for name, config in ENCODERS.items() if self.has_t5 or name != "text_encoder_3"
        }
        return encoders | {"transformer": TRANSFORMER | self.transformer, "vae": VAE}


CASES = {
    "sd3": Case(SHIFTED),
    "sd3.5": Case(SHIFTED, {"dual_attention_layers": [0], "qk_norm": "rms_norm"}, steps=2),
    "without t5": Case(SHIFTED, has_t5=False),
    "dynamic shift": Case(
        FLOW
        | {"use_dynamic_shifting": True, "base_shift": 0.25, "max_shift": 2.0, "max_image_seq_len": 1000},
        has_t5=False,
    ),
    "heun": Case({"_class_name": "FlowMatchHeunDiscreteScheduler", "shift": 3.0}, has_t5=False, guidance=1.0),
}


def write_pipeline(folder: Path, case: Case, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Path:
    """Write a folder of an SD3 pipeline with random weights, and return it.

    Args:
        folder: The folder.
        case: Configs of its components.
        shapes: Shapes of the tensors of each component by name.
    """
    entries: dict[str, list[str | None]] = {
        "scheduler": ["diffusers", case.scheduler["_class_name"]],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "tokenizer_3": ["transformers", "T5TokenizerFast"] if case.has_t5 else [None, None],
        "text_encoder_3": [None, None],
        "image_encoder": [None, None],
    }
    for name, config in case.configs.items():
        is_encoder = name.startswith("text_encoder")
        class_name = config["architectures"][0] if is_encoder else config["_class_name"]
        entries[name] = ["transformers" if is_encoder else "diffusers", class_name]
        stem = "model" if is_encoder else "diffusion_pytorch_model"
        write_folder(folder / name, config, shapes[name], stem=stem)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(case.scheduler))
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusion3Pipeline", "_diffusers_version": "0.42.1"} | entries)
    )
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    tokenizer = Path(shutil.copytree(TOKENIZER, folder / "tokenizer_2")) / "tokenizer_config.json"
    # The second tokenizer of published models pads with another token than the end: an exclamation mark.
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"pad_token": "z"}))
    if case.has_t5:
        PIECES.write(folder / "tokenizer_3", bytes(np.load(STORED_PIECES)[PIECES.key]))
    return folder


def list_shapes(case: Case) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of all tensors of the components as diffusers and transformers have them."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    configs = case.configs
    modules = {
        "transformer": SD3Transformer2DModel.from_config(configs["transformer"]),
        "vae": AutoencoderKL.from_config(configs["vae"]),
        **{
            name: CLIPTextModelWithProjection(CLIPTextConfig(**configs[name]))
            for name in ("text_encoder", "text_encoder_2")
        },
    }
    shapes = {
        name: {tensor: tuple(parameter.shape) for tensor, parameter in module.state_dict().items()}
        for name, module in modules.items()
    }
    if case.has_t5:
        shapes["text_encoder_3"] = list_t5_shapes(configs["text_encoder_3"])
    return shapes


def record(case: Case, folder: Path) -> np.ndarray:
    """Return the images that diffusers makes of a folder, uint8 [prompts, rows, columns, 3]."""
    import torch
    from diffusers import StableDiffusion3Pipeline

    replaced = {"tokenizer_3": None} if case.has_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32, **replaced)
    if case.has_t5:
        pipeline.tokenizer_3 = PiecesTokenizer(folder / "tokenizer_3", T5_ROWS)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        list(PROMPTS),
        negative_prompt=[NEGATIVE_PROMPT] * len(PROMPTS),
        num_inference_steps=case.steps,
        guidance_scale=case.guidance,
        latents=torch.from_numpy(draw_noise(LATENT_SHAPE)),
        output_type="np",
    )
    return (made.images * 255).round().astype(np.uint8)


if __name__ == "__main__":
    recordings = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            recordings[name] = record(case, write_pipeline(Path(folder), case, list_shapes(case)))
    np.savez_compressed(STORED, **recordings)
