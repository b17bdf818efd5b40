"""The launchers of run.py, against stubs that take what is documented and nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from simulate.bundle import run
from simulate.cli import main
from tests.bundle.conftest import HERE


@pytest.fixture
def case(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Yield a function that finds a case of the bundle by name; forget the case's modules afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    manifest = json.loads((bundle / "bundle.json").read_text())
    yield lambda name: next(case for case in manifest["cases"] if case["name"] == name)
    for name in [module for module in sys.modules if module.partition(".")[0] == "travelling"]:
        del sys.modules[name]
    run.import_kernel.cache_clear()


class Placed:
    """A tensor that can be moved to one device only."""

    def __init__(self, tensor: torch.Tensor, device: object) -> None:
        self._tensor, self._device = tensor, device

    def to(self, device: object) -> torch.Tensor:
        """Return the tensor, which stays on the host."""
        assert device == self._device
        return self._tensor


def on_device(monkeypatch: pytest.MonkeyPatch, device: object) -> None:
    to_torch = run.to_torch
    monkeypatch.setattr(run, "to_torch", lambda bits, dtype: Placed(to_torch(bits, dtype), device))


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)


def reading(bundle: Path) -> Callable[[dict[str, Any]], Any]:
    """Read arguments from the files of the bundle."""
    return run.make_reader(bundle, {"weights": None}, None)


def same_as_expected(bundle: Path, case: dict[str, Any], returned: Any) -> None:
    several = returned if isinstance(returned, (tuple, list)) else (returned,)
    assert len(several) == len(case["outputs"])
    for value, output in zip(several, case["outputs"]):
        bits, dtype = run.to_numpy(value)
        assert dtype == output["dtype"]
        np.testing.assert_array_equal(bits, np.load(bundle / output["file"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaled", "shifted", "picked"])
def test_torchneuron_gets_an_operator_that_torch_takes(
    name: str, bundle: Path, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nki_op is torch.library.custom_op here, which reads the operator's signature as the real one does."""
    seen = []

    def nki_op(name: str, *, mutates_args: Any) -> Any:
        seen.append((name, mutates_args))
        return torch.library.custom_op(name, mutates_args=mutates_args)

    module(monkeypatch, "torch_neuronx", nki_op=nki_op)
    on_device(monkeypatch, "neuron")
    same_as_expected(
        bundle,
        case(name),
        run.prepare_torchneuron_launch(bundle, case(name), reading(bundle))(),
    )
    ((operator, mutates),) = seen
    assert operator.startswith(f"nkw_bundle::{name}_")
    assert mutates == set()


def test_torchneuron_is_told_which_arguments_a_kernel_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom operator of torch names them, and may not return them."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "stored"
    words = ["travelling.elementwise:stored", "f32[130,96]", "f32[1,96]", "--target", "trn2"]
    assert main(["bundle", *words, "--out", str(folder)]) == 0
    (case,) = json.loads((folder / "bundle.json").read_text())["cases"]
    assert [output["argument"] for output in case["outputs"]] == ["", "cache"]
    seen = []

    def nki_op(name: str, *, mutates_args: Any) -> Any:
        seen.append(mutates_args)
        return torch.library.custom_op(name, mutates_args=mutates_args)

    module(monkeypatch, "torch_neuronx", nki_op=nki_op)
    on_device(monkeypatch, "neuron")
    try:
        same_as_expected(folder, case, run.prepare_torchneuron_launch(folder, case, reading(folder))())
    finally:
        for name in [module for module in sys.modules if module.partition(".")[0] == "travelling"]:
            del sys.modules[name]
        run.import_kernel.cache_clear()
    assert seen == [{"cache"}]


