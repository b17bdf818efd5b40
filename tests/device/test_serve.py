"""`nkw serve --backend neuron`: requests through a server on a core, against the same server on a simulated core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.commands.compile.command import launch_all
from model.llm.engine_args import set_up_engine
from model.serve.serving import engine_args
from nkw.commands import main
from tests.device.core import Core
from tests.serve.conftest import options_of, serving

SIZES = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--max-model-len", "64")
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 6},
    {"prompt": [5, 70, 200, 9], "temperature": 0.8, "seed": 7, "max_tokens": 5},
)


def answered(*words: str) -> list[tuple[str, str, int]]:
    """Return the text, the finish reason and the number of tokens of each request."""
    with serving(*words) as served:
        client = served.client()
        (name,) = [model.id for model in client.models.list()]
        answers = [client.completions.create(model=name, **request) for request in REQUESTS]
    return [
        (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens)
        for answer in answers
    ]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["native", "xla"])
def test_a_server_on_a_core_answers_as_one_on_a_simulated_core_with_compiled_graphs_alone(
    on: Callable[..., Core], tiny: Path, framework: str
) -> None:
    words = ("--model", str(tiny), *SIZES)
    wanted = answered(*words)
    core: Any = on(framework)
    neuron = (*words, "--backend", "neuron")
    launch_all(set_up_engine(engine_args(options_of(*neuron))))
    compiled = set(core.executed if framework == "xla" else core.operators)
    core.forget()
    assert answered(*neuron) == wanted
    launched = set(core.executed if framework == "xla" else core.operators)
    assert launched and launched <= compiled


def test_replicas_and_processes_of_ranks_are_refused_on_cores(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--model", str(tiny), "--port", "0", "--backend", "neuron"]
    assert main([*words, "--replicas", "2"]) == 2
    assert "--replicas is 2; on NeuronCores start a server for each core" in capsys.readouterr().err
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert main([*words, "--tp", "2"]) == 2
    assert "nkw serve has one process, and torchrun started 2" in capsys.readouterr().err


def test_without_packages_what_is_missing_is_said(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(tiny), "--port", "0", "--backend", "neuron"]) == 2
    assert (
        "the neuron backend needs nki, torch_neuronx, torch_xla, not installed here"
        in capsys.readouterr().err
    )
