"""Fills deploy/cloud-init.yaml in from environment variables, and prints the user data of an instance.

`python deploy/render.py > user-data.yaml`. It ends with status 2 and one sentence where a variable is not set, or has a
value that a line of a shell script cannot hold.
"""

from __future__ import annotations

import base64
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template

FOLDER = Path(__file__).resolve().parent
PARTS = "NKW_PARTS"
"""Words of a command line; every other variable is one word."""


def rendered(template: str, script: bytes, variables: Mapping[str, str]) -> str:
    """Fill in the template. ValueError names the variables that are missing or hold more than one line."""
    given = {"INSTALL_SH": base64.b64encode(script).decode()}
    wanted = {
        found["braced"] for found in Template.pattern.finditer(template) if found["braced"]
    } - given.keys()
    missing = sorted(name for name in wanted if not variables.get(name))
    if missing:
        raise ValueError(f"not set: {', '.join(missing)}; deploy/README.md says what they are")
    for name in sorted(wanted):
        value = variables[name]
        if not value.isprintable() or set(value) & set('"\\'):
            raise ValueError(f"{name} holds a character that a line of the script cannot hold")
        words = value.split() if name == PARTS else [value]
        given[name] = shlex.join(words)
    return Template(template).substitute(given)


def main() -> int:
    """Print the user data; the exit status."""
    try:
        text = rendered(
            (FOLDER / "cloud-init.yaml").read_text(encoding="utf-8"),
            (FOLDER / "install.sh").read_bytes(),
            os.environ,
        )
    except ValueError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
