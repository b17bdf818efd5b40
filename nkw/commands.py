"""The command line `nkw`, and what both command lines do with the table of verbs: options, help, and imports on use.

Exit status of the model's commands: 0 done, 2 wrong input (one line on stderr), 130 interrupted. The simulator's
command line has its own.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from nkw.errors import LONGEST_PATH, NkwError, shown
from nkw.options import add_options
from nkw.process import INTERRUPTED, imported, leave, replace_unprintable
from nkw.verbs import IS_MODEL, MODEL_BUNDLE, MODEL_VERBS, OVERLAY, SIMULATOR, SIMULATOR_VERBS, Verb

_COLUMNS = 78  # of the parts of the help that argparse does not wrap


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `nkw`; returns the exit status."""
    is_process = argv is None
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["sim"]:
        return _run_simulator(arguments[1:], "nkw sim", is_process)
    verbs = {**MODEL_VERBS, **SIMULATOR_VERBS}
    if arguments[:1] == ["bundle"] and load(IS_MODEL)(arguments[1:]):
        verbs["bundle"] = MODEL_BUNDLE
    elif arguments and arguments[0] in SIMULATOR_VERBS:
        return _run_simulator(arguments, "nkw", is_process)
    try:
        return _run_model(arguments, verbs, is_process)
    except NkwError as error:
        print(f"nkw: error: {shown(error.message)}", file=sys.stderr)
        return 2
    except MemoryError:
        print("nkw: error: this needs more memory than this machine has", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        if is_process:
            leave(stopped, "nkw: ")
        print("\n" + ": ".join(["nkw: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        reason = error.strerror or error
        if error.filename is not None:  # a path with too long a name, for example; readers raise ModelError
            path = shown(str(error.filename), LONGEST_PATH)
            print(f"nkw: error: {path} cannot be used: {reason}", file=sys.stderr)
            return 2
        print(f"nkw: error: the output cannot be written: {reason}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
        return 2


def load(name: str) -> Any:
    """Import and return the object that MODULE:NAME means."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def add_commands(
    parser: argparse.ArgumentParser,
    verbs: Mapping[str, Verb],
    arguments: Sequence[str],
    required: bool = False,
) -> tuple[str, argparse.ArgumentParser | None]:
    """Add all commands to a parser, with options and help for the command that is asked for alone.

    Returns: that command's name and parser; "" and None where the arguments name no command.
    """
    commands = parser.add_subparsers(dest="command", required=required, metavar="COMMAND")
    name = next((word for word in arguments if not word.startswith("-")), "")
    for other, verb in verbs.items():
        if other != name:
            commands.add_parser(other, help=verb.sentence)
            continue
        ends = f"Exit status: {verb.ends}; 130 interrupted, 143 terminated."
        sentence = f"{verb.sentence[0].upper()}{verb.sentence[1:]}."
        command = commands.add_parser(
            name,
            help=verb.sentence,
            description=textwrap.fill(verb.description or sentence, _COLUMNS),
            epilog=f"example:\n  {parser.prog} {verb.example}\n\n{textwrap.fill(ends, _COLUMNS)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=bool(verb.options),
        )
        add_options(command, load(verb.options) if verb.options else ())
    return name, commands.choices.get(name)


def build_parser(
    arguments: Sequence[str], verbs: Mapping[str, Verb] = MODEL_VERBS
) -> argparse.ArgumentParser:
    """Return the parser of `nkw` for arguments that may name a command."""
    parser = _OneLineParser(
        prog="nkw",
        description="NKI Workbench: NKI kernels run, timed and checked without a chip, and models made of them.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    add_commands(parser, verbs, arguments)
    return parser


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shown(message)}\n")


def _run_model(arguments: Sequence[str], verbs: Mapping[str, Verb], is_process: bool) -> int:
    """Run a command of the model, or print the version; returns the exit status."""
    parser = build_parser(arguments, verbs)
    options = parser.parse_args(arguments)
    if options.version:
        from nkw.version import DISTRIBUTION, version

        print(f"{DISTRIBUTION} {version()}")
        return 0
    if options.command is None:
        parser.error(f"a command is needed: {', '.join(verbs)}")
    replace_unprintable()
    command = load(verbs[options.command].function)
    if is_process:
        imported()
    if getattr(options, "hardware", None) is not None:
        load(OVERLAY)(options)
    status: int = command(options)
    sys.stdout.flush()
    if is_process:
        gc.freeze()  # the interpreter would walk all objects several times before it ends
    return status


def _run_simulator(arguments: Sequence[str], prog: str, is_process: bool) -> int:
    """Run a command of the simulator. What a script raises passes through, as with `python -m simulate`."""
    try:
        status: int = load(SIMULATOR)(arguments, prog, is_process)
    except KeyboardInterrupt as stopped:
        if not is_process:
            raise
        leave(stopped, "nkw: ")
    return status
