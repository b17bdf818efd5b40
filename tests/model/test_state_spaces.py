"""Mamba and Mamba-2: what their configs say, and what their states are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.mixers import StateSpaceHeads
from model.errors import ModelError
from model.families import compose, load_config, read_config
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import list_states
from model.layers.uneven import describe_uneven
from nkw.commands import main

FIELDS: dict[str, Any] = dict(
    model_type="mamba2",
    vocab_size=50,
    hidden_size=24,
    num_heads=6,
    head_dim=8,
    n_groups=2,
    state_size=5,
    num_hidden_layers=2,
)
INFINITE = {"__float__": "Infinity"}


def config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**FIELDS, **changes}))
    return folder


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [(None, 0.0, None), ([0.0, INFINITE], 0.0, None), ([0.1, 0.5], 0.1, 0.5), ([0, 1], 0.0, 1.0)],
)
def test_time_steps_have_the_limits_of_the_config(tmp_path, limits, least, most) -> None:
    changes = {} if limits is None else {"time_step_limit": limits}
    mixer = read_config(config(tmp_path, **changes)).blocks[0].mixer
    assert isinstance(mixer, StateSpaceHeads)
    assert (mixer.least_step, mixer.most_step) == (least, most)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_groups": 4}, "n_groups: 4 does not divide num_heads, 6"),
        ({"head_dim": 7}, "head_dim: 6 heads of 7 are not expand times hidden_size, 24"),
        ({"time_step_limit": 3}, "time_step_limit: 3 is not a list of two numbers"),
        ({"time_step_limit": [True, 1.0]}, "is not a list of two numbers"),
        ({"time_step_limit": [0.5, 0.1]}, "is not two numbers from 0 on in order"),
        ({"time_step_limit": [INFINITE, INFINITE]}, "is not two numbers from 0 on in order"),
    ],
)
def test_refuses_configs_that_are_none(tmp_path, changes, message) -> None:
    assert read_config(config(tmp_path)).architecture == "Mamba2ForCausalLM"
    with pytest.raises(ModelError) as refused:
        read_config(config(tmp_path, **changes))
    assert message in str(refused.value)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_refuses_another_activation(tmp_path, model_type) -> None:
    assert load_config(config(tmp_path, model_type=model_type, hidden_act="swish"))
    with pytest.raises(ModelError, match="hidden_act: 'gelu'; a state-space layer is computed with silu"):
        load_config(config(tmp_path, model_type=model_type, hidden_act="gelu"))


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_states_have_one_size_however_long_a_sequence_is(tmp_path, model_type) -> None:
    decoder = compose(load_config(config(tmp_path, model_type=model_type)))

    def shapes(length: int, sequences: int) -> list[tuple[int, ...]]:
        single = np.dtype(np.float32)
        step = StepShape(Phase.decode, sequences, sequences, length, length, 2, single, WeightDtypes(single))
        return [state.shape for layer in decoder.layers for state in list_states(layer, step)]

    assert shapes(128, 3) == shapes(4096, 3)
    assert [shape[0] for shape in shapes(128, 3)] == [3] * 4


def test_ranks_beyond_the_heads_hold_padding(tmp_path) -> None:
    read = read_config(config(tmp_path))
    assert read.most_busy_ranks == 6
    described = [describe_uneven(read, ranks) for ranks in (6, 7)]
    assert not any("heads" in sentence for sentence in described[0])
    assert described[1][0] == "6 heads: 1 a rank, 1 of 7 is padding, 1 rank holds padding only"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_traffic_and_plans_are_predicted(tmp_path, capsys, model_type) -> None:
    folder = str(config(tmp_path, model_type=model_type))
    lengths = ["--prompt-lengths", "20", "--output-lengths", "4", "--max-model-len", "128"]
    assert main(["traffic", folder, "--rate", "1", "--requests", "3", *lengths]) == 0
    assert "between tokens (ITL)" in capsys.readouterr().out
    assert main(["plan", folder, "--prompt", "20", "--generate", "4"]) == 0
    kernel = "ssd" if model_type == "mamba2" else "selective_scan"
    assert kernel in capsys.readouterr().out
