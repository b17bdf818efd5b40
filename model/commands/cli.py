"""The command `nkw`: its commands and exit statuses.

What a command does is in a `command.py`, imported when it is needed; its options are in a file `arguments.py`.

Exit status: 0 done, 2 wrong input (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from model.commands.bundle import arguments as layers
from model.commands.compile import arguments as compiled
from model.commands.generate import arguments as generate
from model.commands.peer import arguments as peer
from model.commands.plan import arguments as plan
from model.commands.serve import arguments as serve
from model.commands.top import arguments as top
from model.commands.traffic import arguments as traffic
from model.commands.transcribe import arguments as transcribe
from nkw.errors import LONGEST_PATH, InvalidArgument, NkwError, shown
from nkw.options import add_options
from nkw.process import INTERRUPTED, imported, leave
from nkw.verbs import MODEL_VERBS, VERBS, Verb


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["sim"]:
        return _simulator(arguments[1:], "nkw sim", argv is None)
    of_model = arguments[:1] == ["bundle"] and layers.names_a_model(arguments[1:])
    if arguments and arguments[0] in VERBS and not of_model:
        return _simulator(arguments, "nkw", argv is None)
    try:
        options = _parser(of_model).parse_args(arguments)
        if options.version:
            from model.version import DISTRIBUTION, version

            print(f"{DISTRIBUTION} {version()}")
            return 0
        if options.command is None:
            own = "generate, transcribe, serve, compile, peer, top, plan, traffic"
            _parser().error(f"a command is needed: {own}, {', '.join(VERBS)}")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal without a character shows a question mark
        if options.command == "plan":
            from model.commands.plan.command import plan_command as command
        elif options.command == "traffic":
            from model.commands.traffic.command import traffic_command as command
        elif options.command == "transcribe":
            from model.commands.transcribe.command import transcribe_command as command
        elif options.command == "compile":
            from model.commands.compile.command import compile_command as command
        elif options.command == "bundle":
            from model.commands.bundle.command import bundle_command as command
        elif options.command == "peer":
            from model.commands.peer.command import peer_command as command
        elif options.command == "top":
            from model.commands.top.command import top_command as command
        elif options.command == "serve":
            from model.commands.serve.command import serve_command as command
        else:
            from model.commands.generate.command import generate_command as command
        if argv is None:
            imported()
        _use_overlay(options)
        status = command(options)
        sys.stdout.flush()
        return status
    except NkwError as error:
        print(f"nkw: error: {shown(error.message)}", file=sys.stderr)
        return 2
    except MemoryError:
        print("nkw: error: this needs more memory than this machine has", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        if argv is None:
            leave(stopped, "nkw: ")
        print("\n" + ": ".join(["nkw: interrupted", *map(str, stopped.args)]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (
            error.filename is not None
        ):  # of a look at a path, such as a name that is too long; readers raise ModelError
            place = shown(str(error.filename), LONGEST_PATH)
            print(f"nkw: error: {place} cannot be used: {error.strerror or error}", file=sys.stderr)
            return 2
        print(f"nkw: error: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
        return 2


def _use_overlay(options: argparse.Namespace) -> None:
    """Apply the overlay of --hardware to this process and to its child processes."""
    if getattr(options, "hardware", None) is None:
        return
    backend = getattr(options, "backend", "simulate")
    if backend != "simulate":
        raise InvalidArgument(
            "NKW-HARDWARE", f"--hardware needs the simulate backend; {backend} predicts no times"
        )
    from model.device import use_overlay

    use_overlay(options.hardware)


def _simulator(arguments: Sequence[str], prog: str, is_process: bool) -> int:
    """Run a command of the simulator. What a script raises passes through, as with `python -m simulate`."""
    from simulate.cli import main as simulator

    if is_process:
        imported()
    try:
        return simulator(arguments, prog, is_process)
    except KeyboardInterrupt as stopped:
        if not is_process:
            raise
        leave(stopped, "nkw: ")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shown(message)}\n")


def _parser(of_model: bool = False) -> argparse.ArgumentParser:
    """All commands; with `of_model`, `bundle` is that of a layer of a model and not the simulator's."""
    parser = _Parser(
        prog="nkw",
        description="NKI Workbench: NKI kernels run, timed and checked without a chip, and models made of them.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, arguments in _ARGUMENTS.items():
        _add_command(commands, name, MODEL_VERBS[name], arguments)
    for name, verb in VERBS.items():
        if of_model and name == "bundle":
            carried = verb._replace(
                example="bundle stories --layer 3 --out layer-3", ends="0 done, 2 wrong input"
            )
            _add_command(commands, name, carried, layers)
        else:
            commands.add_parser(name, add_help=False, help=verb.sentence)
    return parser


_ARGUMENTS = {
    "generate": generate,
    "transcribe": transcribe,
    "serve": serve,
    "compile": compiled,
    "peer": peer,
    "top": top,
    "plan": plan,
    "traffic": traffic,
}


def _add_command(commands: Any, name: str, verb: Verb, arguments: Any) -> None:
    """Add a command whose help ends with an example and the exit statuses."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=verb.sentence,
        description=textwrap.fill(arguments.DESCRIPTION, 78),
        epilog=f"example:\n  nkw {verb.example}\n\nExit status: {verb.ends}; 130 interrupted, 143 terminated.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(command, arguments.OPTIONS)
