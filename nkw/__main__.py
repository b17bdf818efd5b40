"""Entry point of `nkw` and `python -m nkw`: checks that the project's packages are not hidden, then runs the command.

A file `model.py` or `simulate.py` earlier on Python's path would be imported in place of the package of that name.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PACKAGES = ("simulate", "model", "nki_kernels")


def main() -> int:
    """Run the command of the process's command line and return its exit status.

    Print an error and return 2 if another file hides one of the packages simulate, model and nki_kernels.
    """
    for name in _PACKAGES:
        spec = find_spec(name)
        path = os.path.realpath(spec.origin) if spec and spec.origin else ""
        if not path.startswith(os.path.join(_ROOT, name) + os.sep):
            print(
                f"nkw: error: [NKW-SHADOWED] {path or name} has the name of the package {name} of NKI Workbench and "
                "hides it: rename that file, or take its folder from Python's path",
                file=sys.stderr,
            )
            return 2
    from nkw.process import begin

    begin("nkw: ")
    from nkw.commands import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
