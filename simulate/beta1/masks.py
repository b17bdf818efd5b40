"""Masks of Beta 1: comparisons of affine indices joined with `&`; an instruction skips the elements that do not hold.

A mask that selects a rectangle costs nothing: the instruction runs on that rectangle. `Mask.boxes` cuts any other one
into rectangles, which a DMA can take one by one. An access is the part of a tensor that an instruction reads or
writes; a mask refers to its axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.memory import NKIObject

Box = tuple[tuple[int, int], ...]
"""A rectangle: (start, end) on every axis."""

COMPARISONS = {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison with 0 of an affine value: offset + the sum of steps[j] * (position on axis j), on a grid of `shape`.

    `comparison` is a key of `COMPARISONS`.
    """

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int
    comparison: str

    def within(self, box: Box) -> np.ndarray:
        """Return a bool array that is True where the condition holds at a position of a box.

        It has one axis per axis of the box, of size 1 where the condition does not depend on the position, so it
        broadcasts to the box's shape.
        """
        steps = (0,) * (len(box) - len(self.steps)) + self.steps
        value: Any = np.int64(self.offset)
        for axis, ((start, end), step) in enumerate(zip(box, steps)):
            if step:
                line = np.arange(start, end, dtype=np.int64) * step
                value = value + line.reshape(tuple(-1 if j == axis else 1 for j in range(len(box))))
        return np.asarray(COMPARISONS[self.comparison](value, 0))


@dataclass(frozen=True, slots=True)
class Mask(NKIObject):
    """Conditions that all have to hold for an element to be selected; without conditions all elements are."""

    conditions: tuple[Condition, ...]

    def __and__(self, other: Any) -> Mask:
        if isinstance(other, (Mask, bool, np.bool_)):
            return Mask(self.conditions + _convert_mask(other).conditions)
        return self._refuse()

    __rand__ = __and__

    def _refuse(self, *_: Any) -> NoReturn:
        """Raise RuleViolation: masks are joined with & only, and are no conditions of Python."""
        raise RuleViolation(
            joined_with_and, "a mask in another operation than &", hint="mask=(i_p < p) & (i_f < f)"
        )

    __or__ = __ror__ = __xor__ = __invert__ = __bool__ = _refuse

    def boxes(self, shape: tuple[int, ...]) -> list[Box]:
        """Return disjoint rectangles that together are the elements that the mask selects from an access of `shape`.

        The list is empty if it selects none. Raises RuleViolation if the mask does not broadcast to `shape`.
        """
        box = [(0, size) for size in shape]
        extent = tuple(box)
        is_irregular = False
        for condition in self.conditions:
            fits_access(condition, shape)
            truth = condition.within(extent)
            axes = [axis for axis, size in enumerate(truth.shape) if size > 1]
            chosen = np.flatnonzero(truth)
            if not len(chosen):
                return []
            run = len(chosen) == chosen[-1] - chosen[0] + 1
            if len(axes) == 1 and run:
                start, end = box[axes[0]]
                box[axes[0]] = max(start, int(chosen[0])), min(end, int(chosen[-1]) + 1)
            elif axes:
                is_irregular = True
        if any(start >= end for start, end in box):
            return []
        if not is_irregular:
            return [tuple(box)]
        truth = np.ones(tuple(end - start for start, end in box), bool)
        for condition in self.conditions:
            truth &= condition.within(tuple(box))
        return [
            tuple((a + start, b + start) for (a, b), (start, _) in zip(inner, box))
            for inner in _yield_rectangles(truth)
        ]


def normalise_mask(mask: Any) -> Mask | None:
    """Return the `mask=` of a call as a Mask; None, which selects everything, for None and True.

    False becomes a Mask that selects nothing. Raises RuleViolation for anything but a mask, a bool or None.
    """
    return None if mask is None or mask is True else _convert_mask(mask)


def find_bounding_box(boxes: list[Box]) -> Box:
    """Return the smallest box that contains all boxes; the list must not be empty."""
    return tuple((min(start for start, _ in axis), max(end for _, end in axis)) for axis in zip(*boxes))


def _convert_mask(value: Any) -> Mask:
    """Return a mask unchanged, and a bool as the mask that selects everything or nothing.

    Raises RuleViolation for another value.
    """
    if isinstance(value, Mask):
        return value
    if isinstance(value, (bool, np.bool_)):
        return Mask(() if value else (Condition((1,), (0,), 0, "not_equal"),))
    raise RuleViolation(
        is_mask, f"mask={value!r:.60}", hint="mask=(i_p < rows) with i_p of nl.arange or nl.mgrid"
    )


def _yield_rectangles(truth: np.ndarray) -> Iterator[Box]:
    """Yield disjoint rectangles that together are the True elements of an array."""
    if truth.all():
        yield tuple((0, size) for size in truth.shape)
        return
    if truth.ndim == 1:
        edges = np.flatnonzero(np.diff(np.concatenate(([False], truth, [False]))))
        yield from (((int(start), int(end)),) for start, end in zip(edges[::2], edges[1::2]))
        return
    start = 0
    for end in range(1, truth.shape[0] + 1):
        if end == truth.shape[0] or not np.array_equal(truth[end], truth[start]):
            if truth[start].any():
                yield from (((start, end), *inner) for inner in _yield_rectangles(truth[start]))
            start = end


@rule("NKW-MASK")
def is_mask() -> None:
    """A mask is a comparison of affine indices, or several joined with &.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


@rule("NKW-MASK-JOIN")
def joined_with_and() -> None:
    """Conditions of a mask are joined with & only, and a mask is no condition of a Python `if`.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


@rule("NKW-MASK-SHAPE")
def fits_access(condition: Condition, shape: tuple[int, ...]) -> None:
    """The indices of a mask broadcast to the shape of the access that it masks.

    Raises RuleViolation if the shape of the condition's indices does not broadcast to `shape`.
    """
    sizes = (1,) * (len(shape) - len(condition.shape)) + condition.shape
    if len(sizes) != len(shape) or any(size not in (1, extent) for size, extent in zip(sizes, shape)):
        raise RuleViolation(
            fits_access,
            f"a mask over {condition.shape} for an access of shape {shape}",
            hint="build the mask from the indices of the access",
        )


@rule("NKW-BETA1-NO-MASK")
def no_mask(instruction: str, mask: Any) -> None:
    """This instruction takes no mask here; slice its operands.

    Raises RuleViolation if `mask` is anything but None or True; `instruction` is for the message.
    """
    if normalise_mask(mask) is not None:
        raise RuleViolation(no_mask, f"{instruction} with mask=")
