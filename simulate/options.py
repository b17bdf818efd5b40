"""Options of the commands that run scripts and kernels, and the order of the words on their command lines."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nkw.errors import InvalidArgument
from nkw.suggestions import did_you_mean
from nkw.targets import HARDWARE_VARIABLE, TARGETS
from nkw.verbs import VERBS
from simulate.isolated import add_limits
from simulate.level import LEVEL_VARIABLE, LEVELS, NEWEST, RULES_VARIABLE, Rules

_SCRIPT = "a Python file, and the arguments that it gets"
_KERNEL = "a kernel, FILE.py:NAME or MODULE:NAME, and its arguments: f32[128,512], literals"
_SCRIPT_OR_KERNEL = f"{_SCRIPT}; or {_KERNEL}, or `group` for the replica group of all ranks"
_KERNEL_ONLY = ("verify", "tune", "bundle")
"""Commands whose first word is a kernel, never a script."""
_COLUMNS = 78  # of the parts of the help that argparse does not wrap

_OPTION = re.compile(r"--[A-Za-z][\w-]*|-[A-Za-z]")
"""A word that can be no argument of a kernel; `-1` and `-1e-5` are numbers."""

Add = Callable[[argparse.ArgumentParser], None]


class OwnOptions(argparse.ArgumentParser):
    """The options of one command alone; raises ArgumentError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise argparse.ArgumentError(None, message)

    def taken(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """The words that are these options with their values, and all others."""
        own: list[str] = []
        others: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            try:
                _, unknown = self.parse_known_args([word])
                (others if unknown or not word.startswith("-") else own).append(word)
            except argparse.ArgumentError:  # the option lacks its value, or has a wrong one
                own += [word, *(rest[:1] if "=" not in word else [])]
                del rest[: "=" not in word]
        return own, others

    def before(self, script: str, own: Sequence[str]) -> list[str]:
        """The options as they stand before the script; with -- after them where the last one would take the script."""
        try:
            self.parse_known_args(own)
            taken = script not in self.parse_known_args([*own, script])[1]
        except argparse.ArgumentError:  # wrong also without the script
            taken = False
        return [*own, *(["--"] if taken else [])]


def add_command(commands: Any, prog: str, name: str, **more: Any) -> argparse.ArgumentParser:
    """A command of `nkw.verbs`; its help shows an example and its exit statuses."""
    verb = VERBS[name]
    ends = f"Exit status: {verb.ends}; 130 interrupted, 143 terminated."
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=verb.sentence,
        description=textwrap.fill(f"{verb.sentence[0].upper()}{verb.sentence[1:]}.", _COLUMNS),
        epilog=f"example:\n  {prog} {verb.example}\n\n{textwrap.fill(ends, _COLUMNS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )
    return command


def add_running(
    commands: Any, prog: str, name: str, act: Callable[[argparse.Namespace], int], *adds: Add
) -> None:
    """A command that runs a script or a kernel by name; `adds` add its options beside chip, level and rules."""
    own = OwnOptions(add_help=False, allow_abbrev=False)
    for add in adds:
        add(own)
    _add_machine(own)
    add_limits(own)
    add_json(own)
    command = add_command(commands, prog, name, parents=[own])
    # One positional, so that argparse leaves all words after the script's name alone, -- too.
    command.add_argument(
        "words",
        nargs=argparse.PARSER,
        metavar="kernel" if name in _KERNEL_ONLY else "script",
        help=_KERNEL if name in _KERNEL_ONLY else _SCRIPT_OR_KERNEL,
    )
    command.set_defaults(act=act, own=own)


def _add_machine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", choices=TARGETS, help="the chip (default: the environment's, else trn2)")
    add_hardware(command)
    add_level(command)
    command.add_argument(
        "--rules",
        choices=[each.value for each in Rules],
        help="whose refusals hold: the chip's, or those of the vendor's simulator; the others become warnings "
        f"(default: {RULES_VARIABLE}, else chip)",
    )


def add_hardware(command: argparse.ArgumentParser) -> None:
    """The option --hardware."""
    command.add_argument(
        "--hardware",
        metavar="FILE",
        help="an overlay, whose numbers replace those of the chip's record (docs/calibrate.md; default: "
        f"{HARDWARE_VARIABLE}, else none)",
    )


def add_ranks(command: argparse.ArgumentParser) -> None:
    """The option --ranks."""
    command.add_argument(
        "--ranks",
        type=rank_count,
        metavar="N",
        help="launch every kernel that is called like a function on N ranks, with equal arguments (default: 1)",
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """The option --json."""
    command.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON (docs/json.md); - is stdout, and all else goes to stderr then",
    )


def add_level(command: argparse.ArgumentParser) -> None:
    """The option --level."""
    command.add_argument(
        "--level",
        choices=[str(level) for level in LEVELS],
        help=f"the release of NKI that kernels are written for (default: {LEVEL_VARIABLE}, else {NEWEST})",
    )


def add_trips(command: argparse.ArgumentParser) -> None:
    """The option --trips."""
    command.add_argument(
        "--trips",
        type=_counts,
        default=(),
        metavar="N[,N…]",
        help="how often device loops of a kernel run whose bounds only the device knows, in the order they are reached",
    )


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no list of counts; give N or N,N")
    return tuple(map(int, parts))


def rank_count(text: str) -> int:
    """A number of ranks on a command line. Raises ArgumentTypeError for none."""
    if not (text.isascii() and text.isdecimal() and len(text) < 4 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number of ranks; give 1 to 999")
    return int(text)


def _refuse_options(options: argparse.Namespace) -> None:
    """Raise ArgumentError for a word among a kernel's arguments that is an option of no command."""
    own: OwnOptions = options.own
    for word in options.arguments:
        name = word.partition("=")[0]
        if _OPTION.fullmatch(name):
            known = [option for action in own._actions for option in action.option_strings]
            meant = did_you_mean(name, known) or f"; `{options.command} --help` lists its options"
            raise argparse.ArgumentError(None, f"{options.command} has no option {name}{meant}")


def take_words(options: argparse.Namespace, prog: str, names_a_kernel: Callable[[str], bool]) -> None:
    """Split the words of the command line into script or kernel, its arguments, and late options of the command.

    Options after a kernel's name, and all options of `verify` and `tune`, belong to the command, words after a script's
    name to the script. Raises InvalidArgument where such a word is also an option of the command, with the order that
    would be taken; after `--` every word belongs to the script. Raises ArgumentError for a wrong value of an option.
    """
    own: OwnOptions = options.own
    words = options.words[options.words[0] == "--" :]
    options.script, options.arguments = words[0], words[1:]
    if options.command in _KERNEL_ONLY or names_a_kernel(options.script):
        _, options.arguments = own.parse_known_args(options.arguments, options)
        _refuse_options(options)
        return
    if options.arguments[:1] == ["--"]:
        del options.arguments[0]
        return
    taken, others = own.taken(options.arguments)
    if taken:
        line = shlex.join(
            [*prog.split(), options.command, *own.before(options.script, taken), options.script, *others]
        )
        raise InvalidArgument(
            "NKW-OPTION-ORDER",
            f"options of {options.command} stand before the script: {line}; to give them to the script, put -- after "
            "its name",
        )
