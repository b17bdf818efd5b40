"""Outputs of diffusers' denoisers with random weights, stored for tests.

`python -m tests.model.denoiser_oracles` writes `denoiser_oracles.npz` with diffusers 0.42.1. Tests read this file where
diffusers is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import safetensors.numpy

STORED = Path(__file__).with_suffix(".npz")


@dataclass(frozen=True)
class Case:
    """Denoiser of diffusers: its class, the fields of its config, and the sizes of its inputs.

    class_name  class of diffusers
    fields      fields of config.json
    size        rows and columns of the latent images
    text        rows and elements of the encoded text
    lengths     rows of each text that are no padding
    timesteps   timestep of each image
    guidance    guidance of each image times 1000; None for a denoiser without this input
    pooled      elements of a pooled text; 0 for a denoiser without this input
    labels      class of each image; empty for a denoiser without classes
    pixels      rows and columns of each image in pixels; empty for a denoiser without these inputs
    """

    class_name: str
    fields: dict[str, Any]
    size: tuple[int, int]
    text: tuple[int, int]
    lengths: tuple[int, ...] = (7, 3)
    timesteps: tuple[float, ...] = (999.0, 37.5)
    seed: int = field(default=0)
    guidance: tuple[float, ...] | None = None
    pooled: int = 0
    labels: tuple[int, ...] = ()
    pixels: tuple[tuple[int, int], ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return {"_class_name": self.class_name, "_diffusers_version": "0.42.1"} | self.fields

    @property
    def channels(self) -> int:
        """Channels of the latent images; FLUX packs 2 x 2 pixels of them."""
        channels: int = self.fields["in_channels"]
        return channels // 4 if self.class_name.startswith("Flux") else channels

    def draw_inputs(self) -> dict[str, np.ndarray]:
        """Return the inputs of the network of the denoiser, [images, ...] each."""
        rng, images = np.random.default_rng(self.seed), len(self.timesteps)
        latents = rng.standard_normal((images, self.channels, *self.size), np.float32)
        inputs = {
            "latents": latents,
            "timesteps": np.array(self.timesteps, np.float32)[:, None],
        }
        if self.text[0]:
            inputs["text"] = rng.standard_normal((images, *self.text), np.float32)
        if self.labels:
            inputs["labels"] = np.array(self.labels, np.int32)[:, None]
        if self.lengths:
            inputs["text_lengths"] = np.array(self.lengths, np.int32)[:, None]
        if self.pooled:
            inputs["pooled"] = rng.standard_normal((images, self.pooled), np.float32)
        if self.guidance is not None:
            inputs["guidance"] = np.array(self.guidance, np.float32)[:, None]
        if self.pixels:
            sizes = [(rows, columns, rows / columns) for rows, columns in self.pixels]
            columns = np.split(np.array(sizes, np.float32), 3, axis=1)
            inputs |= dict(zip(("height", "width", "aspect_ratio"), columns))
        return inputs


PIXART = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 32,
    "sample_size": 8,
    "patch_size": 2,
    "caption_channels": 32,
    "use_additional_conditions": False,
}
FLUX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "guidance_embeds": True,
    "axes_dims_rope": [4, 6, 6],
}


def describe_flux(fields: dict[str, Any], size: tuple[int, int], **options: Any) -> Case:
    """Return a case of FLUX. Timesteps over 1000 are exact in float32, as diffusers divides and multiplies them."""
    return Case(
        "FluxTransformer2DModel",
        FLUX | fields,
        size,
        (7, 24),
        (),
        (875.0, 31.25),
        pooled=20,
        **options,
    )


SD3 = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "joint_attention_dim": 24,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 7,
}


def describe_sd3(fields: dict[str, Any], size: tuple[int, int]) -> Case:
    """Return a case of SD3."""
    return Case("SD3Transformer2DModel", SD3 | fields, size, (7, 24), (), (999.0, 37.5), pooled=20)


DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 8,
    "num_embeds_ada_norm": 10,
    "norm_type": "ada_norm_zero",
    "norm_eps": 1e-4,
}


def describe_dit(class_name: str, fields: dict[str, Any], size: tuple[int, int]) -> Case:
    """Return a case of DiT; the second image has no class."""
    return Case(class_name, DIT | fields, size, (0, 0), (), (999.0, 37.5), labels=(7, 10))


CASES = {
    "pixart": Case("PixArtTransformer2DModel", PIXART, (8, 8), (7, 32)),
    "pixart other size": Case(
        "PixArtTransformer2DModel",
        PIXART | {"interpolation_scale": 2.0, "out_channels": 4, "num_layers": 1},
        (6, 10),
        (7, 32),
    ),
    "pixart without biases and text projection": Case(
        "PixArtTransformer2DModel",
        {name: entry for name, entry in PIXART.items() if name != "caption_channels"}
        | {"attention_bias": False, "patch_size": 1, "sample_size": 4, "num_layers": 1},
        (4, 4),
        (7, 32),
    ),
    "pixart with the size of images": Case(
        "PixArtTransformer2DModel",
        PIXART
        | {
            "attention_head_dim": 24,
            "cross_attention_dim": 48,
            "num_layers": 1,
            "use_additional_conditions": True,
        },
        (8, 8),
        (7, 32),
        pixels=((1024, 1024), (512, 2048)),
    ),
    "flux with guidance": describe_flux({}, (8, 8), guidance=(3500.0, 1000.0)),
    "flux without guidance, other sizes": describe_flux(
        {"guidance_embeds": False, "num_attention_heads": 4, "num_layers": 1, "num_single_layers": 1},
        (6, 14),
    ),
    "dit": describe_dit("DiTTransformer2DModel", {}, (8, 8)),
    "dit in a general class": describe_dit(
        "Transformer2DModel",
        {"attention_bias": False, "activation_fn": "gelu-approximate", "out_channels": 4, "patch_size": 2},
        (12, 12),
    ),
    "sd3": describe_sd3({}, (8, 8)),
    "sd3 with second attention and head norms": describe_sd3(
        {"num_layers": 3, "dual_attention_layers": [0, 2], "qk_norm": "rms_norm"}, (6, 14)
    ),
}


def draw_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random numbers for a tensor, which depend on its name and shape only."""
    rng = np.random.default_rng(crc32(name.encode()))
    fan = shape[-1] if len(shape) == 2 else int(np.prod(shape[1:])) if len(shape) > 1 else 16
    return (rng.standard_normal(shape) / fan**0.5).astype(np.float32)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Any = np.float32,
    stem: str = "diffusion_pytorch_model",
) -> Path:
    """Write a component with random weights of these shapes by name, and return its folder.

    `stem` is the name of the file of weights without its ending.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: draw_weight(name, shape).astype(dtype) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, folder / f"{stem}.safetensors", {"format": "pt"})
    return folder


def record(case: Case) -> np.ndarray:
    """Return the output of diffusers for a case, float32 [images, out_channels, rows, columns]."""
    import diffusers
    import torch

    module = getattr(diffusers, case.class_name).from_config(case.config).eval()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(torch.from_numpy(draw_weight(name, tuple(tensor.shape))))
        inputs = {name: torch.from_numpy(array) for name, array in case.draw_inputs().items()}
        images: np.ndarray = _RUNS[case.class_name](module, inputs).numpy()
    return images


def _run_pixart(module: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the output of diffusers' PixArt."""
    import torch

    mask = torch.arange(inputs["text"].shape[1])[None] < inputs["text_lengths"]
    has_size = "height" in inputs
    resolution = torch.cat([inputs["height"], inputs["width"]], dim=1) if has_size else None
    return module(
        inputs["latents"],
        encoder_hidden_states=inputs["text"],
        encoder_attention_mask=mask.long(),
        timestep=inputs["timesteps"][:, 0],
        added_cond_kwargs={"resolution": resolution, "aspect_ratio": inputs.get("aspect_ratio")},
        return_dict=False,
    )[0]


