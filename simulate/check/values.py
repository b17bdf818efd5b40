"""`values`: numbers that a dtype does not represent, or that a function of the Scalar engine does not cover.

The numbers are noted while the launch runs, by `observed_values` and `observed_integers`.
"""

from __future__ import annotations

import math

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, register_kind
from simulate.check.notes import report_notes
from simulate.run import Launch

INTEGERS = register_kind(
    "NKW-INT-FLOAT32",
    Severity.warning,
    "Integers above 2**24 are not exact on the float32 path of the engines.",
)
FP8 = register_kind(
    "NKW-FP8-RANGE",
    Severity.warning,
    "Before gen4 the chip converts float8_e4m3fn to its own float8_e4m3, whose largest value is 240.",
)
OVERFLOW = register_kind(
    "NKW-FP8-OVERFLOW",
    Severity.warning,
    "A cast to an 8-bit float keeps finite values within the largest value of the dtype.",
)
HALF_OVERFLOW = register_kind(
    "NKW-HALF-OVERFLOW",
    Severity.warning,
    "A cast to a 16-bit float keeps finite values within the largest value of the dtype.",
)
ROUNDED = register_kind(
    "NKW-INT-ROUNDED",
    Severity.warning,
    "Integers become 16-bit floats without loss: up to 256 in bfloat16, 2048 in float16.",
)
FUNCTION = register_kind(
    "NKW-FUNCTION-RANGE",
    Severity.warning,
    "The Scalar engine's functions are fitted to a documented input range; outside of it the result is arbitrary.",
)
SPREAD = register_kind(
    "NKW-TRANSPOSE-SPREAD",
    Severity.warning,
    "Before gen3 the Tensor engine transposes by a product with an identity, which takes finite values only.",
)
SATURATED = register_kind(
    "NKW-INT-SATURATED",
    Severity.warning,
    "A cast to an integer dtype gets values within its range; others become its smallest or largest integer.",
)
WRAPPED = register_kind(
    "NKW-INT-WRAPPED",
    Severity.warning,
    "Sums, differences and products of 32-bit integers stay within 32 bits; what an overflow gives is not documented.",
)
NAN_TO_INTEGER = register_kind(
    "NKW-INT-NAN",
    Severity.warning,
    "A cast to an integer dtype gets no NaN; which integer NaN becomes is not documented.",
)
VANISHED = register_kind(
    "NKW-FP8-UNDERFLOW",
    Severity.warning,
    "A cast to an 8-bit float turns at most half of the nonzero elements into zeros.",
)
_RANGE_HINTS = {
    "sin": "reduce the argument to -pi to pi first, or use nl.sin, which does",
    "arctan": "use arctan(x) = pi/2 - arctan(1/x) for large x",
}


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line that loses values, or whose arguments are outside of a function's range."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.get_core(stream).values
        integers = seen.integers
        findings += report_notes(
            stream,
            INTEGERS,
            seen.large_integers,
            "make all operands and the result int32 or uint32 in SBUF, where GpSimd's tensor_tensor is exact",
        )
        if not launch.hardware.matmul_e4m3fn:
            findings += report_notes(stream, FP8, seen.wide_fp8, "scale the data to 240 before the cast")
        results = (
            (OVERFLOW, seen.overflowing_fp8, "scale by the largest magnitude before the cast, or clip"),
            (HALF_OVERFLOW, seen.overflowing_halves, "keep the sum in float32, or scale before the cast"),
            (ROUNDED, seen.rounded_integers, "keep integers in int32, or cast them to float32"),
            (ROUNDED, integers.rounded_numbers, "write the numbers to int32 or float32"),
            (
                SATURATED,
                integers.saturated,
                "scale or clip to the range before the cast, or take a wider dtype",
            ),
            (WRAPPED, integers.wrapped, "keep the operands small enough, or compute in two halves"),
            (NAN_TO_INTEGER, integers.nan_to_integer, "replace NaN before the cast, or find its source"),
            (VANISHED, seen.vanished, "divide by the scale where the kernel multiplies by it, or widen"),
        )
        for finding_kind, notes, hint in results:
            findings += report_notes(stream, finding_kind, notes, hint, shows_writes=True)
        findings += report_notes(stream, FUNCTION, seen.outside_domain, _choose_range_hint)
        findings += report_notes(
            stream, SPREAD, seen.spread_by_transpose, "mask with a large finite number such as -30000.0"
        )
    return findings


def _choose_range_hint(seen: str) -> str:
    """Return the hint for an argument outside of a function's range.

    Args:
        seen: The text of the note, which names the function and ends with an example argument.
    """
    example = float(seen.rpartition("for example ")[2])
    if not math.isfinite(example):
        return "find the line that made it (an overflow, a division by zero); clipping would only hide it"
    for name, text in _RANGE_HINTS.items():
        if f" of {name} lie" in seen:
            return text
    if example == 0:
        return "add a small constant to the argument"
    if example < 0 and any(f" of {name} lie" in seen for name in ("sqrt", "rsqrt", "log")):
        return "clip it at a small positive number, or compute it so that rounding cannot make it negative"
    return "scale the argument into that range before the call"
