"""`carried`: dependences between iterations that a loop declares independent, and Beta 1 code that its compiler breaks.

Users reported each of these as right in simulation and wrong on the chip. The public reports concern the compiler of
Beta 1 (aws-neuron-sdk issues 1045, 1051 and 1138). The vendor's library uses reshapes and broadcasts of today's
dialect everywhere, so only those of Beta 1 are reported.
"""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.lines import location
from simulate.run import Launch
from simulate.run.stream import READ, WRITE, Access, Iteration, Stream

CARRIED = register_kind(
    "NKW-AFFINE-CARRIED",
    Severity.warning,
    "Iterations of nl.affine_range are independent: no two of them write the same view of a tile made before it.",
    is_expected=True,
)
RESHAPE = register_kind(
    "NKW-BETA1-RESHAPE",
    Severity.warning,
    "The compiler of Beta 1 gives wrong values where a reshape splits the free dim of a filled tile.",
)
BROADCAST = register_kind(
    "NKW-BETA1-BROADCAST",
    Severity.warning,
    "The compiler of Beta 1 gives wrong rows where an operator broadcasts a tile over partitions or a third dim.",
)
UPDATE = register_kind(
    "NKW-BETA1-UPDATE",
    Severity.warning,
    "In Beta 1 `+=` on a PSUM tile accumulates matmuls; adding anything else to it gives wrong values.",
)
_REMARKS = {
    UPDATE.code: (UPDATE, "copy the sum to SBUF, and add to the copy"),
    RESHAPE.code: (RESHAPE, "load or copy the parts into a tile of the new shape"),
    BROADCAST.code: (
        BROADCAST,
        "broadcast the smaller operand with broadcast_to first, or loop over the rows",
    ),
}


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for tiles that several iterations of an nl.affine_range write, and for Beta 1 code.

    Remarks are what the Beta 1 dialect recorded in the stream while the kernel ran: `+=`, reshapes and
    broadcasts.
    """
    findings: list[Finding] = []
    for stream in launch.streams:
        if stream.affine:
            findings += _find_carried(stream, evidence.get_core(stream).accesses)
        for code, line, seen in stream.remarks:
            finding_kind, hint = _REMARKS[code]
            findings.append(make_finding(finding_kind, seen, location(line), hint=hint))
    return findings


def _find_carried(stream: Stream, accesses: list[tuple[Access, ...]]) -> list[Finding]:
    findings = []
    earlier_writes: dict[tuple[int, int], list[tuple[int, Access, Iteration]]] = {}  # by loop and tensor
    reported_tensors: set[int] = set()
    for event, iterations in stream.affine.items():
        if stream.effects(event).sums_products:
            continue
        for access in accesses[event]:
            record = stream.tensors[access.tensor]
            if access.mode != WRITE or not record.buffer.on_chip or access.tensor in reported_tensors:
                continue
            if any(other.mode == READ and _is_same_box(other, access) for other in accesses[event]):
                continue  # a sum in place may be taken in any order, and public kernels do so
            for iteration in iterations:
                if access.tensor >= iteration.tensors_before:
                    continue
                writes = earlier_writes.setdefault((iteration.loop, access.tensor), [])
                other = next(
                    (w for w in writes if w[2].number != iteration.number and _is_same_box(w[1], access)),
                    None,
                )
                if other is None:
                    if not any(w[1] == access and w[2] == iteration for w in writes):
                        writes.append((event, access, iteration))
                    continue
                reported_tensors.add(access.tensor)
                findings.append(
                    make_finding(
                        CARRIED,
                        f"iterations {other[2].number} and {iteration.number} of an nl.affine_range both write "
                        f"{record.name} {record.shape}, which was allocated before the loop",
                        stream.event(event).where,
                        (describe_access(stream, other[0], other[1]), describe_access(stream, event, access)),
                        hint="allocate it inside the loop, or use nl.sequential_range",
                    )
                )
                break
    return findings


def _is_same_box(one: Access, other: Access) -> bool:
    return one.tensor == other.tensor and (
        (one.first_row, one.end_row, one.first_byte, one.end_byte)
        == (other.first_row, other.end_row, other.first_byte, other.end_byte)
    )
