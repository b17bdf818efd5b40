"""A finding: its code and severity, the fault in words, the accesses with bytes and lines, and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from nkw.errors import Location, NkwError, RuleViolation, location_lines
from simulate.level import WARNED
from simulate.run.stream import ACCUMULATE, READ, Access, Stream


class Severity(Enum):
    """error: wrong on the chip, or refused by the compiler. warning: legal, and rarely what was meant."""

    error = "error"
    warning = "warning"


@dataclass(frozen=True, slots=True)
class FindingKind:
    """A kind of finding: its stable code, its usual severity, and the broken rule as a sentence."""

    code: str
    severity: Severity
    sentence: str
    is_expected: bool = False
    """Whether kernels that are right get it as well, so that its warning does not make a check fail."""


KINDS: dict[str, FindingKind] = {}
"""Every code that a detector or a lint rule can report; `explain` prints from it."""


def kind(code: str, severity: Severity, sentence: str, is_expected: bool = False) -> FindingKind:
    """Register a kind of finding of a detector or a lint rule."""
    assert code not in KINDS, f"code {code} is used twice"
    made = KINDS[code] = FindingKind(code, severity, sentence, is_expected)
    return made


@dataclass(frozen=True, slots=True)
class Touch:
    """One access in a finding: core, instruction, tensor, rows, bytes, and the line of the kernel.

    `callers` called that line, innermost first. `allocated` is the line that allocated the tensor, None for an argument
    of the kernel; `allocated_from` called it.
    """

    rank: int
    core: int
    event: int
    op: str
    verb: str
    tensor: str
    memory: str
    rows: tuple[int, int]
    bytes: tuple[int, int]
    where: Location
    callers: tuple[Location, ...] = ()
    allocated: Location | None = None
    allocated_from: tuple[Location, ...] = ()

    def __str__(self) -> str:
        rows = "partitions" if self.memory in ("sbuf", "psum") else "rows"
        box = f"{rows} {self.rows[0]}:{self.rows[1]} bytes {self.bytes[0]}:{self.bytes[1]} of {self.memory}"
        who = f"rank {self.rank} core {self.core} #{self.event} {self.op}"
        return f"{who} {self.verb} {self.tensor} {box} at {self.where}"


def touch(stream: Stream, index: int, access: Access) -> Touch:
    """An access of a stream as a finding names it."""
    event = stream.event(index)
    record = stream.tensors[access.tensor]
    verb = "reads" if access.kind == READ else "adds to" if access.kind == ACCUMULATE else "writes"
    return Touch(
        stream.rank,
        stream.core,
        index,
        event.op,
        verb,
        record.name,
        record.buffer.value,
        (access.first_row, access.end_row),
        (access.first_byte, access.end_byte),
        event.where,
        stream.called_at(index),
        record.where,
        record.called_at,
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `where` is the line to blame, which need not be one of the accesses' lines.

    `callers` called it, innermost first, where it is in a helper of the kernel.
    """

    code: str
    severity: Severity
    message: str
    where: Location | None
    touches: tuple[Touch, ...] = ()
    hint: str = ""
    callers: tuple[Location, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.severity.value}[{self.code}] {self.message}"]
        lines += [f"  {each}" for each in self.touches]
        lines += [f"  {tensor} was allocated at {place}" for tensor, place in self.allocations]
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join([*lines, *location_lines(self.where, self.callers)])

    @property
    def allocations(self) -> list[tuple[str, Location]]:
        """The tensors of the accesses with the lines that allocated them, each once; arguments have none."""
        made = {(each.tensor, each.allocated) for each in self.touches}
        return sorted([(tensor, place) for tensor, place in made if place is not None], key=str)


def fails_a_check(finding: Finding, tolerant: bool) -> bool:
    """Return whether a finding of a detector makes a check fail.

    Errors do. Warnings do unless right kernels get them as well, or the rules are those of the vendor's simulator
    (`tolerant`).
    """
    known = KINDS.get(finding.code)
    is_expected = finding.code in WARNED or (known is not None and known.is_expected)
    return finding.severity is Severity.error or not (tolerant or is_expected)


def found(
    what: FindingKind,
    message: str,
    where: Location | None,
    touches: Iterable[Touch] = (),
    hint: str = "",
    severity: Severity | None = None,
    callers: tuple[Location, ...] = (),
) -> Finding:
    """A finding of a registered kind, of that kind's severity unless another one is given.

    Where `where` is the line of an access, or the one that allocated its tensor, the callers are those of that line.
    """
    touches = tuple(touches)
    lines: list[tuple[Location | None, tuple[Location, ...]]] = [
        (each.where, each.callers) for each in touches
    ]
    lines += [(each.allocated, each.allocated_from) for each in touches]
    above = callers or next((chain for line, chain in lines if line == where), ())
    return Finding(what.code, severity or what.severity, message, where, touches, hint, above)


def barrier_between(tensor: str) -> str:
    """The hint for accesses of the two cores of a rank to one tensor that nothing orders."""
    return f"put nisa.core_barrier(data={tensor}, cores=(0, 1)) between the accesses, or give each core its own part"


def from_error(error: NkwError) -> Finding:
    """A rule that a kernel broke while it ran, as a finding."""
    hint = error.hint if isinstance(error, RuleViolation) else ""
    head, *rest = str(error).removeprefix(f"[{error.code}] ").split("\n")
    shown = {*error.location_lines(), f"  try:   {hint}"}
    kept = [line for line in rest if line not in shown]
    severity = Severity.warning if error.code in WARNED else Severity.error
    return Finding(error.code, severity, "\n".join([head, *kept]), error.where, (), hint, error.callers)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings without repetitions, errors first, then by line, code and text; the same in every run."""

    def key(finding: Finding) -> tuple[object, ...]:
        where = finding.where or Location("", 0, "")
        return (
            finding.severity is not Severity.error,
            where.file,
            where.line,
            finding.code,
            str(finding),
        )

    return sorted(dict.fromkeys(findings), key=key)


def text(findings: Sequence[Finding]) -> str:
    """Findings as text, one after another and then their number; the same bytes in every run."""
    errors = sum(finding.severity is Severity.error for finding in findings)
    count = f"{errors} error{'' if errors == 1 else 's'}, {len(findings) - errors} warning"
    total = f"{count}{'' if len(findings) - errors == 1 else 's'}"
    return "\n".join([*map(str, findings), total]) + "\n"
