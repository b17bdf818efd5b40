"""Conversion of kernel arguments to HBM tensors and of return values to arrays, without copies where possible.

`simulate.run.launcher` makes one `Arguments` for each rank of a launch. The functions for leaves serve nested tuples,
lists and dicts, in which kernels take and return tensors.
"""

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
from simulate.numerics.host_arrays import (
    convert_for_chip,
    dtype_of,
    from_torch,
    is_torch,
    to_torch,
    view_words,
)
from simulate.run.machine import Rank


class Arguments:
    """Converter of one rank's arguments to HBM tensors, and of the kernel's return value to arrays.

    Tensors share the memory of arrays, so the caller sees writes of the kernel. An array that is not contiguous or is
    stored in another dtype is copied; `write_back` copies the bytes back. `torch_seen` tells whether an argument was
    a torch tensor. A dry launch gives tensors no bytes.
    """

    def __init__(self, rank: Rank, storage_dtype: Callable[[DType], DType], dry: bool) -> None:
        self._rank = rank
        self._storage_dtype = storage_dtype
        self._dry = dry
        self._tensors: dict[int, tuple[Any, NkiTensor]] = {}
        self._copies: list[tuple[np.ndarray, np.ndarray, DType]] = []
        self.torch_seen = False

    def to_tensors(self, value: Any, name: str = "") -> Any:
        """Return a kernel argument with an HBM tensor in the place of every NumPy array and torch tensor in it.

        Tuples, lists, dicts and the attributes of dataclasses and NKIObjects are searched. A container without arrays
        is returned itself, one with arrays as a new container. The same array gives the same tensor.

        Args:
            value: The argument.
            name: The parameter, which becomes the tensor's name in messages.

        Raises:
            InvalidArgument: An array has no elements, or a dtype that the chip does not have.
            RuleViolation: An array is int64 and the launch's level does not have int64.
        """
        if isinstance(value, np.ndarray):
            return self._create_tensor(value, value, dtype_of, name)
        if is_torch(value):
            self.torch_seen = True
            return self._convert_torch_tensor(value, name)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = [self.to_tensors(field, f"{name}.{key}") for key, field in zip(value._fields, value)]
            return value if _are_identical(fields, value) else rebuild_sequence(value, fields)
        if isinstance(value, (tuple, list)):
            elements = [self.to_tensors(element, f"{name}[{i}]") for i, element in enumerate(value)]
            return value if _are_identical(elements, value) else rebuild_sequence(value, elements)
        if isinstance(value, dict):
            entries = {key: self.to_tensors(entry, f"{name}[{key!r}]") for key, entry in value.items()}
            return value if _are_identical(entries.values(), value.values()) else entries
        plain = isinstance(value, NKIObject) and not isinstance(value, NkiTensor)
        if plain or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return self._convert_object(value, name)
        return value

    def _convert_object(self, value: Any, name: str) -> Any:
        """Return a copy of an object with tensors for the arrays in its attributes; without arrays, the object."""
        attributes = getattr(value, "__dict__", {})
        converted = {
            key: self.to_tensors(attribute, f"{name}.{key}") for key, attribute in attributes.items()
        }
        if _are_identical(converted.values(), attributes.values()):
            return value
        duplicate = copy.copy(value)
        duplicate.__dict__.update(converted)
        return duplicate

    def _convert_torch_tensor(self, value: Any, name: str) -> NkiTensor:
        """Return the HBM tensor of a torch tensor.

        The dtype float8_e4m3fn becomes float8_e4m3 on chips that multiply only the latter, as the vendor's hosts
        convert it.

        Raises:
            InvalidArgument: The torch tensor has a dtype or a device that the simulator cannot use.
        """
        try:
            array, packed = from_torch(value)
        except InvalidArgument as error:
            raise InvalidArgument(error.code, f"argument {name or '?'}: {error.message}") from None
        if packed is not None:
            return self._create_tensor(value, array, lambda _: packed, name)
        return self._create_tensor(
            value, array, lambda array: convert_for_chip(self._rank.hardware, dtype_of(array)), name
        )

    def _create_tensor(
        self, key: Any, array: np.ndarray, dtype_for: Callable[[np.ndarray], DType], name: str
    ) -> NkiTensor:
        """Return the HBM tensor over an array, the same one for the same `key`, and add it to the rank's tensor table.

        Args:
            key: The caller's array or torch tensor.
            array: The NumPy array with its bytes.
            dtype_for: Returns the NKI dtype of the array; not called for int64.
            name: The parameter, for messages.

        Raises:
            InvalidArgument: The array has no elements, or a dtype that the chip does not have.
        """
        known = self._tensors.get(id(key))
        if known is not None:
            return known[1]
        try:
            dtype_of_array = self._require_int64() if array.dtype == np.int64 else dtype_for(array)
        except InvalidArgument as error:
            raise InvalidArgument(error.code, f"argument {name or '?'}: {error.message}") from None
        if dtype_of_array.is_packed:
            array = view_words(array, dtype_of_array)
        if array.size == 0:
            raise InvalidArgument(
                "NKW-SHAPE",
                f"argument {name or '?'} of shape {array.shape} has no elements; pass an array with at least one",
            )
        shape = array.shape or (1,)
        dtype = self._storage_dtype(dtype_of_array)
        if self._dry:
            stored = np.empty(0, np.uint8)
        elif dtype.storage != array.dtype or not array.flags.c_contiguous:
            stored = np.ascontiguousarray(array).astype(dtype.storage)
            self._note_overflow(array, stored, name)
            self._copies.append((array, stored.reshape(array.shape), dtype_of_array))
        else:
            stored = array
        shared = self._rank.logical_core_size > 1
        region = MemoryRegion.shared_hbm if shared else MemoryRegion.private_hbm
        storage = Storage(shape, dtype, region, name, array=stored)
        self._rank.tensors.add(storage)
        if self._dry:
            self._rank.values.add_argument(storage, array)
        tensor = NkiTensor(shape, dtype, storage)
        self._tensors[id(key)] = (key, tensor)
        return tensor

    def _note_overflow(self, array: np.ndarray, stored: np.ndarray, name: str) -> None:
        """Append a warning of the launch if elements of a float8_e4m3fn argument become infinite as float8_e4m3."""
        if array.dtype != ml_dtypes.float8_e4m3fn or stored.dtype != ml_dtypes.float8_e4m3:
            return
        beyond = int(np.count_nonzero(np.isinf(stored)))  # float8_e4m3fn has no infinity
        if beyond:
            self._rank.warnings.append(
                f"[NKW-ARGUMENT-FP8] {beyond} of {stored.size} elements of the float8_e4m3fn argument {name or '?'} "
                f"are beyond 240, the largest float8_e4m3, which {self._rank.hardware.name} takes: infinite"
            )

    def _require_int64(self) -> DType:
        """Return the dtype int64. Raises RuleViolation if the launch's level does not have it."""
        self._rank.level.require("nl.int64")
        return int64

    def to_arrays(self, value: Any) -> Any:
        """Return a kernel's return value with an array, or torch tensor if an argument was one, for every tensor.

        An argument that is returned as a whole is the caller's array. Arrays of a dry launch are zeros. A partly
        written output gives a warning of the launch.

        Raises:
            RuleViolation: A returned tensor is on chip or was never written, and the launch's rules refuse it.
        """
        return map_leaves(self._to_array, value)

    def _to_array(self, value: Any) -> Any:
        """Return the array or torch tensor of a returned tensor, any other object unchanged."""
        if not isinstance(value, NkiTensor):
            return value
        array = self._read_array(value)
        return to_torch(array) if self.torch_seen else array

    def _read_array(self, tensor: NkiTensor) -> np.ndarray:
        """Return the NumPy array of a returned tensor: the caller's for an entire argument, else one of its bytes.

        A dry launch has zeros. A partly written tensor gives a warning of the launch. Raises RuleViolation for a
        tensor on chip or never written, if the launch's rules refuse it.
        """
        _check_output(self._rank, output_in_hbm, tensor)
        if self._dry:
            zeros = np.zeros(
                (), find_output_dtype(tensor.dtype)
            )  # one element, broadcast: a dry launch has no values
            return (
                np.zeros(tensor.shape, zeros.dtype)
                if self.torch_seen
                else np.broadcast_to(zeros, tensor.shape)
            )
        if tensor.covers_storage and tensor.storage.uncounted_host is not None:
            for key, known in self._tensors.values():
                if (
                    known.storage is tensor.storage
                    and isinstance(key, np.ndarray)
                    and key.shape == tensor.shape
                ):
                    return key
        _check_output(self._rank, output_was_written, tensor)
        validity = tensor.storage.validity
        if not validity.written(*tensor.byte_view()):
            self._rank.warnings.append(
                f"[NKW-OUTPUT-PARTIAL] some bytes of the returned {tensor.describe()} were never written"
            )
        return tensor.uncounted_array.astype(find_output_dtype(tensor.dtype), copy=False)

    @property
    def converts(self) -> bool:
        """Whether a replay could not bind another array: an argument's element size or float8 dtype is converted."""
        return any(
            array.dtype.itemsize != stored.dtype.itemsize
            or array.dtype == ml_dtypes.float8_e4m3fn != stored.dtype
            for array, stored, _ in self._copies
        )

    def storages(self) -> list[Storage]:
        """Return the storages of the argument arrays, each once, in the order of the arguments."""
        return [tensor.storage for _, tensor in self._tensors.values()]

    def write_back(self) -> None:
        """Copy the contents of converted copies back into the caller's arrays, except into read-only ones."""
        for array, stored, _ in self._copies:
            if array.flags.writeable:
                array[...] = stored.astype(array.dtype)


