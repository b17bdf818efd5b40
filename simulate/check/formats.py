"""The formats of a report: text, JSON, and SARIF 2.1.0 for code hosts and editors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any
from urllib.parse import quote

from nkw.errors import RULES, Location
from simulate.check.findings import KINDS, Finding, Severity, Touch, format_text

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


class Format(Enum):
    """Format of a report."""

    text = "text"
    json = "json"
    sarif = "sarif"


def render(findings: Sequence[Finding], report_format: Format) -> str:
    """Return findings as one text that ends in a newline, in their order; equal findings give equal bytes."""
    return _WRITERS[report_format](findings)


def _format_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"findings": plain_findings(findings)}, indent=2) + "\n"


def plain_findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as JSON objects (dicts of plain values), in their order; docs/json.md has the schema."""
    return [_convert_finding(finding) for finding in findings]


def _convert_finding(finding: Finding) -> dict[str, Any]:
    """Return one finding as a JSON object."""
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "message": finding.message,
        "where": _convert_location(finding.where),
        "callers": [_convert_location(caller) for caller in finding.callers],
        "accesses": [_convert_access(access) for access in finding.touches],
        "hint": finding.hint,
    }


def _convert_access(access: Touch) -> dict[str, Any]:
    return {
        "rank": access.rank,
        "core": access.core,
        "event": access.event,
        "instruction": access.op,
        "does": access.verb,
        "tensor": access.tensor,
        "memory": access.memory,
        "rows": list(access.rows),
        "bytes": list(access.bytes),
        "where": _convert_location(access.where),
        "callers": [_convert_location(caller) for caller in access.callers],
        "allocated": _convert_location(access.allocated),
    }


def _convert_location(where: Location | None) -> dict[str, Any] | None:
    return None if where is None else {"file": where.file, "line": where.line, "function": where.function}


def _format_sarif(findings: Sequence[Finding]) -> str:
    codes = sorted({finding.code for finding in findings})
    rules = [{"id": code, "shortDescription": {"text": find_sentence(code) or code}} for code in codes]
    results = []
    for finding in findings:
        result: dict[str, Any] = {
            "ruleId": finding.code,
            "level": "error" if finding.severity is Severity.error else "warning",
            "message": {"text": finding.message + (f"\ntry: {finding.hint}" if finding.hint else "")},
        }
        if finding.where is not None:
            result["locations"] = [_build_sarif_location(finding.where)]
        related = [(access.where, str(access)) for access in finding.touches]
        related += [(line, f"{tensor} was allocated here") for tensor, line in finding.allocations]
        related += [(caller, "called here") for caller in finding.callers]
        if related:
            result["relatedLocations"] = [
                {**_build_sarif_location(line), "message": {"text": remark}} for line, remark in related
            ]
        results.append(result)
    log = {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": {"name": "nki-workbench", "rules": rules}}, "results": results}],
    }
    return json.dumps(log, indent=2) + "\n"


def _build_sarif_location(where: Location) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(where.file)},
            "region": {"startLine": max(where.line, 1)},
        }
    }


def find_sentence(code: str) -> str:
    """Return the sentence of the rule that a code stands for; empty for a code that is not registered."""
    return KINDS[code].sentence if code in KINDS else RULES.get(code, "")


_WRITERS: dict[Format, Callable[[Sequence[Finding]], str]] = {
    Format.text: format_text,
    Format.json: _format_json,
    Format.sarif: _format_sarif,
}
