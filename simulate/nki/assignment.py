"""`tile[key] = value` on a tensor: checks the assignment and issues the instruction that copies."""

from __future__ import annotations

from typing import Any

from nkw.errors import RuleViolation
from simulate.level import ASSIGNMENT
from simulate.memory import NkiTensor
from simulate.memory.view_rules import tensors_are_assigned
from simulate.nki import isa
from simulate.nki.operators import repeat_to
from simulate.run import running_level


def assign(tensor: NkiTensor, key: Any, value: Any) -> None:
    """Copy `value` to `tensor[key]`: by tensor_copy between tensors on chip, by dma_copy if one of them is in HBM.

    Up to level 0.3 a number is assigned by memset, and dims of size 1 of a tile are repeated.

    Raises:
        RuleViolation: The value is no tensor (or, up to level 0.3, no number for a tile), or the instruction refuses
            it.
        OutOfBounds: The key leaves the tensor.
    """
    level, is_tensor = running_level(), isinstance(value, NkiTensor)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and tensor.buffer.on_chip
    if not is_tensor and not (is_number and level.has(ASSIGNMENT)):
        because = f"; {level.lack_of(ASSIGNMENT)}" if is_number else ""
        raise RuleViolation(
            tensors_are_assigned,
            f"an assignment of {type(value).__name__} to {tensor.describe()}{because}",
            hint="nisa.memset(dst=tile[...], value=number), or dst=tile[...] in the instruction that computes it",
        )
    target = tensor[key]
    if not is_tensor:
        isa.memset(dst=target, value=value)
        return
    on_chip = target.buffer.on_chip and value.buffer.on_chip
    if on_chip and level.has(ASSIGNMENT) and value.shape != target.shape and value.ndim == target.ndim:
        value = repeat_to(value, target.shape)
    (isa.tensor_copy if on_chip else isa.dma_copy)(dst=target, src=value)


NkiTensor.assign = staticmethod(assign)
