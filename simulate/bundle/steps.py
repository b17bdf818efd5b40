"""Report of `nkw compare` on a generation: tokens, steps, programs, and the launches that differ.

A step is a run of the model for one token. A program is a kernel with arguments of certain shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from nkw.errors import shown
from nkw.report import Hanging, Part, table
from simulate.bundle.blame import Comparison
from simulate.bundle.comparison import CaseComparison, StepComparison, find_worst
from simulate.bundle.result import EXPECTED
from simulate.bundle.values import OutputComparison

MOST_LAUNCHES = 5
"""Most differing launches that are described; later launches usually differ because of the first."""


def make_generation_parts(
    comparison: Comparison,
    describe_case: Callable[[CaseComparison], Sequence[Part]],
    measure_closeness: Callable[[OutputComparison], float],
) -> Iterator[Part]:
    """Yield the parts of the report on a generation.

    These are sentences about tokens, tables of steps and of programs, and sentences about differences. The
    first MOST_LAUNCHES launches that differ are described.

    Args:
        describe_case: Returns the sentences about a launch that differs.
        measure_closeness: Returns the error of an output relative to its bound.
    """
    yield from _describe_tokens(comparison.steps)
    yield table(
        "prompt, token|launches|values|chosen|expected|us|predicted",
        [_make_step_row(step) for step in comparison.steps if step.tried],
        left=(0, 2),
        firm=(1, 2, 3, 4, 5, 6),
    )
    by_program = sorted(comparison.tried, key=lambda launch: launch.program)
    launches_by_program = {
        program: list(group) for program, group in groupby(by_program, lambda launch: launch.program)
    }
    yield table(
        "kernel|launches|values|of bound|ulps|us|predicted",
        [
            _make_program_row(launches, measure_closeness)
            for launches in (launches_by_program[launch.program] for launch in comparison.programs)
        ],
        left=(0, 2),
        firm=(1, 2, 3, 4, 5, 6),
    )
    differing = [launch for launch in comparison.tried if not launch.agrees]
    for launch in differing[:MOST_LAUNCHES]:
        prompt, token = (
            comparison.steps[launch.case.step].step.prompt + 1,
            comparison.steps[launch.case.step].step.number + 1,
        )
        yield Hanging(f"prompt {prompt}, token {token}, {shown(launch.case.model_part)}:")
        yield from describe_case(launch)
    if len(differing) > MOST_LAUNCHES:
        yield Hanging(f"{len(differing) - MOST_LAUNCHES} more launches differ; --json lists all")
    drifted = [launch for launch in comparison.tried if launch.result is not None and launch.result.drift]
    if drifted:
        largest_drift = max(max(launch.result.drift) for launch in drifted if launch.result is not None)
        yield Hanging(
            f"{_format_count(len(drifted))} beyond the bound with what the launches before returned there, by up to "
            f"{largest_drift:.3g}, and {'was' if len(drifted) == 1 else 'were'} made again with what was expected here"
        )


def _describe_tokens(steps: Sequence[StepComparison]) -> Iterator[Part]:
    """Yield a sentence for every prompt with requested heads: how many tokens are equal, and the first other one."""
    for prompt, prompt_steps in groupby(steps, lambda step: step.step.prompt):
        tried_steps = [step for step in prompt_steps if step.head is not None]
        different = [step for step in tried_steps if step.token != step.step.token]
        if not tried_steps:
            continue
        sentence = (
            f"prompt {prompt + 1}: {len(tried_steps) - len(different)} of {len(tried_steps)} tokens are equal"
        )
        if different:
            step = different[0].step
            token = "none" if different[0].token is None else str(different[0].token)
            sentence += (
                f"; the first other one is token {step.number + 1}, {token} for {step.token} ({step.text!r})"
            )
            near = "rounding can exchange them" if different[0].is_tie else "that is no rounding"
            if different[0].token is not None:
                sentence += f": the largest logits lie {step.margin:.3g} apart and are off by "
                sentence += f"{different[0].moved:.3g}, {near}"
        yield Hanging(shown(sentence))


def _make_step_row(comparison: StepComparison) -> tuple[str, ...]:
    """Return the table row of a step; cells without a number are empty."""
    low, high = (f"{ns / 1e3:.1f}" for ns in comparison.bracket_ns)
    return (
        f"{comparison.step.prompt + 1}, {comparison.step.number + 1}",
        str(len(comparison.tried)),
        _worst_agreement(comparison.tried),
        "" if comparison.token is None else str(comparison.token),
        str(comparison.step.token),
        "" if comparison.measured_ns is None else f"{comparison.measured_ns / 1e3:.1f}",
        f"{low} to {high}",
    )


def _worst_agreement(cases: Iterable[CaseComparison]) -> str:
    """Return the name of the worst agreement of some launches, or "failed" if a launch returned nothing."""
    agreements = [case.agreement for case in cases]
    known_agreements = [case for case in agreements if case is not None]
    return "failed" if len(known_agreements) < len(agreements) else find_worst(known_agreements).name


def _make_program_row(
    launches: Sequence[CaseComparison], measure_closeness: Callable[[OutputComparison], float]
) -> tuple[str, ...]:
    """Return the table row of the launches of a program.

    Its time is the one on the device, else the median over launches of the host's times. Error and ulps are
    the largest of all launches.
    """
    low, high = (f"{ns / 1e3:.1f}" for ns in launches[0].bracket_ns)
    outputs = [output for launch in launches for output in launch.outputs]
    bounded = [measure_closeness(launch) for launch in outputs if launch.allowed and launch.error is not None]
    ulps = [launch.most_ulps for launch in outputs if launch.most_ulps is not None]
    times = [
        launch.result.times.median_ns
        for launch in launches
        if launch.result is not None and launch.result.times
    ]
    device = next((launch.device_ns for launch in launches if launch.device_ns is not None), None)
    measured = device if device is not None else median(times) if times else None
    return (
        launches[0].case.kernel,
        str(len(launches)),
        _worst_agreement(launches),
        f"{max(bounded):.2g}" if bounded else "",
        f"{max(ulps):,}" if ulps else "",
        "" if measured is None else f"{measured / 1e3:.1f}",
        f"{low} to {high}",
    )


def _format_count(launches: int) -> str:
    """Return "1 launch was" or, for example, "3 launches were"."""
    return "1 launch was" if launches == 1 else f"{launches} launches were"


def make_step_document(comparison: StepComparison) -> dict[str, Any]:
    """Return a step as JSON types; docs/json.md has the schema."""
    return {
        "prompt": comparison.step.prompt + 1,
        "number": comparison.step.number + 1,
        "token": comparison.token,
        "expected": comparison.step.token,
        "text": comparison.step.text,
        "agrees": comparison.agrees,
        "margin": comparison.step.margin,
        "moved": comparison.moved,
        "measured_ns": comparison.measured_ns,
        "bracket_ns": list(comparison.bracket_ns),
    }


def make_launch_document(comparison: CaseComparison) -> dict[str, Any]:
    """Return the fields of a case that only launches of a generation need, as JSON types.

    Cases of kernels have defaults.
    """
    return {
        "step": comparison.case.step,
        "part": comparison.case.model_part,
        "inputs": comparison.result.inputs if comparison.result else EXPECTED,
        "drift": list(comparison.result.drift) if comparison.result else [],
    }
