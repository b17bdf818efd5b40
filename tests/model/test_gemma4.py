"""Gemma 4: what its config says of every layer, caches that layers share, and what a plan counts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from model.config import ModelConfig
from model.config.blocks import Experts
from model.config.mixers import GroupedAttention
from model.config.rope import RopeType
from model.errors import ModelError
from model.families import compose, load_config, read_config
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import list_states
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.plan.memory import compute_footprint
from model.plan.sizes import load_model
from tests.model.tiny_families import TINY, tiny_model, write_tiny

torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
transformers = pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

SLIDING, FULL = "sliding_attention", "full_attention"
FLOAT32 = np.dtype(np.float32)

# As google/gemma-4-E2B describes its text model: sizes of full layers stand in fields of their own.
E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": 30.0,
}
SMALL = {
    **E2B,
    "num_hidden_layers": 10,
    "num_kv_shared_layers": 5,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 2,
}
ROUTED = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def mixers(config: ModelConfig) -> list[GroupedAttention]:
    attentions = [block.mixer for block in config.blocks]
    assert all(isinstance(mixer, GroupedAttention) for mixer in attentions)
    return attentions  # type: ignore[return-value]


def test_layers_read_the_cache_of_the_last_earlier_layer_of_their_kind(tmp_path) -> None:
    layers = mixers(load_config(written(tmp_path, SMALL)))
    assert [layer.cache_of for layer in layers] == [None] * 5 + [3, 3, 3, 3, 4]
    assert [layer.window for layer in layers] == ([512] * 4 + [None]) * 2
    assert [layer.head_dim for layer in layers] == ([256] * 4 + [512]) * 2
    assert [layer.value_norm for layer in layers] == [True] * 5 + [False] * 5
    rope = layers[4].positions.rope
    assert (rope.rope_type, rope.pairs, rope.theta) == (RopeType.proportional, 64, 1e6)


def test_the_last_layer_sees_all_positions_whatever_its_type_says(tmp_path) -> None:
    fields = {**SMALL, "num_kv_shared_layers": 0, "layer_types": [SLIDING] * 10}
    assert [mixer.window for mixer in mixers(load_config(written(tmp_path, fields)))] == [512] * 9 + [None]


@pytest.mark.parametrize("name", [name for name, (family, _) in TINY.items() if family == "Gemma4"])
def test_sizes_by_layer_are_those_of_the_fields_for_full_layers(tmp_path, name) -> None:
    """Read published configs' fields for all full layers like the `per_layer_config` of transformers 5."""
    saved = load_config(write_tiny(tmp_path, name))
    fields = {**json.loads((tmp_path / "config.json").read_text()), **TINY[name][1]}
    del fields["per_layer_config"]
    assert load_config(written(tmp_path, fields)) == saved


def test_states_are_held_once(tmp_path) -> None:
    config = load_config(written(tmp_path, SMALL))
    step = StepShape(Phase.decode, 1, 1, 128, 128, 1, FLOAT32, WeightDtypes(FLOAT32))
    names = [state.name for layer in compose(config).layers for state in list_states(layer, step)]
    assert names == [
        f"layers.{layer}.attention.{state}" for layer in range(5) for state in ("keys", "values")
    ]


