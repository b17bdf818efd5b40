"""Function `verify`: a kernel on many values and sizes, its detectors, and its predicted time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nkw.child import show_once
from nkw.errors import NkwError
from simulate.check import Finding, Severity, collect_findings, fails_a_check, gathered, sort_findings
from simulate.check.lint import lint_launched
from simulate.hardware import Hardware
from simulate.level import Level, Rules
from simulate.profile import profile
from simulate.run import Launch, Mode, target_hardware
from simulate.run.environment import RANKS_VARIABLE, read_core_count, read_rank_count
from simulate.run.launch import unwrap_kernel
from simulate.verification import inputs
from simulate.verification.bound import Reference, call_reference, count_contractions
from simulate.verification.inputs import Call, NotArrays
from simulate.verification.statistical_trials import judge_statistics
from simulate.verification.timed_reference import TimedReference
from simulate.verification.trial import (
    Outcome,
    Trial,
    format_error,
    make_not_judged,
    make_refusal,
    reached_user_code,
    run_nan_trial,
    run_trial,
)
from simulate.verification.verdict import Speed, Verdict
from simulate.world import launch

ONE_RANK = "verify runs a kernel on one rank, as a reference takes the arguments of one"
SEVERAL_RANKS = (
    "check_kernel.ranks (docs/testing.md) compares several, and nkw check --ranks looks for faults"
)
_Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def verify(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    reference: Reference | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    target: str | None = None,
    progress: _Progress = lambda trials, _: trials,
) -> Verdict:
    """Judge whether a kernel is right and clean, how fast it is predicted to be, and what bounds it.

    `kernel(*arguments, **keywords)` is compared with `reference(*arguments, **keywords)` on two sets of
    random values, on large ones, zeros, some zeros, and NaN where the reference returns NaN. Random values
    are also tried with each of the first three extents made one less and one more. The bounds are those of
    `simulate.verification.bound`. Detectors and the predicted time belong to the first random trial.

    Args:
        kernel: The kernel, which runs on one rank.
        arguments: Its arguments. Of float arrays only shape and dtype matter; integers keep their values and
            change their order.
        reference: Gets float arrays in float64, and returns an array or a tuple of arrays. None for the
            function `<kernel>_reference` of the kernel's module.
        keywords: Keyword arguments of both.
        target: The chip; None for the chip of the environment.
        progress: Gets the trials after the first one and a name for the work, and yields the trials.

    Raises:
        InvalidArgument: NKW-VERIFY. The environment asks for more than one rank, there is no reference, or it
            does not take the arguments.
        NotJudged: NKW-VERIFY, also an InvalidArgument. The reference fails, returns no arrays or does not
            depend on the arguments, or the kernel fails or ends (SystemExit) at the given sizes without
            breaking a rule.
    """
    if read_rank_count() > 1:
        raise make_refusal(f"{ONE_RANK}, and {RANKS_VARIABLE} asks for more: unset it; {SEVERAL_RANKS}")
    function = unwrap_kernel(kernel)
    name = getattr(function, "__name__", "kernel")
    reference = reference or find_reference(function, name)
    chip = target_hardware(target)
    call = Call(tuple(arguments), dict(keywords or {}))
    reference = TimedReference(reference)
    first, second = inputs.draw_random(call, 0), inputs.draw_random(call, 1)
    truths = _compute_truths(reference, first, second)
    contractions = count_contractions(reference, first, truths)
    run = show_once(partial(_launch, function, name, chip))
    with gathered() as seen:
        trial = run_trial("random", run, reference, first, contractions, is_requested=True)
    advice = lint_launched([launched for launched, _ in seen.launches])
    reported = collect_findings(seen)
    findings = _keep_findings([*reported, *advice])
    trials = [trial]
    if trial.launch is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first trial gave them
            trials += [
                make_trial()
                for make_trial in progress(
                    list_further_trials(run, reference, call, second, contractions), "trials"
                )
            ]
        trials[1] = _explain_constant(trials[0], trials[1])
        trials[2:2] = judge_statistics(trials[:2])
        trials = [replace(trial, truth=None) for trial in trials]
    remarks = sum(finding.severity is Severity.warning for finding in advice)
    tolerated = tuple(sorted({finding.code for finding in reported} - {finding.code for finding in findings}))
    speed = _predict_speed(trial.launch)
    return Verdict(
        name, chip.name, tuple(trials), findings, tolerated, remarks, speed, trial.launch, reference.remark
    )


def list_further_trials(
    run: Any, reference: Reference, call: Call, second: Call, contractions: Sequence[int]
) -> list[Callable[[], Trial]]:
    """Return functions that each run one trial after the first one, and return it.

    Args:
        run: Launches the kernel on a call.
        reference: The reference.
        call: The arguments of the user, which give shapes, dtypes and integers.
        second: The second set of random values.
        contractions: For each output, the number of elements that one element combines.
    """
    values = {
        "other random": second,
        "large": inputs.draw_large(call),
        "zeros": inputs.fill_zeros(call),
        "half zeros": inputs.clear_half(second),
    }
    trials: list[Callable[[], Trial]] = [
        partial(run_trial, name, run, reference, trial_call, contractions, is_requested=True)
        for name, trial_call in values.items()
    ]
    trials.append(partial(run_nan_trial, "NaN", run, reference, inputs.add_nan(second)))
    longer = [count + len(call.floats) for count in contractions]  # each argument by one element more
    for name, sized in inputs.vary_extents(call):
        trials.append(partial(_run_ragged_trial, name, run, reference, inputs.draw_random(sized, 0), longer))
    return trials


def _run_ragged_trial(
    name: str, run: Any, reference: Reference, call: Call, contractions: Sequence[int]
) -> Trial:
    return replace(run_trial(name, run, reference, call, contractions, is_requested=False), ragged=True)


def find_reference(function: Callable[..., Any], name: str) -> Reference:
    """Return the function `<name>_reference` of the module that defines the kernel.

    Raises:
        InvalidArgument: NKW-VERIFY. The module has no such function.
    """
    reference = getattr(function, "__globals__", {}).get(f"{name}_reference")
    if not callable(reference):
        raise make_refusal(
            f"there is no {name}_reference beside {name}; name one with --reference MODULE:NAME"
        )
    return reference  # type: ignore[no-any-return]


def _launch(function: Callable[..., Any], name: str, chip: Hardware, call: Call) -> Launch:
    cores = read_core_count(name, None, Level.resolve())
    return launch(function, [(call.args, call.keywords)], chip, cores, Mode.eager, has_grid=cores > 1)


def _compute_truths(reference: Reference, first: Call, second: Call) -> list[np.ndarray]:
    """Return the reference's results for the first of two sets of random values.

    Raises:
        NotJudged: The reference fails, returns no arrays, or returns an equal result for both sets: any
            constant would agree with it.
        InvalidArgument: The reference does not take these arguments.
    """
    try:
        pairs = list(zip(call_reference(reference, first), call_reference(reference, second), strict=True))
    except NotArrays as error:
        raise make_not_judged(error.message) from None
    except Exception as error:
        if isinstance(error, TypeError) and not reached_user_code(error):
            raise make_refusal(f"the reference does not take these arguments: {error}") from None
        raise make_not_judged(f"the reference fails on random values: {format_error(error)}") from error
    for number, (one, other) in enumerate(pairs):
        if np.array_equal(one, other, equal_nan=inputs.is_float(one)):
            raise make_not_judged(
                f"output {number} of the reference is the same for different arguments, so no kernel can be compared "
                "with it; give a reference whose outputs depend on its arguments"
            )
    return [one for one, _ in pairs]


def _explain_constant(one: Trial, other: Trial) -> Trial:
    """Return the second random trial; its reason says so if its wrong outputs equal those of the first trial."""
    same = bool(one.outputs) and len(one.outputs) == len(other.outputs)
    if other.outcome is Outcome.wrong and same and all(map(np.array_equal, one.outputs, other.outputs)):
        return replace(other, reason="the output is constant: it is the same for different arguments")
    return other


def _keep_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings that make a kernel unclean, errors first; warnings of lint are left out."""
    tolerant = Rules.resolve() is Rules.simulator
    kept = [
        finding for finding in findings if fails_a_check(finding, tolerant or finding.code.startswith("NKI"))
    ]
    return tuple(sort_findings(kept))


def _predict_speed(done: Launch | None) -> Speed | None:
    if done is None:
        return None
    try:
        return Speed.from_profile(profile(done.streams, done.hardware, done.kernel))
    except NkwError:  # ordering requests that cannot be kept, of which a finding tells
        return None
