"""Kernel arguments and results: numpy arrays and torch tensors become HBM tensors without a copy, and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import InvalidArgument, RuleViolation, rule
from simulate.lines import location
from simulate.memory import MemoryRegion, NKIObject, NkiTensor, Storage
from simulate.memory.validity import EMPTY
from simulate.numerics import DType, as_dtype, int64
from simulate.numerics.host_arrays import converted_for, dtype_of, from_torch, is_torch, to_torch, words_of
from simulate.run.machine import Rank


class Arguments:
    """Converts the arguments of one rank to tensors, and the kernel's return value to arrays.

    Tensors share the memory of arrays, so the caller sees writes of the kernel. An array that is not contiguous or is
    stored in another dtype is copied; `write_back` updates it.
    """

    def __init__(self, rank: Rank, storage_dtype: Callable[[DType], DType], dry: bool) -> None:
        self._rank = rank
        self._storage_dtype = storage_dtype
        self._dry = dry
        self._tensors: dict[int, tuple[Any, NkiTensor]] = {}
        self._copies: list[tuple[np.ndarray, np.ndarray, DType]] = []
        self.torch_seen = False

    def to_tensors(self, value: Any, name: str = "") -> Any:
        """A kernel argument with an HBM tensor for every array in it; other values are unchanged.

        Raises InvalidArgument for an array without elements or of a dtype that the chip does not have.
        """
        if isinstance(value, np.ndarray):
            return self._tensor(value, value, dtype_of, name)
        if is_torch(value):
            self.torch_seen = True
            return self._of_torch(value, name)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            parts = [self.to_tensors(part, f"{name}.{key}") for key, part in zip(value._fields, value)]
            return value if _same(parts, value) else like(value, parts)
        if isinstance(value, (tuple, list)):
            parts = [self.to_tensors(part, f"{name}[{i}]") for i, part in enumerate(value)]
            return value if _same(parts, value) else like(value, parts)
        if isinstance(value, dict):
            named = {key: self.to_tensors(part, f"{name}[{key!r}]") for key, part in value.items()}
            return value if _same(named.values(), value.values()) else named
        plain = isinstance(value, NKIObject) and not isinstance(value, NkiTensor)
        if plain or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return self._object(value, name)
        return value

    def _object(self, value: Any, name: str) -> Any:
        """An object among the arguments: a copy whose attributes have tensors for arrays, as in the language guide."""
        had = getattr(value, "__dict__", {})
        parts = {key: self.to_tensors(part, f"{name}.{key}") for key, part in had.items()}
        if _same(parts.values(), had.values()):
            return value
        twin = copy.copy(value)
        twin.__dict__.update(parts)
        return twin

    def _of_torch(self, value: Any, name: str) -> NkiTensor:
        """A torch tensor; its float8_e4m3fn becomes float8_e4m3 on chips that multiply only that, as their hosts do."""
        try:
            array, packed = from_torch(value)
        except InvalidArgument as error:
            raise InvalidArgument(error.code, f"argument {name or '?'}: {error.message}") from None
        if packed is not None:
            return self._tensor(value, array, lambda _: packed, name)
        return self._tensor(
            value, array, lambda given: converted_for(self._rank.hardware, dtype_of(given)), name
        )

    def _tensor(
        self, key: Any, array: np.ndarray, dtype_for: Callable[[np.ndarray], DType], name: str
    ) -> NkiTensor:
        known = self._tensors.get(id(key))
        if known is not None:
            return known[1]
        try:
            given = self._int64() if array.dtype == np.int64 else dtype_for(array)
        except InvalidArgument as error:
            raise InvalidArgument(error.code, f"argument {name or '?'}: {error.message}") from None
        if given.is_packed:
            array = words_of(array, given)
        if array.size == 0:
            raise InvalidArgument(
                "NKW-SHAPE", f"argument {name or '?'} of shape {array.shape} has no elements"
            )
        shape = array.shape or (1,)
        dtype = self._storage_dtype(given)
        if self._dry:
            held = np.empty(0, np.uint8)
        elif dtype.storage != array.dtype or not array.flags.c_contiguous:
            held = np.ascontiguousarray(array).astype(dtype.storage)
            self._note_overflow(array, held, name)
            self._copies.append((array, held.reshape(array.shape), given))
        else:
            held = array
        shared = self._rank.logical_core_size > 1
        region = MemoryRegion.shared_hbm if shared else MemoryRegion.private_hbm
        storage = Storage(shape, dtype, region, name, array=held)
        self._rank.tensors.add(storage)
        if self._dry:
            self._rank.values.give(storage, array)
        tensor = NkiTensor(shape, dtype, storage)
        self._tensors[id(key)] = (key, tensor)
        return tensor

    def _note_overflow(self, array: np.ndarray, held: np.ndarray, name: str) -> None:
        if array.dtype != ml_dtypes.float8_e4m3fn or held.dtype != ml_dtypes.float8_e4m3:
            return
        beyond = int(np.count_nonzero(np.isinf(held)))  # float8_e4m3fn has no infinity
        if beyond:
            self._rank.warnings.append(
                f"[NKW-ARGUMENT-FP8] {beyond} of {held.size} elements of the float8_e4m3fn argument {name or '?'} are "
                f"beyond 240, the largest float8_e4m3, which {self._rank.hardware.name} takes: infinite"
            )

    def _int64(self) -> DType:
        self._rank.level.require("nl.int64")
        return int64

    def to_arrays(self, value: Any) -> Any:
        """A kernel's return value with an array for every tensor; a torch tensor if an argument was one.

        Raises RuleViolation for a tensor on chip and for one that was never written.
        """
        return mapped(self._to_array, value)

    def _to_array(self, value: Any) -> Any:
        if not isinstance(value, NkiTensor):
            return value
        array = self._array(value)
        return to_torch(array) if self.torch_seen else array

    def _array(self, tensor: NkiTensor) -> np.ndarray:
        _checked(self._rank, output_in_hbm, tensor)
        if self._dry:
            zeros = np.zeros((), element(tensor.dtype))  # one element, broadcast: a dry launch has no values
            return (
                np.zeros(tensor.shape, zeros.dtype)
                if self.torch_seen
                else np.broadcast_to(zeros, tensor.shape)
            )
        if tensor.whole and tensor.storage.uncounted_host is not None:
            for key, known in self._tensors.values():
                if (
                    known.storage is tensor.storage
                    and isinstance(key, np.ndarray)
                    and key.shape == tensor.shape
                ):
                    return key
        _checked(self._rank, output_was_written, tensor)
        validity = tensor.storage.validity
        if not validity.written(*tensor.byte_view()):
            self._rank.warnings.append(
                f"[NKW-OUTPUT-PARTIAL] some bytes of the returned {tensor.describe()} were never written"
            )
        return tensor.uncounted_array.astype(element(tensor.dtype), copy=False)

    @property
    def converts(self) -> bool:
        """Whether an array is stored with other bytes, so that a replay could not bind another array."""
        return any(
            array.dtype.itemsize != held.dtype.itemsize
            or array.dtype == ml_dtypes.float8_e4m3fn != held.dtype
            for array, held, _ in self._copies
        )

    def storages(self) -> list[Storage]:
        """The storages of the arrays, in the order of the arguments."""
        return [tensor.storage for _, tensor in self._tensors.values()]

    def write_back(self) -> None:
        """Update the arrays that were copied."""
        for array, held, _ in self._copies:
            if array.flags.writeable:
                array[...] = held.astype(array.dtype)


def like(value: Any, parts: list[Any]) -> Any:
    """A tuple, named tuple or list of the type of `value`, with `parts` as its elements."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`change` of a value, or of every value in nested tuples, lists and dictionaries."""
    if isinstance(value, (tuple, list)):
        return like(value, [mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return change(value)


def leaves(value: Any) -> list[Any]:
    """The values in nested tuples, lists and dictionaries, in order."""
    found: list[Any] = []
    mapped(found.append, value)
    return found


def _same(parts: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(part is other for part, other in zip(parts, others))


def element(dtype: DType) -> np.dtype:
    """The numpy dtype of an output: bool for bool_, else the storage dtype."""
    if dtype == "bool_":
        return np.dtype(bool)
    if dtype == "int64":
        return np.dtype(np.int64)
    return as_dtype(str(dtype)).storage


def _checked(rank: Rank, check: Callable[[NkiTensor], object], tensor: NkiTensor) -> None:
    """Apply a rule to an output; the error's line is that of the allocation."""
    try:
        check(tensor)
    except RuleViolation as error:
        error.where = location(tensor.storage.line) if tensor.storage.line else None
        rank.broken(error)


@rule("NKW-OUTPUT-MEMORY")
def output_in_hbm(tensor: NkiTensor) -> None:
    """A kernel returns tensors in HBM, allocated with buffer=nl.shared_hbm."""
    if tensor.buffer.on_chip:
        raise RuleViolation(
            output_in_hbm,
            f"the kernel returns {tensor.describe()}",
            hint="dma_copy it to an nl.shared_hbm tensor and return that",
        )


@rule("NKW-OUTPUT-UNWRITTEN")
def output_was_written(tensor: NkiTensor) -> None:
    """Every output of a kernel is written before it is returned."""
    if tensor.storage.validity.uniform == EMPTY:
        raise RuleViolation(
            output_was_written,
            f"nothing was written to the returned {tensor.describe()}",
            hint="dma_copy to it",
        )
