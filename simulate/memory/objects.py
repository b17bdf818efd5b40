"""What every object of the language has in common, and what a run-time address is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulate.memory.tensor import NkiTensor


class Looks:
    """Counts how often Python looked at a value; a kernel that does may depend on data."""

    count = 0


LOOKS = Looks()


class NKIObject:
    """Base of the objects a kernel may carry: tensors, instructions, and the user's own parameter classes."""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A part of a view's address that is read at run time.

    `index` is a (P, 1) SBUF tile with one row number per partition (`per_partition`) or a (1, 1) tile with one number
    for the whole access. Each unit moves the view by `step` elements; valid numbers are below `extent`.
    """

    index: NkiTensor
    step: int
    extent: int
    per_partition: bool
