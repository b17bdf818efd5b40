"""Tensors in HBM that a program binds to other arrays at every launch.

To bind a tensor is to set the byte array of its storage. A view is a tensor of the storage that a plan uses; it
caches a NumPy array over these bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import InvalidArgument
from simulate.memory import NkiTensor, Storage
from simulate.run.arguments import find_output_dtype
from simulate.run.rebuild import NO_BYTES


class External:
    """Storage in HBM of a program, with every view that its plans take of it.

    Arguments and results are bound to other bytes in every launch. A tensor that only the kernel uses keeps its
    bytes.
    """

    def __init__(self, storage: Storage, views: list[NkiTensor]) -> None:
        self.storage = storage
        self.views = views
        self._shown: np.ndarray | None = None
        self._shapes = (storage.shape, ()) if storage.shape == (1,) else (storage.shape,)
        self._dtype = find_output_dtype(storage.dtype)

    def check(self, array: Any) -> None:
        """Raise InvalidArgument unless an array has the recorded shape and dtype and is C-contiguous."""
        if (
            not isinstance(array, np.ndarray)
            or array.shape not in self._shapes
            or array.dtype != self._dtype
            or not array.flags.c_contiguous
        ):
            raise build_arrays_error(
                _describe_array(array), f"a contiguous {self._dtype} {self.storage.shape}"
            )

    def bind(self, data: np.ndarray) -> None:
        """Bind the storage to the bytes of a C-contiguous array, which the program then reads and writes in place."""
        storage = self.storage
        storage.uncounted_host = data
        storage.uncounted_array = data.reshape(-1).view(np.uint8)
        storage.float_views.clear()

    def allocate(self) -> None:
        """Allocate bytes for a tensor that only the kernel uses; does nothing if it has some."""
        if self.storage.uncounted_array is NO_BYTES:
            self.storage.uncounted_array = np.empty(self.storage.nbytes, np.uint8)

    def release(self) -> None:
        """Drop the array of the last launch: the storage has no bytes, and the views no arrays."""
        self.storage.uncounted_host = self._shown = None
        self.storage.uncounted_array = NO_BYTES
        self.storage.float_views.clear()
        for view in self.views:
            view.forget_array()

    def finish(self) -> None:
        """Set the nonzero bytes of a bool array to 1, as an eager launch does; does nothing for other dtypes."""
        host = self.storage.uncounted_host
        if host is not None and host.dtype == bool:
            np.not_equal(host.view(np.uint8), 0, out=host)

    def show(self) -> None:
        """Drop the views' cached arrays if the storage was bound to other bytes since the last call."""
        if self._shown is not self.storage.uncounted_array:
            self._shown = self.storage.uncounted_array
            for view in self.views:
                view.forget_array()


def build_arrays_error(seen: str, recorded: str) -> InvalidArgument:
    """Return the error for arrays that differ from the recorded ones; both arguments are descriptions of arrays."""
    return InvalidArgument(
        "NKW-REPLAY-ARRAYS",
        f"a program got {seen}; its launch was recorded with {recorded}; pass arrays of the recorded shapes and "
        "dtypes, or launch the kernel eagerly",
    )


def _describe_array(array: Any) -> str:
    """Return a text with the dtype, shape and contiguity of an array, or the type of another object."""
    if not isinstance(array, np.ndarray):
        return f"a {type(array).__name__} for an array"
    return f"{'a' if array.flags.c_contiguous else 'a non-contiguous'} {array.dtype} {array.shape}"
