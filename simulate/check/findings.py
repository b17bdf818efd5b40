"""Findings: code, severity, message, the accesses that show the fault with their bytes and lines, and a hint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from nkw.errors import Location, NkwError, RuleViolation, format_location
from simulate.level import WARNED
from simulate.run.stream import ACCUMULATE, READ, Access, Stream


class Severity(Enum):
    """Severity of a finding.

    error: wrong on the chip, or refused by the compiler. warning: legal, and rarely what was meant.
    """

    error = "error"
    warning = "warning"


@dataclass(frozen=True, slots=True)
class FindingKind:
    """Stable code of a finding, its usual severity, and the sentence of the broken rule."""

    code: str
    severity: Severity
    sentence: str
    is_expected: bool = False
    """Whether kernels that are right get it as well, so that its warning does not make a check fail."""


KINDS: dict[str, FindingKind] = {}
"""Every code that a detector or a lint rule can report; `explain` prints from it."""


def register_kind(code: str, severity: Severity, sentence: str, is_expected: bool = False) -> FindingKind:
    """Register and return a kind of finding.

    Args:
        code: Stable code, for example "NKW-RACE"; no other kind may have it.
        severity: Severity of its findings where the detector states none.
        sentence: The rule that a finding reports as broken; `explain` prints it.
        is_expected: Whether correct kernels get such findings, so that a warning does not make a check fail.
    """
    assert code not in KINDS, f"code {code} is used twice"
    finding_kind = KINDS[code] = FindingKind(code, severity, sentence, is_expected)
    return finding_kind


@dataclass(frozen=True, slots=True)
class Touch:
    """Access that a finding shows: core, event, instruction, tensor, rows, bytes, and the line of the kernel.

    `event` is the index of the instruction in the core's stream. `verb` is "reads", "writes" or "adds to".
    `rows` and `bytes` are (first, end), the end excluded: partitions on chip, rows in HBM, and bytes of each
    row. `callers` are the lines that called the access's line, innermost first. `allocated` is the line that
    allocated the tensor, None for an argument of the kernel; `allocated_from` are the callers of that line.
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


def describe_access(stream: Stream, index: int, access: Access) -> Touch:
    """Return an access of a stream in the form in which findings show it.

    Args:
        stream: The stream of one core.
        index: The index of the event in the stream.
        access: The access of one operand of that event.
    """
    event = stream.event(index)
    record = stream.tensors[access.tensor]
    verb = "reads" if access.mode == READ else "adds to" if access.mode == ACCUMULATE else "writes"
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
    """One finding about a kernel.

    `where` is the line to blame, which need not be the line of an access. `callers` are the lines that called it,
    innermost first.
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
        lines += [f"  {access}" for access in self.touches]
        lines += [f"  {tensor} was allocated at {line}" for tensor, line in self.allocations]
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join([*lines, *format_location(self.where, self.callers)])

    @property
    def allocations(self) -> list[tuple[str, Location]]:
        """Tensors of the accesses with the lines that allocated them, without repetitions and without arguments."""
        allocations = {(access.tensor, access.allocated) for access in self.touches}
        return sorted([(tensor, line) for tensor, line in allocations if line is not None], key=str)


def fails_a_check(finding: Finding, tolerant: bool) -> bool:
    """Return whether a finding makes a check fail.

    Errors do. Warnings do unless correct kernels get them as well, or `tolerant` is set.

    Args:
        finding: A finding of a detector.
        tolerant: Whether the rules are those of the vendor's simulator, under which no warning makes a check
            fail.
    """
    known = KINDS.get(finding.code)
    is_expected = finding.code in WARNED or (known is not None and known.is_expected)
    return finding.severity is Severity.error or not (tolerant or is_expected)


def make_finding(
    finding_kind: FindingKind,
    message: str,
    where: Location | None,
    touches: Iterable[Touch] = (),
    hint: str = "",
    severity: Severity | None = None,
    callers: tuple[Location, ...] = (),
) -> Finding:
    """Return a finding of a registered kind.

    Args:
        finding_kind: The kind, which gives the code.
        message: What is wrong with which tensor or instruction.
        where: The line to blame, None if it is not known.
        touches: The accesses to show, in the order of the program.
        hint: What to write instead.
        severity: None for the severity of the kind.
        callers: The lines that called `where`. By default those that a shown access has for this line.
    """
    touches = tuple(touches)
    lines: list[tuple[Location | None, tuple[Location, ...]]] = [
        (access.where, access.callers) for access in touches
    ]
    lines += [(access.allocated, access.allocated_from) for access in touches]
    calling_lines = callers or next((chain for line, chain in lines if line == where), ())
    return Finding(
        finding_kind.code, severity or finding_kind.severity, message, where, touches, hint, calling_lines
    )


def suggest_barrier(tensor: str) -> str:
    """Return the hint for accesses of the two cores of a rank to one tensor that nothing orders."""
    return f"put nisa.core_barrier(data={tensor}, cores=(0, 1)) between the accesses, or give each core its own part"


def convert_error(error: NkwError) -> Finding:
    """Convert an error that a kernel raised into a finding.

    The message loses the code, the location and the hint, which the finding has as fields of its own. Codes
    of `simulate.level.WARNED` become warnings, all others errors.
    """
    hint = error.hint if isinstance(error, RuleViolation) else ""
    head, *details = str(error).removeprefix(f"[{error.code}] ").split("\n")
    shown = {*error.format_location(), f"  try:   {hint}"}
    message_lines = [line for line in details if line not in shown]
    severity = Severity.warning if error.code in WARNED else Severity.error
    return Finding(
        error.code, severity, "\n".join([head, *message_lines]), error.where, (), hint, error.callers
    )


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings without repetitions: errors first, then by file, line, code and text."""

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


def format_text(findings: Sequence[Finding]) -> str:
    """Return findings as text, with a last line of the numbers of errors and warnings, ended by a newline."""
    errors = sum(finding.severity is Severity.error for finding in findings)
    count = f"{errors} error{'' if errors == 1 else 's'}, {len(findings) - errors} warning"
    total = f"{count}{'' if len(findings) - errors == 1 else 's'}"
    return "\n".join([*map(str, findings), total]) + "\n"
