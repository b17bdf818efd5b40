"""What stands behind a code: its sentence, an example, its source; and what the codes of the vendor's compiler mean."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nkw.errors import RULES

_FOLDER = Path(__file__).parent
_BETWEEN = ";;"
_CLOSE = 0.6  # difflib's measure of likeness above which a code is offered
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
    """A code of the workbench: what it demands, a line that breaks it, a line that does not, and where that is said."""

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
    """A code of the vendor's compiler: what it means, what helps, and our codes that find the same earlier."""

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
def explanations() -> dict[str, Explanation]:
    """Every code that a message of the workbench prints."""
    from simulate.bind import load_everything
    from simulate.check import KINDS
    from simulate.check.lint import load_rules

    load_everything()
    load_rules()
    sentences = {**RULES, **{code: kind.sentence for code, kind in KINDS.items()}}
    found: dict[str, Explanation] = {}
    for table in ("rules", "lint", "findings", "other"):
        for code, source, wrong, right, *sentence in _rows(table):
            severity = KINDS[code].severity.value if code in KINDS else ""
            said = sentence[0] if sentence else sentences[code]
            found[code] = Explanation(code, severity, said, wrong, right, _source(source))
    for code, said in sentences.items():  # a rule that has no row yet
        severity = KINDS[code].severity.value if code in KINDS else ""
        found.setdefault(code, Explanation(code, severity, said, "", "", ""))
    return found


@lru_cache(maxsize=1)
def vendor_codes() -> dict[str, VendorCode]:
    """Return the codes of the vendor's compiler: the documented ones, and internal ones that users report."""
    return {
        code: VendorCode(code, meaning, cure, tuple(rules.replace(",", " ").split()), _vendor_source(page))
        for code, page, meaning, cure, rules in _rows("vendor")
    }


def explained(asked: str) -> list[Explanation | VendorCode]:
    """What stands behind a code as a user types it; for a beginning such as EOOM all codes that begin so."""
    ours, vendors = explanations(), vendor_codes()
    code = asked.strip().upper()
    for known in (code, f"NKW-{code}", f"NCC_{code}"):
        if known in ours:
            return [ours[known]]
        if known in vendors:
            return [vendors[known]]
    if len(code) < 4:
        return []
    return [each for name, each in vendors.items() if name.startswith((code, f"NCC_{code}"))]


def close_matches(asked: str) -> list[str]:
    """The codes that look like what was typed, the closest first."""
    known = [*explanations(), *vendor_codes()]
    code = asked.strip().upper()
    whole = difflib.get_close_matches(code, known, cutoff=_CLOSE)
    return whole or difflib.get_close_matches(f"NKW-{code}", known, cutoff=_CLOSE)


def _source(key: str) -> str:
    kind, _, name = key.partition(":")
    if name:
        module = _MODULES[kind]
        return f"NKI documentation 0.6, page nki/api/{module.replace('.', '/')}, section {module}.{name}"
    return _SOURCES[kind]


def _vendor_source(page: str) -> str:
    """Return where a code of the vendor's compiler is described."""
    if page == "reported":
        return "reported in public repositories; the vendor documents no cause"
    kind, _, thread = page.partition(":")
    if kind == "issue":
        repository, _, number = thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"
    return f"{_PAGES}/{page}.html"


def _rows(table: str) -> list[list[str]]:
    lines = (_FOLDER / f"{table}.txt").read_text(encoding="utf-8").splitlines()
    return [[part.strip() for part in line.split(_BETWEEN)] for line in lines if not line.startswith("#")]
