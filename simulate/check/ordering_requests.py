"""`order`: ordering requests that the compiler refuses or that order nothing."""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.lines import location
from simulate.run import Launch
from simulate.run.stream import Stream

LATER = register_kind(
    "NKW-ORDER-LATER",
    Severity.error,
    "An instruction can wait only for one that the program issues before it.",
)
LOOP = register_kind(
    "NKW-ORDER-LOOP",
    Severity.error,
    "An ordering request does not lead out of an iteration of a device loop.",
)
NOT_ENTERED = register_kind(
    "NKW-ORDER-NOT-ENTERED",
    Severity.warning,
    "nl.no_reorder() is a context manager: it orders the instructions of a `with` block, and nothing without one.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for requested orders that cannot be kept, and for no_reorder without `with`, core by core."""
    return [
        finding
        for stream in launch.streams
        for finding in (*_find_wrong_orders(stream), *_find_blocks_not_entered(stream))
    ]


def _find_wrong_orders(stream: Stream) -> list[Finding]:
    findings = []
    lines: set[tuple[int, int]] = set()
    for producer, consumer in stream.requested:
        later = producer >= consumer
        producer_loops, consumer_loops = stream.loops.get(producer, ()), stream.loops.get(consumer, ())
        pair = stream.line_ids[producer], stream.line_ids[consumer]
        if pair in lines or not (later or consumer_loops[: len(producer_loops)] != producer_loops):
            continue
        lines.add(pair)
        ops = [stream.op_names[stream.ops[event]] for event in (consumer, producer)]
        touches = [
            describe_access(stream, event, a)
            for event in (producer, consumer)
            for a in stream.accesses(event)[-1:]
        ]
        line = stream.request_lines.get((producer, consumer))
        where = stream.event(consumer).where if line is None else location(line)
        if later:
            producer_text = (
                "itself" if producer == consumer else f"{ops[1]} #{producer}, which the program issues later"
            )
            findings.append(
                make_finding(
                    LATER,
                    f"{ops[0]} #{consumer} cannot wait for {producer_text}",
                    where,
                    touches if producer != consumer else touches[:1],
                    hint="later.depends_on(earlier); with_schedule takes (consumer, producer)",
                )
            )
        else:
            findings.append(
                make_finding(
                    LOOP,
                    f"{ops[0]} #{consumer} cannot wait for {ops[1]} #{producer}: an iteration of a device loop "
                    f"contains #{producer} and not #{consumer}",
                    where,
                    touches,
                    hint="put both into the body of the loop, or the producer before the loop",
                )
            )
    return findings


def _find_blocks_not_entered(stream: Stream) -> list[Finding]:
    return [
        make_finding(
            NOT_ENTERED,
            "nl.no_reorder() is called without `with`, so it orders no instructions",
            location(block.line),
            hint="with nl.no_reorder(): and the instructions below it",
        )
        for block in stream.blocks
        if not block.entered
    ]
