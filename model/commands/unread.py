"""Options that a command reads for some models only: what a user gave of them for another model is refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from model.errors import ModelError
from nkw.options import Option


def refuse_options(
    options: argparse.Namespace, table: Iterable[Option], names: Iterable[str], reason: str
) -> None:
    """Raise ModelError "<flag>: <reason>" for the first of some options whose value is not its default.

    Args:
        options: The parsed options.
        table: The options of the command, with their defaults.
        names: Names of the options, as in `options`.
        reason: Why the options do not apply, and what does.
    """
    unread = set(names)
    for option in table:
        flag = option.name.partition("=")[0].rpartition("|")[2]
        name = option.keywords.get("dest") or flag.strip("-").replace("-", "_")
        default = option.keywords.get("default", option.keywords.get("action") == "store_false")
        if name in unread and (getattr(options, name) or None) != (default or None):
            raise ModelError(f"{flag}: {reason}")
