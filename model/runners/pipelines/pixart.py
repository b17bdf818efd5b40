"""PixArt pipelines: one text encoder, whose padding the denoiser does not see; two passes are guided.

The text encoder of published models is a T5; the shipped model has a small CLIP text encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model.config.autoencoder import AutoencoderConfig
from model.config.denoisers import PixArtConfig
from model.config.text_encoders import TextEncoderConfig
from model.errors import ModelError
from model.families.tasks import AUTOENCODER, DENOISER, TEXT_ENCODER
from model.loading.component import LoadedComponent
from model.loading.pipeline import PipelineFolder
from model.loading.text_tokenizer import TextTokenizer
from model.loading.text_tokenizers import open_text_tokenizer
from model.runners.component import Arrays
from model.runners.pipelines.pipeline import Backend, ImagePipeline, encode_ids

_TOKENIZERS = {"CLIPTextModel": ("CLIPTokenizer",), "T5EncoderModel": ("T5Tokenizer", "T5TokenizerFast")}
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

    text_encoder: LoadedComponent
    tokenizer: TextTokenizer | None

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
        return (self.text_encoder,)

    def resize(self, rows: int, columns: int) -> PixArtPipeline:
        """Return the pipeline for latent images of another size."""
        denoiser = self.denoiser.resize(
            self.denoiser_config.with_size(rows, columns, self.denoiser_config.text_rows)
        )
        autoencoder = self.autoencoder.resize(self.autoencoder_config.with_size(rows, columns))
        return replace(self, denoiser=denoiser, autoencoder=autoencoder)

    def encode(self, texts: Sequence[str], backend: Backend) -> Arrays:
        """Return the encoded texts [texts, rows, size] and the numbers of their tokens [texts, 1]."""
        prepared = [prepare_prompt(text) for text in texts]
        ids, lengths = encode_ids(self.tokenizer, prepared, self.denoiser_config.text_rows)
        inputs = {"ids": ids}
        if "text_lengths" in self.text_encoder.network.inputs:
            inputs["text_lengths"] = lengths
        encoder = backend.create(self.text_encoder, len(texts), "text_encoder")
        return {"text": encoder.run(inputs)["x"], "text_lengths": lengths}

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
            "text_encoder": tuple(_TOKENIZERS),
            "tokenizer": _TOKENIZERS.get(encoder, ()),
        }
    )
    text_encoder = folder.open_component("text_encoder", TEXT_ENCODER, dtype)
    encoder_config = text_encoder.config
    assert isinstance(encoder_config, TextEncoderConfig)
    text_rows = min(_MOST_TEXT_ROWS[folder.class_name], encoder_config.most_rows)
    text_encoder = text_encoder.resize(encoder_config.with_rows(text_rows))
    vocabulary = encoder_config.vocab_size
    denoiser = folder.open_component("transformer", DENOISER, dtype)
    config = denoiser.config
    assert isinstance(config, PixArtConfig)
    rows, columns = config.latent_rows, config.latent_columns
    denoiser = denoiser.resize(config.with_size(rows, columns, text_rows))
    autoencoder = folder.open_component("vae", AUTOENCODER, dtype)
    assert isinstance(autoencoder.config, AutoencoderConfig)
    if autoencoder.config.latent_channels != config.channels:
        raise ModelError(
            f"{folder.path}: latent images have {config.channels} channels in the config of transformer and "
            f"{autoencoder.config.latent_channels} in that of vae; they must be equal",
            "NKW-MODEL-PIPELINE",
        )
    if autoencoder.config.out_channels != 3:
        raise ModelError(
            f"{folder.path}: vae decodes images of {autoencoder.config.out_channels} channels; images need 3",
            "NKW-MODEL-PIPELINE",
        )
    if encoder_config.hidden_size != config.text_size:
        raise ModelError(
            f"{folder.path}: transformer takes encoded texts of {config.text_size} elements and text_encoder returns "
            f"{encoder_config.hidden_size}; they must be equal",
            "NKW-MODEL-PIPELINE",
        )
    autoencoder = autoencoder.resize(autoencoder.config.with_size(rows, columns))
    tokenizer = None
    if not folder.is_planned:
        tokenizer = open_text_tokenizer(
            folder.find_subfolder("tokenizer"), folder.components["tokenizer"], vocabulary, text_rows
        )
    schedule = folder.read_schedule()
    return PixArtPipeline(folder.path, schedule, denoiser, autoencoder, text_encoder, tokenizer)
