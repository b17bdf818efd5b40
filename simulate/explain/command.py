"""The command `explain`: what a code of a message means."""

from __future__ import annotations

import argparse
from typing import Any

from nkw.errors import InvalidArgument
from nkw.files import Outputs, imported_files, json_document
from nkw.terminal import error, show_lines
from simulate.explain import Explanation, VendorCode, close_matches, explained, explanations, vendor_codes


def explain(options: argparse.Namespace) -> int:
    """Print what stands behind a code, or all codes; returns 0, or 2 for an unknown code."""
    try:
        with json_document(options.json, Outputs(imported_files), "explain") as contents:
            return _explained(options.code, contents)
    except InvalidArgument as refused:
        error(refused)
        return 2


def _explained(code: str | None, contents: dict[str, Any]) -> int:
    if code is None:
        found: list[Explanation | VendorCode] = [*explanations().values(), *vendor_codes().values()]
        found.sort(key=lambda each: each.code)
        show_lines("".join(f"{each.code}  {_said(each)}\n" for each in found))
    else:
        found = explained(code)
        if not found:
            close = close_matches(code)
            hint = f"close are {', '.join(close)}" if close else "`explain` without a code lists all"
            error(f"no code {code:.40}; {hint}")
            return 2
        show_lines("\n".join(map(str, found)))
    contents["codes"] = [{"code": each.code, "says": _said(each), "text": str(each)} for each in found]
    return 0


def _said(each: Explanation | VendorCode) -> str:
    return each.meaning if isinstance(each, VendorCode) else each.sentence
