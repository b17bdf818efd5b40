"""Runs the kernels of a test of the library in the simulator, and compares the results."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from simulate.run.environment import target_hardware
from simulate.world import launch
from tests.foreign.library.dtypes import Packed, static_cast


def outputs(test: Any) -> list[list[Any]]:
    """Return the outputs of the kernel, one list of arrays per rank."""
    ranks = test.inference_args.collective_ranks
    inputs_by_rank = [_select_rank(test.kernel_input, rank) for rank in range(ranks)]
    packed = {
        name: str(value.dtype) for name, value in inputs_by_rank[0].items() if isinstance(value, Packed)
    }
    kernel = getattr(test.kernel_func, "func", test.kernel_func)
    arguments = [((), {name: _host(value) for name, value in inputs.items()}) for inputs in inputs_by_rank]
    done = launch(
        _viewing(kernel, packed) if packed else kernel,
        arguments,
        target_hardware(test.compiler_input.platform_target.get_compile_target()),
        test.compiler_input.logical_nc_config,
        has_grid=True,
    )
    return [_listed(value) for value in done.outputs]


def _select_rank(kernel_input: Any, rank: int) -> dict[str, Any]:
    values = kernel_input.for_rank(rank) if hasattr(kernel_input, "for_rank") else kernel_input
    return {name.removesuffix(".must_alias_input"): value for name, value in (values or {}).items()}


def _host(value: Any) -> Any:
    if isinstance(value, Packed):
        return value.plain.copy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.dtype.itemsize == 8:
        return value.astype(value.dtype.kind + "4")  # torch and numpy make them; the chip has none
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return value.astype(np.float32)
    if isinstance(value, np.ndarray):
        return value.copy()  # a kernel may write its inputs, and references are computed afterwards
    return value


def _viewing(kernel: Callable[..., Any], packed: dict[str, str]) -> Callable[..., Any]:
    """Return the kernel with words taken for the packed values that they are."""

    def viewing(**arguments: Any) -> Any:
        for name, dtype in packed.items():
            arguments[name] = arguments[name].view(dtype)
        return kernel(**arguments)

    viewing.__name__ = getattr(kernel, "__name__", "kernel")
    return viewing


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def compared(test: Any, results: list[list[Any]]) -> tuple[bool, str]:
    """Return whether every output of every rank is within the test's own tolerance, and the worst of each."""
    wanted = test.validation_args
    texts, good = [], True
    for rank, values in enumerate(results):
        golden = _golden(wanted.golden_output, rank)
        if golden is None:
            continue
        if len(golden) != len(values):
            return False, f"{len(values)} outputs, expected {len(golden)}: {', '.join(golden)}"
        for (name, expected), value in zip(golden.items(), values):
            passed, text = _one(name, expected, np.asarray(value), wanted)
            good &= passed
            if rank == 0 or not passed:
                texts.append(text if rank == 0 else f"rank {rank} {text}")
    return good, "; ".join(texts) or "nothing to compare with"


def _golden(golden: Any, rank: int) -> dict[str, Any] | None:
    if hasattr(golden, "for_rank"):
        return golden.for_rank(rank)
    if hasattr(golden, "lazy_golden_generator"):
        return golden.golden if rank == 0 else None
    return golden if rank == 0 else None


def _one(name: str, expected: Any, value: np.ndarray, wanted: Any) -> tuple[bool, str]:
    if hasattr(expected, "validator"):  # the test has its own validator for the bytes of the output
        bytes_ = np.ascontiguousarray(value.astype(expected.output_ndarray.dtype, copy=False)).view(np.uint8)
        return bool(expected.validator(None).validate(bytes_.reshape(-1))), f"{name}: judged by the test"
    if isinstance(expected, Packed):
        value = static_cast(
            np.ndarray.view(value, Packed) if not isinstance(value, Packed) else value, np.float32
        )
        expected = static_cast(expected, np.float32)
    if value.size != expected.size:
        return False, f"{name}: shape {value.shape}, expected {expected.shape}"
    seen = value.astype(np.float64).reshape(expected.shape)
    exact = np.asarray(expected).astype(np.float64)
    scale = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
    bound = wanted.absolute_accuracy + wanted.relative_accuracy * scale
    with np.errstate(invalid="ignore"):
        errors = np.where((seen == exact) | (np.isnan(seen) & np.isnan(exact)), 0.0, np.abs(seen - exact))
    beyond = int(np.count_nonzero(~(errors <= bound)))
    text = f"{name}: error {np.max(errors, initial=0.0):.3g} of {bound:.3g} allowed"
    return beyond == 0, text + (f", {beyond} of {errors.size} beyond" if beyond else "")


def results(row: Any) -> list[tuple[bool, str]]:
    """Call the test that a row names; whether each of its launches is within tolerance, and the errors."""
    from test.utils.common_dataclasses import Platforms, TraceMode

    module = importlib.import_module(
        f"test.integration.nkilib.{row.file.removesuffix('.py').replace('/', '.')}"
    )
    owner, _, name = row.test.rpartition(".")
    function = getattr(getattr(module, owner), name) if owner else getattr(module, name)
    options = {"range_test_options": _case(function, row.case)} if row.case else {}
    import nki.language as nl

    options.update(eval(f"dict({row.arguments})", {"nl": nl, "np": np, **module.__dict__}))
    manager = Manager(TraceMode.Simulator)
    fixtures = {
        "test_manager": manager,
        "platform_target": Platforms(row.target),
        "collector": _Silent(),
        "request": _Request(),
        "is_negative_test_case": False,
    }
    names = inspect.signature(function).parameters
    filled = {key: value for key, value in fixtures.items() if key in names}
    function(*([getattr(module, owner)()] if owner else []), **{**filled, **options})
    return manager.results


def _case(function: Any, name: str) -> Any:
    """Return one of the cases that a test's ranges generate, by its name; they are drawn from a fixed seed."""
    from test.utils.ranged_test_harness import RangeTestHarness

    random.seed(0)
    limit = getattr(function, "limit_num_of_test", None)
    limited = {"limit_num_of_test": limit} if limit else {}
    names, cases = RangeTestHarness(function.range_test_config, **limited).get_unique_test_cases()
    return cases[names.index(name)]


class Manager:
    """Replaces the manager that compiles and runs on a device: runs in the simulator, and compares."""

    def __init__(self, trace_mode: Any = None) -> None:
        self.trace_mode = trace_mode
        self.results: list[tuple[bool, str]] = []

    def execute(self, test: Any) -> None:
        """Run a kernel for a test; a wrong result is kept, an error is raised."""
        self.results.append(compared(test, outputs(test)))


class _Silent:
    """Replaces the collector of metrics."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Request:
    """Replaces pytest's request: tests read nothing of it but the name of their case."""

    class node:
        class callspec:
            id = ""
