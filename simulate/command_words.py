"""The words of commands that run scripts and kernels: script or kernel, its arguments, and options in any order."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from typing import NoReturn

from nkw.errors import InvalidArgument
from nkw.suggestions import did_you_mean

KERNEL_ONLY = ("verify", "tune", "bundle")
"""Commands whose first word is a kernel, never a script."""
WITH_WORDS = ("run", "time", "memory", "check", *KERNEL_ONLY)
"""Commands that run a script or a kernel."""
_SCRIPT = "a Python file, and the arguments that it gets"
_KERNEL = "a kernel, FILE.py:NAME or MODULE:NAME, and its arguments: f32[128,512], literals"
_SCRIPT_OR_KERNEL = f"{_SCRIPT}; or {_KERNEL}, or `group` for the replica group of all ranks"

_OPTION = re.compile(r"--[A-Za-z][\w-]*|-[A-Za-z]")
"""A word that can be no argument of a kernel; `-1` and `-1e-5` are numbers."""


class CommandOptions(argparse.ArgumentParser):
    """The options of one command alone; raises ArgumentError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise argparse.ArgumentError(None, message)

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Divide words into these options with their values, and all other words."""
        option_words: list[str] = []
        other_words: list[str] = []
        pending = list(words)
        while pending:
            word = pending.pop(0)
            try:
                _, unknown = self.parse_known_args([word])
                (other_words if unknown or not word.startswith("-") else option_words).append(word)
            except argparse.ArgumentError:  # the option lacks its value, or has a wrong one
                option_words += [word, *(pending[:1] if "=" not in word else [])]
                del pending[: "=" not in word]
        return option_words, other_words

    def write_before(self, script: str, option_words: Sequence[str]) -> list[str]:
        """Return the options as written before the script, with -- at the end if the last would take the script."""
        try:
            self.parse_known_args(option_words)
            taken = script not in self.parse_known_args([*option_words, script])[1]
        except argparse.ArgumentError:  # wrong also without the script
            taken = False
        return [*option_words, *(["--"] if taken else [])]


def add_words(command: argparse.ArgumentParser, name: str) -> None:
    """Add the words that follow a command's options: a kernel or a script, and what belongs to it.

    They are one positional, so that argparse keeps all words after the script's name, also `--`.
    """
    is_kernel = name in KERNEL_ONLY
    command.add_argument(
        "words",
        nargs=argparse.PARSER,
        metavar="kernel" if is_kernel else "script",
        help=_KERNEL if is_kernel else _SCRIPT_OR_KERNEL,
    )


def _refuse_options(options: argparse.Namespace) -> None:
    """Raise ArgumentError for a word among a kernel's arguments that is an option of no command."""
    command_options: CommandOptions = options.command_options
    for word in options.arguments:
        name = word.partition("=")[0]
        if _OPTION.fullmatch(name):
            known = [option for action in command_options._actions for option in action.option_strings]
            meant = did_you_mean(name, known) or f"; `{options.command} --help` lists its options"
            raise argparse.ArgumentError(None, f"{options.command} has no option {name}{meant}")


def take_words(options: argparse.Namespace, prog: str, names_a_kernel: Callable[[str], bool]) -> None:
    """Split the words of the command line into script or kernel, its arguments, and late options of the command.

    Options after a kernel's name, and all options of `verify` and `tune`, belong to the command, words after a script's
    name to the script. Raises InvalidArgument where such a word is also an option of the command, with the order that
    would be taken; after `--` every word belongs to the script. Raises ArgumentError for a wrong value of an option.
    """
    command_options: CommandOptions = options.command_options
    words = options.words[options.words[0] == "--" :]
    options.script, options.arguments = words[0], words[1:]
    if options.command in KERNEL_ONLY or names_a_kernel(options.script):
        _, options.arguments = command_options.parse_known_args(options.arguments, options)
        _refuse_options(options)
        return
    if options.arguments[:1] == ["--"]:
        del options.arguments[0]
        return
    taken, script_words = command_options.split(options.arguments)
    if taken:
        line = shlex.join(
            [
                *prog.split(),
                options.command,
                *command_options.write_before(options.script, taken),
                options.script,
                *script_words,
            ]
        )
        raise InvalidArgument(
            "NKW-OPTION-ORDER",
            f"options of {options.command} stand before the script: {line}; to give them to the script, put -- after "
            "its name",
        )
