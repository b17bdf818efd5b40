"""Trial of a kernel on one set of arguments, compared with the reference in float64."""

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
    call_reference,
    compute_truth,
    derive_terms,
    find_narrowest,
    find_result_dtypes,
    is_narrower,
    longest_chain,
    saturate,
)
from simulate.verification.inputs import Call, NotArrays, convert_results, is_float

_READS_UNWRITTEN = ("NKW-UNWRITTEN", "NKW-OUTPUT-UNWRITTEN")
_NOT_THE_USERS = (*PACKAGES, str(Path(np.__file__).parent))
_PARTIAL = "[NKW-OUTPUT-PARTIAL]"

Run = Callable[[Call], Launch]


class Outcome(Enum):
    """Outcome of a trial.

    right and wrong: the outputs agree with the reference, or do not. not taken: kernel or reference refuses
    the arguments. open: the trial decides nothing.
    """

    right = "right"
    wrong = "wrong"
    not_taken = "not taken"
    open = "open"


@dataclass(frozen=True)
class Trial:
    """Result of one trial.

    name: what the arguments are, such as "zeros". arguments: their shapes. reason: why it is not right, empty
    if it is. error, allowed, largest: the error, the allowed error and the largest truth of the output that
    is closest to its bound; None if nothing was compared. ragged: whether the name is a size that replaces
    one requested extent. launch, truth, outputs: what was compared.
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
        """Ratio of the error to the allowed error; 0.0 if nothing was compared or no error is allowed."""
        return (self.error or 0.0) / self.allowed if self.allowed else 0.0


def run_trial(
    name: str, run: Run, reference: Reference, call: Call, contractions: Sequence[int], is_requested: bool
) -> Trial:
    """Launch the kernel on a call, judge its outputs and return the trial.

    Args:
        name: Name of the values, for reports.
        run: Launches the kernel on a call.
        reference: Computes the outputs with NumPy.
        call: The arguments.
        contractions: For each output, the number of elements that one element combines.
        is_requested: Whether the call has the sizes that the user requested; at other sizes a failure is "not
            taken".

    Raises:
        NotJudged: At the requested sizes, the reference fails, or the kernel fails without breaking a rule.
    """
    try:
        truth = compute_truth(reference, call, contractions)
    except Exception as error:
        if is_requested:
            raise make_not_judged(f"the reference fails on {name} values: {format_error(error)}") from error
        return Trial(name, str(call), Outcome.not_taken, f"the reference fails: {format_error(error)}")
    try:
        launch = run(call.copy_arrays())
    except Exception as error:
        return _judge_error(name, call, error, is_requested)
    return judge_launch(name, call, launch, truth, partial(find_result_dtypes, reference, call))


def _judge_error(name: str, call: Call, error: Exception, is_requested: bool) -> Trial:
    """Return the trial of a kernel that raised an error.

    It is wrong if the error is a broken rule, at the requested sizes or about unwritten bytes, else not
    taken.

    Raises:
        NotJudged: At the requested sizes, the error breaks no rule.
    """
    by_rule = isinstance(error, NkwError) and not isinstance(error, (CallError, NoVerdict))
    code = getattr(error, "code", "")
    if by_rule and (is_requested or code in _READS_UNWRITTEN):
        prefix = "unwritten bytes: " if code in _READS_UNWRITTEN else ""
        return Trial(name, str(call), Outcome.wrong, prefix + format_error(error))
    if is_requested:
        raise make_not_judged(f"the kernel fails on {name} values: {format_error(error)}") from error
    return Trial(name, str(call), Outcome.not_taken, format_error(error))


def judge_launch(
    name: str, call: Call, launch: Launch, truth: Truth, find_dtypes: Callable[[], Sequence[Any]]
) -> Trial:
    """Compare the outputs of a launch with the truth and return the trial.

    Args:
        name: Name of the values, for reports.
        call: The arguments.
        launch: The launch on them.
        truth: The results of the reference.
        find_dtypes: Returns the dtypes of the reference's results; called only for an output with a narrow
            dtype.
    """
    try:
        outputs = convert_results(launch.outputs[0])
    except NotArrays as error:
        return Trial(name, str(call), Outcome.wrong, error.message, launch=launch)
    trial = Trial(name, str(call), Outcome.right, launch=launch, truth=truth, outputs=outputs)
    if len(outputs) != len(truth.arrays):
        count = f"the kernel returns {len(outputs)} arrays, the reference {len(truth.arrays)}"
        return replace(trial, outcome=Outcome.wrong, reason=count)
    if any(_PARTIAL in warning for warning in launch.warnings):
        partly = "unwritten bytes: a part of an output was never written"
        return replace(trial, outcome=Outcome.wrong, reason=partly)
    chain = longest_chain(launch.streams)
    compared = []
    for number, (output, exact) in enumerate(zip(outputs, truth.arrays)):
        prefix = f"output {number}: " if len(outputs) > 1 else ""
        fault = _find_form_fault(number, output, exact, call, find_dtypes)
        if fault:
            return replace(trial, outcome=Outcome.wrong, reason=prefix + fault)
        terms = derive_terms(output, number, truth, call, launch.streams, chain)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WeakComparison)
                comparison = compare(output, saturate(exact, output), *terms)
        except Mismatch as error:
            fault = explain_copy(output, exact, call) or str(error)
            return replace(trial, outcome=Outcome.wrong, reason=prefix + fault)
        if comparison.is_weak:
            bound, largest = f"{comparison.bound:.3g}", f"{comparison.largest:.3g}"
            weak = f"{prefix}the error allowed, {bound}, is as large as the reference, {largest}"
            trial = replace(trial, outcome=Outcome.open, reason=weak)
        compared.append(comparison)
    closest = max(compared, key=lambda pair: pair.error / pair.bound if pair.bound else 0.0)
    return replace(trial, error=closest.error, allowed=closest.bound, largest=closest.largest)


def _find_form_fault(
    number: int, output: np.ndarray, exact: np.ndarray, call: Call, find_dtypes: Callable[[], Sequence[Any]]
) -> str:
    """Return a clause on what is wrong with the shape or dtype of an output; empty if both fit the reference.

    Args:
        number: The index of the output.
        output: The output.
        exact: The truth.
        call: The arguments.
        find_dtypes: Returns the dtypes of the reference's results; called only for an output with a narrow
            dtype.
    """
    if output.shape != exact.shape:
        return f"the output has shape {output.shape}, the reference {exact.shape}"
    dtypes = [array.dtype for array in call.floats]
    if is_float(output) and is_narrower(output.dtype, find_narrowest(dtypes)):
        reference_dtypes = [dtype for dtype in find_dtypes()[number : number + 1] if dtype is not None]
        expected = find_narrowest([*dtypes, *reference_dtypes])
        if is_narrower(output.dtype, expected):
            return f"the output is {output.dtype}, arguments and reference are {expected} or wider"
    return ""


def explain_copy(output: np.ndarray, exact: np.ndarray, call: Call) -> str:
    """Return a clause that says that a wrong output is a copy of an argument, or constant; empty if it is neither.

    Args:
        output: The output of the kernel.
        exact: The truth.
        call: The arguments.
    """
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


def run_nan_trial(name: str, run: Run, reference: Reference, call: Call) -> Trial:
    """Run the kernel on a call with NaN and return the trial: right if NaN is exactly where the reference has it.

    It is wrong if NaN is missing. It is open if the reference refuses NaN or returns none. It is open too if
    NaN reaches more elements than in the reference: a product with 0 and an added mask spread NaN, and
    kernels use both where a reference selects. A kernel that fails is not taken, or wrong if it reads
    unwritten bytes.
    """
    try:
        truths = call_reference(reference, call)
    except Exception as error:
        return Trial(name, str(call), Outcome.open, f"the reference refuses NaN: {format_error(error)}")
    if not any(is_float(array) and np.isnan(array).any() for array in truths):
        return Trial(name, str(call), Outcome.open, "the reference defines no NaN")
    try:
        outputs = convert_results(run(call.copy_arrays()).outputs[0])
    except Exception as error:
        return _judge_error(name, call, error, False)
    spread = ""
    for number, (output, exact) in enumerate(zip(outputs, truths)):
        if not is_float(output) or output.shape != exact.shape:
            continue
        with np.errstate(invalid="ignore"):
            seen, wanted = np.isnan(output.astype(np.float64)), np.isnan(exact)
        if (wanted & ~seen).any():
            lost = f"output {number} has no NaN in {_describe_elements(wanted & ~seen)}, where the reference has one"
            return Trial(name, str(call), Outcome.wrong, lost)
        if (seen & ~wanted).any():
            spread = f"output {number} has NaN in {_describe_elements(seen & ~wanted)}, where the reference has none"
    return Trial(name, str(call), Outcome.open if spread else Outcome.right, spread)


def _describe_elements(where: np.ndarray) -> str:
    """Return a phrase such as "3 elements from (0, 5)": the number of true elements and the index of the first."""
    first = ", ".join(str(int(coordinate)) for coordinate in np.argwhere(where)[0])
    return f"{np.count_nonzero(where)} elements from ({first})"


class NotJudged(InvalidArgument, NoVerdict):
    """Error for a kernel or a reference that fails, or a reference with which no kernel can be compared."""


def make_refusal(sentence: str) -> InvalidArgument:
    """Return the error NKW-VERIFY for a wrong use of `verify`, such as a reference that does not exist."""
    return InvalidArgument("NKW-VERIFY", sentence)


def make_not_judged(sentence: str) -> NotJudged:
    """Return the error NKW-VERIFY for a kernel or a reference that gives no result to judge."""
    return NotJudged("NKW-VERIFY", sentence)


def reached_user_code(error: BaseException) -> bool:
    """Return whether the traceback of an exception has a line outside of the simulator and of NumPy."""
    return any(not frame.filename.startswith(_NOT_THE_USERS) for frame in extract_tb(error.__traceback__))


def format_error(error: Exception) -> str:
    """Return an error in one line: its code or type, its message, and the user's last line in its traceback."""
    if isinstance(error, NkwError):
        text = f"[{error.code}] {error.seen if isinstance(error, RuleViolation) else error.message}"
        return text + (f" at {error.where.file_line}" if error.where else "")
    files = [
        frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text + (f" at {files[-1].filename}:{files[-1].lineno}" if files else "")
