"""Verifying a kernel: right, clean, how fast and what bounds it, in one verdict.

A kernel is right if its outputs agree with a reference in every trial, and clean if the detectors find
nothing. `verify` is the command `verify` and `simulate.verify`. `inputs` makes the values and sizes that a
kernel is tried on, `bound` derives how far a right kernel may be from its reference, `trial` judges one
launch, `verdict` has the records and their text. docs/verify.md says what is tried and why.
"""

from simulate.verification.judging import verify
from simulate.verification.trial import NotJudged, Outcome, Trial
from simulate.verification.verdict import Speed, Verdict

__all__ = ["NotJudged", "Outcome", "Speed", "Trial", "Verdict", "verify"]
