"""`out`: inputs that are unused, outputs that are incomplete, private, independent of inputs, or not returned."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import CodeType

from nkw.errors import Location
from simulate.check.evidence import Evidence, Returned
from simulate.check.findings import Finding, Severity, Touch, describe_access, make_finding, register_kind
from simulate.isa.plan import RandomUse, Synchronization
from simulate.lines import location
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream, TensorRecord

PARTIAL = register_kind(
    "NKW-OUTPUT-PARTIAL", Severity.warning, "Every byte of an output is written before it is returned."
)
PRIVATE = register_kind(
    "NKW-OUTPUT-PRIVATE",
    Severity.warning,
    "An output is allocated with buffer=nl.shared_hbm; private HBM (also nl.hbm) does not compile since 0.3.",
)
UNTOUCHED = register_kind(
    "NKW-OUTPUT-INPUT", Severity.warning, "A returned tensor is an input that the kernel never wrote."
)
CONSTANT = register_kind(
    "NKW-OUTPUT-CONSTANT", Severity.warning, "An output depends on at least one input tensor."
)
FORGOTTEN = register_kind(
    "NKW-OUTPUT-FORGOTTEN",
    Severity.warning,
    "A shared HBM tensor that the kernel writes is returned or read.",
)
UNUSED = register_kind(
    "NKW-INPUT-UNUSED", Severity.warning, "Every input tensor is read or written by some rank."
)

IN_PLACE = register_kind(
    "NKW-INPUT-WRITTEN",
    Severity.warning,
    "An argument that a kernel writes is returned; else the caller on a device does not see the new contents.",
)

COLLECTIVE_IO = register_kind(
    "NKW-COLLECTIVE-IO",
    Severity.warning,
    "HBM tensors of a collective are internal: neither arguments nor results of the kernel, and named by name=.",
)

COLLECTIVE = register_kind(
    "NKW-COLLECTIVE-UNREAD",
    Severity.warning,
    "The result of a collective is read or returned on at least one rank.",
)

_DECORATOR_LINES = 20
"""Number of lines in which the `def` below a decorator is searched."""

_Write = tuple[Stream, int, Access]


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings about inputs and outputs, rank by rank, and about operands and results of collectives."""
    findings: list[Finding] = []
    depends = _trace_inputs(launch, evidence)
    for rank in sorted({stream.rank for stream in launch.streams}):
        streams = [stream for stream in launch.streams if stream.rank == rank]
        findings += _find_faults_of_rank(launch, streams, evidence, depends[rank])
    return [
        *findings,
        *_find_unused_inputs(launch, evidence),
        *_find_unread(launch, evidence),
        *_find_exposed(launch, evidence),
    ]


def _find_definition(launch: Launch) -> Location | None:
    """Return the line of the kernel's `def`, None if the kernel's own body issued no instruction."""
    for stream in launch.streams:
        for code, _ in stream.lines:
            if code.co_name == launch.kernel:
                return location((code, _find_def_line(code)))
    return None


def _find_def_line(code: CodeType) -> int:
    """Return the line of `def` of a function, which comes after the lines of its decorators.

    The first line of the function if none of the next 20 lines has a `def`.
    """
    first = code.co_firstlineno
    for line in range(first, first + _DECORATOR_LINES):
        if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")):
            return line
    return first


