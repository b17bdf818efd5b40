"""Runner of diffusion models: texts are encoded, noise is denoised in steps, and latent images are decoded.

Each image has noise of its own, drawn by Philox from the image's seed, so that images in a batch equal the same images
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

import numpy as np

from model.config.autoencoder import AutoencoderConfig
from model.errors import ModelError, check_memory
from model.noise_schedules import State
from model.runners.backends import CountingBackend
from model.runners.component import Arrays, Component, count_activation_bytes
from model.runners.pipelines.pipeline import DEFAULT_GUIDANCE, Backend, ImagePipeline
from model.runners.tiling import TiledComponent

_CODE = "NKW-MODEL-OPTION"
MOST_SEED = 2**64 - 1
MOST_IMAGES = 1024
"""Most images of a batch."""


class Guidance(Enum):
    """How the two passes of classifier-free guidance run: in one batch of twice as many images, or one by one."""

    batched = "batched"
    separate = "separate"


@dataclass(frozen=True)
class ImageRequest:
    """One image: its prompt, the seed of its noise, and what the image should not show."""

    prompt: str
    seed: int = 0
    negative_prompt: str = ""


@dataclass(frozen=True)
class Sampling:
    """How images are sampled.

    steps     steps of the noise schedule
    guidance  factor of the difference between the passes with the prompt and with the negative prompt; 1 takes only
              the pass with the prompt. A distilled denoiser has it as an input
    mode      how the two passes run
    """

    steps: int = 20
    guidance: float = DEFAULT_GUIDANCE
    mode: Guidance = Guidance.batched

    def __post_init__(self) -> None:
        if not 0 <= self.guidance <= 1000:
            raise ModelError(f"guidance {self.guidance:g} must be between 0 and 1000", _CODE)

    @property
    def is_guided(self) -> bool:
        """Whether each step takes two passes of a denoiser that is guided by passes."""
        return self.guidance != 1.0


@dataclass(frozen=True)
class Drawing:
    """Images of a batch, and the passes of its components.

    images   uint8 [images, rows, columns, 3]
    latents  the last latent images, float32 [images, channels, rows, columns]
    passes   number of passes by the name of the component and the number of images or texts of a pass
    """

    images: np.ndarray
    latents: np.ndarray
    passes: dict[tuple[str, int], int]


OnStep = Callable[[int, np.ndarray], None]
"""Called with the number of finished passes of the denoiser and the latent images after the last one."""


class ImageRunner:
    """Runner of a pipeline on a backend.

    Args:
        pipeline: The opened model for images of one size.
        backend: What creates the components that compute.
    """

    def __init__(self, pipeline: ImagePipeline, backend: Backend) -> None:
        self._pipeline, self._backend = pipeline, backend

    def draw(
        self,
        requests: Sequence[ImageRequest],
        sampling: Sampling,
        noise: np.ndarray | None = None,
        on_step: OnStep = lambda done, latents: None,
    ) -> Drawing:
        """Draw an image for each request.

        Args:
            requests: The images.
            sampling: How they are sampled.
            noise: Gaussian noise from which the images are made, [images, channels, rows, columns]; None to draw it
                from the seeds.
            on_step: Called after each pass of the denoiser.

        Raises:
            ModelError: There is no request or more than `MOST_IMAGES`; the arrays exceed the memory of this machine; a
                seed is out of range; the noise has another shape or is not finite; the schedule does not have so many
                steps; the model has no such guidance or draws no such prompt; or a component computes numbers that are
                not finite.
        """
        check_count(len(requests))
        check_memory(
            self._count_bytes(len(requests)),
            f"a batch of {len(requests)} image{'s' if len(requests) > 1 else ''}",
        )
        generators = _create_generators(requests)
        shape = self._latent_shape
        if noise is None:
            noise = np.stack([generator.standard_normal(shape, np.float32) for generator in generators])
        else:
            with np.errstate(over="ignore"):
                noise = noise.astype(np.float32)
            if noise.shape != (len(requests), *shape) or not np.isfinite(noise).all():
                raise ModelError(
                    f"latents of shape {list(noise.shape)}; this model and the number of images, {len(requests)}, need "
                    f"finite numbers of float32 in the shape {[len(requests), *shape]}",
                    _CODE,
                )
        negative_prompts = [request.negative_prompt for request in requests]
        conditions = self._pipeline.build_guidance(sampling.guidance, negative_prompts)
        if not self._pipeline.is_guided_by_passes:
            sampling = replace(sampling, guidance=1.0)
        trajectory, schedule = self._pipeline.plan(sampling.steps), self._pipeline.schedule
        texts = [request.prompt for request in requests]
        self._pipeline.check_prompts(texts)
        if sampling.is_guided:
            texts = negative_prompts + texts
        backend = CountingBackend(self._backend)
        batches = 2 if sampling.is_guided and sampling.mode is Guidance.batched else 1
        # The denoiser comes first, as its limits are the lowest.
        denoiser = backend.create(self._pipeline.denoiser, batches * len(requests), "denoiser")
        encoded = self._pipeline.encode(texts, backend)
        latents = noise * np.float32(trajectory.initial_scale)
        state: State = ()
        for index, timestep in enumerate(trajectory.timesteps):
            scaled = schedule.scale_input(trajectory, index, latents)
            inputs = {"latents": scaled, **self._pipeline.build_inputs(scaled, timestep), **conditions}
            output = _predict(denoiser, inputs, encoded, sampling)
            fresh = None
            if schedule.needs_noise(trajectory, index):
                fresh = np.stack([generator.standard_normal(shape, np.float32) for generator in generators])
            state, latents = schedule.step(trajectory, state, index, output, latents, fresh)
            on_step(index + 1, latents)
        images = self._decode(latents, backend)
        return Drawing(images, latents, backend.passes)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Return the images of latent images, uint8 [images, rows, columns, 3]."""
        return self._decode(latents, CountingBackend(self._backend))

    def _decode(self, latents: np.ndarray, backend: Backend) -> np.ndarray:
        """Return the images of latent images; the autoencoder computes equal tiles of large ones, which are blended."""
        model, config = self._pipeline.autoencoder, self._pipeline.autoencoder_config

        def create(rows: int, columns: int) -> Component:
            return backend.create(model.resize(config.with_size(rows, columns)), len(latents), "autoencoder")

        tile = find_tile(config, model.activations)
        autoencoder: Component = (
            create(config.latent_rows, config.latent_columns)
            if tile is None
            else TiledComponent(create, config, tile, equal_tiles=True)
        )
        return convert_to_bytes(autoencoder.run({"latents": self._pipeline.unscale(latents)})["x"])

    def _count_bytes(self, images: int) -> int:
        """Return the bytes of the arrays of a batch on the host, and of the activations of the largest component.

        Activations are those of one image, as in NumPy; backends with kernels count those of the whole batch. The other
        arrays are five float32 arrays of latents (noise, scaled latents, predictions with and without the prompt, and
        the result), the encoded prompts and negative prompts, and the images in float32 (decoded and scaled) and uint8.
        """
        config, (rows, columns) = self._pipeline.denoiser_config, self._pipeline.image_size
        texts = 2 * config.text_rows * config.text_size * 4
        host_bytes = images * (5 * prod(self._latent_shape) * 4 + texts + 3 * rows * columns * (4 + 4 + 1))
        autoencoder, decoder = self._pipeline.autoencoder, self._pipeline.autoencoder_config
        tile = find_tile(decoder, autoencoder.activations)
        if tile is not None:
            autoencoder = autoencoder.resize(decoder.with_size(tile, tile))
        components = (*self._pipeline.text_encoders, self._pipeline.denoiser, autoencoder)
        return host_bytes + max(map(count_activation_bytes, components))

    @property
    def _latent_shape(self) -> tuple[int, int, int]:
        config = self._pipeline.denoiser_config
        return config.channels, config.latent_rows, config.latent_columns


