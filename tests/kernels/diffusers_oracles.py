"""Results of small modules of diffusers for drawn arguments, stored for tests of kernels.

`python -m tests.kernels.diffusers_oracles` writes `diffusers_oracles.npz` with diffusers 0.42.1. Tests read this file
where diffusers is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.kernels.accuracy import normal

STORED = Path(__file__).with_suffix(".npz")
TIMES = (0.0, 1.0, 37.5, 250.25, 999.0, 1000.0, 3500.0)
"""Times of a denoiser, and 3.5 of FLUX's guidance."""


@dataclass(frozen=True)
class Embedding:
    """A case of `timestep_embedding`: the fields of diffusers' `Timesteps`, and sizes of its `TimestepEmbedding`."""

    sinusoids: int
    flip_sin_to_cos: bool
    downscale_freq_shift: float
    scale: float = 1.0
    dtype: str = "float32"

    def draw(self) -> list[Any]:
        """Return arguments of the kernel; weights are of float32."""
        depth, hidden = 20, 12
        return [
            (np.array(TIMES, np.float32)[:, None] / np.float32(self.scale)),
            normal(2, self.sinusoids, depth, scale=self.sinusoids**-0.5),
            normal(3, 1, depth),
            normal(4, depth, hidden, scale=depth**-0.5),
            normal(5, 1, hidden),
            normal(6, len(TIMES), hidden),
            self.flip_sin_to_cos,
            self.downscale_freq_shift,
            10000.0,
            self.scale,
        ]


EMBEDDINGS = {
    f"{name} {dtype}": Embedding(*fields, dtype=dtype)
    for name, fields in {
        "pixart": (256, True, 0.0),
        "unet": (32, False, 1.0),
        "qwen": (64, True, 0.0, 1000.0),
    }.items()
    for dtype in ("float32", "bfloat16")
}


def record_embedding(case: Embedding) -> np.ndarray:
    """Return what diffusers makes of a case's arguments, in float32."""
    import torch
    from diffusers.models.embeddings import TimestepEmbedding, Timesteps

    dtype = getattr(torch, case.dtype)
    arguments = case.draw()
    t, w_1, b_1, w_2, b_2, added = (torch.from_numpy(array) for array in arguments[:6])
    module = TimestepEmbedding(*w_1.shape, out_dim=w_2.shape[1])
    module.load_state_dict(
        {
            "linear_1.weight": w_1.T,
            "linear_1.bias": b_1[0],
            "linear_2.weight": w_2.T,
            "linear_2.bias": b_2[0],
        }
    )
    sinusoids = Timesteps(case.sinusoids, case.flip_sin_to_cos, case.downscale_freq_shift, case.scale)
    with torch.no_grad():
        y = module.to(dtype)(sinusoids(t[:, 0]).to(dtype)) + added.to(dtype)
    embeddings: np.ndarray = y.float().numpy()
    return embeddings


GRID = (2, 3)
"""Rows and columns of patches of the images in `LAYERS`."""
LAYERS = ("pixart", "sd3")
"""Denoisers whose last layer is recorded: norm, modulation, product and unpatchify."""


def create_denoiser(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a tiny denoiser with random weights, and the arguments of a pass with two images."""
    import diffusers
    import torch

    torch.manual_seed(7)
    rows, columns = GRID
    if name == "pixart":
        model: Any = diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=3,
            out_channels=6,
            num_layers=1,
            cross_attention_dim=16,
            caption_channels=5,
            sample_size=8,
            use_additional_conditions=False,
        )
        arguments = {"encoder_hidden_states": torch.randn(2, 4, 5)}
    else:
        model = diffusers.SD3Transformer2DModel(
            sample_size=8,
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=3,
            out_channels=3,
            num_layers=1,
            joint_attention_dim=5,
            caption_projection_dim=16,
            pooled_projection_dim=6,
            pos_embed_max_size=8,
        )
        arguments = {
            "encoder_hidden_states": torch.randn(2, 4, 5),
            "pooled_projections": torch.randn(2, 6),
        }
    return model.eval(), {
        "hidden_states": torch.randn(2, 3, 2 * rows, 2 * columns),
        "timestep": torch.tensor([37.0, 801.0]),
        **arguments,
    }


def record_layer(name: str) -> dict[str, np.ndarray]:
    """Return the operands and the images of a denoiser's last layer, in float32.

    x and y are its input and output. w and bias are those of its product. conditions are the embeddings of the images
    that it is modulated by, and modulation has the parameters of their projection.
    """
    import torch

    model, arguments = create_denoiser(name)
    seen: dict[str, Any] = {}
    model.norm_out.register_forward_pre_hook(lambda _, inputs: seen.update(norm=inputs))
    if name == "pixart":
        model.adaln_single.register_forward_hook(lambda _, __, outputs: seen.update(conditions=outputs[1]))
    with torch.no_grad():
        y = model(**arguments, return_dict=False)[0]
    layer = {
        "x": seen["norm"][0].flatten(0, 1),
        "w": model.proj_out.weight.T,
        "bias": model.proj_out.bias[None],
        "y": y,
    }
    if name == "pixart":
        layer |= {"conditions": seen["conditions"], "table": model.scale_shift_table}
    else:
        linear = model.norm_out.linear
        layer |= {
            "conditions": seen["norm"][1],
            "modulation_w": linear.weight.T,
            "modulation_bias": linear.bias[None],
        }
    return {key: tensor.detach().numpy().copy() for key, tensor in layer.items()}


def record() -> dict[str, np.ndarray]:
    """Return all results by name."""
    recordings = {name: record_embedding(case) for name, case in EMBEDDINGS.items()}
    for name in LAYERS:
        recordings |= {f"{name}/{key}": array for key, array in record_layer(name).items()}
    return recordings


def read_recordings() -> dict[str, np.ndarray]:
    """Return the stored results by name."""
    with np.load(STORED) as file:
        return {key: file[key] for key in file.files}


def read_layer(name: str) -> dict[str, np.ndarray]:
    """Return the stored operands and images of a denoiser's last layer by name."""
    prefix = f"{name}/"
    return {
        key.removeprefix(prefix): array for key, array in read_recordings().items() if key.startswith(prefix)
    }


if __name__ == "__main__":
    np.savez_compressed(STORED, **record())  # type: ignore[arg-type]
