"""The words after the options of a command that runs a script or a kernel.

The first word is a script (a Python file) or a kernel by name, FILE.py:NAME or MODULE:NAME. The others are its
arguments. Options of the command may stand between a kernel's arguments, but not after a script.
"""

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
    """Parser of one command's options alone; wrong words raise `argparse.ArgumentError`, where argparse exits."""

    def error(self, message: str) -> NoReturn:
        """Raise ArgumentError with the message instead of exiting."""
        raise argparse.ArgumentError(None, message)

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Divide words into this command's options with their values, and all other words, each list in order.

        An option that lacks its value takes the next word; its value is not checked.
        """
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
        """Return the words of options as they must be written before a script.

        They are `option_words`, followed by `--` if their last option would otherwise take the script's name as a
        value.
        """
        try:
            self.parse_known_args(option_words)
            taken = script not in self.parse_known_args([*option_words, script])[1]
        except argparse.ArgumentError:  # wrong also without the script
            taken = False
        return [*option_words, *(["--"] if taken else [])]


def add_words(command: argparse.ArgumentParser, name: str) -> None:
    """Add to a command's parser the positional `words`: a script or kernel by name, and everything after it.

    One positional takes all of them, so that argparse keeps every word after the script's name, also `--`.

    Args:
        command: The parser of the command.
        name: The name of the command, which decides whether the help offers a script.
    """
    is_kernel = name in KERNEL_ONLY
    command.add_argument(
        "words",
        nargs=argparse.PARSER,
        metavar="kernel" if is_kernel else "script",
        help=_KERNEL if is_kernel else _SCRIPT_OR_KERNEL,
    )


def _refuse_options(options: argparse.Namespace) -> None:
    """Raise ArgumentError for an option that is left among a kernel's arguments: the command does not have it."""
    command_options: CommandOptions = options.command_options
    for word in options.arguments:
        name = word.partition("=")[0]
        if _OPTION.fullmatch(name):
            known = [option for action in command_options._actions for option in action.option_strings]
            meant = did_you_mean(name, known) or f"; `{options.command} --help` lists its options"
            raise argparse.ArgumentError(None, f"{options.command} has no option {name}{meant}")


def take_words(options: argparse.Namespace, prog: str, names_a_kernel: Callable[[str], bool]) -> None:
    """Split `options.words` into `options.script` and `options.arguments`; parse the command's options among them.

    After a kernel's name, and for the commands `verify`, `tune` and `bundle`, options belong to the command and are
    stored in `options`. After a script's name all words belong to the script; a leading `--` there is dropped.

    Args:
        options: The parsed command line, with `words`, `command` and `command_options`; it is changed.
        prog: The name of the program, for messages.
        names_a_kernel: Returns whether a word names a kernel rather than a script.

    Raises:
        InvalidArgument: A word after a script's name is an option of the command. The message has the right order;
            after `--` the word would belong to the script.
        argparse.ArgumentError: An option is unknown or has a wrong value.
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
