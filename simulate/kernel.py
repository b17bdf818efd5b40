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
    """Kernel that is launched by a call, on one physical core or, as `kernel[2](a, b)`, on two.

    Arguments may be NumPy arrays, torch tensors and containers of them.

    `func` is the wrapped function. Called inside another kernel, it is a plain function call, as in the official
    simulator; NKI's compiler refuses such a call (lint rule NKI008).
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
        """Return this kernel with a grid, the number of physical cores: 1 or 2. Deprecated since NKI 0.7.

        Gives a DeprecationWarning at level 0.7. Raises InvalidArgument for any other grid.
        """
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
        """Return this kernel with a compile configuration.

        Args:
            config: The configuration, which nested kernels are compared with.
            overrides: Whether a nested kernel with another configuration gives a warning instead of an error.
        """
        return Kernel(self.func, self._grid, config, overrides)

    @property
    def config(self) -> tuple[object, bool]:
        """Compile configuration, and whether nested kernels with another one give a warning instead of an error."""
        return self._config, self._overrides

    def with_schedule(self, edges: Sequence[tuple[str, str | Sequence[str]]]) -> Kernel:
        """Return this kernel with ordering requests: pairs (consumer, producer or producers) of instruction names.

        A request makes the consumer start after its producers; it changes the predicted time and no value. A launch
        raises InvalidArgument if none of its instructions has one of the names.
        """
        return Kernel(Scheduled(self.func, edges), self._grid, self._config, self._overrides)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel on the target chip and return what it returns, with arrays in the place of HBM tensors.

        Inside another kernel, call the function instead. Arrays that the kernel writes to are updated in place.

        - NKI_LEVEL and NKI_RULES decide what is accepted.
        - Without a grid, NEURON_LOGICAL_NC_CONFIG is the number of physical cores from level 0.7 on. InvalidArgument
          is raised if it differs from the grid.
        - With NKW_REPLAY=1, launches without a grid on one core run in mode replay.
        - With NKW_RANKS=N, N ranks run the kernel, all but rank 0 on copies of the arguments. The return value is
          rank 0's.
        """
        core = running_core()
        if core is not None:
            self._check_config(core.rank.config)
            return self.func(*args, **kwargs)
        level = Level.resolve()
        cores = read_core_count(getattr(self.func, "__name__", "kernel"), self._grid, level)
        has_grid = self._grid is not None or cores > 1
        done = launch(
            self.func,
            copy_for_ranks(args, kwargs),
            logical_core_size=cores,
            mode=Mode.replay if is_replay_requested() and not has_grid else Mode.eager,
            has_grid=has_grid,
            level=level,
            config=self.config,
        )
        return done.outputs[0]

    def _check_config(self, launched: tuple[object, bool]) -> None:
        """Check the compile configuration of this nested kernel against that of the launched kernel.

        Raises InvalidArgument if they differ, or warns if the launched kernel allows other ones; a kernel without a
        configuration agrees with all.
        """
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


def copy_for_ranks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentsOfRanks:
    """Return (args, kwargs) of each of NKW_RANKS ranks: rank 0 gets the arguments, other ranks deep copies."""
    return [(args, kwargs), *(copy.deepcopy((args, kwargs)) for _ in range(read_rank_count() - 1))]


def as_kernel(kernel: Any) -> Kernel:
    """Return a `Kernel` unchanged, and a plain function wrapped as a `Kernel` without grid and configuration."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)