def _find_unused_inputs(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for inputs that no rank reads, writes or returns.

    An input that some ranks ignore is not reported, because ranks may share the work unequally.
    """
    used = set()
    inputs: dict[str, TensorRecord] = {}
    for stream in launch.streams:
        serials = {output.tensor for output in evidence.returned if output.rank == stream.rank}
        serials.update(
            access.tensor for operands in evidence.get_core(stream).accesses for access in operands
        )
        for record in filter(_is_input, stream.tensors):
            inputs.setdefault(record.name, record)
            if record.serial in serials:
                used.add(record.name)
    return [
        make_finding(
            UNUSED,
            f"input {record.name} {record.shape} {record.dtype} is neither read nor written",
            _find_definition(launch),
            hint="drop the parameter, or use it",
        )
        for name, record in inputs.items()
        if name not in used
    ]


def _find_exposed(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line with a collective on arguments, outputs or tensors without name= in HBM.

    Only the first core is looked at, since all ranks run the same lines. Sources: nki.collectives.all_reduce
    of 0.7 (srcs in private HBM), and the comments of the vendor's own collective kernels, which copy
    arguments and outputs to and from named internal tensors.
    """
    stream = launch.streams[0]
    returned = {output.tensor for output in evidence.returned if output.rank == stream.rank}
    findings: dict[int, Finding] = {}
    for index in stream.rendezvous:
        if stream.effects(index).synchronization is not Synchronization.collective:
            continue
        for access in evidence.get_core(stream).accesses[index]:
            record = stream.tensors[access.tensor]
            problem = "" if record.buffer.on_chip else _describe_exposure(record, returned)
            if problem and stream.line_ids[index] not in findings:
                event = stream.event(index)
                findings[stream.line_ids[index]] = make_finding(
                    COLLECTIVE_IO,
                    f"{event.op} takes {record.name} {record.shape}, which {problem}; HBM tensors of a collective are "
                    "internal and have a name",
                    event.where,
                    (describe_access(stream, index, access),),
                    hint="copy through nl.ndarray(…, buffer=nl.private_hbm, name=…)",
                )
    return list(findings.values())


def _describe_exposure(record: TensorRecord, returned: set[int]) -> str:
    if _is_input(record):
        return "is an argument of the kernel"
    if record.serial in returned:
        return "is a result of the kernel"
    return "" if record.is_named else "has no name="


def _find_unread(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line with a collective whose results are neither read nor returned on any rank."""
    unread: dict[str, Finding | None] = {}
    returned = {(output.rank, output.tensor) for output in evidence.returned}
    for stream in launch.streams:
        accesses = evidence.get_core(stream).accesses
        last_read = {a.tensor: i for i, operands in enumerate(accesses) for a in operands if a.mode == READ}
        for index in stream.rendezvous:
            if stream.effects(index).synchronization is not Synchronization.collective:
                continue
            written = [a for a in accesses[index] if a.mode != READ]
            where = stream.event(index).where
            used = any(
                last_read.get(a.tensor, -1) > index or (stream.rank, a.tensor) in returned for a in written
            )
            if used or not written:
                unread[str(where)] = None
            else:
                records = ", ".join(f"{stream.tensors[a.tensor].name}" for a in written)
                unread.setdefault(
                    str(where),
                    make_finding(
                        COLLECTIVE,
                        f"no rank reads or returns {records} after this {stream.event(index).op}",
                        where,
                        [describe_access(stream, index, a) for a in written],
                        hint="use the dsts of the collective, not its srcs",
                    ),
                )
    return [finding for finding in unread.values() if finding is not None]


def _find_faults_of_rank(
    launch: Launch, streams: list[Stream], evidence: Evidence, depends: set[int]
) -> list[Finding]:
    """Return findings about the inputs and outputs of one rank.

    They concern arguments that are written and not returned, returned inputs, faults of outputs, and shared
    HBM that is neither returned nor read.

    Args:
        launch: The launch.
        streams: The streams of the rank's cores.
        evidence: The evidence of the launch.
        depends: The tensors of the rank whose contents depend on an input.
    """
    records = streams[0].tensors
    reads, writes = _find_uses(streams, evidence)
    returned = {output.tensor: output for output in evidence.returned if output.rank == streams[0].rank}
    has_inputs = any(_is_input(record) for record in records)
    findings = [
        make_finding(
            IN_PLACE,
            f"the argument {record.name} {record.shape} is written and not returned",
            stream.event(index).where,
            (describe_access(stream, index, access),),
            hint=f"return {record.name}; a device runs the kernel on a copy unless the caller aliases it",
        )
        for serial, (stream, index, access) in writes.items()
        if _is_input(record := records[serial]) and serial not in returned
    ]
    for serial, output in sorted(returned.items()):
        record = records[serial]
        if not _is_input(record):
            is_constant = has_inputs and serial not in depends
            findings += _find_output_faults(record, output, writes.get(serial), is_constant)
        elif serial not in writes:
            findings.append(
                make_finding(
                    UNTOUCHED,
                    f"the kernel returns its input {record.name} {record.shape}, which it never wrote",
                    _find_definition(launch),
                    hint="return the tensor that holds the result",
                )
            )
    findings += [
        make_finding(
            FORGOTTEN,
            f"{record.name} {record.shape} {record.dtype} is written, but neither returned nor read",
            record.where,
            _describe_write(writes[record.serial]),
            hint="return it, or allocate scratch space with buffer=nl.private_hbm",
        )
        for record in records
        if record.buffer is MemoryRegion.shared_hbm
        and not _is_input(record)
        and record.serial in writes
        and record.serial not in reads
        and record.serial not in returned
    ]
    return findings


def _find_output_faults(
    record: TensorRecord, output: Returned, last: _Write | None, is_constant: bool
) -> Iterator[Finding]:
    """Yield findings about a returned tensor that is no input: bytes never written, private HBM, or constant contents.

    Args:
        record: The tensor.
        output: The returned tensor with the number of its unwritten bytes.
        last: Its last write, None if the kernel never writes it.
        is_constant: Whether the kernel has inputs, and the tensor depends on none of them.
    """
    if output.unwritten_bytes:
        yield make_finding(
            PARTIAL,
            f"{output.unwritten_bytes} of {record.nbytes} bytes of the output {record.name} {record.shape} "
            f"{record.dtype} were never written",
            record.where,
            _describe_write(last),
            hint="write the rest, often the last, ragged tile",
            callers=record.called_at,
        )
    if record.buffer is MemoryRegion.private_hbm:
        yield make_finding(
            PRIVATE,
            f"the output {record.name} {record.shape} lies in private HBM, which does not compile since NKI 0.3",
            record.where,
            _describe_write(last),
            hint="buffer=nl.shared_hbm",
            callers=record.called_at,
        )
    if is_constant:
        yield make_finding(
            CONSTANT,
            f"the output {record.name} {record.shape} depends on no input tensor",
            record.where,
            _describe_write(last),
            hint="check which tile is copied to the output",
        )


def _is_input(record: TensorRecord) -> bool:
    return record.line is None and not record.buffer.on_chip and record.buffer is not MemoryRegion.register


def _describe_write(write: _Write | None) -> tuple[Touch, ...]:
    return () if write is None else (describe_access(*write),)


def _find_uses(streams: list[Stream], evidence: Evidence) -> tuple[set[int], dict[int, _Write]]:
    """Return the tensors that some core of a rank reads, and the last write of every written tensor in HBM, by tensor.

    Barriers do not count as writes.
    """
    reads: set[int] = set()
    writes: dict[int, _Write] = {}
    for stream in streams:
        for index, operands in enumerate(evidence.get_core(stream).accesses):
            for access in operands:
                if access.mode == READ:
                    reads.add(access.tensor)
                elif not (
                    stream.tensors[access.tensor].buffer.on_chip
                    or stream.effects(index).synchronization is Synchronization.barrier
                ):
                    writes[access.tensor] = stream, index, access
    return reads, writes


def _trace_inputs(launch: Launch, evidence: Evidence) -> dict[int, set[int]]:
    """Return, by rank, the tensors whose contents depend on an input or on drawn random numbers.

    A rendezvous passes the dependence of one member's operands on to the results of all members.
    """
    ranks = {stream.rank: stream for stream in launch.streams}
    depends = {
        rank: {record.serial for record in stream.tensors if _is_input(record)}
        for rank, stream in ranks.items()
    }
    reached_by: set[int] = set()
    while True:
        before = sum(map(len, depends.values())), len(reached_by)
        for stream in launch.streams:
            reached = depends[stream.rank]
            for index, accesses in enumerate(evidence.get_core(stream).accesses):
                rendezvous = stream.rendezvous.get(index)
                varies = stream.effects(index).random is RandomUse.draws  # without any input
                if varies or any(access.mode == READ and access.tensor in reached for access in accesses):
                    if rendezvous is not None:
                        reached_by.add(rendezvous)
                elif rendezvous is None or rendezvous not in reached_by:
                    continue
                reached.update(access.tensor for access in accesses if access.mode != READ)
        if len(launch.streams) == 1 or (sum(map(len, depends.values())), len(reached_by)) == before:
            return depends
