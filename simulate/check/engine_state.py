"""`init`: accumulator registers and random generators that a kernel uses before it sets them.

The Scalar and the Vector engine have accumulator registers, one float32 for each partition, which several instructions
share. A launch refuses registers that no instruction has set. An instruction with reduce_cmd idle leaves the registers
of the Vector engine undefined. An unseeded random generator continues the sequence of the previous program.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.plan import RandomUse, Registers, State
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

IDLE = register_kind(
    "NKW-REGISTERS-IDLE",
    Severity.error,
    "After an instruction of the Vector engine with reduce_cmd idle its accumulator registers are undefined.",
)
OPERATOR = register_kind(
    "NKW-REGISTERS-OPERATOR",
    Severity.warning,
    "Accumulator registers are reset for one operator; the sum of another one starts from the wrong identity.",
)
REOPENED = register_kind(
    "NKW-REGISTERS-REOPENED",
    Severity.warning,
    "Accumulator registers whose sum was read out and used are reset before the next sum.",
)
UNREAD = register_kind(
    "NKW-REGISTERS-UNREAD",
    Severity.warning,
    "A sum in accumulator registers is read out before a reset or an idle instruction discards it.",
)
UNSEEDED = register_kind(
    "NKW-RANDOM-UNSEEDED",
    Severity.warning,
    "A random generator is seeded before a kernel draws from it; its state outlives the program.",
)

_RESETS = (ReduceCmd.reset, ReduceCmd.reset_reduce, ReduceCmd.load_reduce)
_NEVER = -1


@dataclass
class _RegisterFile:
    """Accumulator registers of one engine.

    `setter` and `spoiler` are int arrays [partitions]: the last event that set the register of a partition,
    and the last event that left it undefined; -1 for none. `operator` is the operator of the last reset.
    """

    setter: np.ndarray
    spoiler: np.ndarray
    operator: str = ""
    unread: dict[int, Registers] = field(default_factory=dict)
    """Uses whose sum nothing has read out so far, by event, oldest first."""
    results: dict[int, int] = field(default_factory=dict)
    """Events that read the registers out, by the tensor that they wrote."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for accumulator registers and random generators that are not set, or registers not read out."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.get_core(stream)
        findings += _find_register_faults(
            stream, evidence.get_core(stream).accesses, seen.registers, launch.hardware.partitions
        )
        findings += _find_unseeded(stream, seen.generators)
    return findings


def _find_register_faults(
    stream: Stream, accesses: list[tuple[Access, ...]], uses: dict[int, Registers], partitions: int
) -> list[Finding]:
    files: dict[int, _RegisterFile] = {}
    findings: list[Finding] = []
    lines: set[int] = set()
    used_sums: dict[int, int] = {}  # events that read a tensor with a sum that was read out, by tensor
    for event, operands in enumerate(accesses) if uses else ():
        for access in operands:
            for file in files.values():
                if access.mode == READ and access.tensor in file.results:
                    used_sums.setdefault(access.tensor, event)
        use = uses.get(event)
        if use is None:
            continue
        file = files.setdefault(
            stream.engines[event], _RegisterFile(np.full(partitions, _NEVER), np.full(partitions, _NEVER))
        )
        finding = _find_misuse(stream, event, use, file, used_sums) or _find_discarded_sum(
            stream, event, use, file
        )
        if finding is not None and stream.line_ids[event] not in lines:
            lines.add(stream.line_ids[event])
            findings.append(finding)
        _update_registers(stream, event, use, file, used_sums)
    for file in files.values():
        last = next(reversed(file.unread), _NEVER)
        if (
            last != _NEVER
            and file.unread[last].command is ReduceCmd.reduce
            and stream.line_ids[last] not in lines
        ):
            findings.append(_report_discarded(stream, last, None))
    return findings


def _find_misuse(
    stream: Stream, event: int, use: Registers, file: _RegisterFile, used_sums: dict[int, int]
) -> Finding | None:
    """Return the finding about one use of the registers, judged by their state before it; None for a correct use.

    Args:
        stream: The stream of the core.
        event: The event that uses the registers.
        use: Its use of the registers.
        file: The registers of its engine.
        used_sums: The last event that read a tensor with a sum that was read out, by tensor.
    """
    adds = use.command is ReduceCmd.reduce
    spoils = use.command is ReduceCmd.idle and Engine(stream.engines[event]) is Engine.vector
    reads = use.command is ReduceCmd.idle and use.read_out
    if not adds and not reads:
        return None
    action = "adds to" if adds else "reads out"
    op, where = stream.op_names[stream.ops[event]], stream.event(event).where
    engine = Engine(stream.engines[event]).name
    access_of_use = describe_access(stream, event, _get_last_write(stream, event))
    if spoils:
        return make_finding(
            IDLE,
            f"{op} reads out the {engine} accumulator registers with reduce_cmd idle, which leaves them undefined",
            where,
            (access_of_use,),
            hint="reduce_cmd=nisa.reduce_cmd.reset_reduce",
        )
    spoilt = file.spoiler[: use.rows]
    if spoilt.max(initial=_NEVER) != _NEVER:
        idle_event = int(spoilt.max())
        return make_finding(
            IDLE,
            f"{op} {action} the {engine} accumulator registers after a {stream.op_names[stream.ops[idle_event]]} with "
            "reduce_cmd idle, which leaves them undefined",
            where,
            (describe_access(stream, idle_event, _get_last_write(stream, idle_event)), access_of_use),
            hint="read the registers out before the idle instruction, or give it another reduce_cmd",
        )
    setter = int(file.setter[: use.rows].max())
    if adds and file.operator != use.operator:
        return make_finding(
            OPERATOR,
            f"{op} accumulates with {use.operator} onto {engine} registers that "
            f"{stream.op_names[stream.ops[setter]]} reset for {file.operator}",
            where,
            (describe_access(stream, setter, _get_last_write(stream, setter)), access_of_use),
            hint="reduce_cmd=nisa.reduce_cmd.reset_reduce",
        )
    readers = [used_sums[tensor] for tensor in file.results if tensor in used_sums]
    if adds and readers:
        reader = max(readers)
        access = next(a for a in stream.accesses(reader) if a.mode == READ and a.tensor in file.results)
        return make_finding(
            REOPENED,
            f"{op} adds to the {engine} accumulator registers after their sum was read out and used",
            where,
            (describe_access(stream, reader, access), access_of_use),
            hint="reduce_cmd=nisa.reduce_cmd.reset_reduce where the next sum begins",
        )
    return None


