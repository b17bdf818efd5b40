"""Values that a dry launch knows: enough to follow a device loop whose bounds are in registers.

A dry launch computes no values, with one exception. Integer arrays in arguments are known, and so is a small integer
allocation that is computed from known values only. An array that repeats one element (`numpy.broadcast_to`) stands
for a shape without values; dry launches return such arrays themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.isa.plan import Domain, Masked, Plan
from simulate.memory import NkiTensor, Storage
from simulate.memory.validity import EMPTY
from simulate.run.execute import write_result

_MOST_ELEMENTS = 1024
"""Largest size of an allocation that a dry launch computes, such as a row of lengths or counters."""


class DryValues:
    """Allocations of one rank whose values are known; a second Storage holds their bytes, since the first has none."""

    def __init__(self) -> None:
        self._twins: dict[int, Storage] = {}

    def add_argument(self, storage: Storage, array: np.ndarray) -> None:
        """Record the values of an integer argument; does nothing for other, converted and repeating arrays.

        Args:
            storage: The argument's storage, which has no bytes.
            array: The caller's array, which is copied if it is not contiguous.
        """
        stands_for_shape = array.ndim > 0 and not any(array.strides)
        if storage.dtype.is_integer and storage.dtype.storage == array.dtype and not stands_for_shape:
            contents = np.ascontiguousarray(array)
            self._twins[storage.serial] = Storage(
                storage.shape, storage.dtype, storage.buffer, storage.name, contents
            )

    def known_tensor(self, tensor: NkiTensor) -> NkiTensor | None:
        """Return a view like `tensor` over known bytes; None for unknown values and for a run-time index."""
        twin = self._twins.get(tensor.storage.serial)
        if twin is None or tensor.dynamic is not None:
            return None
        return NkiTensor.from_storage(tensor.shape, tensor.dtype, twin, tensor.strides, tensor.offset)

    def update(self, plan: Plan, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]) -> None:
        """Compute an instruction's results if its operands are known; else forget the values of what it writes.

        Results are computed only for small integer allocations. Call it before the writes are marked as written.

        Args:
            plan: The plan.
            reads: The tensors that this call reads.
            writes: The tensors that this call writes.
        """
        results = self._compute_results(plan, reads) if writes and all(map(_is_computable, writes)) else ()
        for tensor, result in zip(writes, results):
            twin = self._find_writable_view(tensor)
            if twin is None or isinstance(result, Masked):
                results = ()
                break
            write_result(twin, result, plan.domain is Domain.float32, plan.skip_out_of_range)
        if not results:
            for tensor in writes:
                self._twins.pop(tensor.storage.serial, None)

    def _compute_results(self, plan: Plan, reads: Sequence[NkiTensor]) -> Sequence[np.ndarray | Masked]:
        """Return a plan's results; () if an operand is unknown or the plan depends on more than its operands."""
        depends_on_more = plan.state or plan.registers or plan.accumulate or plan.rendezvous
        known = [self.known_tensor(tensor) for tensor in reads]
        if depends_on_more or any(tensor is None for tensor in known):
            return ()
        as_float = plan.domain is Domain.float32
        return plan.compute(
            *(
                tensor.uncounted_float32() if as_float else tensor.uncounted_array
                for tensor in known
                if tensor is not None
            )
        )

    def _find_writable_view(self, tensor: NkiTensor) -> NkiTensor | None:
        """Return a view over bytes that may be written; None if a partial write would leave others unknown."""
        storage = tensor.storage
        if storage.serial not in self._twins:
            if storage.validity.uniform != EMPTY and not tensor.covers_storage:
                return None
            self._twins[storage.serial] = Storage(storage.shape, storage.dtype, storage.buffer, storage.name)
        return self.known_tensor(tensor)


def _is_computable(tensor: NkiTensor) -> bool:
    """Return whether a dry launch may compute an allocation: at most 1024 integers, no run-time index, no argument."""
    storage = tensor.storage
    fresh = storage.uncounted_host is None
    return fresh and storage.size <= _MOST_ELEMENTS and storage.dtype.is_integer and tensor.dynamic is None
