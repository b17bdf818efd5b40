"""The simulator's command line, `python -m simulate COMMAND`, and the same commands as `nkw COMMAND`.

`nkw.verbs` lists the commands. A kernel by name is FILE.py:NAME or MODULE:NAME instead of a script.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from nkw.commands import add_commands, describe_unknown, load
from nkw.errors import LONGEST_PATH, InvalidArgument, shown
from nkw.options import add_options
from nkw.process import begin, imported, replace_unprintable
from nkw.verbs import SIMULATOR_VERBS
from simulate.command_words import WITH_WORDS, CommandOptions, add_words, take_words

_WITH_REPORT = ("time", "memory", "verify", "tune", "bundle", "compare", "calibrate")
"""Commands that print `?` for characters that the encoding of stdout lacks."""
_SPAWNED = (
    "import sys; sys.path[:] = {path!r}; from simulate.cli import run_spawned; run_spawned(sys.argv[1:])"
)
"""The code of a child that is a new interpreter."""


def main(
    argv: Sequence[str] | None = None, prog: str = "python -m simulate", is_process: bool = False
) -> int:
    """Run one command and return its exit status.

    The status is 0 for success, 1 for a kernel that breaks a rule or for findings, and 2 for a command that cannot be
    done. It is 3 where code of the user ended or failed, so that there is no verdict. Errors are printed on stderr.

    Args:
        argv: The words of the command line without the program; None takes those of `sys.argv`.
        prog: The name of the program in help and messages.
        is_process: Whether this process does nothing else. Then commands that judge code of the user run in a child
            process, and signals raise exceptions once the command is imported.

    Raises:
        SystemExit: The words are wrong (status 2), or ask for help (status 0).
    """
    from nkw import terminal

    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse_options(arguments, prog)
    if is_process:
        from simulate.isolated import run_isolated, runs_in_child

        imported()
    try:
        if is_process and runs_in_child(options):
            return run_isolated(options, [_SPAWNED.format(path=sys.path), prog, *arguments])
        if options.command in _WITH_REPORT:
            replace_unprintable()
        status: int = options.act(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and str(error.filename) in arguments:
            terminal.error(f"{shown(str(error.filename), LONGEST_PATH)} cannot be used: {error.strerror}")
            return 2
        if error.filename is not None or (options.command == "run" and Path(options.script).is_file()):
            raise  # from the script; errors of report files are typed
        terminal.error(f"the report cannot be written: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
        return 2


def run_spawned(arguments: Sequence[str]) -> NoReturn:
    """Run a command as the child that `run_in_child` started as a new interpreter; never returns.

    Args:
        arguments: The parent's JSON text for `become_spawned_child`, the name of the program, and the command's
            words.
    """
    from simulate.child_entry import become_spawned_child
    from simulate.isolated import act_in_child, set_limits

    child_arguments, prog, *words = arguments
    begin()
    imported()
    options = _parse_options(words, prog)
    set_limits(options)
    become_spawned_child(partial(act_in_child, options), child_arguments)


def _parse_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Parse a command line and return its options, with the function of the command as the attribute `act`.

    Exits with status 2 and a message for wrong words.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="Run and time NKI kernels without a chip.", allow_abbrev=False
    )
    name, command = add_commands(parser, SIMULATOR_VERBS, arguments, required=True)
    if command is not None and name in WITH_WORDS:
        add_words(command, name)
    options, unknown = parser.parse_known_args(arguments)
    options.prog, options.unknown = prog, unknown
    if unknown and options.command != "fidelity":
        parser.error(describe_unknown(command or parser, unknown))
    verb = SIMULATOR_VERBS[options.command]
    if "words" in options:
        options.command_options = CommandOptions(add_help=False, allow_abbrev=False)
        add_options(options.command_options, load(verb.options))
        _take_words(parser, options)
    options.act = load(verb.function)
    return options


def _take_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set `script` and `arguments` of the options from the words after the command; parse options among them.

    Exits with status 2 and a message for an unknown or misplaced option, or for a limit with a script.
    """
    from nkw import terminal
    from simulate.isolated import check_limits
    from simulate.kernel_by_name import names_a_kernel

    try:
        take_words(options, parser.prog, names_a_kernel)
        check_limits(options)
    except InvalidArgument as misplaced:
        terminal.error(misplaced)
        sys.exit(2)
    except argparse.ArgumentError as error:
        parser.error(str(error))
