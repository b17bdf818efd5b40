"""`init`: accumulator registers and random generators that a kernel uses before it sets them.

The Scalar and the Vector engine have accumulator registers, one float32 per partition; several instructions share
them. A launch refuses registers that no instruction has set; an instruction with reduce_cmd idle may leave anything in
those of the Vector engine. An unseeded random generator begins where the previous program left it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, found, kind, touch
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.plan import RandomUse, Registers, State
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

IDLE = kind(
    "NKW-REGISTERS-IDLE",
    Severity.error,
    "After an instruction of the Vector engine with reduce_cmd idle its accumulator registers are undefined.",
)
OPERATOR = kind(
    "NKW-REGISTERS-OPERATOR",
    Severity.warning,
    "Accumulator registers are reset for one operator; the sum of another one starts from the wrong identity.",
)
REOPENED = kind(
    "NKW-REGISTERS-REOPENED",
    Severity.warning,
    "Accumulator registers whose sum was read out and used are reset before the next sum.",
)
UNREAD = kind(
    "NKW-REGISTERS-UNREAD",
    Severity.warning,
    "A sum in accumulator registers is read out before a reset or an idle instruction discards it.",
)
UNSEEDED = kind(
    "NKW-RANDOM-UNSEEDED",
    Severity.warning,
    "A random generator is seeded before a kernel draws from it; its state outlives the program.",
)

_RESETS = (ReduceCmd.reset, ReduceCmd.reset_reduce, ReduceCmd.load_reduce)
_NEVER = -1


@dataclass
class _File:
    """The registers of one engine: per partition, the events that set it and that left it undefined."""

    setter: np.ndarray
    spoiler: np.ndarray
    operator: str = ""
    unread: dict[int, Registers] = field(default_factory=dict)
    """The uses whose sum nothing has read out so far, by event, oldest first."""
    results: dict[int, int] = field(default_factory=dict)  # tensors that hold what was read out: event


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Registers and generators that are used before they are set."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.of(stream)
        findings += _registers(
            stream, evidence.of(stream).accesses, seen.registers, launch.hardware.partitions
        )
        findings += _generators(stream, seen.generators)
    return findings


def _registers(
    stream: Stream, accesses: list[tuple[Access, ...]], uses: dict[int, Registers], partitions: int
) -> list[Finding]:
    files: dict[int, _File] = {}
    findings: list[Finding] = []
    lines: set[int] = set()
    waiting: dict[int, int] = {}  # tensors with a sum that was read out, to the event that used it
    for event, operands in enumerate(accesses) if uses else ():
        for access in operands:
            for each in files.values():
                if access.kind == READ and access.tensor in each.results:
                    waiting.setdefault(access.tensor, event)
        use = uses.get(event)
        if use is None:
            continue
        file = files.setdefault(
            stream.engines[event], _File(np.full(partitions, _NEVER), np.full(partitions, _NEVER))
        )
        finding = _judged(stream, event, use, file, waiting) or _discarded(stream, event, use, file)
        if finding is not None and stream.line_ids[event] not in lines:
            lines.add(stream.line_ids[event])
            findings.append(finding)
        _after(stream, event, use, file, waiting)
    for file in files.values():
        last = next(reversed(file.unread), _NEVER)
        if (
            last != _NEVER
            and file.unread[last].command is ReduceCmd.reduce
            and stream.line_ids[last] not in lines
        ):
            findings.append(_lost(stream, last, None))
    return findings


def _judged(
    stream: Stream, event: int, use: Registers, file: _File, waiting: dict[int, int]
) -> Finding | None:
    """The finding about one use of the registers in their state before it; None for a correct use."""
    adds = use.command is ReduceCmd.reduce
    spoils = use.command is ReduceCmd.idle and Engine(stream.engines[event]) is Engine.vector
    reads = use.command is ReduceCmd.idle and use.read_out
    if not adds and not reads:
        return None
    what = "adds to" if adds else "reads out"
    op, where = stream.op_names[stream.ops[event]], stream.event(event).where
    engine = Engine(stream.engines[event]).name
    here = touch(stream, event, _result(stream, event))
    if spoils:
        return found(
            IDLE,
            f"{op} reads out the {engine} accumulator registers with reduce_cmd idle, which leaves them undefined",
            where,
            (here,),
            hint="reduce_cmd=nisa.reduce_cmd.reset_reduce",
        )
    spoilt = file.spoiler[: use.rows]
    if spoilt.max(initial=_NEVER) != _NEVER:
        by = int(spoilt.max())
        return found(
            IDLE,
            f"{op} {what} the {engine} accumulator registers after a {stream.op_names[stream.ops[by]]} with "
            "reduce_cmd idle, which leaves them undefined",
            where,
            (touch(stream, by, _result(stream, by)), here),
            hint="read the registers out before the idle instruction, or give it another reduce_cmd",
        )
    setter = int(file.setter[: use.rows].max())
    if adds and file.operator != use.operator:
        return found(
            OPERATOR,
            f"{op} accumulates with {use.operator} onto {engine} registers that "
            f"{stream.op_names[stream.ops[setter]]} reset for {file.operator}",
            where,
            (touch(stream, setter, _result(stream, setter)), here),
            hint="reduce_cmd=nisa.reduce_cmd.reset_reduce",
        )
    used = [waiting[tensor] for tensor in file.results if tensor in waiting]
    if adds and used:
        at = max(used)
        access = next(a for a in stream.accesses(at) if a.kind == READ and a.tensor in file.results)
        return found(
            REOPENED,
            f"{op} adds to the {engine} accumulator registers after their sum was read out and used",
            where,
            (touch(stream, at, access), here),
            hint="reduce_cmd=nisa.reduce_cmd.reset_reduce where the next sum begins",
        )
    return None


def _discarded(stream: Stream, event: int, use: Registers, file: _File) -> Finding | None:
    """Return a finding if a use discards a sum of several instructions, or a sum that a loop was meant to continue.

    One reset_reduce alone is no sum: an exponential takes it so that the registers stay defined. It counts where the
    next reset_reduce has its line or one of its operands, and reads the registers out.
    """
    idles = use.command is ReduceCmd.idle and Engine(stream.engines[event]) is Engine.vector
    if not file.unread or not (use.command in _RESETS or idles):
        return None
    last, before = next(reversed(file.unread.items()))
    is_sum = before.command is ReduceCmd.reduce
    if not is_sum and use.read_out and use.command is not ReduceCmd.reset and use.operator == before.operator:
        shared = {access.tensor for access in stream.accesses(last) if access.kind == READ}
        is_sum = stream.line_ids[last] == stream.line_ids[event] or any(
            access.kind == READ and access.tensor in shared for access in stream.accesses(event)
        )
    return _lost(stream, last, event) if is_sum and before.rows <= use.rows else None


def _lost(stream: Stream, last: int, event: int | None) -> Finding:
    """Return the finding for a sum that an event discards, or that the kernel never reads out."""
    name = Engine(stream.engines[last]).name
    accumulation = f"{stream.op_names[stream.ops[last]]} accumulates in the {name} registers"
    if event is None:
        return found(
            UNREAD,
            f"{accumulation}, and nothing reads the sum out",
            stream.event(last).where,
            (touch(stream, last, _result(stream, last)),),
            hint="reduce_res=… in the last instruction of the sum",
        )
    discarding = stream.op_names[stream.ops[event]]
    return found(
        UNREAD,
        f"{accumulation}, and {discarding} discards the sum before anything reads it out",
        stream.event(event).where,
        (touch(stream, last, _result(stream, last)), touch(stream, event, _result(stream, event))),
        hint="reduce_cmd=nisa.reduce_cmd.reduce to continue the sum, or read it out before by reduce_res=…",
    )


def _after(stream: Stream, event: int, use: Registers, file: _File, waiting: dict[int, int]) -> None:
    rows = slice(0, use.rows)
    idles = use.command is ReduceCmd.idle and Engine(stream.engines[event]) is Engine.vector
    if idles or use.command in _RESETS or use.read_out:
        file.unread.clear()
    if not (use.read_out or use.in_result or use.command in (ReduceCmd.idle, ReduceCmd.reset)):
        file.unread[event] = use
    if use.command is ReduceCmd.idle and Engine(stream.engines[event]) is Engine.vector:
        file.spoiler[rows] = event
        return
    if use.command in _RESETS:
        file.spoiler[rows] = _NEVER
        file.operator = use.operator
        for tensor in file.results:
            waiting.pop(tensor, None)
        file.results.clear()
    if use.command is not ReduceCmd.idle:
        file.setter[rows] = event
    if use.read_out:
        result = _result(stream, event).tensor
        waiting.pop(result, None)
        file.results[result] = event


def _result(stream: Stream, event: int) -> Access:
    """The last operand that is written: the tile that receives the registers where there is one, else dst."""
    return [access for access in stream.accesses(event) if access.kind != READ][-1]


def _generators(stream: Stream, uses: dict[int, State]) -> list[Finding]:
    seeded: set[State] = set()
    said: set[State] = set()
    findings = []
    for event, generator in sorted(uses.items()):
        use = stream.effects(event).random
        if use is RandomUse.seeds:
            seeded.add(generator)
        elif use is RandomUse.draws and generator not in seeded | said:
            said.add(generator)
            others = "; it seeds another generator" if seeded else ""
            drawing = stream.event(event)
            findings.append(
                found(
                    UNSEEDED,
                    f"{drawing.op} draws from the {drawing.engine.name} engine's random generator, which this "
                    f"kernel has not seeded{others}",
                    drawing.where,
                    (touch(stream, event, _result(stream, event)),),
                    hint="seed it first: nisa.set_rng_seed for the Vector engine, nisa.rand_set_state for GpSimd",
                )
            )
    return findings