def check_count(images: int) -> None:
    """Raise ModelError if a batch has more than `MOST_IMAGES` images."""
    if images > MOST_IMAGES:
        raise ModelError(f"{images} images in one batch; at most {MOST_IMAGES:,}: give fewer images", _CODE)


def _create_generators(requests: Sequence[ImageRequest]) -> list[np.random.Generator]:
    """Return a random generator for each request.

    Raises:
        ModelError: There is no request, or a seed is out of range.
    """
    if not requests:
        raise ModelError("no image is asked for; give at least one prompt", _CODE)
    for request in requests:
        if not 0 <= request.seed <= MOST_SEED:
            raise ModelError(f"seed {request.seed} is not between 0 and 2^64 - 1", _CODE)
    return [np.random.Generator(np.random.Philox(request.seed)) for request in requests]


def _predict(denoiser: Component, inputs: Arrays, encoded: Arrays, sampling: Sampling) -> np.ndarray:
    """Return the denoiser's prediction for each image, guided if `sampling` says so.

    Args:
        denoiser: The denoiser.
        inputs: Its inputs for each image.
        encoded: Its inputs for each text; with guidance first those of the negative prompts.
        sampling: Guidance.
    """
    if not sampling.is_guided:
        return denoiser.run({**inputs, **encoded})["x"]
    if sampling.mode is Guidance.batched:
        twice = {name: np.concatenate([array, array]) for name, array in inputs.items()}
        without, conditioned = np.split(denoiser.run({**twice, **encoded})["x"], 2)
    else:
        halves = [{name: np.split(array, 2)[half] for name, array in encoded.items()} for half in (0, 1)]
        without, conditioned = (denoiser.run({**inputs, **half})["x"] for half in halves)
    return without + np.float32(sampling.guidance) * (conditioned - without)


_MOST_ATTENDED = {4: 44, 2: 64}
"""Rows and columns of the largest latent images whose pixels attend to each other, by bytes of an activation.

Attention of one head of 512 channels takes 4,096 rows in bfloat16 and 2,048 in float32.
"""


def find_tile(config: AutoencoderConfig, activations: np.dtype) -> int | None:
    """Return rows and columns of the tiles in which latent images are decoded; None if they are decoded whole.

    diffusers decodes them whole unless it is asked for tiles.
    """
    tile = _MOST_ATTENDED[activations.itemsize]
    is_large = config.latent_rows * config.latent_columns > tile * tile
    return tile if config.mid_block_add_attention and is_large else None


def convert_to_bytes(images: np.ndarray) -> np.ndarray:
    """Return images with numbers from -1 to 1, [images, 3, rows, columns], as uint8 [images, rows, columns, 3].

    Numbers are clipped and rounded to the nearest byte, halves to even, as diffusers does.
    """
    scaled = np.clip(images / np.float32(2) + np.float32(0.5), 0, 1) * np.float32(255)
    return np.rint(scaled).astype(np.uint8).transpose(0, 2, 3, 1)
