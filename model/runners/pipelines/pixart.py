"""PixArt pipelines: one text encoder, whose padding the denoiser does not see; two passes are guided.

The text encoder of published models is a T5; the shipped model has a small CLIP text encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.config.denoisers import PixArtConfig
from model.loading.component import LoadedComponent
from model.loading.pipeline import PipelineFolder
from model.runners.component import Arrays
from model.runners.pipelines.components import (
    TOKENIZERS,
    PromptEncoder,
    check_text_size,
    open_autoencoder,
    open_denoiser,
    open_prompt_encoder,
)
from model.runners.pipelines.pipeline import Backend, ImagePipeline

_MOST_TEXT_ROWS = {"PixArtAlphaPipeline": 120, "PixArtSigmaPipeline": 300}
"""Most tokens of a text by class of pipeline, the defaults of diffusers; a text encoder may take fewer."""
_ASPECTS = (
    *(
        (8, 32),
        (8, 29),
        (9, 28),
        (9, 27),
        (9, 26),
        (10, 25),
        (10, 24),
        (11, 23),
        (11, 22),
        (11, 21),
        (12, 21),
    ),
    *(
        (12, 20),
        (13, 19),
        (13, 18),
        (14, 18),
        (14, 17),
        (15, 17),
        (15, 16),
        (16, 16),
        (16, 15),
        (17, 15),
        (17, 14),
    ),
    *(
        (18, 14),
        (18, 13),
        (19, 13),
        (20, 12),
        (21, 12),
        (22, 11),
        (23, 11),
        (24, 10),
        (25, 10),
        (27, 9),
        (32, 8),
    ),
)
"""Rows and columns of the images of which PixArt was trained, in sixteenths of the rows of the square one.

They are ASPECT_RATIO_256_BIN, _512_BIN and _1024_BIN of diffusers.
"""
_SIDES_WITH_ASPECTS = (256, 512, 1024)


@dataclass(frozen=True)
class PixArtPipeline(ImagePipeline):
    """Opened PixArt model with its text encoder and tokenizer."""

    prompt_encoder: PromptEncoder

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """The square size for which the denoiser's positions are defined, then others of about as many pixels.

        Other sizes are known for squares of 256, 512 and 1024 pixels.
        """
        config = self.denoiser.config
        assert isinstance(config, PixArtConfig)
        side = config.sample_size * self.autoencoder_config.spatial_scale
        aspects = _ASPECTS if side in _SIDES_WITH_ASPECTS else ()
        further = [(side * rows // 16, side * columns // 16) for rows, columns in aspects if rows != columns]
        return [(side, side), *further]

    @property
    def text_encoders(self) -> Sequence[LoadedComponent]:
        """The one text encoder."""
        return (self.prompt_encoder.model,)

    def encode(self, texts: Sequence[str], backend: Backend) -> Arrays:
        """Return the encoded texts [texts, rows, size] and the numbers of their tokens [texts, 1]."""
        prepared = [prepare_prompt(text) for text in texts]
        encoded = self.prompt_encoder.encode(prepared, backend, masks_padding=True)
        return {"text": encoded.outputs["x"], "text_lengths": encoded.lengths}

    def list_tokens(self, text: str) -> list[tuple[int, int, str]]:
        """Return (row, id, text) of each token of a text."""
        return self.prompt_encoder.list_tokens(prepare_prompt(text))

    def build_inputs(self, latents: np.ndarray, timestep: Any) -> Arrays:
        """Return the timestep of each image, and its size in pixels if that is a condition."""
        numbers = {"timesteps": timestep}
        config = self.denoiser_config
        assert isinstance(config, PixArtConfig)
        if config.has_image_size:
            rows, columns = self.image_size
            numbers |= {"height": rows, "width": columns, "aspect_ratio": rows / columns}
        return {name: np.full((len(latents), 1), number, np.float32) for name, number in numbers.items()}


def prepare_prompt(text: str) -> str:
    """Return a prompt in lower case, without blanks around it, as diffusers gives it to the tokenizer.

    diffusers' `clean_caption` does more where the packages bs4 and ftfy are installed: it takes out addresses, tags of
    HTML, names after @, hashes, numbers of files and Chinese characters, repairs wrongly decoded text, and makes quotes
    and dashes alike. That is for captions gathered from the web. Here it is not done, as with `clean_caption=False`.
    """
    return text.lower().strip()


def open_pixart(folder: PipelineFolder, dtype: str) -> PixArtPipeline:
    """Open a folder of a PixArt model; see `open_pipeline`."""
    encoder = folder.components.get("text_encoder", "")
    folder.check_components(
        {
            "transformer": ("PixArtTransformer2DModel", "Transformer2DModel"),
            "vae": ("AutoencoderKL",),
            "text_encoder": tuple(TOKENIZERS),
            "tokenizer": TOKENIZERS.get(encoder, ()),
        }
    )
    prompt_encoder = open_prompt_encoder(folder, dtype, most_rows=_MOST_TEXT_ROWS[folder.class_name])
    text_rows = prompt_encoder.config.rows
    denoiser, config = open_denoiser(folder, dtype, PixArtConfig)
    config = config.with_size(config.latent_rows, config.latent_columns, text_rows)
    autoencoder = open_autoencoder(folder, dtype, config)
    check_text_size(folder, "text_encoder", prompt_encoder.config.hidden_size, config.text_size)
    schedule = folder.read_schedule()
    return PixArtPipeline(folder.path, schedule, denoiser.resize(config), autoencoder, prompt_encoder)
