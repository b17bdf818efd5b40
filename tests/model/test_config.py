"""config.json and generation_config.json become one checked record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig, read_json
from model.config.rope import RopeType
from model.errors import ModelError
from model.families import load_config
from tests.model.folders import TINY


def change(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_config(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_reads_every_field(write_model) -> None:
    config = load_config(write_model(head_dim=16, torch_dtype="bfloat16"))
    assert isinstance(config, ModelConfig)
    assert (config.hidden_size, config.blocks[0].mlp.width, config.vocab_size) == (32, 48, 300)
    mixer = config.blocks[0].mixer
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim, len(config.blocks)) == (4, 2, 16, 2)
    assert (config.blocks[0].norms.eps, config.max_position_embeddings, config.dtype) == (
        1e-5,
        64,
        "bfloat16",
    )
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.blocks[0].mixer.positions.rope.rope_type is RopeType.default


def test_fields_that_hugging_face_derives_may_be_absent(write_model) -> None:
    config = load_config(
        write_model(num_key_value_heads=None, head_dim=None, torch_dtype=None, rope_theta=None)
    )
    mixer = config.blocks[0].mixer
    assert (mixer.kv_heads, mixer.head_dim, config.dtype) == (4, 8, None)
    assert config.blocks[0].mixer.positions.rope.theta == 10000.0


def test_dtype_is_read_under_its_new_name(write_model) -> None:
    assert load_config(change(write_model(torch_dtype=None), dtype="float16")).dtype == "float16"


@pytest.mark.parametrize("eos", [2, [2, 5]])
def test_end_tokens_are_one_or_several(write_model, eos) -> None:
    assert load_config(write_model(eos_token_id=eos)).eos_token_ids == tuple(
        eos if isinstance(eos, list) else [eos]
    )


def test_generation_config_has_the_last_word_on_end_tokens(write_model) -> None:
    folder = write_model()
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load_config(folder).eos_token_ids == (7, 8)
    (folder / "generation_config.json").write_text("{}")
    assert load_config(folder).eos_token_ids == (2,)


def test_rope_scaling_is_read_in_both_spellings(write_model) -> None:
    fields = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    old = load_config(write_model(name="old", rope_scaling={"rope_type": "llama3", **fields}))
    new = load_config(
        write_model(
            name="new",
            rope_theta=None,
            rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **fields},
        )
    )
    legacy = load_config(write_model(name="legacy", rope_scaling={"type": "linear", "factor": 2.0}))
    assert old.blocks[0].mixer.positions == new.blocks[0].mixer.positions
    assert old.blocks[0].mixer.positions.rope.rope_type is RopeType.llama3
    assert old.blocks[0].mixer.positions.rope.original_positions == 32
    assert legacy.blocks[0].mixer.positions.rope.rope_type is RopeType.linear


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "32"}, "hidden_size: '32' is not a positive whole number"),
        ({"hidden_size": True}, "hidden_size: True is not a positive whole number"),
        ({"vocab_size": 0}, "vocab_size: 0 is not a positive whole number"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: 2.5 is not a positive whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: 'small' is not a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not a positive number"),
        ({"rope_theta": 10**400}, "rope_theta: 1000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads, 4"),
        ({"hidden_size": 34}, "hidden_size: 34 is not a multiple of num_attention_heads, 4"),
        ({"head_dim": 7}, "head_dim: 7 is odd; rotary embedding turns pairs"),
        ({"hidden_act": "elu"}, "hidden_act: 'elu'; an MLP is computed with silu, "),
        ({"mlp_bias": 1}, "mlp_bias: 1 is neither true nor false"),
        ({"torch_dtype": "int8"}, "torch_dtype: 'int8'; known are bfloat16, float16, float32"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config: weights quantised by hqq; fp8, compressed-tensors, ",
        ),
        ({"eos_token_id": 300}, "eos_token_id: 300 is not a token of a vocabulary of 300"),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>' is neither a token id nor a list of them"),
        (
            {"architectures": ["RwkvForCausalLM"]},
            "architectures: RwkvForCausalLM is not known; known are Llama",
        ),
        ({"architectures": "x"}, "architectures: 'x' is not a list of one name; known are LlamaForCausalLM"),
        (
            {"architectures": None, "model_type": "gptj"},
            "architectures: missing, and model_type is 'gptj'; known",
        ),
        ({"rope_scaling": 3}, "rope_scaling: 3 is not an object"),
        (
            {"rope_scaling": {"rope_type": "spiral"}},
            "rope_scaling.rope_type: 'spiral' is not supported; known are",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3}},
            "rope_scaling.short_factor: not a list of 4 positive numbers, one for each pair of a head",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_theta": 1.0}, "rope_theta: 1.0; must be greater than 1"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: 0.5 is not 1; this family turns whole heads",
        ),
        (
            {"rope_scaling": dict(rope_type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=4.0)},
            "rope_scaling.high_freq_factor: 4.0; must be greater than low_freq_factor, 4.0",
        ),
    ],
)
def test_refuses_a_field_by_file_name_and_value(write_model, fields, message) -> None:
    folder = write_model()
    assert refusal(change(folder, **fields)).startswith(f"{folder / 'config.json'}: {message}")


def test_largest_end_token_is_accepted(write_model) -> None:
    assert load_config(write_model(eos_token_id=299)).eos_token_ids == (299,)


def test_model_type_stands_in_for_absent_architectures(write_model) -> None:
    assert load_config(write_model(architectures=None)).architecture == "LlamaForCausalLM"


def test_refuses_a_missing_folder_and_a_missing_file(tmp_path) -> None:
    assert "is not a folder" in refusal(tmp_path / "nowhere")
    assert "is not a folder" in refusal(tmp_path / ("a" * 300))
    assert refusal(tmp_path).startswith(
        f"{tmp_path} is an empty folder; a model is a Hugging Face folder with"
    )


@pytest.mark.parametrize(
    "text",
    ['{"hidden_size": 3', "[1]", "\xff", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"],
    ids=["cut off", "a list", "not UTF-8", "nested too deeply", "a number of 5000 digits"],
)
def test_refuses_what_is_not_a_json_object(write_model, text) -> None:
    folder = write_model()
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert refusal(folder).startswith(str(folder / "config.json"))


HUGE = {
    "no turns": {"rope_type": "linear", "factor": 1e-320},
    "no share": {
        "rope_type": "llama3",
        "factor": 1e-310,
        "low_freq_factor": 1e-320,
        "high_freq_factor": 2e-320,
    },
    "an infinite pair": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320},
    "the logarithm of 0": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308},
    "a division by 0": {
        "rope_type": "yarn",
        "factor": 2.718281828459045,
        "mscale": 1,
        "mscale_all_dim": -10.0,
    },
    "an infinite factor": {"rope_type": "yarn", "factor": 2.0, "mscale": 1e308, "mscale_all_dim": 1e-308},
    "no float32": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e308},
}


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("numbers", HUGE.values(), ids=HUGE)
def test_refuses_numbers_that_lead_to_no_rotations(write_model, field, numbers) -> None:
    folder = write_model(**{field: numbers})
    with pytest.raises(ModelError) as refused:
        load_config(folder)
    wanted = f"{folder / 'config.json'}: {field}: these numbers lead to rotations that are not finite"
    assert (str(refused.value), refused.value.code) == (wanted, "NKW-MODEL-CONFIG")
    assert (
        load_config(write_model(name="sound", **{field: {"rope_type": "yarn", "factor": 2.0}}))
        .blocks[0]
        .mixer.positions
    )


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_refuses_what_is_no_regular_file(write_model, name) -> None:
    folder = write_model()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=f"{name} cannot be read: it is not a regular file"):
        load_config(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=f"{name} is a link out of the model's folder"):
        load_config(folder)


def test_text_of_a_file_reaches_a_message_escaped_and_cut(write_model) -> None:
    with pytest.raises(ModelError) as refused:
        load_config(write_model(architectures=["\x1b[31mred\u202e" + "x" * 3_000_000]))
    assert "\\x1b[31mred" in str(refused.value)
    assert "\x1b" not in str(refused.value) and "\u202e" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_field_that_stands_twice_is_refused_where_its_values_differ(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": {"b": 1, "b": 1}}')
    assert read_json(path) == {"a": {"b": 1}}
    path.write_text('{"a": {"b": 1, "b": 2}}')
    with pytest.raises(ModelError) as refused:
        read_json(path)
    assert str(refused.value) == f"{path}: b is repeated with different values"


def test_a_json_file_of_more_than_16_mib_is_refused_unread(tmp_path) -> None:
    path = tmp_path / "config.json"
    for more, message in ((0, None), (1, f"{path} cannot be read: it holds more than 16,777,216 bytes")):
        path.write_text('{"a": 1}'.ljust(2**24 + more))
        if message is None:
            assert read_json(path) == {"a": 1}
            continue
        with pytest.raises(ModelError) as refused:
            read_json(path)
        assert str(refused.value) == message


@pytest.mark.parametrize("residual", [2.0**-64, 2.0**64])
def test_a_residual_multiplier_whose_square_float32_does_not_hold_is_refused(tmp_path, residual) -> None:
    fields = {**TINY, "model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    for value in (residual, residual**0.5):
        (tmp_path / "config.json").write_text(json.dumps({**fields, "residual_multiplier": value}))
        if value != residual:
            assert load_config(tmp_path).embedding_scale == 1 / value
            continue
        with pytest.raises(ModelError, match="float32 does not hold its square"):
            load_config(tmp_path)
