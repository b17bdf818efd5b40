"""`tile[key] = other`: the copy that an assignment of one tensor to a part of another issues."""

from __future__ import annotations

from simulate.memory import NkiTensor
from simulate.nki import isa


def copy(target: NkiTensor, value: NkiTensor) -> None:
    """A tensor_copy between tensors on chip, a DMA where one of them lies in HBM. Raises what these raise."""
    on_chip = target.buffer.on_chip and value.buffer.on_chip
    (isa.tensor_copy if on_chip else isa.dma_copy)(dst=target, src=value)


NkiTensor.assign = staticmethod(copy)
