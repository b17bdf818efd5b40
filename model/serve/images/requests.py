"""Requests for images: OpenAI's arguments and further ones as a pydantic model, and the limits of one request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from pydantic import Field

from model.runners.denoise import MOST_SEED, ImageRequest, Sampling
from model.runners.pipelines.pipeline import ImagePipeline
from model.serve.errors import ApiError
from model.serve.openai.messages import Checked

MOST_IMAGES = 10
"""Most images of a request, as in OpenAI's API."""
MOST_PROMPT_CHARACTERS = 4000
_MOST_STEPS_OF_IMAGES = 500
"""Most images x steps of a request for images of the model's largest size: 10 images of 50 steps."""


class ImageGenerationRequest(Checked):
    """Body of a request for images of one prompt.

    The image with the index i has the seed `seed` + i.
    """

    known_as = "images"
    prompt: str = Field(max_length=MOST_PROMPT_CHARACTERS)
    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_IMAGES)
    size: str | None = None
    response_format: str | None = None
    negative_prompt: str | None = Field(None, max_length=MOST_PROMPT_CHARACTERS)
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = None
    seed: int | None = Field(None, ge=0, le=MOST_SEED)


@dataclass(frozen=True)
class DrawingJob:
    """Images of one request, which are drawn one after another.

    image_size  rows and columns of the images in pixels, a size of the model
    images      prompt and seed of each image
    sampling    how the images are sampled
    """

    image_size: tuple[int, int]
    images: tuple[ImageRequest, ...]
    sampling: Sampling


def plan_job(request: ImageGenerationRequest, pipeline: ImagePipeline, seeds: Random) -> DrawingJob:
    """Return the job of a request.

    Args:
        request: The parsed body.
        pipeline: The opened model for images of the default size.
        seeds: Generator of the seeds of requests that have none.

    Raises:
        ApiError: The size or the format is unknown, or a limit is exceeded.
        ModelError: Guidance is out of range or not for this model, the model draws no such prompt, or the schedule
            does not have so many steps.
    """
    if request.response_format not in (None, "b64_json"):
        raise ApiError(
            400,
            "response_format: images are not stored, so they have no URL: set response_format to b64_json",
            "unsupported_parameter",
            "response_format",
        )
    sampling = Sampling(
        steps=Sampling.steps if request.num_inference_steps is None else request.num_inference_steps,
        guidance=Sampling.guidance if request.guidance_scale is None else request.guidance_scale,
    )
    count = request.n or 1
    image_size = choose_size(pipeline, request.size)
    pipeline.plan(sampling.steps)
    pipeline.build_guidance(sampling.guidance, [request.negative_prompt or ""])
    pipeline.check_prompts([request.prompt])
    check_work(count, image_size, sampling.steps, pipeline.sizes)
    first = seeds.randrange(2**63) if request.seed is None else request.seed
    if first + count - 1 > MOST_SEED:
        raise ApiError(
            400, f"seed: {count} images from this seed on exceed 2^64 - 1: give a smaller seed", param="seed"
        )
    images = tuple(
        ImageRequest(request.prompt, first + index, request.negative_prompt or "") for index in range(count)
    )
    return DrawingJob(image_size, images, sampling)


def choose_size(pipeline: ImagePipeline, size: str | None) -> tuple[int, int]:
    """Return rows and columns of a size such as "64x64", WIDTHxHEIGHT; None and "auto" are the default size.

    Raises:
        ApiError: The model does not have the size.
    """
    if size is None or size == "auto":
        return pipeline.image_size
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", size, re.ASCII)
    columns, rows = (0, 0) if match is None else map(int, match.groups())
    if match is None or not pipeline.has_size(rows, columns):
        known = pipeline.describe_sizes(rows / columns if match else 1.0)
        raise ApiError(400, f"size: {size!r:.40} is no size of this model; {known}", param="size")
    return rows, columns


def check_work(
    images: int, image_size: tuple[int, int], steps: int, sizes: Sequence[tuple[int, int]]
) -> None:
    """Check that images x pixels x steps of a request do not exceed the server's limit.

    Args:
        images: Number of images.
        image_size: Their rows and columns in pixels.
        steps: Steps of the noise schedule.
        sizes: All sizes of the model, of which the largest one sets the limit.

    Raises:
        ApiError: They do (400); the message has the limit.
    """
    pixels = image_size[0] * image_size[1]
    limit = _MOST_STEPS_OF_IMAGES * max(rows * columns for rows, columns in sizes)
    work = images * pixels * steps
    if work > limit:
        raise ApiError(
            400,
            f"n x pixels x steps is {images} x {pixels:,} x {steps:,} = {work:,}; the limit of a request is "
            f"{limit:,}: ask for fewer images or steps",
            "image_work",
            "num_inference_steps",
        )