def _find_discarded_sum(stream: Stream, event: int, use: Registers, file: _RegisterFile) -> Finding | None:
    """Return a finding if a use discards a sum of several instructions, or a sum that a loop was meant to continue.

    A single reset_reduce is no sum: an exponential takes it so that the registers stay defined. It counts
    only if the next reset_reduce reads the registers out and is on the same line or reads one of its
    operands. None if nothing is discarded.
    """
    idles = use.command is ReduceCmd.idle and Engine(stream.engines[event]) is Engine.vector
    if not file.unread or not (use.command in _RESETS or idles):
        return None
    last, before = next(reversed(file.unread.items()))
    is_sum = before.command is ReduceCmd.reduce
    if not is_sum and use.read_out and use.command is not ReduceCmd.reset and use.operator == before.operator:
        shared = {access.tensor for access in stream.accesses(last) if access.mode == READ}
        is_sum = stream.line_ids[last] == stream.line_ids[event] or any(
            access.mode == READ and access.tensor in shared for access in stream.accesses(event)
        )
    return _report_discarded(stream, last, event) if is_sum and before.rows <= use.rows else None


def _report_discarded(stream: Stream, last: int, event: int | None) -> Finding:
    """Return the finding for a sum that an event discards, or that the kernel never reads out.

    Args:
        stream: The stream of the core.
        last: The event that added to the sum last.
        event: The event that discards the sum, None if the launch ends first.
    """
    name = Engine(stream.engines[last]).name
    accumulation = f"{stream.op_names[stream.ops[last]]} accumulates in the {name} registers"
    if event is None:
        return make_finding(
            UNREAD,
            f"{accumulation}, and nothing reads the sum out",
            stream.event(last).where,
            (describe_access(stream, last, _get_last_write(stream, last)),),
            hint="reduce_res=… in the last instruction of the sum",
        )
    discarding = stream.op_names[stream.ops[event]]
    return make_finding(
        UNREAD,
        f"{accumulation}, and {discarding} discards the sum before anything reads it out",
        stream.event(event).where,
        (
            describe_access(stream, last, _get_last_write(stream, last)),
            describe_access(stream, event, _get_last_write(stream, event)),
        ),
        hint="reduce_cmd=nisa.reduce_cmd.reduce to continue the sum, or read it out before by reduce_res=…",
    )


def _update_registers(
    stream: Stream, event: int, use: Registers, file: _RegisterFile, used_sums: dict[int, int]
) -> None:
    """Update `file` and `used_sums` in place after a use of the registers by an event.

    `used_sums` maps a tensor with a sum that was read out to the event that read the tensor; a reset removes
    its entries.
    """
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
            used_sums.pop(tensor, None)
        file.results.clear()
    if use.command is not ReduceCmd.idle:
        file.setter[rows] = event
    if use.read_out:
        result = _get_last_write(stream, event).tensor
        used_sums.pop(result, None)
        file.results[result] = event


def _get_last_write(stream: Stream, event: int) -> Access:
    """Return the last written operand of an event: the tile that receives the registers if there is one, else dst.

    Raises IndexError if the event writes nothing.
    """
    return [access for access in stream.accesses(event) if access.mode != READ][-1]


def _find_unseeded(stream: Stream, uses: dict[int, State]) -> list[Finding]:
    seeded: set[State] = set()
    reported: set[State] = set()
    findings = []
    for event, generator in sorted(uses.items()):
        use = stream.effects(event).random
        if use is RandomUse.seeds:
            seeded.add(generator)
        elif use is RandomUse.draws and generator not in seeded | reported:
            reported.add(generator)
            remark = "; it seeds another generator" if seeded else ""
            drawing = stream.event(event)
            findings.append(
                make_finding(
                    UNSEEDED,
                    f"{drawing.op} draws from the {drawing.engine.name} engine's random generator, which this "
                    f"kernel has not seeded{remark}",
                    drawing.where,
                    (describe_access(stream, event, _get_last_write(stream, event)),),
                    hint="seed it first: nisa.set_rng_seed for the Vector engine, nisa.rand_set_state for GpSimd",
                )
            )
    return findings
