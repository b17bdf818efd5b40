"""The simulator's command line: `python -m simulate …`, and the same as `nkw …`. `nkw.verbs` has its commands."""

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
_SPAWNED = "import sys; sys.path[:] = {path!r}; from simulate.cli import spawned; spawned(sys.argv[1:])"
"""The code of a child that is a new interpreter."""


def main(
    argv: Sequence[str] | None = None, prog: str = "python -m simulate", is_process: bool = False
) -> int:
    """Run one command; returns the exit status.

    0, 1 for a kernel that breaks a rule or for findings, 2 for what the command cannot do, 3 where code of the user
    ended or failed, so that there is no verdict.

    Args:
        prog: the name of the command line, for its help.
        is_process: whether the command is all that this process does. Commands on a kernel by name run in a child
            process then, and signals raise exceptions once the command is imported.
    """
    from nkw import terminal

    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _options(arguments, prog)
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


def spawned(arguments: Sequence[str]) -> NoReturn:
    """Run a command as the child process of another interpreter, see `run_in_child`."""
    from simulate.child_entry import become_spawned_child
    from simulate.isolated import act_in_child, set_limits

    child_arguments, prog, *words = arguments
    begin()
    imported()
    options = _options(words, prog)
    set_limits(options)
    become_spawned_child(partial(act_in_child, options), child_arguments)


def _options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Return the options of a command line, and the command's function as `act`; exits with 2 for a wrong one."""
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
    """Take script or kernel and what follows it; exits with status 2 where that cannot be taken."""
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
