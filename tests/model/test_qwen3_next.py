"""Qwen3-Next: what its configs and checkpoints say, what its states are, and prompts of several chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from model.config.mixers import GatedDelta
from model.errors import ModelError
from model.families import compose, load_config, read_config
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import list_states
from model.layers.uneven import describe_uneven
from model.loading.checkpoint import open_checkpoint
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.folders import byte_tokenizer
from tests.model.oracle import Oracle, random_model
from tests.model.test_dense_families import assert_equal, kernels, load
from tests.model.test_sequence_parallel import model_of
from tests.model.tiny_families import COMMON, DELTA, write_tiny

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

SMALL: dict[str, Any] = {**COMMON, **DELTA, "model_type": "qwen3_next"}
SECOND_TOKEN = "mtp.layers.0.self_attn.q_proj.weight"


def config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads: 5 is not a multiple of linear_num_key_heads",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: not a list of 4 names"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types: 'sliding_attention'; known are linear_atten",
        ),
    ],
)
def test_refuses_configs_that_are_none(tmp_path, changes, message) -> None:
    assert load_config(config(tmp_path)).architecture == "Qwen3NextForCausalLM"
    with pytest.raises(ModelError, match=message):
        load_config(config(tmp_path, **changes))


def test_every_fourth_layer_attends_and_has_a_cache(tmp_path) -> None:
    decoder = compose(load_config(config(tmp_path)))

    def shapes(length: int) -> list[list[tuple[int, ...]]]:
        single = np.dtype(np.float32)
        step = StepShape(Phase.decode, 3, 3, length, length, 2, single, WeightDtypes(single))
        return [[state.shape for state in list_states(block[0], step)] for block in decoder.blocks]

    delta = [(3, 3, 10 + 10 + 3 * 14), (3, 3, 10, 14)]
    assert shapes(128) == [delta] * 3 + [[(3, 1, 16, 128), (3, 1, 128, 16)]]
    assert shapes(4096)[:3] == [delta] * 3


def test_ranks_beyond_the_key_heads_hold_padding(tmp_path) -> None:
    read = read_config(config(tmp_path))
    assert isinstance(read.blocks[0].mixer, GatedDelta)
    assert read.most_busy_ranks == 2
    assert not any("key heads" in sentence for sentence in describe_uneven(read, 2))
    assert (
        describe_uneven(read, 3)[0] == "2 key heads: 1 a rank, 1 of 3 is padding, 1 rank holds padding only"
    )


@pytest.mark.parametrize(("name", "read"), [(SECOND_TOKEN, True), ("mtq.norm.weight", False)])
def test_the_layer_that_predicts_a_second_token_is_not_read(tmp_path, name, read) -> None:
    config, weights = load(write_tiny(tmp_path, "qwen3-next"))
    tensors = {**weights, name: np.zeros((3, 2), np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    if read:
        assert set(open_checkpoint(tmp_path, config)) == set(weights)
    else:
        with pytest.raises(ModelError, match=f"{name} is not a tensor of Qwen3NextForCausalLM"):
            open_checkpoint(tmp_path, config)


@pytest.mark.slow
def test_a_prompt_of_several_chunks_equals_transformers(tmp_path) -> None:
    """More rows than a tile has: two chunks of the rule, experts sorted, gates of rows in two groups."""
    fields = {**COMMON, **DELTA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    fields["layer_types"] = ["linear_attention", "full_attention"]
    model = random_model("Qwen3Next", fields, seed=5)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(4).integers(3, 151, 152).tolist()
    expected, loaded = Oracle(model, ids, 150), load(tmp_path)
    cut = model_of(*loaded, 2, cache=256)  # ranks cut the rows of the prompt
    for candidate_model in (ReferenceModel(*loaded), kernels(*loaded, 2, "float32", cache=256), cut):
        assert_equal(candidate_model, expected)


@pytest.mark.deep
def test_traffic_and_plans_are_predicted(tmp_path, capsys) -> None:
    folder = str(config(tmp_path))
    lengths = ["--prompt-lengths", "20", "--output-lengths", "4", "--max-model-len", "64"]
    assert main(["traffic", folder, "--rate", "1", "--requests", "3", *lengths]) == 0
    assert "between tokens (ITL)" in capsys.readouterr().out
    for more in ([], ["--sp"]):
        assert main(["plan", folder, "--prompt", "20", "--generate", "4", "--tp", "2", *more]) == 0
        printed = capsys.readouterr().out
        assert "gated_delta " in printed
        assert "gated_delta_step" in printed
        assert "oofline for a part" not in printed
        assert ("rows of a group" in printed) == bool(more)


@pytest.mark.slow
def test_text_is_generated_as_the_reference_does(tmp_path, capsys) -> None:
    fields = {**COMMON, **DELTA, "vocab_size": 300}
    random_model("Qwen3Next", fields, seed=6).save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "4", "--tp", "2"]
    for more in ([], ["--sp"]):
        assert main(["generate", *arguments, *more]) == 0
        assert "4 of 4" in capsys.readouterr().out
