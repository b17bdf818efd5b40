"""Parameters, caches and active experts from config.json alone, against models that transformers built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors

from model.config import ModelConfig
from model.config.mixers import GroupedAttention
from model.config.published import PUBLISHED
from model.errors import ModelError
from model.families import FAMILIES
from model.layers import find_unsupported
from model.plan.sizes import load_model
from tests.model.conftest import PRETRAINED
from tests.model.folders import TINY

CONFIGS = PUBLISHED
COUNTS = dict(
    line.split("\t") for line in (Path(__file__).parent / "published_parameters.tsv").read_text().splitlines()
)

TOKEN = {"llama-2-7b": 524_288, "llama-2-13b": 819_200, "llama-3-8b": 131_072, "llama-3-70b": 327_680}


def config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def written(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


GEMMA3N: dict[str, Any] = {
    **TINY,
    "model_type": "gemma3n_text",
    "num_kv_shared_layers": 0,
    "max_position_embeddings": 4096,
    "activation_sparsity_pattern": 0.95,
}
"""The fields of a config that is planned only."""
NOT_COMPUTED = "sparse activations or alternating updates of several hidden states"


def changed(folder: Path, name: str, **changes: Any) -> Path:
    """Return a published config with some fields changed; None leaves one out."""
    fields = {key: value for key, value in {**config(name), **changes}.items() if value is not None}
    return written(folder, fields)


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_parameters_of_published_models(name) -> None:
    model = load_model(CONFIGS / f"{name}.json")
    assert model.total == int(COUNTS[name])
    assert sum(model.parameters.values()) == model.total


WITHOUT_CONFIG = {
    "ministral",
    "ministral3",
    "mistral3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "glm4_moe",
    "glm4_moe_lite",
    "solar_open",
    "afmoe",
    "qwen2",
    "gemma4_text",
    "gemma4",
    "gemma3n_text",
    "phi3",
    "gpt2",
    "smollm3",
    "granite",
}
"""Families of texts and speech of which no published config is in the folder."""


def test_every_published_config_has_its_count_and_every_reader_a_config() -> None:
    assert set(COUNTS) == {path.stem for path in CONFIGS.glob("*.json")}
    assert len(COUNTS) == 46
    planned = {name for name, row in FAMILIES.items() if row.task.record is ModelConfig}
    assert planned - {config(name)["model_type"] for name in COUNTS} == WITHOUT_CONFIG


def test_parameters_of_a_checkpoint_on_disk() -> None:
    with safetensors.safe_open(PRETRAINED / "model.safetensors", "numpy") as weights:
        num_elements = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    assert load_model(PRETRAINED).total == num_elements


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "deepseek-v2",
            {"experts": 148_478_361_600 + 74_239_180_800, "mlp": 3_021_045_760, "head": 524_288_000},
        ),
        ("gpt-oss-20b", {"experts": 19_116_933_120, "attention": 637_203_456, "norms": 141_120}),
        ("gemma-3-1b", {"embedding": 301_989_888, "head": 0, "mlp": 3 * 207_028_224}),
        ("gemma-3-27b", {"aside": 27_432_406_640 - 27_009_346_304}),
        ("qwen3-next-80b-a3b", {"mixer": 1_213_860_096, "attention": 327_155_712, "mlp": 201_424_896}),
        ("mamba-130m", {"mixer": 90_501_120, "attention": 0, "norms": 18_432 + 768}),
        ("whisper-tiny", {"aside": 8_208_384, "embedding": 19_916_160 + 172_032}),
    ],
)
def test_parameters_by_part(name, expected) -> None:
    counted = load_model(CONFIGS / f"{name}.json").parameters
    assert {category: counted[category] for category in expected} == expected


@pytest.mark.parametrize("name", sorted(TOKEN))
def test_cache_of_a_token_in_two_byte_elements(name) -> None:
    model = load_model(CONFIGS / f"{name}.json")
    assert model.count_cache_bytes(1, "bfloat16") == TOKEN[name]
    assert model.count_cache_bytes(1024, "float16") == 1024 * TOKEN[name]


def test_latent_attention_caches_one_vector_of_576_elements() -> None:
    assert load_model(CONFIGS / "deepseek-v3.json").count_cache_bytes(10, "float32") == 4 * 61 * 10 * (
        512 + 64
    )


@pytest.mark.parametrize(("tokens", "kept"), [(127, 127), (128, 128), (129, 128)])
def test_layers_with_a_window_cache_no_more_than_it(tokens, kept) -> None:
    model = load_model(CONFIGS / "gpt-oss-20b.json")
    assert model.count_cache_bytes(tokens, "bfloat16") == 2 * 12 * 2 * 512 * (tokens + kept)


def test_window_patterns_follow_the_families() -> None:
    for name, counts in (("gemma-3-27b", {1024: 52, None: 10}), ("gemma-2-2b", {4096: 13, None: 13})):
        blocks = load_model(CONFIGS / f"{name}.json").blocks
        assert {next(iter(block.count_page_bytes(1, "bfloat16"))): block.count for block in blocks} == counts


def test_state_of_a_mamba_does_not_grow() -> None:
    model = load_model(CONFIGS / "mamba-130m.json")
    for tokens in (1, 100_000):
        assert model.count_cache_bytes(tokens, "bfloat16") == 24 * 1536 * (4 * 16 + 2 * 3)


def test_state_of_the_gated_delta_rule_stands_beside_the_cache_of_every_fourth_layer() -> None:
    model = load_model(CONFIGS / "qwen3-next-80b-a3b.json")
    state, inputs = 32 * 128 * 128, 3 * (2 * 16 + 32) * 128
    for tokens in (0, 10):
        attended = 12 * 2 * 2 * 256 * tokens
        assert model.count_cache_bytes(tokens, "bfloat16") == 36 * (4 * state + 2 * inputs) + 2 * attended
    assert round(model.active / 1e9, 1) == 3.3
    assert [block.count for block in model.blocks] == [36, 12]


def test_qwen3_next_takes_the_kinds_of_its_layers_from_either_field(tmp_path) -> None:
    layer_types = ["linear_attention", "full_attention"] * 24
    for changes, attending in (({"layer_types": layer_types}, 24), ({"full_attention_interval": 3}, 16)):
        model = load_model(changed(tmp_path, "qwen3-next-80b-a3b", **changes))
        assert (
            sum(block.count for block in model.blocks if None in block.count_page_bytes(1, "float32"))
            == attending
        )


def test_decoder_of_whisper_caches_what_the_encoder_left() -> None:
    model = load_model(CONFIGS / "whisper-tiny.json")
    assert model.count_cache_bytes(3, "float32") == 4 * 4 * 2 * 384 * (1500 + 3)


def test_active_parameters_are_those_of_the_chosen_experts() -> None:
    model = load_model(CONFIGS / "mixtral-8x7b.json")
    expert = 3 * 4096 * 14336
    dense = model.total - 32 * 8 * expert
    embedding, head, final = 32000 * 4096, 32000 * 4096, 4096
    assert model.active == dense + 32 * 2 * expert - embedding - head - final


def test_a_large_batch_reaches_every_expert_and_one_token_its_own() -> None:
    (block,) = load_model(CONFIGS / "mixtral-8x7b.json").blocks
    experts = block.parameters["experts"]
    other_parameters = block.parameters.total() - experts
    for tokens, share in ((1, 2 / 8), (2, 1 - 0.75**2), (64, 1.0)):
        assert block.count_active(tokens) == pytest.approx(other_parameters + share * experts, rel=1e-7)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 9])
def test_pairs_are_counted_as_one_by_one(window) -> None:
    mixer = GroupedAttention(4, 4, 64, window=window)
    counted = sum(
        1 for query in range(8) for key in range(query + 1) if window is None or query - key < window
    )
    assert mixer.count_pairs(8) == counted


def test_a_folder_and_its_file_give_the_same_model(tmp_path) -> None:
    path = written(tmp_path, TINY)
    assert load_model(tmp_path) == load_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "rwkv"},
            "model_type: 'rwkv' is not known; --as llama plans the nearest known family",
        ),
        (
            {"model_type": "lama"},
            "model_type: 'lama' is not known; did you mean llama? --as llama plans the nearest",
        ),
        ({"model_type": None}, "model_type: None is not known; --as llama plans the nearest"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"vocab_size": "300"}, "vocab_size: '300' is not a positive whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads, 32"),
        (
            {"num_attention_heads": 24, "num_key_value_heads": None},
            "hidden_size: 4096 is not a multiple of num_attention_heads, 24",
        ),
        (
            {"num_hidden_layers": 10_001},
            "num_hidden_layers: 10001 is more than any machine holds; at most 10,000",
        ),
        (
            {"hidden_size": 2**30, "head_dim": 128},
            "describes more than 1e+15 parameters; a plan takes no more",
        ),
    ],
)
def test_refuses_a_config_that_describes_no_model(tmp_path, changes, message) -> None:
    name = "llama-2-7b"
    with pytest.raises(ModelError, match=r"config\.json") as refused:
        load_model(changed(tmp_path, name, **changes))
    assert message in str(refused.value)
    assert load_model(changed(tmp_path, name)).total == int(COUNTS[name])


@pytest.mark.parametrize(
    ("name", "field", "refused", "message", "accepted"),
    [
        ("llama-2-7b", "num_hidden_layers", 10_001, "at most 10,000", 10_000),
        ("llama-2-7b", "num_attention_heads", 1024, "1024 is more than any machine holds; at most 512", 512),
        ("llama-2-7b", "head_dim", 2**16 + 2, "head_dim: 65538 is more", 2**16),
        ("llama-2-7b", "max_position_embeddings", 2**31, "at most 2,147,483,647", 2**31 - 1),
        ("deepseek-v3", "num_attention_heads", 513, "at most 512", 512),
        ("deepseek-v3", "qk_rope_head_dim", 2**16 + 1, "at most 65,536", 2**16),
        ("whisper-tiny", "decoder_attention_heads", 768, "at most 512", 6),
        ("mixtral-8x7b", "num_experts_per_tok", 9, "9 of 8 experts", 8),
        ("gpt-oss-20b", "layer_types", ["full_attention"], "not a list of 24 names", ["full_attention"] * 24),
        ("gpt-oss-20b", "layer_types", ["linear"] * 24, "'linear'; known are", ["sliding_attention"] * 24),
        ("qwen3-30b-a3b", "mlp_only_layers", "all", "'all' is not a list of layers", [0, 1]),
    ],
)
def test_refuses_a_field_beyond_its_limit(tmp_path, name, field, refused, message, accepted) -> None:
    with pytest.raises(ModelError) as error:
        load_model(changed(tmp_path, name, **{field: refused}))
    assert message in str(error.value)
    assert load_model(changed(tmp_path, name, **{field: accepted})).total > 0


def test_experts_are_counted_under_the_name_of_transformers_5(tmp_path) -> None:
    name = "qwen3-30b-a3b"
    experts = config(name)["num_experts"]
    saved = load_model(changed(tmp_path, name, num_experts=None, num_local_experts=experts))
    assert saved.total == int(COUNTS[name])
    with pytest.raises(ModelError, match="num_experts: missing"):
        load_model(changed(tmp_path, name, num_experts=None))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_refuses_a_file_without_an_object(tmp_path, text) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="JSON"):
        load_model(tmp_path)


def test_refuses_a_missing_file(tmp_path) -> None:
    with pytest.raises(ModelError, match="is an empty folder; a model is a Hugging Face folder with config"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"attention_bias": True}, 32 * (3 * 4096 + 4096)),
        ({"mlp_bias": True}, 32 * (2 * 11008 + 4096)),
        ({"model_type": "qwen2"}, 32 * 3 * 4096),
        ({"tie_word_embeddings": True}, -32000 * 4096),
    ],
)
def test_biases_and_tied_tables_are_counted(tmp_path, changes, extra) -> None:
    model = load_model(changed(tmp_path, "llama-2-7b", **changes))
    assert model.total == int(COUNTS["llama-2-7b"]) + extra
    assert find_unsupported(model.config) == ()
