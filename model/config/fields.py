"""A model's shape: config.json and generation_config.json of a Hugging Face folder as one frozen record."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.families import ARCHITECTURES
from model.rope import RopeParameters, RopeType, yarn_attention_factor

_DTYPES = ("bfloat16", "float16", "float32")
_MODEL_TYPES = {"llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one Llama, checked; names are those of config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def load_config(folder: Path | str) -> LlamaConfig:
    """Read a model folder's config.json, and the end tokens of generation_config.json if it is there.

    Raises ModelError for a missing or damaged file, an unknown architecture, and a field that is missing, of the
    wrong type, or describes a model this package does not compute.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise ModelError(f"{folder} is not a folder; a model is a Hugging Face folder with config.json in it")
    fields = Fields(folder / "config.json")
    architecture = _architecture(fields)
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads, {heads}")
    if "head_dim" not in fields and hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is no multiple of num_attention_heads, {heads}")
    head_dim = fields.count("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd; rotary embedding turns pairs")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"{activation!r}; a Llama's MLP is computed with silu only")
    for bias in ("attention_bias", "mlp_bias"):
        if fields.flag(bias):
            raise fields.error(bias, "true; the projection kernels add no bias")
    positions = fields.count("max_position_embeddings")
    vocabulary = fields.count("vocab_size")
    generation = Fields(folder / "generation_config.json", optional=True)
    ends_in = generation if "eos_token_id" in generation else fields
    starts_in = fields if "bos_token_id" in fields else generation
    return LlamaConfig(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_hidden_layers=fields.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=_rope(fields, positions),
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
        bos_token_id=next(iter(starts_in.token_ids("bos_token_id", vocabulary)), None),
        eos_token_ids=ends_in.token_ids("eos_token_id", vocabulary),
    )


def _architecture(fields: Fields) -> str:
    known = ", ".join(ARCHITECTURES)
    named = fields.get("architectures", None)
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        if named[0] not in ARCHITECTURES:
            raise fields.error("architectures", f"{named[0]} is not known; known are {known}")
        return named[0]
    if named is not None:
        raise fields.error("architectures", f"{named!r} is not a list of one name; known are {known}")
    model_type = fields.get("model_type", None)
    if isinstance(model_type, str) and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    raise fields.error("architectures", f"missing, and model_type is {model_type!r}; known are {known}")


def _dtype(fields: Fields) -> str | None:
    for name in ("dtype", "torch_dtype"):  # transformers 5 writes the first, earlier versions the second
        value = fields.get(name, None)
        if value is None:
            continue
        if not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES:
            raise fields.error(name, f"{value!r}; known are {', '.join(_DTYPES)}")
        return value.removeprefix("torch.")
    return None


def _rope(fields: Fields, positions: int) -> RopeParameters:
    """Rotary parameters from `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it."""
    name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    scaling = fields.table(name)
    theta = (scaling if "rope_theta" in scaling else fields).number("rope_theta", default=10000.0)
    kind_field = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.get(kind_field, "default")
    known = [each.value for each in RopeType]
    if not isinstance(kind, str) or kind not in known:
        raise scaling.error(kind_field, f"{kind!r} is not computed; known are {', '.join(known)}")
    rope_type = RopeType(kind)
    for owner in (fields, scaling):
        if owner.number("partial_rotary_factor", default=1.0) != 1:
            raise owner.error("partial_rotary_factor", "not 1; the rope kernel turns whole heads")
    if theta <= 1:
        raise fields.error("rope_theta", f"{theta}; must be greater than 1")
    if rope_type is RopeType.default:
        return RopeParameters(theta)
    if rope_type is RopeType.yarn and scaling.get("factor", None) is None:
        # transformers takes the ratio of the two contexts where YaRN gives no factor of its own.
        factor = positions / scaling.count("original_max_position_embeddings")
    else:
        factor = scaling.number("factor")
    if rope_type in (RopeType.linear, RopeType.dynamic):
        return RopeParameters(theta, rope_type, factor)
    original_owner = fields if "original_max_position_embeddings" in fields else scaling
    original = original_owner.count("original_max_position_embeddings", default=positions)
    if rope_type is RopeType.llama3:
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"{high}; must be greater than low_freq_factor, {low}")
        return RopeParameters(theta, rope_type, factor, original, low, high)
    mscale = scaling.number("mscale", default=0.0, positive=False)
    mscale_all_dim = scaling.number("mscale_all_dim", default=0.0, positive=False)
    return RopeParameters(
        theta,
        rope_type,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        truncate=scaling.flag("truncate", default=True),
        attention_factor=scaling.number(
            "attention_factor", default=yarn_attention_factor(factor, mscale, mscale_all_dim)
        ),
    )


class Fields:
    """The fields of one JSON object; every access checks the type, and an error names file, field and value."""

    def __init__(self, path: Path, optional: bool = False) -> None:
        self._path = path
        self._prefix = ""
        self._values = {} if optional and not path.exists() else read_json(path)

    def table(self, name: str) -> Fields:
        """The object in field `name`; an empty one where the field is absent or null."""
        value = self.get(name, None)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"{value!r} is not an object")
        inner = object.__new__(Fields)
        inner._path, inner._prefix, inner._values = self._path, f"{self._prefix}{name}.", value or {}
        return inner

    def error(self, name: str, what: str) -> ModelError:
        """The error to raise about field `name`."""
        return ModelError(f"{self._path}: {self._prefix}{name}: {what}")

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str, default: Any) -> Any:
        """The value as it stands, unchecked; null counts as absent."""
        value = self._values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"{value!r} is not a positive whole number")
        return value

    def number(self, name: str, default: float | None = None, positive: bool = True) -> float:
        """A finite number, greater than 0 unless `positive` is False."""
        value = self._required(name, default)
        good = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and abs(value) <= sys.float_info.max
        )
        if not good or (positive and value <= 0):
            raise self.error(name, f"{value!r} is not a {'positive' if positive else 'finite'} number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r} is neither true nor false")
        return value

    def token_ids(self, name: str, vocabulary: int) -> tuple[int, ...]:
        """One token id or a list of them, each inside the vocabulary; empty where absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int):
                raise self.error(name, f"{value!r} is neither a token id nor a list of them")
            if not 0 <= each < vocabulary:
                raise self.error(name, f"{each} is no token of a vocabulary of {vocabulary}")
        return tuple(ids)

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(name, "missing")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object but {type(values).__name__}")
    return values
