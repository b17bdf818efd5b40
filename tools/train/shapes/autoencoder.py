"""Training of the autoencoder: reconstruction, and a small pull of the latents towards a normal distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

from tools.shapes.captions import Caption
from tools.shapes.checker import check_picture
from tools.train.shapes.budget import Training
from tools.train.shapes.folder import create_autoencoder
from tools.train.shapes.pictures import draw_pictures, to_pictures, to_tensor

_KL_WEIGHT = 1e-3
_SQUARE_WEIGHT = 4.0


def train_autoencoder(folder: Path, state: Path, core_minutes: float, batch: int = 32, seed: int = 0) -> None:
    """Fit the autoencoder to training pictures within a budget, and write it with its latents' statistics."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    autoencoder = create_autoencoder().to(memory_format=torch.channels_last)
    training = Training(autoencoder, state, core_minutes, rate=2e-3, matrices=False)
    rng = np.random.default_rng([seed, training.step])
    test_pictures, test_scenes = draw_pictures(np.random.default_rng(seed + 10**6), 400)

    def compute_loss() -> torch.Tensor:
        x = to_tensor(draw_pictures(rng, batch)[0])
        with torch.autocast("cpu", torch.bfloat16):
            posterior = autoencoder.encode(x).latent_dist
            y = autoencoder.decode(posterior.mean + posterior.std * torch.randn_like(posterior.mean)).sample
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        error = y.float() - x
        divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        return error.abs().mean() + _SQUARE_WEIGHT * (error**2).mean() + _KL_WEIGHT * divergence

    def report() -> str:
        trained = training.use_average()
        accepted, _, _ = judge_reconstructions(autoencoder, test_pictures, test_scenes)
        autoencoder.load_state_dict(trained)
        return f"{accepted / len(test_scenes):.4f} accepted after reconstruction"

    training.run(compute_loss, report, every=120)
    training.use_average()
    _, mean, deviation = judge_reconstructions(autoencoder, test_pictures, test_scenes)
    autoencoder.register_to_config(scaling_factor=1 / deviation)
    centre_latents(autoencoder, mean)
    autoencoder.to(torch.bfloat16).save_pretrained(folder / "vae")


@torch.no_grad()
def centre_latents(autoencoder: AutoencoderKL, mean: float) -> None:
    """Subtract `mean` from the latents of the autoencoder, which makes the same images of them.

    Biases of the convolutions at both ends of the latents change, since PixArt's pipeline knows no shift of latents.
    """
    autoencoder.quant_conv.bias[: autoencoder.config.latent_channels] -= mean
    autoencoder.post_quant_conv.bias += autoencoder.post_quant_conv.weight.sum(dim=(1, 2, 3)) * mean


@torch.no_grad()
def judge_reconstructions(
    autoencoder: torch.nn.Module, pictures: np.ndarray, scenes: list
) -> tuple[int, float, float]:
    """Return how many reconstructed pictures the checker accepts, and mean and deviation of all latents."""
    autoencoder.eval()
    latents = autoencoder.encode(to_tensor(pictures)).latent_dist.mean
    reconstructed = to_pictures(autoencoder.decode(latents).sample)
    autoencoder.train()
    accepted = sum(
        check_picture(picture, Caption(*scene)).is_right for picture, scene in zip(reconstructed, scenes)
    )
    return accepted, float(latents.mean()), float(latents.std())
