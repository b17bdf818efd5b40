"""Configs of unknown model types: the family that their refusal proposes, and plans under a family by --as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.config import Fields
from model.config.published import PUBLISHED
from model.errors import ModelError
from model.families import FAMILIES, load_config, read_config
from model.families.stand_in import find_nearest_family
from model.plan.sizes import load_model
from nkw.commands import main
from tests.model.folders import TINY

EXPERTS: dict[str, Any] = {
    **TINY,
    "architectures": ["UnheardOfForCausalLM"],
    "model_type": "unheard_of",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 24,
    "num_mtp_modules": 1,
    "attention_dropout": 0.1,
    "moe_layer_freq": 1,
    "use_qk_norm": False,
}
"""A config that a Mixtral reads but for two fields with an effect."""
NESTED = {
    "model_type": "unheard_of_vl",
    "dtype": "float32",
    "text_config": {**EXPERTS, "model_type": "unheard_of_text"},
    "vision_config": {"hidden_size": 8},
}


def write(folder: Path, fields: dict[str, Any], **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**fields, **changes}))
    return path


def published(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((PUBLISHED / f"{name}.json").read_text()), **changes}


def refusal(path: Path, family: str | None = None) -> str:
    with pytest.raises(ModelError) as refused:
        read_config(path, family)
    return str(refused.value)


def test_a_refusal_proposes_the_nearest_family_and_that_family_plans_it(tmp_path) -> None:
    path = write(tmp_path, EXPERTS)
    message = refusal(path)
    assert message == (
        f"{path}: model_type: 'unheard_of' is not known; --as mixtral plans the nearest known family and says what it "
        "ignores"
    )
    config = read_config(path, "mixtral")
    assert (config.model_type, config.blocks[0].mlp.count) == ("mixtral", 4)
    assert config.blocks == read_config(write(tmp_path, EXPERTS, model_type="mixtral")).blocks


def test_ignored_are_the_unread_fields_with_an_effect(tmp_path) -> None:
    stand_in = read_config(write(tmp_path, EXPERTS), "mixtral").stand_in
    assert stand_in is not None
    assert stand_in.ignored == ("shared_intermediate_size", "num_mtp_modules")
    assert list(stand_in.describe()) == [
        "Planned is a mixtral in place of unheard_of (--as): sizes and times are those of the family.",
        "Ignored: shared_intermediate_size: shared experts are not counted.",
        "Ignored: num_mtp_modules: layers for multi-token prediction are not counted.",
    ]
    on = read_config(write(tmp_path, EXPERTS, use_qk_norm=True, moe_layer_freq=2), "mixtral").stand_in
    assert on is not None
    assert set(on.ignored) - set(stand_in.ignored) == {"use_qk_norm", "moe_layer_freq"}


def test_of_a_nested_config_the_text_decoder_is_read(tmp_path) -> None:
    path = write(tmp_path, NESTED)
    assert "--as mixtral plans" in refusal(path)
    config = read_config(path, "mixtral")
    assert config.dtype == "float32"
    assert config.blocks == read_config(write(tmp_path, EXPERTS), "mixtral").blocks
    assert config.stand_in is not None
    assert (config.stand_in.model_type, config.stand_in.text_only) == ("unheard_of_vl", True)
    sentences = list(config.stand_in.describe())
    assert "Only its text decoder is planned." in sentences
    assert "Ignored: vision_config: towers for images or sound are not counted." in sentences


@pytest.mark.parametrize("value", [7, [], "llama", None])
def test_a_text_config_that_is_no_object_is_no_text_decoder(tmp_path, value) -> None:
    config = read_config(write(tmp_path, EXPERTS, text_config=value), "mixtral")
    assert config.stand_in is not None
    assert not config.stand_in.text_only


NEAREST = {
    "qwen3-30b-a3b": "qwen3_moe",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v2-lite": "deepseek_v2",
    "mixtral-8x7b": "mixtral",
    "llama-3.1-8b": "llama",
    "gemma-2-2b": "gemma2",
    "qwen3-next-80b-a3b": "qwen3_next",
    "mamba-130m": "mamba",
}


@pytest.mark.parametrize(("name", "family"), NEAREST.items())
def test_the_nearest_family_of_a_renamed_config_reads_its_parts(tmp_path, name, family) -> None:
    fields = Fields(write(tmp_path, published(name, model_type="unheard_of")))
    nearest = find_nearest_family(fields)
    assert nearest is not None
    if name.startswith("deepseek"):
        assert nearest.startswith("deepseek")  # V2 and V3 have the same fields
    else:
        assert nearest == family


@pytest.mark.parametrize(
    ("model_type", "family"), [("qwen3_vl_text", "qwen3"), ("mistral_next", "mistral"), ("x_qwen3", "llama")]
)
def test_of_families_that_read_alike_the_one_with_the_name_is_nearest(tmp_path, model_type, family) -> None:
    assert find_nearest_family(Fields(write(tmp_path, TINY, model_type=model_type))) == family


@pytest.mark.parametrize("field", ["n_routed_experts", "num_attention_heads"])
def test_no_family_is_near_that_does_not_read_the_experts_or_the_heads(tmp_path, field) -> None:
    """A plan without them would be of another model. Zero experts are none."""
    sound = {**published("mamba-130m"), "model_type": "unheard_of"}
    path = write(tmp_path, sound, **{field: 8})
    assert "; known are " in refusal(path)
    assert "--as" not in refusal(path)
    assert "--as mamba plans" in refusal(write(tmp_path, sound, **{field: 0}))


def test_a_family_that_is_named_may_read_less_and_says_so(tmp_path) -> None:
    stand_in = read_config(write(tmp_path, EXPERTS), "llama").stand_in
    assert stand_in is not None
    assert "Ignored: num_local_experts: routed experts are not counted: the model is far larger." in list(
        stand_in.describe()
    )


def test_a_field_that_the_family_needs_is_named_with_a_family_that_reads_the_config(tmp_path) -> None:
    path = write(tmp_path, TINY)
    assert refusal(path, "mixtral") == (
        f"{path}: num_local_experts: missing; --as mixtral needs it; --as llama reads this config"
    )
    assert read_config(path, "llama").model_type == "llama"


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "mixtrall",
            "--as 'mixtrall' is not a family of models that continue texts; did you mean mixtral? (docs",
        ),
        ("whisper", "--as 'whisper' is not a family of models that continue texts"),
        ("", "--as '' is not a family of models that continue texts"),
    ],
)
def test_an_unknown_family_is_refused(tmp_path, family, message) -> None:
    assert refusal(write(tmp_path, TINY), family).startswith(message)


def test_a_known_type_is_planned_under_another_family_and_under_its_own(tmp_path) -> None:
    path = write(tmp_path, TINY)
    other, llama_stand_in = read_config(path, "mistral").stand_in, read_config(path, "llama").stand_in
    assert other is not None
    assert llama_stand_in is not None
    assert next(other.describe()).startswith("Planned is a mistral in place of llama (--as)")
    assert list(llama_stand_in.describe()) == ["--as llama is the config's own model type."]
    assert read_config(path).stand_in is None
    assert load_model(path, family="llama").total == load_model(path).total


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.nested])
def test_a_family_of_nested_configs_reads_the_whole_config(tmp_path, family) -> None:
    assert "missing" in refusal(write(tmp_path, NESTED), family)
    assert read_config(PUBLISHED / "gemma-3-27b.json", "gemma3").encoder is not None


def test_without_as_an_unknown_type_stays_refused_everywhere(tmp_path) -> None:
    write(tmp_path, EXPERTS)
    with pytest.raises(ModelError, match="architectures: UnheardOfForCausalLM is not known"):
        load_config(tmp_path)
    assert main(["plan", str(tmp_path)]) == 2
    assert main(["traffic", str(tmp_path)]) == 2


def test_plan_says_it_in_text_and_json(tmp_path, capsys) -> None:
    path, written = write(tmp_path, NESTED), tmp_path / "plan.json"
    words = ["plan", str(path), "--as", "mixtral", "--accelerator", "h100", "--json", str(written)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "\nmixtral in place of unheard_of_vl, " in text
    assert "Planned is a mixtral in place of unheard_of_vl (--as)" in text
    assert "vision_config: towers for images" in text
    document = json.loads(written.read_text())
    assert document["model_type"] == "mixtral"
    assert document["stand_in"] == {
        "model_type": "unheard_of_vl",
        "family": "mixtral",
        "text_only": True,
        "ignored": ["shared_intermediate_size", "num_mtp_modules", "vision_config"],
        "meanings": [
            "shared_intermediate_size: shared experts are not counted",
            "num_mtp_modules: layers for multi-token prediction are not counted",
            "vision_config: towers for images or sound are not counted",
        ],
    }


@pytest.mark.slow
def test_traffic_says_it_in_text_and_json(tmp_path, capsys) -> None:
    path, written = write(tmp_path, EXPERTS), tmp_path / "traffic.json"
    words = ["traffic", str(path), "--as", "mixtral", "--tp", "1", "--users", "1", "--requests", "1"]
    words += ["--prompt-lengths", "16", "--output-lengths", "2", "--instance", "inf2.xlarge"]
    assert main([*words, "--json", str(written)]) == 0
    text = capsys.readouterr().out
    assert "mixtral in place of unheard_of on inf2.xlarge" in text
    assert "Planned is a mixtral in place of unheard_of" in text
    assert json.loads(written.read_text())["stand_in"]["family"] == "mixtral"
