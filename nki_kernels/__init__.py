"""NKI kernels of a Llama: one kernel per file, each with its plain numpy reference beside it.

Importing the package decides what `import nki` means (`simulate.bind.install`): the real package where a usable one
is installed, else the simulator. Then every file `<name>.py` that holds a kernel `<name>` and its `<name>_reference`
gives both to the package.

`cores` in a kernel's file has the numbers of physical cores of a logical core that divide the work of a launch: (1,) or
(1, 2). On two cores a kernel with (1,) refuses a launch, leaves the second core idle, or repeats its work on each.
"""

from __future__ import annotations

import importlib
import pkgutil

from simulate.bind import install

install()


def _import_kernels() -> dict[str, object]:
    """Import the modules of this package; return their kernels and references by name.

    A module `<name>` counts if it defines both `<name>` and `<name>_reference`; other modules and subpackages
    are left out.
    """
    kernels: dict[str, object] = {}
    for file in pkgutil.iter_modules(__path__):
        names = (file.name, f"{file.name}_reference")
        module = None if file.ispkg else importlib.import_module(f"{__name__}.{file.name}")
        if all(hasattr(module, name) for name in names):
            kernels |= {name: getattr(module, name) for name in names}
    return kernels


_SHIPPED = _import_kernels()
globals().update(_SHIPPED)
__all__ = list(_SHIPPED)
