"""Runs a command inside the process of a test, instead of in a new interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def run_command(main: Callable[[list[str]], Any], words: Sequence[str], capture: Any, status: int = 0) -> Any:
    """Run a command's main function, check its exit status, and return what it wrote.

    Args:
        main: the function that takes the words of the command line, and returns the status or raises SystemExit.
        words: the words behind the name of the program.
        capture: pytest's fixture capsys or capfd.
        status: the status with which the command has to end.

    Returns:
        A pair (out, err), the texts of stdout and stderr.
    """
    try:
        ended = main([*words])
    except SystemExit as exit:
        ended = exit.code
    output = capture.readouterr()
    assert ended == status, output
    return output
