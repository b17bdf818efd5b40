"""Index expressions of Beta 1: affine functions of the positions in an access (`nl.arange`, `nl.mgrid`).

They follow numpy's advanced indexing: the indices of one access are broadcast together, and the result has
the broadcast shape. As every index is affine, such an access is an access pattern of the hardware and
nothing is gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from nkw.errors import RuleViolation, rule
from simulate.beta1.masks import Condition, Mask
from simulate.memory import NKIObject


def _compare(comparison: str) -> Callable[[Index, Any], Mask]:
    """Return the method of `Index` for a comparison with another index or an integer; the method returns a Mask."""

    def compare(self: Index, other: Any) -> Mask:
        difference = self - other
        return Mask((Condition(difference.shape, difference.steps, difference.offset, comparison),))

    return compare


@dataclass(frozen=True, slots=True, eq=False)
class Index(NKIObject):
    """Affine index: offset + the sum over axes j of steps[j] * (position on axis j), on a grid of `shape`."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int

    def aligned(self, rank: int) -> tuple[int, ...]:
        """Return the steps on a grid of `rank` axes; the added axes come first and have step 0."""
        return (0,) * (rank - len(self.steps)) + self.steps

    def __getitem__(self, key: Any) -> Index:
        keys = key if isinstance(key, tuple) else (key,)
        kept = [element for element in keys if element is not None]
        if any(element != slice(None) for element in kept) or len(kept) != len(self.shape):
            raise RuleViolation(new_axes_only, f"index [{key!r:.60}]", hint="nl.arange(n)[:, None]")
        sizes, steps = iter(self.shape), iter(self.steps)
        return Index(
            tuple(1 if element is None else next(sizes) for element in keys),
            tuple(0 if element is None else next(steps) for element in keys),
            self.offset,
        )

    def __add__(self, other: Any) -> Index:
        if not isinstance(other, Index):
            return Index(self.shape, self.steps, self.offset + _convert_integer(other))
        rank = max(len(self.shape), len(other.shape))
        return Index(
            broadcast(self.shape, other.shape),
            tuple(a + b for a, b in zip(self.aligned(rank), other.aligned(rank))),
            self.offset + other.offset,
        )

    __radd__ = __add__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Any) -> Index:
        return self + (-other if isinstance(other, Index) else -_convert_integer(other))

    def __rsub__(self, other: Any) -> Index:
        return -self + other

    def __mul__(self, factor: Any) -> Index:
        times = _convert_integer(factor)
        return Index(self.shape, tuple(step * times for step in self.steps), self.offset * times)

    __rmul__ = __mul__

    def _refuse_operation(self, *_: Any) -> NoReturn:
        """Raise RuleViolation: the operation would not give an affine index."""
        raise RuleViolation(
            affine_only,
            "a division, remainder or conversion of an index",
            hint="add a dim to the index and step over it",
        )

    for _name in ("floordiv rfloordiv truediv mod rmod pow and or lshift rshift int bool index iter").split():
        locals()[f"__{_name}__"] = _refuse_operation
    del _name

    __lt__, __le__ = _compare("less"), _compare("less_equal")
    __gt__, __ge__ = _compare("greater"), _compare("greater_equal")
    __eq__, __ne__ = _compare("equal"), _compare("not_equal")  # type: ignore[assignment]
    __hash__ = object.__hash__


def broadcast(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape of two shapes by NumPy's broadcasting rule. Raises RuleViolation if there is none."""
    rank = max(len(shape), len(other))
    pairs = zip((1,) * (rank - len(shape)) + shape, (1,) * (rank - len(other)) + other)
    sizes = []
    for a, b in pairs:
        if a != b and 1 not in (a, b):
            raise RuleViolation(shapes_broadcast, f"{shape} and {other}")
        sizes.append(max(a, b))
    return tuple(sizes)


def arange(*bounds: int) -> Index:
    """Return the index start … stop - 1, as `range` counts, on one axis; `[:, None]` or `[None, :]` adds an axis.

    Raises RuleViolation for an empty range.
    """
    start, stop, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}.get(len(bounds), (0, 0, 1))
    return _build_axis(slice(start, stop, step), "nl.arange", 1, 0)


class Grid(tuple[Index, ...]):
    """Indices of one `nl.mgrid`, one per axis, each over all axes; `p`, `x`, `y`, `z`, `w` name them in order."""

    p = property(lambda self: self[0])
    x = property(lambda self: self[1])
    y = property(lambda self: self[2])
    z = property(lambda self: self[3])
    w = property(lambda self: self[4])


class _MeshGrid:
    """Type of `nl.mgrid`: `nl.mgrid[0:128, 0:512]` is a Grid of dense indices over all axes, as in `numpy.mgrid`."""

    def __getitem__(self, key: Any) -> Grid:
        keys = key if isinstance(key, tuple) else (key,)
        axes = [_build_axis(element, "nl.mgrid", len(keys), axis) for axis, element in enumerate(keys)]
        shape = tuple(index.shape[axis] for axis, index in enumerate(axes))
        return Grid(Index(shape, index.steps, index.offset) for index in axes)


mgrid = _MeshGrid()


def _build_axis(element: Any, where: str, rank: int, axis: int) -> Index:
    """Return the index that counts along one axis as a slice says.

    Args:
        element: The slice start:stop:step.
        where: The name of the function, for messages.
        rank: The number of axes of the index.
        axis: The axis along which it counts.

    Raises:
        RuleViolation: `element` is no slice with a stop, has no elements, or has bounds that are no integers.
    """
    well_formed = isinstance(element, slice) and element.stop is not None
    start, stop, step = (
        (
            _convert_integer(element.start or 0),
            _convert_integer(element.stop),
            _convert_integer(element.step or 1),
        )
        if well_formed
        else (0, 0, 1)
    )
    count = len(range(start, stop, step)) if step else 0
    if not count:
        raise RuleViolation(
            axis_has_elements, f"{where} over {element!r:.60}", hint="nl.mgrid[0:128, 0:512], nl.arange(128)"
        )
    return Index(
        tuple(count if j == axis else 1 for j in range(rank)),
        tuple(step if j == axis else 0 for j in range(rank)),
        start,
    )


def _convert_integer(value: Any) -> int:
    """Return a value as an integer. Raises RuleViolation if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise RuleViolation(
            affine_only, f"{type(value).__name__} {value!r:.60} in an index", hint="use integers"
        ) from None


@rule("NKW-INDEX-AFFINE")
def affine_only() -> None:
    """An index is an affine expression: aranges times integers, plus integers.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


@rule("NKW-INDEX-AXES")
def new_axes_only() -> None:
    """An index is given its axes with `:` and None, one `:` for each axis it has.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


@rule("NKW-INDEX-BROADCAST")
def shapes_broadcast() -> None:
    """Shapes broadcast by numpy's rule: sizes agree, or one of them is 1.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


@rule("NKW-INDEX-EMPTY")
def axis_has_elements() -> None:
    """An index axis is start:stop or start:stop:step with at least one element.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """
