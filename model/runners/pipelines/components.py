"""Components that pipelines have in common, opened and checked: text encoders with tokenizers, and the autoencoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from model.config.autoencoder import AutoencoderConfig
from model.config.component import ComponentConfig
from model.config.denoisers import DenoiserConfig
from model.config.folder import PIPELINE_INDEX
from model.config.text_encoders import ClipTextConfig, TextEncoderConfig
from model.errors import ModelError
from model.families.tasks import AUTOENCODER, DENOISER, TEXT_ENCODER
from model.layers.relative_attention import TEXT_LENGTHS
from model.loading.component import LoadedComponent
from model.loading.pipeline import PipelineFolder
from model.loading.text_tokenizer import TextTokenizer
from model.loading.text_tokenizers import open_text_tokenizer
from model.runners.component import Arrays
from model.runners.pipelines.pipeline import Backend

TOKENIZERS = {"CLIPTextModel": ("CLIPTokenizer",), "T5EncoderModel": ("T5Tokenizer", "T5TokenizerFast")}
"""Classes of the tokenizers of a text encoder, by its class."""
_CODE = "NKW-MODEL-PIPELINE"
D = TypeVar("D", bound=DenoiserConfig)


@dataclass(frozen=True)
class EncodedPrompts:
    """Encoded texts.

    config   config of the text encoder
    ids      token ids of the padded texts, int32 [texts, rows]
    lengths  numbers of their tokens, int32 [texts, 1]
    outputs  outputs of the text encoder by name, [texts, ...] each
    """

    config: TextEncoderConfig
    ids: np.ndarray
    lengths: np.ndarray
    outputs: Arrays

    @property
    def pooled(self) -> np.ndarray:
        """Pooled states of a CLIP text encoder, [texts, size]."""
        assert isinstance(self.config, ClipTextConfig)
        return self.config.pool(self.ids, self.outputs)


@dataclass(frozen=True)
class PromptEncoder:
    """Text encoder of a pipeline.

    name       name of the component in the folder
    model      the opened component, whose config has the rows of a padded text
    tokenizer  its tokenizer; None for dry runs, in which all texts are as long as possible
    """

    name: str
    model: LoadedComponent
    tokenizer: TextTokenizer | None

    @property
    def config(self) -> TextEncoderConfig:
        """Config of the text encoder."""
        assert isinstance(self.model.config, TextEncoderConfig)
        return self.model.config

    def encode(self, texts: Sequence[str], backend: Backend, masks_padding: bool = False) -> EncodedPrompts:
        """Return the encoded texts after one pass over all of them.

        Args:
            texts: The texts.
            backend: What creates the component that computes.
            masks_padding: Whether tokens of a text encoder without a causal mask attend to no padding.
        """
        rows = self.config.rows
        all_rows = np.full((len(texts), 1), rows, np.int32)
        if self.tokenizer is None:
            ids, lengths = np.zeros((len(texts), rows), np.int32), all_rows
        else:
            ids, lengths = self.tokenizer.encode(texts)
        inputs = {"ids": ids}
        if TEXT_LENGTHS in self.model.network.inputs:
            inputs[TEXT_LENGTHS] = lengths if masks_padding else all_rows
        outputs = backend.create(self.model, len(texts), self.name).run(inputs)
        return EncodedPrompts(self.config, ids, lengths, outputs)

    def list_tokens(self, text: str, first_row: int = 0) -> list[tuple[int, int, str]]:
        """Return (row, id, text) of each token of a text without padding; the first one has the row `first_row`."""
        assert self.tokenizer is not None, "a component that is planned only"
        (ids,), ((length,),) = self.tokenizer.encode([text])
        shown = self.tokenizer.tokenizer.shown
        return [(first_row + row, int(id), shown(int(id))) for row, id in enumerate(ids[:length])]


def open_prompt_encoder(
    folder: PipelineFolder, dtype: str, name: str = "text_encoder", most_rows: int | None = None
) -> PromptEncoder:
    """Open a text encoder and its tokenizer, whose folder has the same ending.

    Args:
        folder: The folder of the pipeline, with both among its checked components.
        dtype: Dtype of activations.
        name: Name of the text encoder in the folder.
        most_rows: Most tokens of a padded text; None for as many as the text encoder takes.

    Raises:
        ModelError: A file is missing or damaged, config.json is of another class than model_index.json names, or the
            tokenizer has ids that the text encoder has not.
    """
    model = folder.open_component(name, TEXT_ENCODER, dtype)
    config = model.config
    assert isinstance(config, TextEncoderConfig)
    if config.architecture != folder.components[name]:
        raise _refuse_class(folder, name, config)
    rows = config.most_rows if most_rows is None else min(most_rows, config.most_rows)
    tokenizer = None
    if not folder.is_planned:
        tokenizer_name = name.replace("text_encoder", "tokenizer")
        tokenizer = open_text_tokenizer(
            folder.find_subfolder(tokenizer_name), folder.components[tokenizer_name], config.vocab_size, rows
        )
    return PromptEncoder(name, model.resize(config.with_rows(rows)), tokenizer)


def check_text_size(folder: PipelineFolder, name: str, returned: int, taken: int) -> None:
    """Raise ModelError if `transformer` takes texts of another size than the text encoder `name` returns."""
    if returned != taken:
        raise ModelError(
            f"{folder.path}: transformer takes encoded texts of {taken} elements and {name} returns {returned}; "
            "they must be equal",
            _CODE,
        )


def _refuse_class(folder: PipelineFolder, name: str, config: ComponentConfig) -> ModelError:
    """Return, without raising it, the error about a component whose config.json is of another class than its entry."""
    return ModelError(
        f"{folder.path / name / 'config.json'}: a {config.architecture}; {PIPELINE_INDEX} of this "
        f"{folder.class_name} names a {folder.components[name]}, so one of the files is of another model",
        _CODE,
    )


def open_denoiser(folder: PipelineFolder, dtype: str, record: type[D]) -> tuple[LoadedComponent, D]:
    """Open the denoiser of a pipeline, and return it with its config.

    Args:
        folder: The folder of the pipeline, with `transformer` among its checked components.
        dtype: Dtype of activations.
        record: Class of the configs of the pipeline's denoisers.

    Raises:
        ModelError: A file is missing or damaged, or config.json is of a denoiser of another pipeline.
    """
    denoiser = folder.open_component("transformer", DENOISER, dtype)
    config = denoiser.config
    if not isinstance(config, record):
        raise _refuse_class(folder, "transformer", config)
    return denoiser, config


def open_autoencoder(folder: PipelineFolder, dtype: str, denoiser: DenoiserConfig) -> LoadedComponent:
    """Open the autoencoder for the latent images of a denoiser.

    Raises:
        ModelError: A file is missing or damaged, latent images have another number of channels, or images have not
            three.
    """
    autoencoder = folder.open_component("vae", AUTOENCODER, dtype)
    config = autoencoder.config
    assert isinstance(config, AutoencoderConfig)
    if config.latent_channels != denoiser.channels:
        raise ModelError(
            f"{folder.path}: latent images have {denoiser.channels} channels in the config of transformer and "
            f"{config.latent_channels} in that of vae; they must be equal",
            _CODE,
        )
    if config.out_channels != 3:
        raise ModelError(
            f"{folder.path}: vae decodes images of {config.out_channels} channels; images need 3", _CODE
        )
    return autoencoder.resize(config.with_size(denoiser.latent_rows, denoiser.latent_columns))
