"""Advice and bounds as parts of a profile's text and JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nkw.report import Hanging, Part, table
from simulate.profile.numbers import format_share, format_us

if TYPE_CHECKING:
    from simulate.profile.profile import Profile

_FIRST = 3  # most pieces of advice in a short report
_SPEEDUP = (
    "speedup: how many times shorter the launch is at most if only the engine of the bound improves, the length over "
    "the larger of the bound and the busy time of every other engine"
)
_LINES = 3  # most kernel lines that a piece of advice names


def make_advice_parts(profile: Profile, all_advice: bool) -> list[list[Part]]:
    """Return the section of the advice, and with `all_advice` also the section of the bounds, each a list of parts.

    Args:
        all_advice: Show all pieces; by default, the best piece of each of three kinds. Without pieces, the
            list is then empty.
    """
    blocks: list[list[Part]] = []
    pieces = profile.advice
    if not all_advice:  # the fastest of each kind
        first_of_kind = {piece.advice_kind: piece for piece in reversed(pieces)}
        pieces = tuple(piece for piece in pieces if first_of_kind[piece.advice_kind] is piece)[:_FIRST]
    if pieces or all_advice:
        blocks.append(["advice, each piece timed alone" if pieces else "advice: no change gains 2 %"])
    for number, piece in enumerate(pieces, 1):
        blocks[0].append(
            Hanging(
                f"{number}. {format_us(piece.length_ns)} us ({-100 * piece.gain:.1f} %): {piece.sentence}",
                indent=3,
            )
        )
        num_more_lines = len(piece.lines) - _LINES
        named = ", ".join(piece.lines[:_LINES]) + (
            f" and {num_more_lines} more" if num_more_lines > 0 else ""
        )
        blocks[0].append(Hanging(f"   {named}", indent=3))
    num_omitted = len(profile.advice) - len(pieces)
    if num_omitted:
        blocks[0].append(f"{num_omitted} more with --advice")
    if all_advice and profile.bounds:
        rows = [
            (
                bound.name,
                format_us(bound.time_ns),
                format_share(bound.time_ns, profile.length_ns),
                f"{bound.speedup:.2f}",
            )
            for bound in profile.bounds
        ]
        blocks.append([table("the vendor's bounds|us|of length|speedup", rows), Hanging(_SPEEDUP)])
    return blocks


def make_advice_records(profile: Profile) -> dict[str, list[dict[str, object]]]:
    """Return advice and bounds of a profile as JSON types, under these two keys.

    Times are in ns, gains are shares of the length.
    """
    return {
        "advice": [
            {
                "kind": piece.advice_kind.name,
                "sentence": piece.sentence,
                "tensors": list(piece.tensors),
                "lines": list(piece.lines),
                "length_ns": piece.length_ns,
                "gain": piece.gain,
            }
            for piece in profile.advice
        ],
        "bounds": [
            {"name": bound.name, "formula": bound.formula, "time_ns": bound.time_ns, "speedup": bound.speedup}
            for bound in profile.bounds
        ],
    }