def test_tensors_of_keys_that_another_layer_has_are_not_read(tmp_path) -> None:
    config = load_config(write_tiny(tmp_path, "gemma4"))
    tensors = dict(open_checkpoint(tmp_path, config))
    tensor_name = "model.layers.{}.self_attn.k_proj.weight"
    assert tensor_name.format(2) in tensors and tensor_name.format(3) not in tensors
    safetensors.numpy.save_file(
        {**tensors, tensor_name.format(3): np.ones((24, 36), np.float32)}, tmp_path / "model.safetensors"
    )
    assert set(open_checkpoint(tmp_path, config)) == set(tensors)
    safetensors.numpy.save_file(
        {**tensors, tensor_name.format(6): np.ones((24, 36), np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ModelError, match=r"layers\.6\.self_attn\.k_proj\.weight is not a tensor of Gemma4For"
    ):
        open_checkpoint(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: all; a layer sees earlier"),
        (ROUTED, "enable_moe_block: true; no layer computes routed experts"),
        ({"num_kv_shared_layers": 10}, "10 of 10 layers read another layer's cache; at least one needs"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers: 6; none of the 4 layers with a cache has"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers: -1 is not a positive whole number"),
        ({"global_head_dim": 511}, "global_head_dim: 511 is odd; rotary embedding turns pairs"),
        ({"sliding_window": None}, "sliding_window: null; layers of this family have a window"),
        ({"vocab_size_per_layer_input": 9}, "9; a vocabulary of 262144 tokens needs as many rows"),
        (
            {"per_layer_config": {"4": {"head_dim": 64}}},
            "per_layer_config: layers with the same window must have equal heads",
        ),
        ({"per_layer_config": {"x": {}}}, "per_layer_config.x: is not the number of a layer"),
        (
            {"per_layer_config": {"1": {"sliding_window": 4}}},
            "per_layer_config: sliding_window; layers differ in",
        ),
        ({"rope_parameters": {FULL: {}}}, "rope_parameters.sliding_attention: missing; rope_parameters has"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads: 3 does not divide num_attention_heads, 8",
        ),
        (
            {
                "rope_parameters": {
                    SLIDING: {},
                    FULL: {"rope_type": "proportional", "partial_rotary_factor": 2},
                }
            },
            "rope_parameters.full_attention.partial_rotary_factor: 2.0 of a head is more than the head",
        ),
    ],
)
def test_refuses_what_no_layer_computes(tmp_path, changes, message) -> None:
    """The config without the change is accepted."""
    assert load_config(written(tmp_path, SMALL)).architecture == "Gemma4ForCausalLM"
    with pytest.raises(ModelError) as refused:
        load_config(written(tmp_path, {**SMALL, **changes}))
    assert message in str(refused.value)


@pytest.mark.parametrize("use", [None, "vision"])
def test_attention_to_later_images_changes_nothing_for_text(tmp_path, use) -> None:
    fields = {**SMALL, "use_bidirectional_attention": use}
    assert load_config(written(tmp_path, fields)) == load_config(written(tmp_path, SMALL))


@pytest.mark.parametrize("name", [name for name, (family, _) in TINY.items() if family == "Gemma4"])
def test_a_plan_counts_the_parameters_and_the_bytes_of_a_tiny_model(tmp_path, name) -> None:
    """Numbers that multiply a layer's result are buffers, which a rank holds and nothing counts as parameters."""
    config = load_config(write_tiny(tmp_path, name))
    counts = load_model(tmp_path)
    assert counts.total == sum(parameter.numel() for parameter in tiny_model(name).parameters())
    (rank_weights,) = shard_weights(config, dict(open_checkpoint(tmp_path, config)), 1)
    sizes = [array.nbytes for array in rank_weights.arrays.values()]
    assert compute_footprint(counts, "float32", 1, 16).weight_bytes == sum(sizes)
    step = StepShape(Phase.decode, 1, 1, 16, 16, 1, FLOAT32, WeightDtypes(FLOAT32))
    states = [state for layer in compose(config).layers for state in list_states(layer, step)]
    held_positions = sum(state.nbytes for state in states) // 16
    assert sum(counts.count_page_bytes(1, "float32").values()) == held_positions


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 2}, ROUTED])
def test_parameters_of_published_shapes_are_those_of_transformers(tmp_path, changes) -> None:
    fields = {**E2B, **changes}
    counts = load_model(written(tmp_path, fields))
    text_config = transformers.Gemma4TextConfig(
        **{key: field for key, field in fields.items() if key != "model_type"}
    )
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(text_config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert isinstance(read_config(tmp_path).blocks[0].mlp, Experts) == bool(changes == ROUTED)


@pytest.mark.parametrize("towers", [("vision",), ("vision", "audio"), ()])
def test_towers_of_a_model_that_sees_and_hears_are_counted(tmp_path, towers) -> None:
    tower_configs = {"vision": transformers.Gemma4VisionConfig(), "audio": transformers.Gemma4AudioConfig()}
    full_config = transformers.Gemma4Config(text_config=transformers.Gemma4TextConfig(**E2B))
    full_config.vision_config = tower_configs["vision"] if "vision" in towers else None
    full_config.audio_config = tower_configs["audio"] if "audio" in towers else None
    full_config.save_pretrained(tmp_path)
    counts = load_model(tmp_path)
    with torch.device("meta"):
        model = transformers.Gemma4ForConditionalGeneration(full_config)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ModelError) as refused:
        load_config(tmp_path)
    assert ("needs the vision and audio towers, which" in str(refused.value)) == (len(towers) == 2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 5, "num_kv_shared_layers": 0, "intermediate_size": [96] * 5, "laurel_rank": 3},
    ],
)
def test_gemma_3n_is_counted_and_refused_by_what_is_missing(tmp_path, changes) -> None:
    text_config = transformers.Gemma3nTextConfig(**changes)
    text_config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.Gemma3nForCausalLM(text_config)
    assert load_model(tmp_path).total == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ModelError) as refused:
        load_config(tmp_path)
    sparse = "" if changes else "sparse activations, "
    needs = f"gemma3n_text needs {sparse}alternating updates of several hidden states"
    assert f"{needs}, which no layer computes; nkw plan takes it" in str(refused.value)


def test_a_step_reads_a_shared_cache_in_every_layer(tmp_path) -> None:
    counts = load_model(written(tmp_path, SMALL))
    window, full = 2 * 256, 2 * 512
    assert counts.count_cache_bytes(1000, "bfloat16") == 2 * (4 * window * 512 + full * 1000)
    assert counts.count_cache_bytes(1000, "bfloat16", read=True) == 2 * (8 * window * 512 + 2 * full * 1000)
