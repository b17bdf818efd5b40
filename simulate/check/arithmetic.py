"""`arithmetic`: operations that are legal on the chip and rarely meant: wrong identities, logical shifts, old seeds.

`observed_arithmetic` notes them while the launch runs.
"""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.check.notes import report_notes
from simulate.run import Launch
from simulate.run.stream import Stream

IDENTITY = register_kind(
    "NKW-IDENTITY",
    Severity.warning,
    "A running maximum, minimum or product starts at the identity of its operator, which is not 0.",
)
ABSORBED = register_kind(
    "NKW-SUM-ABSORBED",
    Severity.warning,
    "A running sum has a dtype whose spacing is smaller than what is added to it.",
)
LONG = register_kind(
    "NKW-SUM-NARROW",
    Severity.warning,
    "A running sum of 32 or more terms is kept in float32; in 16 bits each addition is rounded.",
)
SHIFT = register_kind(
    "NKW-SHIFT-SIGN",
    Severity.warning,
    "right_shift fills with zeros, for signed dtypes as well; no chip has an arithmetic right shift.",
)
INVERTED = register_kind(
    "NKW-INVERT-MASK",
    Severity.warning,
    "invert flips every bit; a mask of 0 and 1 is negated by an exclusive or with 1, which flips the lowest one.",
)
INDEX = register_kind(
    "NKW-INDEX-ROUNDED",
    Severity.warning,
    "A run-time index is an integer before its cast; casts round to the nearest integer and do not truncate.",
)
BITS = register_kind(
    "NKW-REINTERPRETED",
    Severity.warning,
    "A view with another dtype reinterprets bits; arithmetic reads a tile with the float dtype that wrote it.",
)
SEED = register_kind(
    "NKW-SEED-REPEATED",
    Severity.warning,
    "A random generator gets another seed before each sequence, and on each core; equal seeds repeat the numbers.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line whose values show that the kernel means another operation, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.get_core(stream).arithmetic
        absorbed = {stream.line_ids[note.event] for note in seen.absorbed}
        long_sums = [note for note in seen.long_sums if stream.line_ids[note.event] not in absorbed]
        results = (
            (IDENTITY, seen.wrong_identity, "fill it with -inf, inf or 1, or copy the first block to it"),
            (ABSORBED, seen.absorbed, "keep the running sum in float32, and cast it once"),
            (LONG, long_sums, "keep the running sum in float32, and cast it once"),
            (
                SHIFT,
                seen.logical_shifts,
                "subtract before the shift, or multiply by a power of two in float32",
            ),
            (INVERTED, seen.inverted_masks, "op=nl.bitwise_xor with 1, or op=nl.equal with 0"),
            (INDEX, seen.rounded_indices, "subtract just under a half before the cast, or shift integers"),
        )
        for finding_kind, notes, hint in results:
            findings += report_notes(stream, finding_kind, notes, hint, shows_writes=True)
        findings += report_notes(
            stream, BITS, seen.reinterpreted, "tensor_copy to a tile of that dtype converts the values"
        )
        findings += report_notes(
            stream, SEED, seen.repeated_seeds, "seed once before the loop, or add the round to the seed"
        )
    return findings + _find_shared_seeds(launch, evidence)


def _find_shared_seeds(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each rank on which both cores set an equal seed and draw with it.

    At most one seed is reported for each rank. The seeds are those of `Arithmetic.seeds`.
    """
    findings: list[Finding] = []
    first_of_rank: dict[int, Stream] = {}
    for stream in launch.streams:
        first = first_of_rank.setdefault(stream.rank, stream)
        if first is stream:
            continue
        seeds, first_seeds = (
            evidence.get_core(stream).arithmetic.seeds,
            evidence.get_core(first).arithmetic.seeds,
        )
        for digest in sorted(seeds.keys() & first_seeds.keys(), key=lambda seed: seeds[seed]):
            seeded = [(first, *first_seeds[digest]), (stream, *seeds[digest])]
            touches = [
                describe_access(core, event, next(a for a in core.accesses(event) if a.tensor == tensor))
                for core, event, tensor in seeded
            ]
            findings.append(
                make_finding(
                    SEED,
                    f"both cores of rank {stream.rank} seed with the same value and draw the same numbers",
                    stream.event(seeds[digest][0]).where,
                    touches,
                    hint="add nl.program_id(0) to the seed",
                )
            )
            break
    return findings
