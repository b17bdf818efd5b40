"""Fixtures for tests of models: folders with random models, the shipped model, and transformers as a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tokenizers

from model.device import SimulatedDevice
from tests.model import folders
from tests.model.folders import TINY, Weights, write_folder

PRETRAINED = Path(__file__).resolve().parents[2] / "model" / "pretrained"

Writer = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> Writer:
    """Return `write_model(seed=0, field=value, ...)`, which writes a model's folder and returns its path.

    A field that is None is left out of config.json.
    """

    def write(seed: int = 0, dtype: Any = np.float32, name: str = "model", **changes: Any) -> Path:
        return write_folder(tmp_path / name, seed, dtype, **changes)

    return write


@pytest.fixture(scope="session")
def random_weights() -> Callable[..., Weights]:
    """Return `random_weights(seed=0, field=value, ...)`: the weights that `write_model` writes for these arguments."""
    return lambda seed=0, **changes: folders.random_weights({**TINY, **changes}, seed)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., tokenizers.Tokenizer]:
    """Return `byte_tokenizer(vocabulary=259, add_bos=True)`: the tokenizer that `write_model` writes."""
    return folders.byte_tokenizer


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Return the model that the project ships."""
    return PRETRAINED


@pytest.fixture(scope="session")
def transformers_llama() -> ModuleType:
    """Return transformers' Llama module; skip the test if transformers is not installed."""
    pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    from transformers.models.llama import modeling_llama

    return modeling_llama


WAYS = {"eager": {"replay": False}, "replay": {}, "exact replay": {"exact": True}}


@pytest.fixture(params=WAYS)
def simulated(request: pytest.FixtureRequest) -> Iterator[Callable[[str, int], SimulatedDevice]]:
    """Yield `simulated(target, ranks)`, which creates simulated devices; each test runs eagerly and with replay."""
    devices: list[SimulatedDevice] = []

    def made(target: str, ranks: int) -> SimulatedDevice:
        devices.append(SimulatedDevice(target, ranks, **WAYS[request.param]))
        return devices[-1]

    yield made
    reports = [device.replays.report for device in devices]
    assert any(report.hits for report in reports) == (request.param != "eager")
    assert any(report.rewritten for report in reports) == (request.param == "replay")
