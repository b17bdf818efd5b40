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
    """

    class_name: str
    fields: dict[str, Any]
    size: tuple[int, int]
    text: tuple[int, int]
    lengths: tuple[int, ...] = (7, 3)
    timesteps: tuple[float, ...] = (999.0, 37.5)
    seed: int = field(default=0)

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return {"_class_name": self.class_name, "_diffusers_version": "0.42.1"} | self.fields

    def draw_inputs(self) -> dict[str, np.ndarray]:
        """Return the inputs of the network of the denoiser, [images, ...] each."""
        rng, images = np.random.default_rng(self.seed), len(self.timesteps)
        latents = rng.standard_normal((images, self.fields["in_channels"], *self.size), np.float32)
        return {
            "latents": latents,
            "timesteps": np.array(self.timesteps, np.float32)[:, None],
            "text": rng.standard_normal((images, *self.text), np.float32),
            "text_lengths": np.array(self.lengths, np.int32)[:, None],
        }


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
}


def draw_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random numbers for a tensor, which depend on its name and shape only."""
    rng = np.random.default_rng(crc32(name.encode()))
    fan = shape[-1] if len(shape) == 2 else int(np.prod(shape[1:])) if len(shape) > 1 else 16
    return (rng.standard_normal(shape) / fan**0.5).astype(np.float32)


def write_folder(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32
) -> Path:
    """Write a component with random weights of these shapes by name, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: draw_weight(name, shape).astype(dtype) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return folder


def record(case: Case) -> np.ndarray:
    """Return the output of diffusers for a case, float32 [images, out_channels, rows, columns]."""
    import diffusers
    import torch

    module = getattr(diffusers, case.class_name).from_config(case.config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(draw_weight(name, tuple(parameter.shape))))
        inputs = {name: torch.from_numpy(array) for name, array in case.draw_inputs().items()}
        mask = torch.arange(case.text[0])[None] < inputs["text_lengths"]
        images: torch.Tensor = module(
            inputs["latents"],
            encoder_hidden_states=inputs["text"],
            encoder_attention_mask=mask.long(),
            timestep=inputs["timesteps"][:, 0],
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
    return images.numpy()


def read_recordings() -> dict[str, np.ndarray]:
    """Return the stored outputs by name of the case."""
    with np.load(STORED) as stored:
        return {name: stored[name] for name in stored.files}


if __name__ == "__main__":
    np.savez_compressed(STORED, **{name: record(case) for name, case in CASES.items()})
