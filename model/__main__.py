"""The command `nkw`, once its packages are known to be ours; and `python -m model`, which is the same."""

from __future__ import annotations

import sys

from nkw.process import begin


def main() -> int:
    """Run the command that the command line names; returns the exit status."""
    begin("nkw: ")
    from model.commands.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
