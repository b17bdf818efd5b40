"""Families whose parts others have: what their configs mean, and the towers around their text decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.config.blocks import Experts, Mlp
from model.config.mixers import GatedDelta, GroupedAttention, HeadNorm, LatentAttention
from model.config.published import PUBLISHED
from model.errors import ModelError
from model.families import load_config, read_config
from model.plan.sizes import load_model
from tests.model.folders import TINY

ROUTED: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "architectures"},
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}


def write(folder: Path, fields: dict[str, Any], **changes: Any) -> Path:
    """Write a config; a change to None leaves a field out."""
    merged = {name: value for name, value in {**fields, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    return folder


def experts(folder: Path) -> list[bool]:
    """Return whether each layer has experts."""
    return [isinstance(block.mlp, Experts) for block in read_config(folder).blocks]


def test_kimi_k2_is_a_deepseek_v3_under_another_name(tmp_path) -> None:
    kimi = read_config(PUBLISHED / "kimi-k2.json")
    fields = json.loads((PUBLISHED / "kimi-k2.json").read_text())
    assert kimi.model_type == "kimi_k2"
    assert kimi.blocks == read_config(write(tmp_path, fields, model_type="deepseek_v3")).blocks


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
@pytest.mark.parametrize("architectures", [["DeepseekV3ForCausalLM"], None])
def test_of_two_types_with_one_architecture_a_config_keeps_its_own(
    tmp_path, model_type, architectures
) -> None:
    folder = write(
        tmp_path, {**ROUTED, **LATENT}, model_type=model_type, architectures=architectures, n_group=1
    )
    assert load_config(
        write(folder, json.loads((folder / "config.json").read_text()), topk_group=1)
    ).model_type == (model_type)


def test_glm_4_5_has_an_mlp_first_half_rotated_heads_and_one_group(tmp_path) -> None:
    folder = write(tmp_path, ROUTED, model_type="glm4_moe", num_hidden_layers=3)
    config = read_config(folder)
    mixer, routed = config.blocks[1].mixer, config.blocks[1].mlp
    assert isinstance(mixer, GroupedAttention)
    assert isinstance(routed, Experts)
    assert mixer.positions is not None
    assert (mixer.positions.width, mixer.head_dim, mixer.head_norm, mixer.output_bias) == (4, 8, None, False)
    assert (routed.groups, routed.scoring, routed.choice_bias, routed.scale) == (1, "sigmoid", True, 1.0)
    assert experts(folder) == [False, True, True]
    assert experts(write(folder, ROUTED, model_type="glm4_moe", first_k_dense_replace=0)) == [True, True]
    normed = read_config(write(folder, ROUTED, model_type="glm4_moe", use_qk_norm=True, attention_bias=True))
    mixer = normed.blocks[0].mixer
    assert isinstance(mixer, GroupedAttention)
    assert (mixer.head_norm, mixer.query_bias, mixer.output_bias) == (HeadNorm.head, True, False)


def test_solar_open_has_experts_in_every_layer_and_whole_rotated_heads(tmp_path) -> None:
    config = read_config(write(tmp_path, ROUTED, model_type="solar_open", first_k_dense_replace=1))
    assert experts(tmp_path) == [True, True]
    mixer = config.blocks[0].mixer
    assert isinstance(mixer, GroupedAttention)
    assert mixer.head_dim == 128  # config.json names none
    assert mixer.positions is not None
    assert mixer.positions.width == 128


@pytest.mark.parametrize(
    ("layer_types", "has_experts"), [(None, [False, True]), (["sparse", "dense"], [True, False])]
)
def test_layers_of_glm_4_7_flash_follow_mlp_layer_types(tmp_path, layer_types, has_experts) -> None:
    folder = write(tmp_path, {**ROUTED, **LATENT}, model_type="glm4_moe_lite", mlp_layer_types=layer_types)
    assert experts(folder) == has_experts
    assert isinstance(read_config(folder).blocks[0].mixer, LatentAttention)


@pytest.mark.parametrize("layer_types", [["dense"], ["dense", "linear"], 7, "dense", [1, 2]])
def test_hostile_layer_types_of_glm_4_7_flash_are_refused(tmp_path, layer_types) -> None:
    folder = write(tmp_path, {**ROUTED, **LATENT}, model_type="glm4_moe_lite", mlp_layer_types=layer_types)
    with pytest.raises(ModelError, match="mlp_layer_types: "):
        read_config(folder)


@pytest.mark.parametrize(("rotary_dim", "width"), [(4, 4), (8, 8), (None, 8)])
def test_minimax_m2_rotates_rotary_dim_elements(tmp_path, rotary_dim, width) -> None:
    changes = {"model_type": "minimax_m2", "num_local_experts": 8, "head_dim": 8, "rotary_dim": rotary_dim}
    mixer = read_config(write(tmp_path, ROUTED, **changes)).blocks[0].mixer
    assert isinstance(mixer, GroupedAttention)
    assert mixer.positions is not None
    assert (mixer.positions.width, mixer.head_norm) == (width, HeadNorm.width)


@pytest.mark.parametrize("rotary_dim", [0, -4, "4", 9, True])
def test_a_hostile_rotary_dim_is_refused(tmp_path, rotary_dim) -> None:
    changes = {"num_local_experts": 8, "head_dim": 8, "rotary_dim": rotary_dim}
    folder = write(
        tmp_path, ROUTED, model_type="minimax_m2", architectures=["MiniMaxM2ForCausalLM"], **changes
    )
    with pytest.raises(ModelError, match=r"rotary_dim: |partial_rotary_factor: "):
        load_config(folder)


@pytest.mark.parametrize(
    ("beta", "original", "is_refused"), [(0.1, 63, True), (0.1, 64, False), (0.0, 16, False)]
)
def test_ministral_3_is_computed_where_no_query_is_scaled(tmp_path, beta, original, is_refused) -> None:
    """The context of the config has 64 positions."""
    rope = {**YARN, "llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    changes = {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
    folder = write(tmp_path, TINY, rope_parameters=rope, rope_theta=None, **changes)
    refusals = read_config(folder).refusals
    assert ["llama_4_scaling_beta" in refusal for refusal in refusals] == [True] * is_refused
    if is_refused:
        with pytest.raises(ModelError, match="queries are not scaled by their position"):
            load_config(folder)
    else:
        load_config(folder)


@pytest.mark.parametrize("beta", ["x", [], True, float("inf")])
def test_a_hostile_scaling_of_queries_is_refused(tmp_path, beta) -> None:
    rope = {**YARN, "llama_4_scaling_beta": beta}
    folder = write(tmp_path, TINY, model_type="ministral3", rope_parameters=rope)
    with pytest.raises(ModelError, match="llama_4_scaling_beta: "):
        read_config(folder)


def test_qwen3_5_has_the_parts_of_qwen3_next_with_an_mlp() -> None:
    config = read_config(PUBLISHED / "qwen3.5-27b.json")
    mixer_types = [type(block.mixer) for block in config.blocks[:4]]
    assert mixer_types == [GatedDelta, GatedDelta, GatedDelta, GroupedAttention]
    assert all(isinstance(block.mlp, Mlp) for block in config.blocks)
    assert config.encoder is not None
    assert config.dtype == "bfloat16"
    routed = read_config(PUBLISHED / "qwen3.5-35b-a3b.json").blocks[0].mlp
    assert isinstance(routed, Experts)
    assert (routed.count, routed.shared_width, routed.shared_gate, routed.renormalise) == (
        256,
        512,
        True,
        True,
    )


def test_a_qwen3_5_without_gate_is_planned_and_not_computed(tmp_path) -> None:
    text = json.loads((PUBLISHED / "qwen3.5-27b.json").read_text())["text_config"]
    fields = {**text, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    load_config(write(tmp_path, fields))
    with pytest.raises(ModelError, match="attn_output_gate: false"):
        load_config(write(tmp_path, fields, attn_output_gate=False))


TEXT = {name: value for name, value in TINY.items() if name not in ("architectures", "torch_dtype")}


MISTRAL3: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "mistral", "head_dim": 8},
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_channels": 3,
        "patch_size": 4,
        "image_size": 16,
    },
}
MISTRAL3_COUNTS: list[tuple[dict[str, Any], int]] = [
    ({"tie_word_embeddings": True}, 40_880),
    (
        {"vision_feature_layer": [-2, -1], "multimodal_projector_bias": True, "spatial_merge_size": 3},
        54_192,
    ),
    ({"text_config": {**TEXT, "model_type": "ministral3", "head_dim": 12}}, 53_552),
]
"""Changes of the config and the parameters of the model that transformers 5.20.2 builds from it."""


@pytest.mark.parametrize(("changes", "count"), MISTRAL3_COUNTS)
def test_parameters_of_mistral_3(tmp_path, changes, count) -> None:
    assert load_model(write(tmp_path, {**MISTRAL3, **changes, "model_type": "mistral3"})).total == count


@pytest.mark.deep
@pytest.mark.parametrize(("changes", "count"), MISTRAL3_COUNTS)
def test_parameters_of_mistral_3_are_those_of_transformers(changes, count) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    transformers = pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    with torch.device("meta"):
        config = transformers.Mistral3Config(**MISTRAL3 | changes)
        model = transformers.Mistral3ForConditionalGeneration(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


AFMOE: dict[str, Any] = {
    **TINY,
    "architectures": ["AfmoeForCausalLM"],
    "model_type": "afmoe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_shared_experts": 1,
    "sliding_window": 16,
}


def test_afmoe_rotates_in_layers_with_a_window_alone(tmp_path) -> None:
    config = load_config(write(tmp_path, AFMOE, head_dim=8))
    mixers = [block.mixer for block in config.blocks]
    assert all(isinstance(mixer, GroupedAttention) and mixer.output_gate for mixer in mixers)
    mixer_traits = [(mixer.window, mixer.positions is None) for mixer in mixers]
    assert mixer_traits == [(16, False)] * 3 + [(None, True)]
    assert experts(tmp_path) == [False, True, True, True]
    assert config.embedding_scale == 1.0
    assert config.blocks[1].norms.after
    changed = load_config(
        write(tmp_path, AFMOE, head_dim=8, num_dense_layers=0, mup_enabled=True, global_attn_every_n_layers=2)
    )
    windows = [block.mixer.window for block in changed.blocks]
    assert windows == [16, None, 16, None]
    assert all(isinstance(block.mlp, Experts) for block in changed.blocks)
    assert changed.embedding_scale == 32**0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["sliding_attention"]},
        {"num_experts": 0},
        {"num_experts_per_tok": 9},
        {"num_shared_experts": -1},
        {"num_dense_layers": "1"},
        {"route_scale": 0},
        {"mup_enabled": "yes"},
        {"global_attn_every_n_layers": 0},
    ],
)
def test_hostile_fields_of_afmoe_are_refused_by_name(tmp_path, changes) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        load_config(write(tmp_path, AFMOE, **changes))
