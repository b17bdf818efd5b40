"""The shipped model of images: what it draws, by kernels and by diffusers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from model.device import SimulatedDevice
from model.loading.shipped import SHAPES
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.denoise import ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from tools.shapes.captions import Caption, list_held_out_captions, parse_caption
from tools.shapes.checker import check_picture

PROMPT = "a red circle above a blue square"
REQUESTS = [ImageRequest(PROMPT, 1), ImageRequest(PROMPT, 2), ImageRequest("a small green cross", 1)]
SAMPLING = Sampling(steps=20, guidance=4.0)
MOST_BYTES, MOST_PARAMETERS = 7_000_000, 3_000_000


def draw(backend: Any, requests: list[ImageRequest] = REQUESTS, steps: int = 20) -> np.ndarray:
    """Return images, uint8 [images, 64, 64, 3]."""
    runner = ImageRunner(open_pipeline(SHAPES), backend)
    return runner.draw(requests, Sampling(steps, SAMPLING.guidance)).images


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Return the images of the requests by the numpy model."""
    return draw(ReferenceBackend())


def test_images_show_what_captions_say(images: np.ndarray) -> None:
    for request, image in zip(REQUESTS, images, strict=True):
        assert check_picture(image, parse_caption(request.prompt)).is_right, request


def test_seed_and_caption_change_an_image(images: np.ndarray) -> None:
    errors = np.abs(images.astype(int)[:, None] - images)
    assert (errors.max(axis=(2, 3, 4)) > 100).tolist() == (~np.eye(len(images), dtype=bool)).tolist()


def test_kernels_draw_the_same_bytes(images: np.ndarray) -> None:
    """Sums in another order move float32 latents by some 2^-20, which rounds few bytes otherwise, each by one."""
    errors = np.abs(draw(KernelBackend(SimulatedDevice("trn2", 1))).astype(int) - images)
    assert errors.max() <= 1 and np.count_nonzero(errors) < errors.size / 1000


def test_the_folder_is_as_small_as_stated() -> None:
    assert sum(path.stat().st_size for path in SHAPES.rglob("*") if path.is_file()) < MOST_BYTES
    weights = SHAPES / "transformer" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_size < 2 * MOST_PARAMETERS


def test_most_held_out_captions_of_two_figures_are_drawn_right() -> None:
    """The README of the model has the share of all 200 captions; here are ten, with fixed seeds and 8 steps."""
    captions: list[Caption] = list_held_out_captions()[10::19]
    requests = [ImageRequest(caption.text, seed) for seed, caption in enumerate(captions)]
    pictures = draw(ReferenceBackend(), requests, steps=8)
    right = sum(
        check_picture(image, caption).is_right for image, caption in zip(pictures, captions, strict=True)
    )
    assert right >= 7


@pytest.mark.deep
def test_diffusers_draws_the_same_images(images: np.ndarray) -> None:
    """The pipeline asks its scheduler for two things that flow matching lacks; they change nothing there."""
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    import torch
    from diffusers import PixArtAlphaPipeline

    pipeline = PixArtAlphaPipeline.from_pretrained(SHAPES, torch_dtype=torch.float32)
    pipeline.scheduler.init_noise_sigma = 1.0
    pipeline.scheduler.scale_model_input = lambda sample, _: sample
    noise = [
        np.random.Generator(np.random.Philox(request.seed)).standard_normal((8, 8, 8), np.float32)
        for request in REQUESTS
    ]
    made = pipeline(
        prompt=[request.prompt for request in REQUESTS],
        negative_prompt=[""] * len(REQUESTS),
        num_inference_steps=SAMPLING.steps,
        guidance_scale=SAMPLING.guidance,
        height=64,
        width=64,
        latents=torch.from_numpy(np.stack(noise)),
        use_resolution_binning=False,
        output_type="np",
    ).images
    errors = np.abs((made * 255).round().astype(int) - images)
    assert errors.max() <= 1 and np.count_nonzero(errors) < errors.size / 1000
