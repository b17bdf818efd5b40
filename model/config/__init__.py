"""Model configs: the parts of a model, read from the fields of config.json."""

from __future__ import annotations

from model.config.blocks import ModelConfig
from model.config.fields import Fields, read_json
from model.config.record import Config

__all__ = ["Config", "Fields", "ModelConfig", "read_json"]
