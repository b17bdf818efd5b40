"""`@nki.jit` makes a function a kernel: an object that is launched by calling it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from simulate.errors import InvalidArgument
from simulate.run.machine import Mode, running_core
from simulate.run.order_requests import Scheduled
from simulate.run.target import SETS_LOGICAL_CORE, replay_is_wanted
from simulate.world import launch


class Kernel:
    """A kernel; call it with numpy arrays or torch tensors, or `kernel[2](…)` for two physical cores.

    `func` is the wrapped function. Inside another kernel a kernel is a plain function call, as in the official
    simulator (the compiler refuses it; see lint rule NKI008).
    """

    def __init__(self, func: Callable[..., Any], logical_core_size: int = 1, has_grid: bool = False) -> None:
        if not callable(func):
            raise InvalidArgument("NKW-KERNEL", f"nki.jit of {type(func).__name__}; it takes a function")
        functools.update_wrapper(self, func)
        self.func = func
        self._logical_core_size = logical_core_size
        self._has_grid = has_grid

    def __getitem__(self, grid: int) -> Kernel:
        """The kernel on `grid` physical cores of one logical core: 1 or 2."""
        size = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        if size not in (1, 2) or isinstance(size, bool):
            raise InvalidArgument(
                "NKW-LNC",
                f"kernel[{grid!r:.40}]: the grid is one integer, 1 or 2, the logical core size, which is set by "
                + SETS_LOGICAL_CORE,
            )
        return Kernel(self.func, size, True)

    def with_schedule(self, edges: Sequence[tuple[str, str | Sequence[str]]]) -> Kernel:
        """The kernel with ordering requests between named instructions: (consumer, producer or producers).

        Requests change the predicted time and no value. A launch raises InvalidArgument if it has no instruction of a
        name.
        """
        return Kernel(Scheduled(self.func, edges), self._logical_core_size, self._has_grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch on one rank of the target chip; returns what the kernel returns, as arrays.

        With NKW_REPLAY=1, launches without a grid run in mode replay.
        """
        if running_core() is not None:
            return self.func(*args, **kwargs)
        done = launch(
            self.func,
            [(args, kwargs)],
            logical_core_size=self._logical_core_size,
            mode=Mode.replay if replay_is_wanted() and not self._has_grid else Mode.eager,
            has_grid=self._has_grid,
        )
        return done.outputs[0]

    def __repr__(self) -> str:
        return f"<nki kernel {getattr(self.func, '__qualname__', self.func)}>"


def as_kernel(kernel: Any) -> Kernel:
    """A jitted kernel unchanged, a plain function wrapped."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)
