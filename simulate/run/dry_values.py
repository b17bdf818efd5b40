"""The numbers that a dry launch knows: as many as it takes to follow a device loop.

A dry launch computes no numbers, with one exception. Integers in arguments that are given as arrays are known, and so
is a small integer allocation that is computed from known ones alone. An array that repeats one element
(`numpy.broadcast_to`) gives a shape and no numbers; dry launches return such arrays themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.isa.plan import Domain, Masked, Plan
from simulate.memory import NkiTensor, Storage
from simulate.memory.validity import EMPTY
from simulate.run.execute import put

_MOST_ELEMENTS = 1024
"""Of an allocation that a dry launch computes: a row of lengths or counters, and no tile of data."""


class DryValues:
    """The known allocations of one rank, each with a twin that has the bytes; the allocations have none."""

    def __init__(self) -> None:
        self._twins: dict[int, Storage] = {}

    def give(self, storage: Storage, array: np.ndarray) -> None:
        """Note the argument that an array is given for, unless the array stands for a shape alone."""
        stands_for_shape = array.ndim > 0 and not any(array.strides)
        if storage.dtype.is_integer and storage.dtype.storage == array.dtype and not stands_for_shape:
            held = np.ascontiguousarray(array)
            self._twins[storage.serial] = Storage(
                storage.shape, storage.dtype, storage.buffer, storage.name, held
            )

    def of(self, tensor: NkiTensor) -> NkiTensor | None:
        """The tensor over known bytes; None where they are not known."""
        twin = self._twins.get(tensor.storage.serial)
        if twin is None or tensor.dynamic is not None:
            return None
        return NkiTensor.over(tensor.shape, tensor.dtype, twin, tensor.strides, tensor.offset)

    def update(self, plan: Plan, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]) -> None:
        """Compute an instruction whose operands are known; otherwise what it writes is not known any more.

        Called before the writes are marked as written.
        """
        results = self._computed(plan, reads) if writes and all(map(_is_small, writes)) else ()
        for tensor, result in zip(writes, results):
            twin = self._twin(tensor)
            if twin is None or isinstance(result, Masked):
                results = ()
                break
            put(twin, result, plan.domain is Domain.float32, plan.skip_out_of_range)
        if not results:
            for tensor in writes:
                self._twins.pop(tensor.storage.serial, None)

    def _computed(self, plan: Plan, reads: Sequence[NkiTensor]) -> Sequence[np.ndarray | Masked]:
        depends_on_more = plan.state or plan.registers or plan.accumulate or plan.rendezvous
        known = [self.of(tensor) for tensor in reads]
        if depends_on_more or any(each is None for each in known):
            return ()
        as_float = plan.domain is Domain.float32
        return plan.compute(
            *(
                each.uncounted_float32() if as_float else each.uncounted_array
                for each in known
                if each is not None
            )
        )

    def _twin(self, tensor: NkiTensor) -> NkiTensor | None:
        """The tensor over bytes that may be written; None where the rest of its allocation is unknown."""
        storage = tensor.storage
        if storage.serial not in self._twins:
            if storage.validity.uniform != EMPTY and not tensor.whole:
                return None
            self._twins[storage.serial] = Storage(storage.shape, storage.dtype, storage.buffer, storage.name)
        return self.of(tensor)


def _is_small(tensor: NkiTensor) -> bool:
    """Whether a dry launch may compute the tensor's allocation; the caller's arrays keep what they hold."""
    storage = tensor.storage
    fresh = storage.uncounted_host is None
    return fresh and storage.size <= _MOST_ELEMENTS and storage.dtype.is_integer and tensor.dynamic is None
