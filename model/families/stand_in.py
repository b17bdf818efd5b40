"""Configs of model types that no row of the registry has, planned under a known family.

A family that reads more of a config's fields is nearer to it. Of the fields that the family does not read, a plan says
which parts of the model they may describe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from model.config import Config, Fields
from model.config.record import StandIn
from model.errors import ModelError
from model.families.registry import FAMILIES, read
from model.families.tasks import TEXT
from nkw.suggestions import did_you_mean

TEXT_TABLES = ("text_config", "llm_config", "language_config")
"""Fields of the config of a model for several kinds of inputs that hold the config of its text decoder."""

_SHARED = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields that the config of a text decoder may leave to the config around it."""

_ESSENTIAL = ("num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts")
"""Fields without which a plan is of another model: a family that does not read them is not proposed."""

_STRUCTURE = re.compile(r"expert|lora_rank|linear_(num|key|value)|mamba_|conv_kernel|state_size")
"""Fields of parts that few families have. A family that reads them comes before one that reads more other fields."""

_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_EACH_LAYER = re.compile(r"\w*(freq|step|interval)")
"""Fields that mean every layer where they are 1."""

_WITHOUT_EFFECT = re.compile(
    r"architectures|auto_map|model_type|_name_or_path|transformers_version|.*(token_id|token_ids|token_index|_coef)|"
    r"(attention|hidden|embd|resid|attn|classifier|routing)_?(dropout|pdrop|dropout_prob)|initializer_range|use_cache|"
    r"output_\w+|return_dict|pretraining_tp|ep_size|seq_aux|aux_loss_alpha|problem_type|torch_dtype|dtype|rope_\w+|"
    r"partial_rotary_factor|tokenizer_class|is_encoder_decoder|id2label|label2id|attn_implementation|\w*jitter\w*|"
    r"length_penalty|max_length|num_beam\w*|num_return_sequences|repetition_penalty|temperature|top_p|top_k|typical_p|"
    r"ignore_index|use_sliding_window|max_window_layers|layer_norm_eps\w*|norm_eps|rms_norm_eps|scoring_func|topk_method|router_\w*loss\w*"
)
"""Fields that change neither the parameters of a decoder nor, to a degree that a plan shows, its times."""

_MEANINGS = (
    ("vision|image|video|audio|speech|mm_|projector", "towers for images or sound are not counted"),
    ("index_|indexer", "the indexer of sparse attention is not counted, and attention reads all tokens"),
    ("mtp|nextn", "layers for multi-token prediction are not counted"),
    (
        "linear_|lightning|mamba|ssm|conv|time_step|dt_|state_size|attn_type|block_type",
        "recurrent layers are planned as the family's attention",
    ),
    ("shared_expert|shared_intermediate", "shared experts are not counted"),
    ("num_(local_)?experts$|n_routed_experts", "routed experts are not counted: the model is far larger"),
    ("lora_rank|qk_nope|qk_rope|v_head_dim", "latent attention is planned with keys and values of all heads"),
    ("heads$|head_dim$|_heads_", "heads have the family's numbers and sizes"),
    ("expert|moe|rout|topk|top_k|n_group", "routing, or the layers that have experts, may differ"),
    (
        "layer_type|sliding|window|chunk|no_rope|full_attention|global|swa|nope",
        "layers whose attention differs, by a window or otherwise, are planned alike",
    ),
    ("qk_norm|norm", "further norms are not counted"),
    ("bias", "biases are not counted"),
    ("intermediate|ffn|mlp", "layers of another width are planned with the family's"),
    ("gate", "gates are not counted"),
    ("rotary|multiplier|scal|softcap|cap|mup|beta", "factors take next to no time"),
)
"""What fields mean whose name has a pattern; the first pattern counts."""
_UNKNOWN = "what they describe is not known here"


def read_stand_in(fields: Fields, family: str) -> Config:
    """Return the config that a known family reads from a config.json of any model type, with `stand_in` set.

    For a model of several kinds of inputs, the text decoder's fields are read. `stand_in` names the ignored fields.

    Raises:
        ModelError: The family is unknown or not one of texts, or a field that it needs is missing or wrong.
    """
    families = [name for name, row in FAMILIES.items() if row.task is TEXT]
    if family not in families:
        raise ModelError(
            f"--as {family!r:.40} is not a family of models that continue texts{did_you_mean(family, families)} "
            f"(docs/families.md lists them)",
            "NKW-MODEL-CONFIG",
        )
    text = fields if FAMILIES[family].nested else find_text_fields(fields)
    try:
        config = read(family, text)
    except ModelError as error:
        nearest = find_nearest_family(fields)
        hint = f"; --as {nearest} reads this config" if nearest else ""
        raise ModelError(f"{error}; --as {family} needs it{hint}", error.code) from None
    ignored = tuple(name for name in text.list_unread() if _has_effect(name, text))
    if text is not fields:
        ignored += tuple(
            name for name in fields.list_unread() if name not in _SHARED and _has_effect(name, fields)
        )
    stand_in = StandIn(
        str(fields.get("model_type", "")), family, text is not fields, ignored, tuple(_explain(ignored))
    )
    return replace(config, stand_in=stand_in)


def find_text_fields(fields: Fields) -> Fields:
    """Return the fields of the text decoder: of the first object of TEXT_TABLES that the config has, else `fields`."""
    for name in TEXT_TABLES:
        if isinstance(fields.get(name, None), dict):
            return fields.table(name, shared=_SHARED)
    return fields


def find_nearest_family(fields: Fields) -> str | None:
    """Return the model type of the text family that fits a config best; None if no family reads its essential fields.

    Essential are the numbers of heads and experts. Preferred is a family whose name begins the model type of the text
    decoder; then one that reads the config's fields of experts, latents and states and looks for no others; then the
    one that reads the most fields.
    """
    text = find_text_fields(fields)
    named = str(text.get("model_type", ""))
    essential = {name for name in _ESSENTIAL if _has_effect(name, text)}
    scores: dict[str, tuple[int, int, int]] = {}
    for name, row in FAMILIES.items():
        if row.task is not TEXT or row.nested:
            continue
        attempt = text.copy_unread()
        try:
            read(name, attempt)
        except ModelError:
            continue
        known_fields = attempt.asked_names
        present = {field for field in known_fields if field in attempt}
        if essential <= present:
            begins = len(name) if named.startswith(name) else 0
            structure = [1 if field in present else -1 for field in known_fields if _STRUCTURE.search(field)]
            scores[name] = (begins, sum(structure), len(present))
    return max(scores, key=lambda name: scores[name], default=None)


def _has_effect(name: str, fields: Fields) -> bool:
    """Return whether a field may change a model's parameters or times.

    It does not if it is absent, false, 0 or empty, or if its name is one that only matters for training or sampling.
    """
    value = fields.get(name, None)
    if value in _OFF or (value == 1 and _EACH_LAYER.fullmatch(name)):
        return False
    return not _WITHOUT_EFFECT.fullmatch(name)


def _explain(names: tuple[str, ...]) -> Iterator[str]:
    """Yield "<fields>: <what they may mean>" for the ignored fields `names`, one text for all fields of a meaning."""
    meanings: dict[str, list[str]] = {}
    for name in names:
        meaning = next((meaning for pattern, meaning in _MEANINGS if re.search(pattern, name)), _UNKNOWN)
        meanings.setdefault(meaning, []).append(name)
    for meaning, fields in meanings.items():
        yield f"{', '.join(fields)}: {meaning}"
