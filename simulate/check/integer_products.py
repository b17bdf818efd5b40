"""`integer_products`: sums of products of integers that float32 may not hold exactly, and the proof for those it does.

`integer_sums` follows possible values from dtypes and constants; no data decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nkw.errors import Location
from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, make_finding, register_kind
from simulate.check.integer_sums import IntegerSum, find_integer_sums
from simulate.lines import location
from simulate.run import Launch
from simulate.run.stream import Line

INEXACT = register_kind(
    "NKW-INT-PRODUCT",
    Severity.warning,
    "A sum of products of integers is exact in float32 while their magnitudes add up to at most 2**24.",
    is_expected=True,
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line on which a group of matmuls of proven integers may exceed exact float32 sums.

    Each names the first such group that ends on the line. The groups are also stored in `evidence.integer_sums`.
    """
    evidence.integer_sums = find_integer_sums(launch)
    limit = launch.hardware.exact_float_integer_max
    first: dict[Line, IntegerSum] = {}
    for group in evidence.integer_sums.sums:
        if not group.is_exact(limit):
            first.setdefault(group.line, group)
    return [_report_group(group, limit) for group in first.values()]


def _report_group(group: IntegerSum, limit: int) -> Finding:
    stationary, moving = group.factors
    fitting = limit // (stationary * moving)
    return make_finding(
        INEXACT,
        f"a group of matmuls sums K={group.depth:,} products of integers up to {stationary:,} and {moving:,} in "
        f"magnitude: sums may reach {group.bound:,}, and float32 rounds them above {limit:,}",
        location(group.line),
        hint=f"end the group after {fitting:,} products, and add the sums of groups in float32 in the order of K",
    )


def list_lines(launches: Iterable[tuple[Launch, Evidence]]) -> list[dict[str, Any]]:
    """Return what is proven about the matmuls of launches, an object for each launch and kernel line.

    Each has `kernel`, `where` (file, line, function), `groups` of proven integers that end on the line, the number of
    `exact` ones, the largest `depth` (K) and `bound`, the `limit` that exact sums keep, and `unproven`, the number of
    matmuls on the line whose operands are not proven integers.
    """
    objects = []
    for launch, evidence in launches:
        sums, limit = evidence.integer_sums, launch.hardware.exact_float_integer_max
        by_line: dict[Line, list[IntegerSum]] = {line: [] for line in sums.unproven_lines}
        for group in sums.sums:
            by_line.setdefault(group.line, []).append(group)
        for line, groups in by_line.items():
            objects.append(
                {
                    "kernel": launch.kernel,
                    "where": _convert_location(location(line)),
                    "groups": len(groups),
                    "exact": sum(group.is_exact(limit) for group in groups),
                    "depth": max([group.depth for group in groups], default=0),
                    "bound": max([group.bound for group in groups], default=0),
                    "limit": limit,
                    "unproven": sums.unproven_lines.get(line, 0),
                }
            )
    return objects


def _convert_location(where: Location) -> dict[str, Any]:
    return {"file": where.file, "line": where.line, "function": where.function}


def format_lines(objects: Sequence[dict[str, Any]], all_products: bool) -> str:
    """Return a line of text for each line of a kernel with exact sums, ended by a newline; empty without any.

    Args:
        objects: What `list_lines` returns; equal lines of several launches are printed once.
        all_products: Whether lines with matmuls whose operands are not proven integers are printed too.
    """
    lines = []
    for entry in objects:
        where = entry["where"]
        line_text = f"{where['file']}:{where['line']} in {where['function']}"
        if entry["exact"]:
            groups = "group" if entry["exact"] == 1 else "groups"
            lines.append(
                f"exact: sums of {entry['exact']:,} {groups} of products of integers at {line_text}: K up to "
                f"{entry['depth']:,}, magnitude up to {entry['bound']:,} of {entry['limit']:,}"
            )
        if all_products and entry["unproven"]:
            lines.append(
                f"no statement: {entry['unproven']:,} matmuls at {line_text}, whose operands are not proven integers"
            )
    return "".join(f"{line}\n" for line in dict.fromkeys(lines))
