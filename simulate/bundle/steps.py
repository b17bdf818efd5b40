"""The report of `nkw compare` on a generation: its tokens, its steps, its programs, and the launches that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from nkw.errors import shown
from nkw.parts import Hanging, Part, table
from simulate.bundle.blame import Comparison
from simulate.bundle.comparison import CaseComparison, StepComparison, worst
from simulate.bundle.result import EXPECTED
from simulate.bundle.values import OutputComparison

MOST_LAUNCHES = 5
"""The launches with a difference that are described: later ones mostly differ because the first one did."""


def parts_of_generation(
    seen: Comparison,
    details: Callable[[CaseComparison], Sequence[Part]],
    closeness: Callable[[OutputComparison], float],
) -> Iterator[Part]:
    """The parts of the text. `details` describes a case that differs, `closeness` an output."""
    yield from _tokens(seen.steps)
    yield table(
        "prompt, token|launches|values|chosen|expected|us|predicted",
        [_step(each) for each in seen.steps if each.tried],
        left=(0, 2),
        firm=(1, 2, 3, 4, 5, 6),
    )
    by_program = sorted(seen.tried, key=lambda each: each.program)
    found = {program: list(own) for program, own in groupby(by_program, lambda each: each.program)}
    yield table(
        "kernel|launches|values|of bound|ulps|us|predicted",
        [_program(own, closeness) for own in (found[each.program] for each in seen.programs)],
        left=(0, 2),
        firm=(1, 2, 3, 4, 5, 6),
    )
    differing = [each for each in seen.tried if not each.agrees]
    for each in differing[:MOST_LAUNCHES]:
        prompt, token = (
            seen.steps[each.case.step].step.prompt + 1,
            seen.steps[each.case.step].step.number + 1,
        )
        yield Hanging(f"prompt {prompt}, token {token}, {shown(each.case.part)}:")
        yield from details(each)
    if len(differing) > MOST_LAUNCHES:
        yield Hanging(f"{len(differing) - MOST_LAUNCHES} more launches differ; --json lists all")
    carried = [each for each in seen.tried if each.result is not None and each.result.drift]
    if carried:
        most = max(max(each.result.drift) for each in carried if each.result is not None)
        yield Hanging(
            f"{_count(len(carried))} beyond the bound with what the launches before returned there, by up to "
            f"{most:.3g}, and {'was' if len(carried) == 1 else 'were'} made again with what was expected here"
        )


def _tokens(steps: Sequence[StepComparison]) -> Iterator[Part]:
    """A sentence for every prompt: how many tokens are equal, and the first that is not."""
    for prompt, own in groupby(steps, lambda each: each.step.prompt):
        tried = [each for each in own if each.head is not None]
        other = [each for each in tried if each.token != each.step.token]
        if not tried:
            continue
        said = f"prompt {prompt + 1}: {len(tried) - len(other)} of {len(tried)} tokens are equal"
        if other:
            step = other[0].step
            chosen = "none" if other[0].token is None else str(other[0].token)
            said += (
                f"; the first other one is token {step.number + 1}, {chosen} for {step.token} ({step.text!r})"
            )
            near = "rounding can exchange them" if other[0].is_tie else "that is no rounding"
            if other[0].token is not None:
                said += f": the largest logits lie {step.margin:.3g} apart and are off by {other[0].moved:.3g}, {near}"
        yield Hanging(shown(said))


def _step(each: StepComparison) -> tuple[str, ...]:
    low, high = (f"{ns / 1e3:.1f}" for ns in each.bracket_ns)
    return (
        f"{each.step.prompt + 1}, {each.step.number + 1}",
        str(len(each.tried)),
        _values(each.tried),
        "" if each.token is None else str(each.token),
        str(each.step.token),
        "" if each.measured_ns is None else f"{each.measured_ns / 1e3:.1f}",
        f"{low} to {high}",
    )


def _values(cases: Iterable[CaseComparison]) -> str:
    """The word for the launch that agrees least; `failed` where one returned nothing."""
    found = [each.agreement for each in cases]
    known = [each for each in found if each is not None]
    return "failed" if len(known) < len(found) else worst(known).name


def _program(
    own: Sequence[CaseComparison], closeness: Callable[[OutputComparison], float]
) -> tuple[str, ...]:
    low, high = (f"{ns / 1e3:.1f}" for ns in own[0].bracket_ns)
    outputs = [output for each in own for output in each.outputs]
    bounded = [closeness(each) for each in outputs if each.allowed and each.error is not None]
    ulps = [each.most_ulps for each in outputs if each.most_ulps is not None]
    times = [each.result.times.median_ns for each in own if each.result is not None and each.result.times]
    device = next((each.device_ns for each in own if each.device_ns is not None), None)
    measured = device if device is not None else median(times) if times else None
    return (
        own[0].case.kernel,
        str(len(own)),
        _values(own),
        f"{max(bounded):.2g}" if bounded else "",
        f"{max(ulps):,}" if ulps else "",
        "" if measured is None else f"{measured / 1e3:.1f}",
        f"{low} to {high}",
    )


def _count(launches: int) -> str:
    return "1 launch was" if launches == 1 else f"{launches} launches were"


def document_of_step(each: StepComparison) -> dict[str, Any]:
    """A step as plain values; docs/json.md has the schema."""
    return {
        "prompt": each.step.prompt + 1,
        "number": each.step.number + 1,
        "token": each.token,
        "expected": each.step.token,
        "text": each.step.text,
        "agrees": each.agrees,
        "margin": each.step.margin,
        "moved": each.moved,
        "measured_ns": each.measured_ns,
        "bracket_ns": list(each.bracket_ns),
    }


def document_of_launch(each: CaseComparison) -> dict[str, Any]:
    """What only launches of a generation have, as plain values."""
    return {
        "step": each.case.step,
        "part": each.case.part,
        "inputs": each.result.inputs if each.result else EXPECTED,
        "drift": list(each.result.drift) if each.result else [],
    }
