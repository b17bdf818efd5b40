"""Explanations of codes: sentence, example and source of our codes; meanings of the vendor compiler's codes.

The examples and sources are rows of the text tables of this folder. `command` prints them as `nkw explain`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nkw.errors import RULES

_FOLDER = Path(__file__).parent
_BETWEEN = ";;"
_CLOSE = 0.6  # least similarity, as difflib measures it, of a suggested code
_PAGES = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes"

_UNTOLD = "section not recorded"
_SOURCES = {
    "api": "NKI documentation 0.6, page nki/api/nki/isa, notes on the parameters of the instruction that refuses",
    "arch": "NKI documentation 0.6, pages nki/guides/architecture/trainium_inferentia2_arch, trainium2_arch and "
    f"trainium3_arch, {_UNTOLD}",
    "beta1": f"NKI documentation of Beta 1 (SDK 2.26), pages general/nki/api/nki, {_UNTOLD}",
    "here": "decided here",
    "lang": f"NKI documentation 0.6, language guide, {_UNTOLD}",
    "lnc": f"Neuron documentation, logical NeuronCore configuration (LNC), {_UNTOLD}",
    "measured": "measured here, or reported by users of the chip",
    "migrate": f"NKI documentation 0.6, page nki/migration/index, {_UNTOLD}",
    "user": "a user report: right in simulation, wrong on the chip",
    "v07": f"NKI documentation 0.7, pages nki-scalar and nki/deep-dives/nki-loops, {_UNTOLD}",
}
_MODULES = {"isa": "nki.isa", "cc": "nki.collectives", "nl": "nki.language"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Code of the workbench: its rule, a line that breaks it, a line that follows it, and its source.

    `severity` is that of its findings, empty for a code that only errors have. `wrong`, `right` and `source`
    are empty for a rule without a row in the tables.
    """

    code: str
    severity: str
    sentence: str
    wrong: str
    right: str
    source: str

    def __str__(self) -> str:
        grade = f" ({self.severity})" if self.severity else ""
        return (
            f"{self.code}{grade}: {self.sentence}\n"
            f"  wrong:  {self.wrong}\n  right:  {self.right}\n  source: {self.source}"
        )


@dataclass(frozen=True, slots=True)
class VendorCode:
    """Code of the vendor's compiler: its meaning, its cure, and our codes that report the cause earlier."""

    code: str
    meaning: str
    cure: str
    rules: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.meaning}", f"  try:    {self.cure}"]
        if self.rules:
            lines.append(f"  here:   found earlier as {', '.join(self.rules)}")
        else:
            lines.append("  here:   no rule; it concerns the graph around a kernel, or its compilation")
        return "\n".join([*lines, f"  source: {self.source}"])


@lru_cache(maxsize=1)
def load_explanations() -> dict[str, Explanation]:
    """Return, by code, the explanation of every code that a message of the workbench can have; loaded once."""
    from simulate.bind import load_everything
    from simulate.check import KINDS
    from simulate.check.lint import load_rules

    load_everything()
    load_rules()
    sentences = {**RULES, **{code: finding_kind.sentence for code, finding_kind in KINDS.items()}}
    explanations: dict[str, Explanation] = {}
    for table in ("rules", "lint", "findings", "other"):
        for code, source, wrong, right, *sentence in _read_rows(table):
            severity = KINDS[code].severity.value if code in KINDS else ""
            rule_sentence = sentence[0] if sentence else sentences[code]
            explanations[code] = Explanation(
                code, severity, rule_sentence, wrong, right, _format_source(source)
            )
    for code, rule_sentence in sentences.items():  # rules without a row in the tables
        severity = KINDS[code].severity.value if code in KINDS else ""
        explanations.setdefault(code, Explanation(code, severity, rule_sentence, "", "", ""))
    return explanations


@lru_cache(maxsize=1)
def load_vendor_codes() -> dict[str, VendorCode]:
    """Return, by code, the codes of the vendor's compiler; loaded once.

    They are the documented ones, and internal ones that users report.
    """
    return {
        code: VendorCode(
            code, meaning, cure, tuple(rules.replace(",", " ").split()), _format_vendor_source(page)
        )
        for code, page, meaning, cure, rules in _read_rows("vendor")
    }


def explain_code(text: str) -> list[Explanation | VendorCode]:
    """Return the explanations of a code as a user types it: in any case, with or without NKW- or NCC_.

    Returns:
        The explanation of the code. If no code equals the text and it has four characters or more, all vendor
        codes that begin with it. Empty if there is none.
    """
    ours, vendors = load_explanations(), load_vendor_codes()
    code = text.strip().upper()
    for known in (code, f"NKW-{code}", f"NCC_{code}"):
        if known in ours:
            return [ours[known]]
        if known in vendors:
            return [vendors[known]]
    if len(code) < 4:
        return []
    return [vendor_code for name, vendor_code in vendors.items() if name.startswith((code, f"NCC_{code}"))]


def find_close_codes(text: str) -> list[str]:
    """Return up to three codes that are similar to a text, closest first; empty if none is similar."""
    known = [*load_explanations(), *load_vendor_codes()]
    code = text.strip().upper()
    matches = difflib.get_close_matches(code, known, cutoff=_CLOSE)
    return matches or difflib.get_close_matches(f"NKW-{code}", known, cutoff=_CLOSE)


def _format_source(key: str) -> str:
    """Return the source of a rule as a sentence.

    Args:
        key: The key in the tables: a key of `_SOURCES`, or a key of `_MODULES` with a name, such as
            `isa:nc_matmul`.
    """
    source_kind, _, name = key.partition(":")
    if name:
        module = _MODULES[source_kind]
        return f"NKI documentation 0.6, page nki/api/{module.replace('.', '/')}, section {module}.{name}"
    return _SOURCES[source_kind]


def _format_vendor_source(page: str) -> str:
    """Return where a code of the vendor's compiler is described: an address, or that users reported it.

    Args:
        page: "reported", "issue:OWNER/REPOSITORY#NUMBER", or the name of a page of the vendor's
            documentation.
    """
    if page == "reported":
        return "reported in public repositories; the vendor documents no cause"
    page_kind, _, thread = page.partition(":")
    if page_kind == "issue":
        repository, _, number = thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"
    return f"{_PAGES}/{page}.html"


def _read_rows(table: str) -> list[list[str]]:
    """Return the rows of the table NAME.txt of this package, each split into stripped cells; comments are skipped."""
    lines = (_FOLDER / f"{table}.txt").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split(_BETWEEN)] for line in lines if not line.startswith("#")]
