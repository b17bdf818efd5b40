"""`FRAMEWORK FOLDER ARGUMENT…`: nkw with these arguments, in a process that torchrun started on a core of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nkw.commands import main
from tests.device.conftest import FRAMEWORKS
from tests.device.site import install


def on_a_core(framework: str, folder: str, *arguments: str) -> int:
    """Run one command; the vendor's packages seem to be in a folder of this rank."""
    make, versions = FRAMEWORKS[framework]
    with pytest.MonkeyPatch.context() as patch:
        install(Path(f"{folder}-{os.environ['RANK']}"), versions, patch)
        make("trn2", int(os.environ["WORLD_SIZE"]), patch)
        return main(arguments)


if __name__ == "__main__":
    sys.exit(on_a_core(*sys.argv[1:]))
