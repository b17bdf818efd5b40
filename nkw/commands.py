"""Command line `nkw`: parsers, help and lazy imports of its commands, also for the simulator's own command line.

Exit statuses of the model's commands: 0 done, 2 wrong input (one line on stderr), 130 interrupted. The simulator's
command line has its own exit statuses.
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
from nkw.verbs import (
    IS_MODEL,
    MODEL_BUNDLE,
    MODEL_VERBS,
    OVERLAY,
    SIMULATOR,
    SIMULATOR_VERBS,
    VLLM_OPTIONS,
    Verb,
)

_COLUMNS = 78  # of the parts of the help that argparse does not wrap


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `nkw` and return its exit status; errors are printed on stderr as one line.

    Args:
        argv: The words after `nkw`. With None they are those of this process, which an interrupt then ends at once.
    """
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
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        reason = error.strerror or error
        if error.filename is not None:  # a path with too long a name, for example; readers raise ModelError
            path = shown(str(error.filename), LONGEST_PATH)
            print(f"nkw: error: {path} cannot be used: {reason}", file=sys.stderr)
            return 2
        print(f"nkw: error: the output cannot be written: {reason}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops the rest of its buffer
        return 2


def load(name: str) -> Any:
    """Import a module and return its object, from a text MODULE:NAME.

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: The module has no such name.
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def add_commands(
    parser: argparse.ArgumentParser,
    verbs: Mapping[str, Verb],
    arguments: Sequence[str],
    required: bool = False,
    dest: str = "command",
) -> tuple[str, argparse.ArgumentParser | None]:
    """Add all commands to a parser as subparsers; only the requested command gets its options and full help.

    The second word of a command that has one becomes the option `verb`.

    Args:
        parser: The parser.
        verbs: The commands by name.
        arguments: The command line, whose first word without a hyphen names the requested command.
        required: Whether parsing fails without a command.
        dest: Name of the parsed option that has the command.

    Returns:
        Name and parser of the requested command; for a command of two words, the parser of the second word. The name is
        "" and the parser None if no word names a command.
    """
    second: argparse.ArgumentParser | None = None
    commands = parser.add_subparsers(dest=dest, required=required, metavar="COMMAND")
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
            add_help=bool(verb.options or verb.verbs),
            allow_abbrev=False,
        )
        if verb.verbs:
            following = arguments[list(arguments).index(name) + 1 :]
            _, second = add_commands(command, verb.verbs, following, dest="verb")
        add_options(command, load(verb.options) if verb.options else ())
    return name, second or commands.choices.get(name)


def build_parser(
    arguments: Sequence[str], verbs: Mapping[str, Verb] = MODEL_VERBS
) -> argparse.ArgumentParser:
    """Return the parser of `nkw` in which the command that the arguments name has its options."""
    parser = _OneLineParser(
        prog="nkw",
        description="NKI Workbench: NKI kernels run, timed and checked without a chip, and models made of them.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    _, command = add_commands(parser, verbs, arguments)
    if command is not None:
        load(VLLM_OPTIONS)(command)
    return parser


class _OneLineParser(argparse.ArgumentParser):
    """Parser whose errors are one line. Option names may have underscores, as in vLLM, and are not abbreviated."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{**keywords, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        """Print the message in one line on stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {shown(message)}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all words, and return the options and an empty list.

        Exit with status 2 if a word is left over. A positional word may also follow the options.
        """
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = map(_hyphenate, words[:end])
        if self._subparsers is not None and words[:1] and words[0].startswith("-"):
            name = words[0].partition("=")[0]
            if name not in self._option_string_actions:  # argparse would read its value as the command
                self.error(describe_unknown(self, [name]))
        options, unknown = super().parse_known_args(words, namespace)
        takes_word = any(action.nargs == argparse.OPTIONAL for action in self._get_positional_actions())
        if unknown and takes_word and not any(word.startswith("-") for word in unknown):
            options, unknown = super().parse_known_args(unknown, options)
        if unknown:
            self.error(describe_unknown(self, unknown))
        return options, unknown

    def _get_option_tuples(self, option_string: str) -> Any:
        """Return argparse's candidates for a word, but only options whose whole flag begins it, such as -n of -n4.

        Argparse itself also takes words that are the beginning of a flag.
        """
        tuples = super()._get_option_tuples(option_string)
        return [option for option in tuples if option_string.startswith(option[1])]


def _hyphenate(word: str) -> str:
    """Return a word with hyphens in place of the underscores of an option's name; other words are unchanged.

    The name ends at `=` or at the first dot.
    """
    name = word.partition("=")[0].partition(".")[0] if word.startswith("--") else ""
    if " " in name:  # argparse takes such a word as a value
        return word
    return name.replace("_", "-") + word[len(name) :]


def describe_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Return the message about words that a parser does not take: the first option among them, else the first word.

    The value of an option may be a secret and is not repeated.
    """
    from nkw.suggestions import did_you_mean

    name = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if name is None:
        return f"unexpected word {words[0]}"
    actions = parser._option_string_actions
    options = [option for option, action in actions.items() if action.help is not argparse.SUPPRESS]
    longer = [option for option in options if len(name) > 4 and option.startswith(name)]
    if longer:
        return f"there is no option {name}; did you mean {min(longer, key=len)}? Options are not abbreviated"
    return f"there is no option {name}{did_you_mean(name, options) or '; --help lists the options'}"


def _run_model(arguments: Sequence[str], verbs: Mapping[str, Verb], is_process: bool) -> int:
    """Run a command of the model, or print the version, and return the exit status.

    Args:
        arguments: The words after `nkw`.
        verbs: The commands by name.
        is_process: Whether the command is the whole process, so that signal handlers may be set.

    Raises:
        SystemExit: The words are refused, with status 2, or ask for help.
    """
    parser = build_parser(arguments, verbs)
    options = parser.parse_args(arguments)
    if options.version:
        from nkw.version import DISTRIBUTION, version

        print(f"{DISTRIBUTION} {version()}")
        return 0
    if options.command is None:
        parser.error(f"a command is needed: {', '.join(verbs)}")
    verb = verbs[options.command]
    if verb.verbs and options.verb is None:
        parser.parse_args([*arguments, "--help"])
    replace_unprintable()
    command = load((verb.verbs[options.verb] if verb.verbs else verb).function)
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
    """Run a command of the simulator and return its exit status.

    Exceptions of the user's script pass through. An interrupt ends the process if `is_process` is True.

    Args:
        arguments: The words of the command.
        prog: Name of the command line in messages.
        is_process: Whether the command is the whole process.
    """
    try:
        status: int = load(SIMULATOR)(arguments, prog, is_process)
    except KeyboardInterrupt as stopped:
        if not is_process:
            raise
        leave(stopped, "nkw: ")
    return status
