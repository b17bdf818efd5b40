"""`@nki.jit` makes a function a kernel: an object that is launched by calling it."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from nkw.errors import InvalidArgument
from simulate.level import LNC_BY_GRID, Level
from simulate.run.environment import SETS_LOGICAL_CORE, is_replay_requested, read_core_count, read_rank_count
from simulate.run.launch import ArgumentsOfRanks
from simulate.run.machine import Mode, running_core
from simulate.run.order_requests import Scheduled
from simulate.world import launch


class Kernel:
    """A kernel; call it with numpy arrays or torch tensors, or `kernel[2](…)` for two physical cores.

    `func` is the wrapped function. Inside another kernel a kernel is a plain function call, as in the official
    simulator (the compiler refuses it; see lint rule NKI008).
    """

    def __init__(
        self,
        func: Callable[..., Any],
        grid: int | None = None,
        config: object = None,
        overrides: bool = False,
    ) -> None:
        if not callable(func):
            raise InvalidArgument("NKW-KERNEL", f"nki.jit of {type(func).__name__}; it takes a function")
        functools.update_wrapper(self, func)
        self.func = func
        self._grid = grid
        self._config = config
        self._overrides = overrides

    def __getitem__(self, grid: int) -> Kernel:
        """Return the kernel on `grid` physical cores of one logical core, 1 or 2. Deprecated since NKI 0.7."""
        Level.resolve().notice(LNC_BY_GRID)
        size = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        if size not in (1, 2) or isinstance(size, bool):
            raise InvalidArgument(
                "NKW-LNC",
                f"kernel[{grid!r:.40}]: the grid is one integer, 1 or 2, the logical core size, which is set by "
                + SETS_LOGICAL_CORE,
            )
        return Kernel(self.func, size, self._config, self._overrides)

    def configured(self, config: object, overrides: bool) -> Kernel:
        """Return the kernel with a compile configuration; `overrides` tolerates nested kernels with another one."""
        return Kernel(self.func, self._grid, config, overrides)

    @property
    def config(self) -> tuple[object, bool]:
        """The compile configuration, and whether nested kernels may have another one."""
        return self._config, self._overrides

    def with_schedule(self, edges: Sequence[tuple[str, str | Sequence[str]]]) -> Kernel:
        """Return the kernel with ordering requests between named instructions: (consumer, producer or producers).

        Requests change the predicted time and no value. A launch raises InvalidArgument if it has no instruction of a
        name.
        """
        return Kernel(Scheduled(self.func, edges), self._grid, self._config, self._overrides)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch on the target chip, on one rank; returns what the kernel returns, as arrays.

        NKI_LEVEL and NKI_RULES decide what is accepted. Without a grid, from level 0.7 on, NEURON_LOGICAL_NC_CONFIG is
        the number of physical cores; InvalidArgument is raised where it is not that of the grid. With NKW_REPLAY=1,
        launches without a grid on one core run in mode replay. With NKW_RANKS=N, N ranks run the kernel, the others on
        copies of the arguments; what rank 0 returns is returned.
        """
        core = running_core()
        if core is not None:
            self._agree(core.rank.config)
            return self.func(*args, **kwargs)
        level = Level.resolve()
        cores = read_core_count(getattr(self.func, "__name__", "kernel"), self._grid, level)
        has_grid = self._grid is not None or cores > 1
        done = launch(
            self.func,
            for_all_ranks(args, kwargs),
            logical_core_size=cores,
            mode=Mode.replay if is_replay_requested() and not has_grid else Mode.eager,
            has_grid=has_grid,
            level=level,
            config=self.config,
        )
        return done.outputs[0]

    def _agree(self, launched: tuple[object, bool]) -> None:
        """Compare the configuration of a nested kernel with that of the launched kernel."""
        config, overrides = launched
        if self._config is None or self._config == config:
            return
        text = f"nested kernel {self.__name__} has {self._config}, the launched kernel {config}"  # type: ignore[attr-defined]
        if not overrides:
            raise InvalidArgument(
                "NKW-COMPILE-CONFIG",
                f"{text}; make them equal, or launch with SpecializationConfig(allow_nested_config_override=True)",
            )
        warnings.warn(f"{text}, which holds for both", UserWarning, stacklevel=3)

    def __repr__(self) -> str:
        return f"<nki kernel {getattr(self.func, '__qualname__', self.func)}>"


def for_all_ranks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentsOfRanks:
    """Return the arguments of a call for each rank: the arguments for rank 0, copies of them for the other ranks."""
    return [(args, kwargs), *(copy.deepcopy((args, kwargs)) for _ in range(read_rank_count() - 1))]


def as_kernel(kernel: Any) -> Kernel:
    """Return a kernel unchanged, and a plain function wrapped as a kernel."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)