def _run_flux(module: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the output of diffusers' FLUX, with latents packed and unpacked as its pipeline does."""
    import torch
    from diffusers import FluxPipeline

    images, channels, rows, columns = inputs["latents"].shape
    packed = FluxPipeline._pack_latents(inputs["latents"], images, channels, rows, columns)
    ids = FluxPipeline._prepare_latent_image_ids(1, rows // 2, columns // 2, "cpu", torch.float32)
    guidance = inputs.get("guidance")
    output = module(
        packed,
        encoder_hidden_states=inputs["text"],
        pooled_projections=inputs["pooled"],
        timestep=inputs["timesteps"][:, 0] / 1000,
        guidance=None if guidance is None else guidance[:, 0] / 1000,
        img_ids=ids,
        txt_ids=torch.zeros(inputs["text"].shape[1], 3),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(output, 8 * rows, 8 * columns, 8)


def _run_sd3(module: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the output of diffusers' SD3."""
    return module(
        inputs["latents"],
        encoder_hidden_states=inputs["text"],
        pooled_projections=inputs["pooled"],
        timestep=inputs["timesteps"][:, 0],
        return_dict=False,
    )[0]


def _run_dit(module: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the output of diffusers' DiT."""
    return module(
        inputs["latents"],
        timestep=inputs["timesteps"][:, 0],
        class_labels=inputs["labels"][:, 0].long(),
        return_dict=False,
    )[0]


_RUNS = {
    "DiTTransformer2DModel": _run_dit,
    "Transformer2DModel": _run_dit,
    "PixArtTransformer2DModel": _run_pixart,
    "FluxTransformer2DModel": _run_flux,
    "SD3Transformer2DModel": _run_sd3,
}
"""Function that runs a class of diffusers on the inputs of a case."""


def read_recordings() -> dict[str, np.ndarray]:
    """Return the stored outputs by name of the case."""
    with np.load(STORED) as stored:
        return {name: stored[name] for name in stored.files}


if __name__ == "__main__":
    np.savez_compressed(STORED, **{name: record(case) for name, case in CASES.items()})
