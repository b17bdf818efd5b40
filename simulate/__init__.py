"""A simulator of NeuronCores that runs, checks and times NKI kernels on any machine.

The names below are imported when they are first used: `import simulate` alone takes no time, so a pytest that finds
this package's plugin and has no kernel to test does not wait for numpy.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nkw.errors import NkwError
    from nkw.targets import TARGETS
    from simulate.bind import install
    from simulate.hardware import Hardware, hardware
    from simulate.occupancy.kernel import occupancy
    from simulate.profile.kernel import profile
    from simulate.run import Launch, Mode, recorded, target_hardware
    from simulate.verification import verify
    from simulate.world import World, launch

__version__ = "0.1.0"

__all__ = [
    "TARGETS",
    "Hardware",
    "Launch",
    "Mode",
    "NkwError",
    "World",
    "hardware",
    "install",
    "launch",
    "occupancy",
    "profile",
    "recorded",
    "target_hardware",
    "verify",
]

_HOMES = {
    "install": "bind",
    "NkwError": "errors",
    "TARGETS": "targets",
    "Hardware": "hardware",
    "hardware": "hardware",
    "World": "world",
    "launch": "world",
    "occupancy": "occupancy.kernel",
    "profile": "profile.kernel",
    "verify": "verification",
}
_PACKAGES = frozenset(
    "bind check errors isa memory nki numerics replay run testing timing verification".split()
)


class _OnDemand(ModuleType):
    """Module type of `simulate`, which imports a public name or a subpackage when the name is first read."""

    def __getattr__(self, name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"simulate.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'simulate' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"simulate.{_HOMES.get(name, 'run')}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # These name a package and a function in it; importing the package would hide the public function.
        if name in ("hardware", "occupancy", "profile") and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _OnDemand
