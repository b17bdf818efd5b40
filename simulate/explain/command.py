"""The command `explain`: what a code of a message means."""

from __future__ import annotations

import argparse

from simulate.explain import close_matches, explained, explanations, vendor_codes
from simulate.terminal import error, show_lines


def explain(options: argparse.Namespace) -> int:
    """Print what stands behind a code, or all codes; returns 0, or 2 for an unknown code."""
    if options.code is None:
        known = {code: each.sentence for code, each in explanations().items()}
        known |= {code: each.meaning for code, each in vendor_codes().items()}
        show_lines("".join(f"{code}  {known[code]}\n" for code in sorted(known)))
        return 0
    found = explained(options.code)
    if not found:
        close = close_matches(options.code)
        hint = f"close are {', '.join(close)}" if close else "`explain` without a code lists all"
        error(f"no code {options.code:.40}; {hint}")
        return 2
    show_lines("\n".join(map(str, found)))
    return 0
