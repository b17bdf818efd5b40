"""Options of `vllm serve` on the commands of the model, by the table in `model.llm.vllm_options`."""

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

    They are not in the help. A refused option ends the command with exit status 2 and one line without its value.
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
    """Return the names of an option: those of its negation and of its inverse as well for a switch, as in vLLM."""
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
    """Add an action that neither the help nor the parsed options show."""
    parser.add_argument(
        *flags,
        action=action,
        option=option,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


class _VllmAction(argparse.Action):
    """Action of an option of vLLM."""

    def __init__(self, option_strings: Sequence[str], dest: str, option: VllmOption, **keywords: Any) -> None:
        takes_rest = option.is_refused and not option.default
        nargs = 0 if option.is_switch else "*" if takes_rest else None
        super().__init__(option_strings, dest, nargs=nargs, **keywords)
        self.option = option

    def read_switch(self, flag: str | None) -> bool:
        """Return what one of the names of a switch says about the name in the table."""
        return flag == self.option.flag


class _Remark(_VllmAction):
    """Refusal of an option, or a line on stderr about one without effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        """Accept vLLM's default, and what is so anyway; the value is never printed."""
        option = self.option
        if option.is_default(self.read_switch(flag) if option.is_switch else values) or not option.sentence:
            return
        if option.is_refused:
            parser.error(f"{flag}: {option.sentence}")
        print(f"{parser.prog}: {flag} has no effect: {option.sentence}", file=sys.stderr)


class _Switch(_VllmAction):
    """Switch that sets an attribute of the options."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        """Set the attribute."""
        assert self.option.equivalent is not None
        setattr(
            namespace, self.option.equivalent.sets, self.option.equivalent.read(self.read_switch(flag), None)
        )


class _Key(_VllmAction):
    """Option that sets one key of the JSON object of --speculative-config."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        """Set the key: method and model to a text, other keys to a positive integer."""
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
