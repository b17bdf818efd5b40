"""Options of `vllm serve` that the model's commands accept or refuse, by the table in `model.llm.vllm_options`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from model.commands.options.readers import count
from model.llm.vllm_options import VllmOption, list_options


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options to the parser of a command, under all names that the command does not have itself.

    They are not in the help. An option with an equivalent here sets it. Another option is refused or has no effect:
    when the command line is parsed, a refused option ends the command with exit status 2 and one line without its
    value.
    """
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    for option in list_options():
        flags = [flag for flag in _list_flags(option) if flag not in parser._option_string_actions]
        if not flags:
            continue
        if option.equivalent is None:
            _add(parser, flags, _Remark, option)
            continue
        rows = (row.partition("=")[0].split("|")[0] for row in option.equivalent.rows.split())
        action = next((actions[row] for row in rows if row in actions), None)
        if action is None:
            continue
        if option.equivalent.sets:
            _add(parser, flags, _Switch, option)
        elif option.equivalent.key:
            _add(parser, flags, _Key, option)
        else:
            parser._option_string_actions.update(dict.fromkeys(flags, action))


def _list_flags(option: VllmOption) -> list[str]:
    """Return the flags of an option of vLLM; a switch also has --no-NAME, and enable and disable exchanged."""
    flags = [option.flag]
    if option.is_switch and option.flag.startswith("--"):
        name = option.flag[2:]
        flags.append(f"--no-{name}")
        for word, inverse in (("enable-", "disable-"), ("disable-", "enable-")):
            if name.startswith(word):
                flags.append(f"--{inverse}{name.removeprefix(word)}")
    return flags


def _add(
    parser: argparse.ArgumentParser, flags: Sequence[str], action: type[_VllmAction], option: VllmOption
) -> None:
    """Add an option of vLLM to a parser, such that neither the help nor the parsed options show it.

    Args:
        parser: The parser.
        flags: Flags of the option.
        action: Class of its action.
        option: The option.
    """
    parser.add_argument(
        *flags,
        action=action,
        option=option,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


class _VllmAction(argparse.Action):
    """Base of the argparse actions of vLLM's options."""

    def __init__(self, option_strings: Sequence[str], dest: str, option: VllmOption, **keywords: Any) -> None:
        takes_rest = option.is_refused and not option.default
        nargs = 0 if option.is_switch else "*" if takes_rest else None
        super().__init__(option_strings, dest, nargs=nargs, **keywords)
        self.option = option

    def read_switch(self, flag: str | None) -> bool:
        """Return whether a flag is the switch's name in the table; its negations and inverses return False."""
        return flag == self.option.flag


class _Remark(_VllmAction):
    """Action of an option without an equivalent: it is refused, or a line on stderr says that it has no effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        """Accept the option, print that it has no effect, or refuse it; its value is never printed.

        vLLM's default is accepted in silence, and so is what this server does in any case.

        Raises:
            SystemExit: The option is refused (status 2).
        """
        option = self.option
        if option.is_default(self.read_switch(flag) if option.is_switch else values) or not option.sentence:
            return
        if option.is_refused:
            parser.error(f"{flag}: {option.sentence}")
        print(f"{parser.prog}: {flag} has no effect: {option.sentence}", file=sys.stderr)


class _Switch(_VllmAction):
    """Action of a switch that sets an attribute of the parsed options."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        """Set the attribute to the value that the flag means."""
        assert self.option.equivalent is not None
        setattr(
            namespace, self.option.equivalent.sets, self.option.equivalent.read(self.read_switch(flag), None)
        )


class _Key(_VllmAction):
    """Action of an option that sets one key in the JSON object of --speculative-config."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        """Set the key in the JSON text of --speculative-config: method and model to a text, others to an integer.

        Raises:
            SystemExit: The text is no JSON object, or the value is no positive integer (status 2).
        """
        assert self.option.equivalent is not None
        name = self.option.equivalent.rows.lstrip("-").replace("-", "_")
        text = getattr(namespace, name)
        try:
            current = json.loads(text or "{}")
        except ValueError:
            current = None
        if not isinstance(current, Mapping):
            parser.error(f"{self.option.equivalent.rows} is no JSON object")
        is_text = self.option.equivalent.key in ("method", "model")
        try:
            value = values if is_text else count(values)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument {flag}: {error}")
        setattr(namespace, name, json.dumps(self.option.equivalent.read(value, current)))
