"""`Storage`: an allocation with its bytes, their validity, and its name for reports. Tensors are views of storages.

Each allocation has bytes of its own, also if `address=` places two of them on the same bytes of the chip, as in the
official simulator. Where allocations overlap on the chip is computed afterwards from the stream
(`simulate.memory.placement`).
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
    """Allocation of `shape` elements of `dtype` in `buffer`; on chip, dim 0 runs over the partitions.

    Attributes:
        uncounted_array: Bytes as a flat uint8 array, empty in a dry launch; reading it is no read by Python.
        uncounted_host: The caller's array, for a kernel argument; else None.
        validity: Which bytes are defined.
        float_views: float32 copies of views of narrow dtypes, by layout, until the next write.
        free_size: Elements per partition, or of a row of dim 0 in HBM.
        nbytes: Bytes in the host, which exceed those on the chip where values are kept as float32.
        serial: Number of the allocation within the launch, -1 before it is recorded.
    """

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
            array: Bytes of a kernel argument, whose memory is shared; with `fresh`, the bytes to use in place of new
                ones, such as none at all in a dry launch. None allocates new bytes.
            address: (partition, byte) at which the kernel places it; None if the compiler places it.
            line: Kernel line of the allocation, None for an argument.
            fresh: Whether the bytes count as undefined although `array` is passed.
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
        """Bytes of the allocation, flat uint8; reading the property counts as a read by Python (`ValueReads`)."""
        VALUE_READS.count += 1
        return self.uncounted_array

    @property
    def host(self) -> np.ndarray | None:
        """Caller's array that this allocation represents, None if it is no argument; counts as a read by Python."""
        VALUE_READS.count += 1
        return self.uncounted_host

    def fill_fresh(self) -> None:
        """Fill all bytes with what the vendor's simulator leaves in a fresh tensor: NaN for floats, 4 for other dtypes.

        The validity does not change: the bytes stay undefined.
        """
        is_float = self.dtype.is_float and not self.dtype.is_packed
        self.uncounted_array.view(self.dtype.storage)[...] = np.nan if is_float else 4

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'} {self.shape} {self.dtype} {self.buffer.value}"
