"""Allocation: its bytes, their validity, and its name for reports.

Each tensor has bytes of its own for any `address=`, as in the official simulator. The addresses of tensors and their
overlaps are computed from the stream (`simulate.memory.placement`).
"""

from __future__ import annotations

from types import CodeType

import numpy as np

from simulate.memory.layout import Layout, intern_form
from simulate.memory.objects import VALUE_READS
from simulate.memory.regions import MemoryRegion
from simulate.memory.validity import EMPTY, WRITTEN, Validity
from simulate.numerics import DType


class Storage:
    """Allocation of `shape` elements of `dtype` in `buffer`; on chip, dim 0 runs over the partitions."""

    __slots__ = (
        "address",
        "buffer",
        "dtype",
        "float_views",
        "form",
        "free_size",
        "line",
        "name",
        "nbytes",
        "serial",
        "shape",
        "size",
        "uncounted_array",
        "uncounted_host",
        "validity",
    )

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        buffer: MemoryRegion,
        name: str,
        array: np.ndarray | None = None,
        address: tuple[int, int] | None = None,
        line: tuple[CodeType, int] | None = None,
        fresh: bool = False,
    ) -> None:
        """Allocate a tensor.

        Args:
            shape: Shape of the tensor.
            dtype: Its dtype.
            buffer: Its memory.
            name: Its name for reports.
            array: Bytes of a kernel argument; or, with `fresh`, bytes to use in a dry run.
            address: (partition, byte), None if the compiler places it.
            line: Kernel line of the allocation, None for an argument.
            fresh: Whether the bytes are undefined.
        """
        form = self.form = intern_form(shape, dtype, buffer)
        size = form.size
        self.shape = shape
        self.dtype = dtype
        self.buffer = buffer
        self.name = name
        self.size = size
        self.free_size = size // shape[0] if shape[0] else 0
        self.address = address
        self.line = line
        self.serial = -1
        self.nbytes = size * dtype.storage.itemsize
        self.uncounted_host = None if fresh else array
        # Fresh bytes are deliberately not zeroed: the validity map decides which bytes may be read.
        self.uncounted_array = (
            np.empty(self.nbytes, np.uint8) if array is None else array.reshape(-1).view(np.uint8)
        )
        self.validity = Validity(self.nbytes, EMPTY if fresh or array is None else WRITTEN, form.stored_shape)
        self.float_views: dict[Layout, np.ndarray] = {}

    @property
    def array(self) -> np.ndarray:
        """Bytes of the allocation, uint8; a read counts as a read by Python, as for `NkiTensor.array`."""
        VALUE_READS.count += 1
        return self.uncounted_array

    @property
    def host(self) -> np.ndarray | None:
        """The caller's array that this allocation represents, else None; counts as a read by Python."""
        VALUE_READS.count += 1
        return self.uncounted_host

    def fill_fresh(self) -> None:
        """Fill an allocation as the vendor's simulator does: NaN for floats, 4 for integers."""
        is_float = self.dtype.is_float and not self.dtype.is_packed
        self.uncounted_array.view(self.dtype.storage)[...] = np.nan if is_float else 4

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'} {self.shape} {self.dtype} {self.buffer.value}"
