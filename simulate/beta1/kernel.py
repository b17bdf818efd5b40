"""Kernels of Beta 1: launched over an SPMD grid of any number of axes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nkw.errors import InvalidArgument, RuleViolation, rule
from simulate.beta1.overloads import OperatorTile
from simulate.beta1.program import Program, entered, running
from simulate.beta1.region import Region
from simulate.beta1.tile import BlockTensor, Tile
from simulate.kernel import for_all_ranks
from simulate.memory import NkiTensor
from simulate.run import current_core
from simulate.run.arguments import map_leaves
from simulate.run.launch import Launch
from simulate.world import launch


class Kernel:
    """A kernel; call it with numpy arrays or torch tensors, or `kernel[4, 2](…)` for a grid of programs.

    The programs of a grid run one after another on one core, the last axis fastest, so a run is
    deterministic; the tensors they allocate in shared HBM are the same ones. Inside another kernel a kernel
    is a plain function call.
    """

    def __init__(self, func: Callable[..., Any], grid: tuple[int, ...] = ()) -> None:
        if not callable(func):
            raise InvalidArgument("NKW-KERNEL", f"nki.jit of {type(func).__name__}; it takes a function")
        functools.update_wrapper(self, func)
        self.function = func
        self.grid = grid
        self.func = _Body(func, grid)  # which `World.launch` runs

    def __getitem__(self, grid: Any) -> Kernel:
        """Return the kernel over a grid: integers, nl.nc(n) or nl.spmd_dim(…), one per axis.

        `kernel[0]` occurs in public kernels for "one program" and is taken so.
        """
        sizes = grid if isinstance(grid, tuple) else (grid,)
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
            raise InvalidArgument(
                "NKW-GRID", f"kernel[{grid!r:.60}]: a grid is one or more positive integers"
            )
        return Kernel(self.function, tuple(max(int(size), 1) for size in sizes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch on the target chip; returns what the first program returns, as arrays."""
        if running() is not None:
            return self.function(*args, **kwargs)
        return self.launched(args, kwargs).outputs[0]

    def launched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
        """Run the kernel and return its launch with the stream."""
        return launch(self.func, for_all_ranks(args, kwargs))

    def __repr__(self) -> str:
        return f"<nki kernel {getattr(self.function, '__qualname__', self.function)}>"


class Benchmarked(Kernel):
    """A kernel that also predicts its latency: `benchmark_result.nc_latency.get_latency_percentile(p)` in us.

    The prediction is the same for every percentile: a simulated run does not vary. It is device time: start and end of
    the kernel are in it, the host side is not.
    """

    benchmark_result: SimpleNamespace

    def __getitem__(self, grid: Any) -> Benchmarked:
        """Return the kernel over a grid."""
        return Benchmarked(self.function, super().__getitem__(grid).grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch, and predict the time from the streams."""
        from simulate.timing import schedule

        done = self.launched(args, kwargs)
        timeline = schedule(done.streams, done.hardware)
        microseconds = (timeline.length_ns + timeline.overhead_ns) / 1000
        latency = SimpleNamespace(get_latency_percentile=lambda percentile: microseconds)
        self.benchmark_result = SimpleNamespace(nc_latency=latency)
        return done.outputs[0]


class _Body:
    """The function that a core runs: all programs of the grid.

    The dialect's compiler reorders affine loops, so PSUM tiles that do not fit in program order are a warning.
    """

    def __init__(self, func: Callable[..., Any], grid: tuple[int, ...]) -> None:
        self._func = func
        self._grid = grid
        self.__name__ = getattr(func, "__name__", "kernel")
        self.__code__ = getattr(func, "__code__", None)  # the names of the arguments, for reports

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        core = current_core()
        core.rank.reorders_loops = True
        shared: list[NkiTensor] = []
        results = []
        for ids in itertools.product(*(range(size) for size in self._grid)):
            program = Program(core, ids, self._grid, shared, OperatorTile)
            with entered(program):
                result = self._func(*map_leaves(_wrapped, args), **map_leaves(_wrapped, kwargs))
                program.settle()
                results.append(map_leaves(_unwrapped, result))
        return results[0]


def _wrapped(value: Any) -> Any:
    return OperatorTile.from_region(Region.from_tensor(value)) if isinstance(value, NkiTensor) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, BlockTensor):
        returned_from_hbm(value)
    return value.tensor if isinstance(value, Tile) else value


@rule("NKW-BETA1-RETURN")
def returned_from_hbm(value: BlockTensor) -> None:
    """A kernel returns tensors in HBM."""
    raise RuleViolation(returned_from_hbm, f"{value!r}", hint="nl.store it to an nl.shared_hbm tensor")
