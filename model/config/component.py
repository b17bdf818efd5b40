"""Configs of the components of a diffusion model: text encoders, denoisers and autoencoders.

A diffusers folder has each component in a subfolder with a config.json of its own. A network is composed for one size
of its inputs, so configs have the size: `with_size` returns the same component for another one.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.config.fields import Fields
from model.config.record import Config

_UNREAD = (
    "_class_name _diffusers_version _name_or_path architectures model_type torch_dtype transformers_version "
    "quantization_config"
).split()
"""Fields of config.json that describe the file, not the model, and the quantisation, which the registry reads."""


@dataclass(frozen=True, kw_only=True)
class ComponentConfig(Config):
    """Config of one component; `rows` is the number of rows of hidden states that one image or text has."""

    rows: int


def refuse_unread(fields: Fields, *ignored: str) -> None:
    """Add a refusal for each field that nothing has read, so that no unknown field changes a model silently.

    Args:
        fields: the fields of a component's config.json, after its reader has read them.
        *ignored: names of fields that do not change what the component computes.
    """
    for name in fields.list_unread():
        if name not in (*_UNREAD, *ignored) and not fields.is_null(name):
            fields.unsupported(name, "the field is not known, so it may change what the component computes")
