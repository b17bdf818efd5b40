"""The command `explain`: the meaning of a code in a message."""

from __future__ import annotations

import argparse
from typing import Any

from nkw.errors import InvalidArgument
from nkw.files import Outputs, json_document, list_imported_files
from nkw.terminal import error, show_lines
from simulate.explain import (
    Explanation,
    VendorCode,
    explain_code,
    find_close_codes,
    load_explanations,
    load_vendor_codes,
)


def explain(options: argparse.Namespace) -> int:
    """Print the explanation of a code, or list all codes with their sentences if `options.code` is None.

    Returns the exit status: 2 for an unknown code or a JSON file that cannot be written, else 0.
    """
    try:
        with json_document(options.json, Outputs(list_imported_files), "explain") as contents:
            return _print_explanations(options.code, contents)
    except InvalidArgument as refused:
        error(refused)
        return 2


def _print_explanations(code: str | None, contents: dict[str, Any]) -> int:
    """Print the explanations of a code, or all codes for None, and put them into the JSON document `contents`.

    Returns the exit status; for an unknown code, 2 after an error message that names similar codes.
    """
    if code is None:
        explanations: list[Explanation | VendorCode] = [
            *load_explanations().values(),
            *load_vendor_codes().values(),
        ]
        explanations.sort(key=lambda explanation: explanation.code)
        show_lines(
            "".join(f"{explanation.code}  {_get_sentence(explanation)}\n" for explanation in explanations)
        )
    else:
        explanations = explain_code(code)
        if not explanations:
            close = find_close_codes(code)
            suggestion = f"close are {', '.join(close)}" if close else "`explain` without a code lists all"
            error(f"no code {code:.40}; {suggestion}")
            return 2
        show_lines("\n".join(map(str, explanations)))
    contents["codes"] = [
        {"code": explanation.code, "says": _get_sentence(explanation), "text": str(explanation)}
        for explanation in explanations
    ]
    return 0


def _get_sentence(explanation: Explanation | VendorCode) -> str:
    """Return the sentence of the rule of a code; of a code of the vendor's compiler its meaning."""
    return explanation.meaning if isinstance(explanation, VendorCode) else explanation.sentence