@pytest.mark.parametrize("name", ["scaled", "shifted", "picked"])
def test_torch_xla_gets_tensors_on_its_device_and_a_step(
    name: str, bundle: Path, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, steps = object(), []
    xla = {"xla_device": lambda: device, "mark_step": lambda: steps.append(1)}
    module(monkeypatch, "torch_xla.core.xla_model", **xla)
    on_device(monkeypatch, device)
    same_as_expected(
        bundle,
        case(name),
        run.prepare_torch_xla_launch(bundle, case(name), reading(bundle))(),
    )
    assert steps == [1]


def test_beta1_kernels_go_through_baremetal_and_benchmark(
    bundle: Path, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmark_result.nc_latency.get_latency_percentile gives microseconds."""
    kernels = []

    def benchmark(*, warmup: int, iters: int) -> Any:
        assert (warmup, iters) == (2, 9)

        def decorate(kernel: Any) -> Any:
            def launch(**arguments: np.ndarray) -> None:
                assert {name: type(value) for name, value in arguments.items()} == {"a": np.ndarray}

            percentile = {25: 9.0, 50: 10.0}.__getitem__
            result = SimpleNamespace(nc_latency=SimpleNamespace(get_latency_percentile=percentile))
            launch.benchmark_result = result  # type: ignore[attr-defined]
            return launch

        return decorate

    def baremetal(kernel: Any) -> Any:
        kernels.append(kernel)
        return kernel

    module(monkeypatch, "neuronxcc.nki", baremetal=baremetal, benchmark=benchmark, jit=None)
    doubled = case("doubled")
    same_as_expected(bundle, doubled, run.prepare_baremetal_launch(bundle, doubled, reading(bundle))())
    assert len(kernels) == 1
    times = run.benchmark_kernel(
        bundle,
        doubled,
        reading(bundle),
        argparse.Namespace(warmup=2, repetitions=9),
    )
    assert (times["median_ns"], times["spread_ns"], times["clock"]) == (10_000.0, 2000.0, "device")


@pytest.mark.parametrize(
    ("dialect", "installed", "launcher", "reason"),
    [
        ("nki", {"nki": "0.7.0"}, "nki", ""),
        ("nki", {"nki": "0.5.0", "torch-neuronx": "2.14.0"}, "nki", ""),
        ("nki", {"nki": "0.4.1+g1", "torch-neuronx": "2.13.1"}, "torchneuron", "takes no numpy arrays"),
        (
            "nki",
            {"nki": "0.4.1", "torch-neuronx": "2.9.0.2.12", "torch-xla": "2.9"},
            "torch_xla",
            "takes no numpy arrays",
        ),
        ("nki", {"nki": "0.2.0"}, "nki", "is older than 0.5"),
        ("nki", {"nki": "0.0.1"}, None, "placeholder"),
        (
            "nki",
            {"neuronx-cc": "2.21.0"},
            None,
            "no package nki is installed; neuronxcc.nki does not run them",
        ),
        ("nki", {}, None, "no package nki is installed"),
        ("neuronxcc.nki", {"neuronx-cc": "2.21.0", "nki": "0.3.0"}, "neuronxcc", ""),
        ("neuronxcc.nki", {"nki": "0.7.0"}, None, "neuronx-cc is not installed"),
    ],
)
def test_what_is_installed_decides_the_path(
    dialect: str, installed: dict[str, str], launcher: str | None, reason: str
) -> None:
    launcher_name, remark = run.find_launcher(dialect, installed)
    assert launcher_name == launcher
    assert reason in remark and bool(reason) == bool(remark)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32", "int32"])
def test_arrays_are_the_same_bits_in_torch_and_back(dtype: str) -> None:
    values = np.arange(-6, 6).astype(run.find_dtype(dtype))
    bits, name = run.to_numpy(values)
    tensor = run.to_torch(bits, name)
    assert str(tensor.dtype) == f"torch.{dtype}"
    again, back = run.to_numpy(tensor)
    assert back == name == dtype
    assert again.tobytes() == values.tobytes()


def failing_writes(monkeypatch: pytest.MonkeyPatch, often: int) -> list[Path]:
    """Let the first replacements of a file fail, as those on a full disk do."""
    tried: list[Path] = []
    replace = run.os.replace

    def full(source: Any, target: Any) -> None:
        tried.append(Path(target))
        if len(tried) <= often:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(run.os, "replace", full)
    return tried


@pytest.mark.parametrize("often", [0, 1, 2, 3])
def test_a_record_gives_up_its_reserve_then_the_values_then_goes_to_stdout(
    often: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run.Record(tmp_path, "digest", "trn2")
    (tmp_path / "values").mkdir()
    record.values["cases"].append({"name": "a", "outputs": [{"file": "values/a.npy"}]})
    failing_writes(monkeypatch, often)
    record.save()
    assert (tmp_path / ".reserve").exists() == (often == 0)
    assert (tmp_path / "values").exists() == (often < 2)
    assert list(tmp_path.glob("*.part")) == []
    told = (
        json.loads((tmp_path / "result.json").read_text())
        if often < 3
        else json.loads(capsys.readouterr().out.splitlines()[1])
    )
    assert (told["cases"][0]["outputs"][0]["file"] is None) == (often >= 2)
    assert bool(told["failures"]) == (often >= 2)


def test_the_spread_is_the_interquartile_range() -> None:
    times = run.summarize_times([4.0, 1.0, 3.0, 2.0, 100.0], 1, "host")
    assert times["median_ns"] == 3.0
    assert times["spread_ns"] == np.subtract(*np.percentile([1, 2, 3, 4, 100], [75, 25]))
    assert run.summarize_times([5.0], 0, "host")["spread_ns"] == 0.0
