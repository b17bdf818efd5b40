"""Options of `nkw bundle` for a model or a layer, and the test whether a command line names a model or a kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from model.commands.options import option, options
from model.loading.shipped import find_model_path

OPTIONS = options(
    "model --layer --out=DIR --prompt",
    option("--max-new-tokens", default=None, help="most tokens of a generation (default: 8)"),
    "--tokens --target --tp --lnc --dtype --hardware --json",
)


def names_a_model(words: Sequence[str]) -> bool:
    """Return whether the words after `nkw bundle` ask for a model, not for a kernel.

    They do if they include --layer, also as --layer=N, or if the first word is a folder with a config.json or the name
    of a model that comes along, such as "stories".
    """
    if any(word.partition("=")[0] == "--layer" for word in words):
        return True
    folder = find_model_path(words[0]) if words else Path()
    if not words or not os.path.isdir(folder):
        return False
    from model.config.folder import (
        find_config_file,  # imports numpy, which no help of a kernel's bundle needs
    )

    return os.path.isfile(find_config_file(folder))
