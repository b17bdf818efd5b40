"""The neuron backend on a core that computes by the simulator: what it answers, and what it keeps on the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.device import SimulatedDevice
from model.device.binding import find_parameter_indices
from model.device.neuron import NeuronDevice
from model.errors import ModelError
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.sampling import StepOutput
from tests.device.core import Core, mutable_places
from tests.device.xla import XlaCore

FRAMEWORKS = ("native", "xla")
PROMPTS = [[5, 70, 200, 9], [31, 8]]
NEW = 5


def steps(folder: Path, device: Any, dtype: str = "float32") -> list[StepOutput]:
    """Return the outputs of a model for two prompts and for the likeliest token after each."""
    config = load_config(folder)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), 1, dtype=dtype)
    model = KernelModel(config, weights, device, 64, candidates=8, sequences=2)
    step_outputs = [model.prefill(PROMPTS)]
    for number in range(NEW):
        tokens = [int(output.ids[0]) for output in step_outputs[-1]]
        step_outputs.append(model.decode(tokens, [len(prompt) + number for prompt in PROMPTS]))
    return [output for step in step_outputs for output in step]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_tokens_and_logits_equal_those_of_the_simulated_backend(
    on: Callable[..., Core], tiny: Path, framework: str, dtype: str
) -> None:
    wanted = steps(tiny, SimulatedDevice("trn2", 1), dtype)
    on(framework)
    outputs = steps(tiny, NeuronDevice(1), dtype)
    for output, other in zip(outputs, wanted, strict=True):
        assert np.array_equal(output.ids, other.ids)
        assert np.array_equal(output.logits, other.logits)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_and_caches_go_to_the_core_once(on: Callable[..., Core], tiny: Path, framework: str) -> None:
    core = on(framework)
    config = load_config(tiny)
    weights = shard_weights(config, dict(open_checkpoint(tiny, config)), 1)
    model = KernelModel(config, weights, NeuronDevice(1), 64)
    model.prefill(PROMPTS[:1])
    weight_bytes = sum(array.nbytes for array in weights[0].arrays.values())
    assert core.placed_bytes > weight_bytes
    before = core.placed_bytes
    model.decode([3], [4])
    step_bytes = core.placed_bytes - before
    arrays = "ids positions num_computed_tokens num_scheduled_tokens state_slots own_positions".split()
    assert step_bytes == 4 * len(arrays)
    model.decode([3], [5])
    assert core.placed_bytes - before == 2 * step_bytes


def test_each_kind_of_step_is_one_graph_on_torch_xla(on: Callable[..., Core], tiny: Path) -> None:
    core = on("xla")
    assert isinstance(core, XlaCore)
    steps(tiny, NeuronDevice(1))
    prefill, *decoding = core.executed
    assert len(decoding) == NEW
    assert len({prefill, *decoding}) == 2


def test_a_kernel_has_an_operator_for_each_choice_of_other_values(on: Callable[..., Core]) -> None:
    core: Any = on("native")
    device = NeuronDevice(1)
    x, weight = np.ones((4, 8), np.float32), np.ones((1, 8), np.float32)
    for eps in (1e-6, 1e-5, 1e-6):
        device.run("rmsnorm", [{"x": x, "weight": weight, "eps": eps}], [None])
    assert len(core.operators) == 2
    assert all(name.startswith("nki_workbench::rmsnorm_") for name in core.operators)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "dtype", [np.float32, np.int32, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_arrays_go_there_and_back_unchanged(on: Callable[..., Core], framework: str, dtype: Any) -> None:
    on(framework)
    device = NeuronDevice(1)
    array = np.arange(12).reshape(3, 4).astype(dtype)
    (result,) = device.gather([device.hold(array)])
    assert result.dtype == dtype
    assert np.array_equal(result, array)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int16])
def test_a_dtype_that_cores_do_not_take_is_refused(on: Callable[..., Core], dtype: Any) -> None:
    on("xla")
    with pytest.raises(ModelError, match=f"an array of {np.dtype(dtype)}: NeuronCores take float32, float16"):
        NeuronDevice(1).hold(np.zeros(3, dtype))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_process_has_one_rank(on: Callable[..., Core], framework: str) -> None:
    on(framework)
    assert NeuronDevice(1).local_ranks == range(1)
    with pytest.raises(ModelError, match="2 ranks, 1 process; start it with torchrun --nproc-per-node 2"):
        NeuronDevice(2)


class Recorded(SimulatedDevice):
    """A device that keeps which argument each output is said to be, and which it is."""

    def run(self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Any = ()) -> list[Any]:
        outputs = super().run(kernel, arguments, written)
        output_tuple = outputs[0] if isinstance(outputs[0], tuple) else (outputs[0],)
        recorded.append(
            (kernel, tuple(written), tuple(name_of(output, arguments[0]) for output in output_tuple))
        )
        return outputs


recorded: list[tuple[str, tuple[str | None, ...], tuple[str | None, ...]]] = []


def name_of(output: Any, arguments: Mapping[str, Any]) -> str | None:
    return next((name for name, argument in arguments.items() if argument is output), None)


def test_the_arguments_that_a_kernel_writes_to_are_known_before_it_runs(tiny: Path) -> None:
    recorded.clear()
    steps(tiny, Recorded("trn2", 1))
    assert any(name is not None for _, _, names in recorded for name in names)
    for kernel, written, names in recorded:
        assert written == names, kernel
        indices = find_parameter_indices(kernel, names)
        assert {index for index in indices if index is not None} <= mutable_places(kernel)
