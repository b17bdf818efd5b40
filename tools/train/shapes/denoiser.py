"""Training of the denoiser for the trained text encoder: flow matching on the autoencoder's latents.

x_t = (1 - t) * latents + t * noise,   the denoiser learns noise - latents,   t = sigmoid(0.5 + 1.2 * normal number)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn

from tools.shapes.captions import Caption, Figure, list_held_out_captions
from tools.shapes.checker import Verdict, check_picture
from tools.train.shapes.budget import Training
from tools.train.shapes.folder import LATENT_CHANNELS, create_denoiser, load_tokenizer, tokenize
from tools.train.shapes.pictures import describe_scenes, draw_pictures, to_pictures, to_tensor
from tools.train.shapes.text import load_text_encoder

_EMPTY_CAPTIONS = 0.1
"""Share of captions that are replaced by the empty one, for guidance."""
_PICTURES = 65536
"""Pictures that are drawn and encoded before a run; their captions are written anew for every batch."""
_SIDE = 8


@dataclass(frozen=True)
class _Dataset:
    """Scaled latents of pictures, float32 [pictures, channels, 8, 8], and the figures and relation of each."""

    latents: torch.Tensor
    scenes: list[tuple[tuple[Figure, ...], str]]

    @classmethod
    def draw(cls, autoencoder: AutoencoderKL, seeds: list[int]) -> _Dataset:
        """Draw and encode pictures; equal seeds give equal pictures."""
        pictures, scenes = draw_pictures(np.random.default_rng(seeds), _PICTURES)
        with torch.no_grad():
            latents = torch.cat(
                [
                    autoencoder.encode(to_tensor(chunk)).latent_dist.mean
                    for chunk in np.split(pictures, _PICTURES // 64)
                ]
            )
        return cls(latents * autoencoder.config.scaling_factor, scenes)

    def draw_batch(self, rng: np.random.Generator, batch: int) -> tuple[torch.Tensor, list[str]]:
        """Return latents of random pictures, and a caption of each, some of them empty."""
        rows = rng.integers(_PICTURES, size=batch)
        captions = describe_scenes(rng, [self.scenes[row] for row in rows])
        return self.latents[rows], ["" if rng.random() < _EMPTY_CAPTIONS else text for text in captions]


def train_denoiser(folder: Path, state: Path, core_minutes: float, batch: int = 128, seed: int = 0) -> None:
    """Fit a denoiser to training pictures within a budget, and write it to `folder`."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(folder)
    autoencoder = AutoencoderKL.from_pretrained(folder / "vae").float().eval()
    denoiser = create_denoiser()
    module = nn.ModuleDict({"transformer": denoiser, "text_encoder": load_text_encoder(folder)})
    training = Training(denoiser, state, core_minutes, rate=3e-3, matrices=True)
    rng = np.random.default_rng([seed, training.step])
    torch.manual_seed(seed + training.step)
    dataset = _Dataset.draw(autoencoder, [seed, training.step])
    captions = list_held_out_captions()[::4]

    def compute_loss() -> torch.Tensor:
        latents, texts = dataset.draw_batch(rng, batch)
        t = torch.sigmoid(0.5 + 1.2 * torch.randn(batch, 1, 1, 1))
        noise = torch.randn_like(latents)
        text = encode_texts(module, tokenizer, texts)
        flow = predict_flow(module, (1 - t) * latents + t * noise, t.flatten(), text)
        return ((flow - (noise - latents)) ** 2).mean()

    def report() -> str:
        trained = training.use_average()
        verdicts = judge_captions(module, autoencoder, tokenizer, captions)
        denoiser.load_state_dict(trained)
        return describe_verdicts(verdicts)

    training.run(compute_loss, report, every=300)
    training.use_average()
    denoiser.to(torch.bfloat16).save_pretrained(folder / "transformer")


def encode_texts(
    module: nn.ModuleDict, tokenizer: object, captions: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text encoder's states of captions, [captions, 16, width], and the mask of tokens, [captions, 16]."""
    ids, mask = tokenize(tokenizer, captions)
    return module["text_encoder"](ids, attention_mask=mask).last_hidden_state, mask


def predict_flow(
    module: nn.ModuleDict, x: torch.Tensor, t: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the flow at x [images, channels, 8, 8] and times t [images] from 0 to 1, for texts of `encode_texts`."""
    conditions = {"resolution": None, "aspect_ratio": None}
    states, mask = text
    return module["transformer"](
        x,
        encoder_hidden_states=states,
        encoder_attention_mask=mask,
        timestep=t * 1000,
        added_cond_kwargs=conditions,
        return_dict=False,
    )[0]


@torch.no_grad()
def generate(
    module: nn.ModuleDict,
    autoencoder: AutoencoderKL,
    tokenizer: object,
    captions: list[Caption],
    steps: int = 20,
    guidance: float = 2.5,
    seed: int = 0,
) -> np.ndarray:
    """Return a picture for each caption, uint8 [captions, 64, 64, 3], by Euler steps with guidance."""
    module.eval()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(captions), LATENT_CHANNELS, _SIDE, _SIDE, generator=generator)
    text = encode_texts(module, tokenizer, [""] * len(captions) + [caption.text for caption in captions])
    times = torch.linspace(1, 0, steps + 1)
    for t, following in itertools.pairwise(times):
        flows = predict_flow(module, torch.cat([x, x]), t.repeat(2 * len(captions)), text)
        without, conditioned = flows.chunk(2)
        x = x + (following - t) * (without + guidance * (conditioned - without))
    module.train()
    return to_pictures(autoencoder.decode(x / autoencoder.config.scaling_factor).sample)


def judge_captions(
    module: nn.ModuleDict,
    autoencoder: AutoencoderKL,
    tokenizer: object,
    captions: list[Caption],
    **options: float,
) -> list[tuple[Caption, Verdict]]:
    """Return the checker's verdict on a generated picture of each caption."""
    pictures = generate(module, autoencoder, tokenizer, captions, **options)
    return [(caption, check_picture(picture, caption)) for caption, picture in zip(captions, pictures)]


def describe_verdicts(verdicts: list[tuple[Caption, Verdict]]) -> str:
    """Return the share of right pictures with one and with two figures, and of right attributes of the latter."""
    words = []
    for count in (1, 2):
        chosen = [verdict for caption, verdict in verdicts if len(caption.figures) == count]
        words.append(f"{count}: {sum(verdict.is_right for verdict in chosen)}/{len(chosen)}")
    for attribute in ("count", "colour", "shape", "size", "relation"):
        words.append(f"{attribute} {sum(getattr(verdict, attribute) is True for verdict in chosen)}")
    return ", ".join(words)
