"""Tensors in HBM whose bytes a program is bound to, launch by launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import InvalidArgument
from simulate.memory import NkiTensor, Storage
from simulate.run.arguments import output_dtype
from simulate.run.rebuild import NO_BYTES


class External:
    """A storage in HBM with every view that the plans take of it.

    An argument or a result has other bytes in every launch; a tensor of the kernel's own keeps its bytes.
    """

    def __init__(self, storage: Storage, views: list[NkiTensor]) -> None:
        self.storage = storage
        self.views = views
        self._shown: np.ndarray | None = None
        self._shapes = (storage.shape, ()) if storage.shape == (1,) else (storage.shape,)
        self._dtype = output_dtype(storage.dtype)

    def check(self, array: Any) -> None:
        """Raise InvalidArgument for an array that cannot stand in for the one of the recorded launch."""
        if (
            not isinstance(array, np.ndarray)
            or array.shape not in self._shapes
            or array.dtype != self._dtype
            or not array.flags.c_contiguous
        ):
            raise refused(_seen(array), f"a contiguous {self._dtype} {self.storage.shape}")

    def bind(self, data: np.ndarray) -> None:
        """Bind the storage to the bytes of `data`."""
        storage = self.storage
        storage.uncounted_host = data
        storage.uncounted_array = data.reshape(-1).view(np.uint8)
        storage.float_views.clear()

    def allocate(self) -> None:
        """Allocate a tensor of the kernel's own, at the first exact replay."""
        if self.storage.uncounted_array is NO_BYTES:
            self.storage.uncounted_array = np.empty(self.storage.nbytes, np.uint8)

    def release(self) -> None:
        """Drop the array of the last launch."""
        self.storage.uncounted_host = self._shown = None
        self.storage.uncounted_array = NO_BYTES
        self.storage.float_views.clear()
        for view in self.views:
            view.forget_array()

    def finish(self) -> None:
        """Normalise an array of bool to 0 and 1, as an eager launch does; a tile of bool_ may have any byte."""
        host = self.storage.uncounted_host
        if host is not None and host.dtype == bool:
            np.not_equal(host.view(np.uint8), 0, out=host)

    def show(self) -> None:
        """Drop the views' arrays if the storage has other bytes now."""
        if self._shown is not self.storage.uncounted_array:
            self._shown = self.storage.uncounted_array
            for view in self.views:
                view.forget_array()


def refused(seen: str, recorded: str) -> InvalidArgument:
    """The error for arrays that a program does not take."""
    return InvalidArgument(
        "NKW-REPLAY-ARRAYS", f"a program got {seen}; its launch was recorded with {recorded}"
    )


def _seen(array: Any) -> str:
    if not isinstance(array, np.ndarray):
        return f"a {type(array).__name__} for an array"
    return f"{'a' if array.flags.c_contiguous else 'a non-contiguous'} {array.dtype} {array.shape}"
