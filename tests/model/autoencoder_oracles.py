"""Images and latents that AutoencoderKL of diffusers makes with drawn weights, stored for tests.

`python -m tests.model.autoencoder_oracles` writes `autoencoder_oracles.npz` with diffusers 0.42.1. Tests read this file
where diffusers is not installed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

STORED = Path(__file__).with_suffix(".npz")
LATENT = (5, 7)
"""Rows and columns of the latents."""
_COMMON = {
    "_class_name": "AutoencoderKL",
    "_diffusers_version": "0.42.1",
    "act_fn": "silu",
    "force_upcast": True,
    "in_channels": 3,
    "out_channels": 3,
    "latents_mean": None,
    "latents_std": None,
    "norm_num_groups": 8,
    "sample_size": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "plain": _COMMON
    | {
        "block_out_channels": [16, 32, 32],
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "latent_channels": 4,
        "layers_per_block": 1,
        "mid_block_add_attention": False,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
    },
    "attention": _COMMON
    | {
        "block_out_channels": [72, 80],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "latent_channels": 6,
        "layers_per_block": 1,
        "mid_block_add_attention": True,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
}
"""Fields of config.json by case: with convolutions of the latents, and with attention in the middle block."""


TILED = ("plain",)
"""Cases whose latents are larger than the tiles of `sample_size`, which are 4 x 4."""


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the weight of a tensor, drawn by its name; sums of products keep the order of their inputs."""
    generator = np.random.default_rng(list(name.encode()))
    values = generator.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return values * np.float32(0.1) + np.float32("norm" in name and name.endswith("weight"))
    return values * np.float32(np.prod(shape[1:]) ** -0.5)


def draw_latents(case: str) -> np.ndarray:
    """Return two latents of a case."""
    return draw(f"{case} latents", (2, CONFIGS[case]["latent_channels"], *LATENT)) * np.float32(9)


def draw_images(case: str) -> np.ndarray:
    """Return two images of the size that the latents of a case have."""
    scale = 2 ** (len(CONFIGS[case]["block_out_channels"]) - 1)
    return np.clip(draw(f"{case} images", (2, 3, *(scale * side for side in LATENT))) * 20, -1, 1)


def write_folder(folder: Path, case: str, shapes: Mapping[str, tuple[int, ...]], **changes: Any) -> Path:
    """Write config.json, with some fields changed, and drawn weights of some shapes; return the folder."""
    folder.mkdir(exist_ok=True)
    fields = {name: entry for name, entry in {**CONFIGS[case], **changes}.items() if entry is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    weights = {name: draw(name, shape) for name, shape in shapes.items()}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return folder


def compute_oracles() -> dict[str, np.ndarray]:
    """Return for each case and half the float64 result of diffusers, and its errors in float32 and in bfloat16.

    The largest error is that of float32, and the mean error that of bfloat16.
    """
    import torch
    from diffusers import AutoencoderKL

    oracles = {}
    for case, fields in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            made = AutoencoderKL.from_config(dict(fields))
            shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
            write_folder(Path(folder), case, shapes)
            results: dict[str, list[np.ndarray]] = {"decoder": [], "encoder": []}
            if case in TILED:
                results |= {"tiled decoder": [], "tiled encoder": []}
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                model = AutoencoderKL.from_pretrained(folder, torch_dtype=dtype).to(dtype).eval()
                for prefix in ("", "tiled ") if case in TILED else ("",):
                    if prefix:
                        model.enable_tiling()
                    with torch.no_grad():
                        images = model.decode(torch.tensor(draw_latents(case)).to(dtype)).sample
                        moments = model.encode(torch.tensor(draw_images(case)).to(dtype)).latent_dist
                    results[f"{prefix}decoder"].append(images.double().numpy())
                    # `parameters` are the means and the log variances before the distribution clips these.
                    results[f"{prefix}encoder"].append(moments.parameters.double().numpy())
        for half, (exact, wide, narrow) in results.items():
            oracles[f"{case} {half}"] = exact.astype(np.float32)
            errors = np.abs(wide - exact).max(), np.abs(narrow - exact).mean()
            oracles[f"{case} {half} errors"] = np.array(errors)
        oracles[f"{case} names"] = np.array([f"{name} {shape}" for name, shape in sorted(shapes.items())])
    return oracles


if __name__ == "__main__":
    np.savez_compressed(STORED, **compute_oracles())
