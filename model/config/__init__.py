"""A model as parts, and the fields of config.json that they are read from."""

from __future__ import annotations

from model.config.fields import Fields, read_json
from model.config.parts import ModelConfig
from model.config.record import Config

__all__ = ["Config", "Fields", "ModelConfig", "read_json"]
