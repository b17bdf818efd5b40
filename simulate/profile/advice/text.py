"""Advice and bounds as parts of a profile's text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nkw.parts import Hanging, Part, table
from simulate.profile.numbers import share, us

if TYPE_CHECKING:
    from simulate.profile.profile import Profile

_FIRST = 3  # pieces of advice in a short report
_SPEEDUP = (
    "speedup: how many times shorter the launch is at most if only the engine of the bound improves, the length over "
    "the larger of the bound and the busy time of every other engine"
)
_LINES = 3  # lines of the kernel that a piece of advice names


def advice_parts(profile: Profile, all_advice: bool) -> list[list[Part]]:
    """The section of the advice, and with `all_advice` that of the bounds; none where there is nothing to say."""
    blocks: list[list[Part]] = []
    pieces = profile.advice
    if not all_advice:  # the first of each kind
        kinds = {each.kind: each for each in reversed(pieces)}
        pieces = tuple(each for each in pieces if kinds[each.kind] is each)[:_FIRST]
    if pieces or all_advice:
        blocks.append(["advice, each piece timed alone" if pieces else "advice: no change gains 2 %"])
    for number, each in enumerate(pieces, 1):
        blocks[0].append(
            Hanging(
                f"{number}. {us(each.length_ns)} us ({-100 * each.gain:.1f} %): {each.sentence}", indent=3
            )
        )
        more = len(each.lines) - _LINES
        named = ", ".join(each.lines[:_LINES]) + (f" and {more} more" if more > 0 else "")
        blocks[0].append(Hanging(f"   {named}", indent=3))
    left = len(profile.advice) - len(pieces)
    if left:
        blocks[0].append(f"{left} more with --advice")
    if all_advice and profile.bounds:
        rows = [
            (each.name, us(each.time_ns), share(each.time_ns, profile.length_ns), f"{each.speedup:.2f}")
            for each in profile.bounds
        ]
        blocks.append([table("the vendor's bounds|us|of length|speedup", rows), Hanging(_SPEEDUP)])
    return blocks


def records(profile: Profile) -> dict[str, list[dict[str, object]]]:
    """Advice and bounds as plain values, for JSON: times in ns, gains as parts of the length."""
    return {
        "advice": [
            {
                "kind": each.kind.name,
                "sentence": each.sentence,
                "tensors": list(each.tensors),
                "lines": list(each.lines),
                "length_ns": each.length_ns,
                "gain": each.gain,
            }
            for each in profile.advice
        ],
        "bounds": [
            {"name": each.name, "formula": each.formula, "time_ns": each.time_ns, "speedup": each.speedup}
            for each in profile.bounds
        ],
    }
