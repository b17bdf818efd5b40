"""Options that a command reads for some models only: what a user gave of them for another model is refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from model.errors import ModelError
from nkw.options import Option


def refuse_options(
    options: argparse.Namespace, table: Iterable[Option], names: Iterable[str], reason: str
) -> None:
    """Raise ModelError "--<name>: <reason>" for the first of some options whose value is not its default.

    Args:
        options: The parsed options.
        table: The options of the command, with their defaults.
        names: Names of the options, as in `options`.
        reason: Why the options do not apply, and what does.
    """
    defaults = {
        option.keywords.get("dest")
        or option.name.rpartition("|")[2].strip("-").partition("=")[0].replace("-", "_"): option.keywords.get(
            "default"
        )
        for option in table
    }
    for name in names:
        if (getattr(options, name) or None) != (defaults[name] or None):
            raise ModelError(f"--{name.replace('_', '-')}: {reason}")
