"""The neuron backend as far as it goes without a chip: what it needs, and arrays to tensors and back."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import ml_dtypes
import nki.language as nl
import numpy as np
import pytest

from model.device import neuron
from model.errors import ModelError


@pytest.fixture
def installed(monkeypatch) -> SimpleNamespace:
    """A host where the vendor's packages seem to be there; the kernels are those of the returned namespace."""
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    kernels = SimpleNamespace()
    monkeypatch.setattr(neuron, "neuron_package_installed", lambda: True)
    monkeypatch.setattr(neuron, "bind_neuron", lambda: None)
    monkeypatch.setattr(neuron.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        neuron.importlib,
        "import_module",
        lambda name: SimpleNamespace(xla_device=lambda: torch.device("cpu")),
    )
    monkeypatch.setitem(sys.modules, "nki_kernels", kernels)
    return kernels


def test_names_every_missing_package(monkeypatch) -> None:
    monkeypatch.setattr(neuron, "neuron_package_installed", lambda: False)
    monkeypatch.setattr(neuron.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs nki, torch, torch_xla, not installed here"):
        neuron.NeuronDevice(1)


def test_one_rank_runs_and_two_are_refused(installed) -> None:
    assert neuron.NeuronDevice(1).ranks == 1
    with pytest.raises(ModelError, match="runs one rank in one process, not 2; use --tp 1"):
        neuron.NeuronDevice(2)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, ml_dtypes.bfloat16])
def test_arrays_go_there_and_back_unchanged(installed, dtype) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    installed.same = lambda x, scale: x
    installed.pair = lambda x, scale: (x, x)
    device = neuron.NeuronDevice(1)
    (single,) = device.run("same", [(array, 0.5)])
    (pair,) = device.run("pair", [(array, 0.5)])
    for result in (single, *pair):
        assert result.dtype == dtype
        assert np.array_equal(result, array)


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16])
def test_a_dtype_is_that_of_the_bound_package(installed, dtype) -> None:
    assert neuron.NeuronDevice(1).dtype(str(dtype)) is dtype


def test_other_arguments_reach_the_kernel_as_they_are(installed) -> None:
    seen = []
    installed.note = lambda x, *rest: seen.extend(rest) or x
    neuron.NeuronDevice(1).run("note", [(np.ones(1, np.float32), 0.5, 3, None)])
    assert seen == [0.5, 3, None]
