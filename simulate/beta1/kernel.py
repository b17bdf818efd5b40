"""Kernels of Beta 1, launched over an SPMD grid of any number of axes.

A program is one run of the kernel's function, at one position of the grid.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from nkw.errors import InvalidArgument, RuleViolation, rule
from simulate.beta1.overloads import OperatorTile
from simulate.beta1.program import Program, enter_program, running
from simulate.beta1.region import Region
from simulate.beta1.tile import BlockTensor, Tile
from simulate.kernel import copy_for_ranks
from simulate.memory import NkiTensor
from simulate.run import current_core
from simulate.run.arguments import map_leaves
from simulate.run.launch import Launch
from simulate.world import launch


class Kernel:
    """Kernel that is launched by a call, or as `kernel[4, 2](…)` for a grid of programs.

    Arguments may be NumPy arrays and torch tensors. The programs of a grid run one after another on one core, the
    last axis fastest; their allocations in shared HBM are the same tensors. Inside another kernel a kernel is a plain
    function call.
    """

    def __init__(self, func: Callable[..., Any], grid: tuple[int, ...] = ()) -> None:
        if not callable(func):
            raise InvalidArgument("NKW-KERNEL", f"nki.jit of {type(func).__name__}; it takes a function")
        functools.update_wrapper(self, func)
        self.function = func
        self.grid = grid
        self.func = _Body(func, grid)  # which `World.launch` runs

    def __getitem__(self, grid: Any) -> Kernel:
        """Return this kernel over a grid: integers, nl.nc(n) or nl.spmd_dim(…), one per axis.

        `kernel[0]` occurs in public kernels for one program and means that here. Raises InvalidArgument for anything
        but integers of 0 or more.
        """
        sizes = grid if isinstance(grid, tuple) else (grid,)
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
            raise InvalidArgument(
                "NKW-GRID", f"kernel[{grid!r:.60}]: a grid is one or more positive integers"
            )
        return Kernel(self.function, tuple(max(int(size), 1) for size in sizes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel on the target chip and return what its first program returns, with arrays for HBM tensors.

        Arrays that the kernel writes to are updated in place. Inside another kernel, call the function instead.
        """
        if running() is not None:
            return self.function(*args, **kwargs)
        return self.launched(args, kwargs).outputs[0]

    def launched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
        """Launch the kernel and return the record of the launch, with outputs and streams; NKW_RANKS sets the ranks."""
        return launch(self.func, copy_for_ranks(args, kwargs))

    def __repr__(self) -> str:
        return f"<nki kernel {getattr(self.function, '__qualname__', self.function)}>"


class Benchmarked(Kernel):
    """Kernel that also predicts its latency: `benchmark_result.nc_latency.get_latency_percentile(p)` in us.

    The prediction is the same for every percentile, because a simulated run does not vary. It is time on the device:
    start and end of the kernel are included, the host's part is not.
    """

    benchmark_result: SimpleNamespace

    def __getitem__(self, grid: Any) -> Benchmarked:
        """Return this kernel over a grid: integers, nl.nc(n) or nl.spmd_dim(…), one per axis.

        Raises InvalidArgument for anything but integers of 0 or more.
        """
        return Benchmarked(self.function, super().__getitem__(grid).grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel, set `benchmark_result` from the streams, and return what the first program returns."""
        from simulate.timing import schedule

        done = self.launched(args, kwargs)
        timeline = schedule(done.streams, done.hardware)
        microseconds = (timeline.length_ns + timeline.overhead_ns) / 1000
        latency = SimpleNamespace(get_latency_percentile=lambda percentile: microseconds)
        self.benchmark_result = SimpleNamespace(nc_latency=latency)
        return done.outputs[0]


class _Body:
    """Function that a core runs: all programs of a grid one after another; a call returns what the first one returns.

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
            with enter_program(program):
                result = self._func(*map_leaves(_wrap_tensor, args), **map_leaves(_wrap_tensor, kwargs))
                program.settle()
                results.append(map_leaves(_unwrap_tile, result))
        return results[0]


def _wrap_tensor(value: Any) -> Any:
    """Return a tile over an HBM tensor, and any other argument unchanged."""
    return OperatorTile.from_region(Region.from_tensor(value)) if isinstance(value, NkiTensor) else value


def _unwrap_tile(value: Any) -> Any:
    """Return the tensor of a returned tile, and any other object unchanged.

    Raises RuleViolation for a BlockTensor, which is on chip.
    """
    if isinstance(value, BlockTensor):
        returned_from_hbm(value)
    return value.tensor if isinstance(value, Tile) else value


@rule("NKW-BETA1-RETURN")
def returned_from_hbm(value: BlockTensor) -> None:
    """A kernel returns tensors in HBM.

    Always raises RuleViolation; called for a returned BlockTensor, which is on chip.
    """
    raise RuleViolation(returned_from_hbm, f"{value!r}", hint="nl.store it to an nl.shared_hbm tensor")
