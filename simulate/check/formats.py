"""The formats of a report: text, JSON, and SARIF 2.1.0 for code hosts and editors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any
from urllib.parse import quote

from nkw.errors import RULES, Location
from simulate.check.findings import KINDS, Finding, Severity, Touch, text

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


class Format(Enum):
    """How findings are written."""

    text = "text"
    json = "json"
    sarif = "sarif"


def render(findings: Sequence[Finding], how: Format) -> str:
    """Findings in one of the formats; the same bytes in every run."""
    return _WRITERS[how](findings)


def _json(findings: Sequence[Finding]) -> str:
    return json.dumps({"findings": plain(findings)}, indent=2) + "\n"


def plain(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as documents have them."""
    return [_plain(finding) for finding in findings]


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "message": finding.message,
        "where": _place(finding.where),
        "callers": [_place(caller) for caller in finding.callers],
        "accesses": [_access(each) for each in finding.touches],
        "hint": finding.hint,
    }


def _access(each: Touch) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "core": each.core,
        "event": each.event,
        "instruction": each.op,
        "does": each.verb,
        "tensor": each.tensor,
        "memory": each.memory,
        "rows": list(each.rows),
        "bytes": list(each.bytes),
        "where": _place(each.where),
        "callers": [_place(caller) for caller in each.callers],
        "allocated": _place(each.allocated),
    }


def _place(where: Location | None) -> dict[str, Any] | None:
    return None if where is None else {"file": where.file, "line": where.line, "function": where.function}


def _sarif(findings: Sequence[Finding]) -> str:
    codes = sorted({finding.code for finding in findings})
    rules = [{"id": code, "shortDescription": {"text": sentence(code) or code}} for code in codes]
    results = []
    for finding in findings:
        result: dict[str, Any] = {
            "ruleId": finding.code,
            "level": "error" if finding.severity is Severity.error else "warning",
            "message": {"text": finding.message + (f"\ntry: {finding.hint}" if finding.hint else "")},
        }
        if finding.where is not None:
            result["locations"] = [_sarif_location(finding.where)]
        related = [(each.where, str(each)) for each in finding.touches]
        related += [(place, f"{tensor} was allocated here") for tensor, place in finding.allocations]
        related += [(caller, "called here") for caller in finding.callers]
        if related:
            result["relatedLocations"] = [
                {**_sarif_location(place), "message": {"text": said}} for place, said in related
            ]
        results.append(result)
    log = {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": {"name": "nki-workbench", "rules": rules}}, "results": results}],
    }
    return json.dumps(log, indent=2) + "\n"


def _sarif_location(where: Location) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(where.file)},
            "region": {"startLine": max(where.line, 1)},
        }
    }


def sentence(code: str) -> str:
    """The sentence behind a code of a rule, a detector or a lint rule; empty for an unregistered code."""
    return KINDS[code].sentence if code in KINDS else RULES.get(code, "")


_WRITERS: dict[Format, Callable[[Sequence[Finding]], str]] = {
    Format.text: text,
    Format.json: _json,
    Format.sarif: _sarif,
}