def rebuild_sequence(sequence: Any, elements: list[Any]) -> Any:
    """Return a tuple, named tuple or list of the type of `sequence` with new elements."""
    return type(sequence)(*elements) if hasattr(sequence, "_fields") else type(sequence)(elements)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of nested tuples, lists and dicts with a function applied to every leaf."""
    if isinstance(tree, (tuple, list)):
        return rebuild_sequence(tree, [map_leaves(function, element) for element in tree])
    if isinstance(tree, dict):
        return {key: map_leaves(function, entry) for key, entry in tree.items()}
    return function(tree)


def list_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree of nested tuples, lists and dicts, in order: every object that is none of these."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves


def _are_identical(objects: Iterable[Any], originals: Iterable[Any]) -> bool:
    """Return whether both iterables have the same objects, pair by pair."""
    return all(element is original for element, original in zip(objects, originals))


def find_output_dtype(dtype: DType) -> np.dtype:
    """Return the NumPy dtype of an output: bool for bool_, int64 for int64, else the storage dtype."""
    if dtype == "bool_":
        return np.dtype(bool)
    if dtype == "int64":
        return np.dtype(np.int64)
    return as_dtype(str(dtype)).storage


def _check_output(rank: Rank, check: Callable[[NkiTensor], object], tensor: NkiTensor) -> None:
    """Apply a rule to a returned tensor; a broken rule gets the line of the allocation and raises, or is tolerated.

    Args:
        rank: The rank, whose launch decides whether the rule refuses.
        check: The rule, which raises RuleViolation.
        tensor: The returned tensor.
    """
    try:
        check(tensor)
    except RuleViolation as error:
        error.where = location(tensor.storage.line) if tensor.storage.line else None
        rank.report_violation(error)


@rule("NKW-OUTPUT-MEMORY")
def output_in_hbm(tensor: NkiTensor) -> None:
    """A kernel returns tensors in HBM, allocated with buffer=nl.shared_hbm.

    Raises RuleViolation if the tensor is in SBUF or PSUM.
    """
    if tensor.buffer.on_chip:
        raise RuleViolation(
            output_in_hbm,
            f"the kernel returns {tensor.describe()}",
            hint="dma_copy it to an nl.shared_hbm tensor and return that",
        )


@rule("NKW-OUTPUT-UNWRITTEN")
def output_was_written(tensor: NkiTensor) -> None:
    """Every output of a kernel is written before it is returned.

    Raises RuleViolation if no byte of the tensor's allocation was written.
    """
    if tensor.storage.validity.uniform == EMPTY:
        raise RuleViolation(
            output_was_written,
            f"nothing was written to the returned {tensor.describe()}",
            hint="dma_copy to it",
        )
