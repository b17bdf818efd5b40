"""One trial: a kernel on one set of arguments, against the truth."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, NkwError, NoVerdict, RuleViolation
from simulate.isa.book import CallError
from simulate.lines import PACKAGES
from simulate.run import Launch
from simulate.testing import Mismatch, WeakComparison, compare
from simulate.verification.bound import (
    Reference,
    Truth,
    answer,
    longest_chain,
    narrower,
    narrowest,
    own_precision,
    stored,
    terms_of,
    truth_of,
)
from simulate.verification.inputs import Call, NotArrays, is_float, results

_READS_UNWRITTEN = ("NKW-UNWRITTEN", "NKW-OUTPUT-UNWRITTEN")
_NOT_THE_USERS = (*PACKAGES, str(Path(np.__file__).parent))
_PARTIAL = "[NKW-OUTPUT-PARTIAL]"

Run = Callable[[Call], Launch]


class Outcome(Enum):
    """right, wrong; not taken: kernel or reference refuses the arguments; open: the trial decides nothing."""

    right = "right"
    wrong = "wrong"
    not_taken = "not taken"
    open = "open"


@dataclass(frozen=True)
class Trial:
    """What came of one trial; error and allowed are those of the result that is closest to its bound.

    ragged: the name is a size that one extent has in place of the given one.
    """

    name: str
    arguments: str
    outcome: Outcome
    reason: str = ""
    error: float | None = None
    allowed: float | None = None
    largest: float | None = None
    ragged: bool = False
    launch: Launch | None = field(default=None, compare=False, repr=False)
    truth: Truth | None = field(default=None, compare=False, repr=False)
    outputs: Sequence[np.ndarray] = field(default=(), compare=False, repr=False)

    @property
    def closeness(self) -> float:
        """The error over what is allowed."""
        return (self.error or 0.0) / self.allowed if self.allowed else 0.0


def tried(
    name: str, run: Run, reference: Reference, call: Call, contractions: Sequence[int], given: bool
) -> Trial:
    """Run the kernel on a call and judge it; `given`: these are the sizes that the user asked for.

    Raises InvalidArgument where, at the sizes given, kernel or reference fail without breaking a rule.
    """
    try:
        truth = truth_of(reference, call, contractions)
    except Exception as error:
        if given:
            raise not_judged(f"the reference fails on {name} values: {short(error)}") from error
        return Trial(name, str(call), Outcome.not_taken, f"the reference fails: {short(error)}")
    try:
        launch = run(call.copied())
    except Exception as error:
        return _refused(name, call, error, given)
    return judged(name, call, launch, truth, partial(own_precision, reference, call))


def _refused(name: str, call: Call, error: Exception, given: bool) -> Trial:
    """The trial of a kernel that raised: a rule is broken at the sizes given, or unwritten bytes at any size."""
    by_rule = isinstance(error, NkwError) and not isinstance(error, (CallError, NoVerdict))
    code = getattr(error, "code", "")
    if by_rule and (given or code in _READS_UNWRITTEN):
        what = "unwritten bytes: " if code in _READS_UNWRITTEN else ""
        return Trial(name, str(call), Outcome.wrong, what + short(error))
    if given:
        raise not_judged(f"the kernel fails on {name} values: {short(error)}") from error
    return Trial(name, str(call), Outcome.not_taken, short(error))


def judged(name: str, call: Call, launch: Launch, truth: Truth, own: Callable[[], Sequence[Any]]) -> Trial:
    """Hold the outputs of a launch against the truth; `own` returns the dtypes that the reference has of its own."""
    try:
        outputs = results(launch.outputs[0])
    except NotArrays as error:
        return Trial(name, str(call), Outcome.wrong, error.message, launch=launch)
    trial = Trial(name, str(call), Outcome.right, launch=launch, truth=truth, outputs=outputs)
    if len(outputs) != len(truth.arrays):
        count = f"the kernel returns {len(outputs)} arrays, the reference {len(truth.arrays)}"
        return replace(trial, outcome=Outcome.wrong, reason=count)
    if any(_PARTIAL in each for each in launch.warnings):
        partly = "unwritten bytes: a part of an output was never written"
        return replace(trial, outcome=Outcome.wrong, reason=partly)
    chain = longest_chain(launch.streams)
    compared = []
    for number, (output, exact) in enumerate(zip(outputs, truth.arrays)):
        which = f"output {number}: " if len(outputs) > 1 else ""
        fault = _kind_of(number, output, exact, call, own)
        if fault:
            return replace(trial, outcome=Outcome.wrong, reason=which + fault)
        terms = terms_of(output, number, truth, call, launch.streams, chain)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WeakComparison)
                found = compare(output, stored(exact, output), *terms)
        except Mismatch as error:
            fault = copied_from(output, exact, call) or str(error)
            return replace(trial, outcome=Outcome.wrong, reason=which + fault)
        if found.is_weak:
            weak = f"{which}the error allowed, {found.bound:.3g}, is as large as the reference, {found.largest:.3g}"
            trial = replace(trial, outcome=Outcome.open, reason=weak)
        compared.append(found)
    closest = max(compared, key=lambda each: each.error / each.bound if each.bound else 0.0)
    return replace(trial, error=closest.error, allowed=closest.bound, largest=closest.largest)


def _kind_of(
    number: int, output: np.ndarray, exact: np.ndarray, call: Call, own: Callable[[], Sequence[Any]]
) -> str:
    """What is wrong with shape or dtype of an output; empty if nothing is."""
    if output.shape != exact.shape:
        return f"the output has shape {output.shape}, the reference {exact.shape}"
    given = [each.dtype for each in call.floats]
    if is_float(output) and narrower(output.dtype, narrowest(given)):
        expected = narrowest([*given, *(each for each in own()[number : number + 1] if each is not None)])
        if narrower(output.dtype, expected):
            return f"the output is {output.dtype}, arguments and reference are {expected} or wider"
    return ""


def copied_from(output: np.ndarray, exact: np.ndarray, call: Call) -> str:
    """The argument of which a wrong output is a copy, or that all its elements are one value; else empty."""
    wide = output.astype(np.float64)
    for number, array in enumerate(call.arrays):
        same_size = array.size == output.size and array.size > 0
        if same_size and np.array_equal(
            wide.reshape(-1), array.astype(np.float64).reshape(-1), equal_nan=True
        ):
            return f"the output is a copy of argument {number}"
    if wide.size > 1 and np.all(wide == wide.flat[0]) and not np.all(exact == exact.flat[0]):
        return f"the output is constant: every element is {wide.flat[0]:.9g}"
    return ""


def nan_trial(name: str, run: Run, reference: Reference, call: Call) -> Trial:
    """Whether NaN comes out wherever it comes out of the reference; open where the reference gives none.

    Open as well where NaN reaches more elements than in the reference: a product with 0 and a mask that is added spread
    NaN, and kernels do both where a reference selects.
    """
    try:
        truths = answer(reference, call)
    except Exception as error:
        return Trial(name, str(call), Outcome.open, f"the reference refuses NaN: {short(error)}")
    if not any(is_float(each) and np.isnan(each).any() for each in truths):
        return Trial(name, str(call), Outcome.open, "the reference defines no NaN")
    try:
        outputs = results(run(call.copied()).outputs[0])
    except Exception as error:
        return _refused(name, call, error, False)
    spread = ""
    for number, (output, exact) in enumerate(zip(outputs, truths)):
        if not is_float(output) or output.shape != exact.shape:
            continue
        with np.errstate(invalid="ignore"):
            seen, wanted = np.isnan(output.astype(np.float64)), np.isnan(exact)
        if (wanted & ~seen).any():
            lost = f"output {number} has no NaN in {_places(wanted & ~seen)}, where the reference has one"
            return Trial(name, str(call), Outcome.wrong, lost)
        if (seen & ~wanted).any():
            spread = f"output {number} has NaN in {_places(seen & ~wanted)}, where the reference has none"
    return Trial(name, str(call), Outcome.open if spread else Outcome.right, spread)


def _places(where: np.ndarray) -> str:
    """How many elements, and the first of them."""
    first = ", ".join(str(int(each)) for each in np.argwhere(where)[0])
    return f"{np.count_nonzero(where)} elements from ({first})"


class NotJudged(InvalidArgument, NoVerdict):
    """A kernel or a reference that failed, or a reference that no kernel can be compared with."""


def refusal(sentence: str) -> InvalidArgument:
    """Return the error for a wrong use of `verify`, such as a reference that does not exist."""
    return InvalidArgument("NKW-VERIFY", sentence)


def not_judged(sentence: str) -> NotJudged:
    """Return the error for a kernel or a reference that gives no result."""
    return NotJudged("NKW-VERIFY", sentence)


def reached_user_code(error: BaseException) -> bool:
    """Return whether an exception passed a line outside of the simulator and of NumPy."""
    return any(not each.filename.startswith(_NOT_THE_USERS) for each in extract_tb(error.__traceback__))


def short(error: Exception) -> str:
    """An error in one line: its code and sentence, and the line of the kernel or the reference."""
    if isinstance(error, NkwError):
        said = f"[{error.code}] {error.seen if isinstance(error, RuleViolation) else error.message}"
        return said + (f" at {error.where.file_line}" if error.where else "")
    files = [each for each in extract_tb(error.__traceback__) if not each.filename.startswith(_NOT_THE_USERS)]
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return said + (f" at {files[-1].filename}:{files[-1].lineno}" if files else "")
