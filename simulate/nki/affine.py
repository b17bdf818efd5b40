"""`nl.affine_range`: a range whose iterations the stream records, because the kernel declares them independent.

`simulate.check` finds iterations that depend on each other all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simulate.run.machine import running_core
from simulate.run.stream import Iteration


def iterate_independently(values: Sequence[int]) -> Iterator[int]:
    """Yield the values, one per iteration; inside a kernel the stream records which iteration issues each event."""
    core = running_core()
    if core is None:
        yield from values
        return
    stream = core.stream
    loop, before = len(stream.affine_loops), len(stream.tensors)
    stream.affine_loops.append(len(stream))
    for number, value in enumerate(values):
        stream.open_affine.append(Iteration(loop, number, before))
        try:
            yield value
        finally:
            stream.open_affine.pop()


class AffineRange(Sequence[int]):
    """Range of ints that behaves like `range`, and whose iterations the stream records."""

    def __init__(self, *bounds: int) -> None:
        self._range = range(*bounds)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        return self._range[index]

    def __iter__(self) -> Iterator[int]:
        return iterate_independently(self._range)

    def __eq__(self, other: object) -> bool:
        return self._range == (other._range if isinstance(other, AffineRange) else other)

    def __hash__(self) -> int:
        return hash(self._range)

    def __repr__(self) -> str:
        return repr(self._range)
