"""Weights of 4 bits: unsigned nibbles with a scale and a zero point for each row, or for each group of a row.

The value of element [i, j] of a weight [out, in] is (nibble - zero) * scale, computed in float32. Scale and zero point
are those of row i and of the group of `group` inputs that contains j. A symmetric weight has no stored zero points: all
are 8. Stored elements are bytes [out, in / 2], the first of two inputs in the low nibble. Readers of other containers
make weights from nibbles with `store_nibbles`.

compressed-tensors stores `weight_packed` int32 [out, in / 8], the first input in the lowest nibble, `weight_scale`
[out, groups], `weight_shape`, and for asymmetric weights `weight_zero_point` int32 [out / 8, groups], packed along the
rows.

Kernels read bytes in another order, see `arrange`, and a nibble n as n * 2^-9, the number that its byte is in fp8: so
`pass_to_kernels` multiplies scales by 2^9.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from model.errors import ModelError
from model.formats.format import (
    ELEMENTS,
    SCALES,
    ConfigFields,
    Format,
    QuantisedWeight,
    Scope,
    Shape,
    TensorSpec,
)
from model.formats.scaled import check_scales, check_shape, take_input_scale

ZEROS = "zeros"
"""Name of the stored tensor of zero points."""
SYMMETRIC_ZERO = 8
"""Zero point of weights without stored zero points."""
KERNEL_UNIT = 512
"""Factor of scales in kernels, in which the nibble 1 is 2^-9."""

_BYTE, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
_SCALE_DTYPES = (_FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_LARGEST = 15
_RUN, _BLOCK = 256, 128
"""Rows of a run and of a block of rows behind the whole runs, in the order of kernels."""
_GROUPS = (32, 64, 128)
"""Sizes of groups that are read."""


@dataclass(frozen=True)
class Int4(Format):
    """Format of weights of 4 bits; `group` is the number of inputs that share a scale, None for all of them.

    `method` is `quant_method` of config.json. Weights that are not `symmetric` have stored zero points.
    """

    method: str
    group: int | None = None
    symmetric: bool = True

    @property
    def name(self) -> str:
        """`quant_method` of config.json."""
        return self.method

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Int4 | None:
        """Return the format of the fields `weights` of a group of compressed-tensors with 4 bits; None if unsupported.

        Raises:
            ModelError: A field has a wrong type.
        """
        fields = quantization_config
        strategy, group = fields.get("strategy", None), fields.get("group_size", None)
        if strategy not in ("channel", "group"):
            fields.unsupported(
                "strategy", f"{strategy!r:.60}; known for weights of 4 bits are channel, group"
            )
            return None
        if strategy == "group" and group not in _GROUPS:
            known = ", ".join(map(str, _GROUPS))
            fields.unsupported("group_size", f"{group!r:.60}; weights of 4 bits have groups of {known}")
            return None
        symmetric = fields.get("symmetric", True) is True
        return cls("compressed-tensors", group if strategy == "group" else None, symmetric)

    @property
    def kernel_tensors(self) -> tuple[str, ...]:
        """Elements, scales and stored zero points."""
        return self._stored_tensors

    @property
    def scope(self) -> Scope:
        """Matrices of the same rows: `mlp` takes nibbles in gate and up, or in neither."""
        return Scope.rows

    @property
    def kernel_options(self) -> tuple[str, ...]:
        """The option of kernels that says how nibbles become operands; kernels without it widen weights of 4 bits."""
        return ("nibble_dtype",)

    @property
    def kernels(self) -> tuple[str, ...] | None:
        """`mlp` alone for scales of groups of inputs, which have the parameter of scales of outputs; else None."""
        return None if self.group is None else ("mlp",)

    @property
    def _stored_tensors(self) -> tuple[str, ...]:
        return (ELEMENTS, SCALES) if self.symmetric else (ELEMENTS, SCALES, ZEROS)

    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of bytes [out, in / 2], scales [out, groups] float32, and zero points uint8 if stored."""
        rows, columns = shape
        group = self.group or columns
        groups = (rows, -(-columns // group))
        specs = {
            ELEMENTS: TensorSpec((rows, -(-columns // 2)), _BYTE, (1, 2)),
            SCALES: TensorSpec(groups, _FLOAT32, (1, group)),
            ZEROS: TensorSpec(groups, _BYTE, (1, group)),
        }
        return {name: specs[name] for name in self._stored_tensors}

    def pass_to_kernels(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the stored tensors with scales for nibbles that are multiples of 2^-9."""
        return {**tensors, SCALES: tensors[SCALES] * np.float32(KERNEL_UNIT)}

    def arrange(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return a rank's part of a kernel tensor [inputs, out] in the order of kernels; only bytes change.

        Bytes [inputs / 2, out] of neighbouring inputs become [packed rows, out]. A run of 256 inputs becomes 128 packed
        rows: byte p has input p in its low nibble and input p + 128 in its high one. Of the remaining inputs, each
        block of up to 128 has the inputs from 64 on in high nibbles if it has more than 64, from 32 on if it has more
        than 32, else low nibbles alone.
        """
        if name != ELEMENTS:
            return array
        arranged = np.empty(self.arrange_shape(name, array.shape), _BYTE)
        first_packed = 0
        for first, end, low in _list_runs(2 * len(array)):
            pairs = array[first // 2 : end // 2]
            nibbles = np.empty((end - first, *array.shape[1:]), _BYTE)
            nibbles[0::2], nibbles[1::2] = pairs & 15, pairs >> 4
            packed = arranged[first_packed : first_packed + low]
            packed[...] = nibbles[:low]
            packed[: end - first - low] |= nibbles[low:] << 4
            first_packed += low
        return arranged

    def arrange_shape(self, name: str, shape: Shape) -> Shape:
        """Return the shape of what `arrange` returns for an array of a shape."""
        if name != ELEMENTS:
            return shape
        return (sum(low for _, _, low in _list_runs(2 * shape[0])), *shape[1:])

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove `<name>_packed` and its scales and zero points from `tensors` and return the weight.

        Returns None, and removes nothing, if `tensors` has no `<name>_packed`. The weight widens to `dtype`.

        Raises:
            ModelError: A tensor is missing, or has a wrong shape or dtype; a scale is not a finite number above 0; the
                inputs are not whole groups; or groups follow an activation order.
        """
        packed_name = f"{name}_packed"
        if packed_name not in tensors or len(shape) != 2:
            return None
        if f"{name}_g_idx" in tensors:
            raise ModelError(
                f"{name}_g_idx orders the inputs of groups; quantise {name} again without activation order"
            )
        rows, columns = shape
        if self.group is not None and columns % self.group:
            raise ModelError(
                f"{name} has {columns} inputs; groups of {self.group} need a multiple of {self.group}"
            )
        specs = self.describe_tensors(shape)
        packed = _pop(tensors, packed_name, (rows, -(-columns // 8)), (np.dtype(np.int32),), shape)
        check_shape(name, tensors, shape)
        stored: dict[str, np.ndarray] = {
            ELEMENTS: np.ascontiguousarray(packed).view(_BYTE)[:, : specs[ELEMENTS].shape[1]],
            SCALES: _pop(tensors, f"{name}_scale", specs[SCALES].shape, _SCALE_DTYPES, shape).astype(
                _FLOAT32
            ),
        }
        check_scales(f"{name}_scale", stored[SCALES], name)
        if not self.symmetric:
            groups = specs[ZEROS].shape[1]
            zeros = _pop(tensors, f"{name}_zero_point", (-(-rows // 8), groups), (np.dtype(np.int32),), shape)
            stored[ZEROS] = unpack_words(zeros.T)[:, :rows].T
        take_input_scale(name, tensors)
        return QuantisedWeight.from_tensors(self, stored, shape, dtype)

    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return (nibble - zero) * scale of each element, float32 [out, in]; `in` is rounded up to an even number."""
        pairs, scales = tensors[ELEMENTS], tensors[SCALES]
        zeros = tensors.get(ZEROS, np.array([[SYMMETRIC_ZERO]], _BYTE)).astype(np.float32)
        wide = np.empty((len(pairs), 2 * pairs.shape[1]), np.float32)
        wide[:, 0::2], wide[:, 1::2] = pairs & 15, pairs >> 4
        wide -= self._spread(zeros, wide.shape[1])
        wide *= self._spread(scales, wide.shape[1])
        return wide

    def _spread(self, entries: np.ndarray, columns: int) -> np.ndarray:
        """Return the entry [out, groups] of each of `columns` inputs, or one entry that broadcasts over all of them."""
        return entries if entries.shape[1] == 1 else np.repeat(entries, self.group or 1, axis=1)[:, :columns]

    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return stored tensors of numbers [out, in]; nibbles are rounded to nearest even and clipped to 0 … 15.

        A symmetric scale is the smallest with which a group lies from -8 to 7 steps, an asymmetric one 1 / 15 of the
        range of a group and 0. Groups of zeros have the scale 1. `in` is a multiple of `group`, and even.
        """
        rows, columns = array.shape
        grouped = array.astype(np.float32).reshape(rows, -1, self.group or columns)
        highest, lowest = np.maximum(grouped.max(axis=2), 0), np.minimum(grouped.min(axis=2), 0)
        largest = np.maximum(highest / np.float32(7), -lowest / np.float32(8))
        scales = largest if self.symmetric else (highest - lowest) / np.float32(_LARGEST)
        scales = np.where(scales == 0, np.float32(1), scales)
        zeros = np.clip(np.rint(-lowest / scales), 0, _LARGEST)
        if self.symmetric:
            zeros = np.full_like(scales, SYMMETRIC_ZERO)
        nibbles = np.clip(np.rint(grouped / scales[:, :, None]) + zeros[:, :, None], 0, _LARGEST)
        return self.store_nibbles(nibbles.astype(_BYTE).reshape(rows, columns), scales, zeros.astype(_BYTE))

    def store_nibbles(
        self, nibbles: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return stored tensors of nibbles uint8 [out, in], scales [out, groups], and zero points unless symmetric."""
        if nibbles.shape[1] % 2:
            nibbles = np.pad(nibbles, ((0, 0), (0, 1)))
        stored = {
            ELEMENTS: nibbles[:, 0::2] | nibbles[:, 1::2] << 4,
            SCALES: np.asarray(scales, np.float32),
        }
        if not self.symmetric:
            assert zeros is not None
            stored[ZEROS] = np.asarray(zeros, np.uint8)
        return stored


def unpack_words(words: np.ndarray) -> np.ndarray:
    """Return the nibbles of int32 words [rows, n] as uint8 [rows, 8 n], the lowest nibble of a word first."""
    pairs = np.ascontiguousarray(words).view(_BYTE)
    nibbles = np.empty((len(pairs), 2 * pairs.shape[1]), _BYTE)
    nibbles[:, 0::2], nibbles[:, 1::2] = pairs & 15, pairs >> 4
    return nibbles


def _pop(
    tensors: MutableMapping[str, np.ndarray],
    name: str,
    shape: Shape,
    dtypes: tuple[np.dtype, ...],
    weight_shape: Shape,
) -> np.ndarray:
    """Remove and return a tensor of a weight with the shape `weight_shape`.

    Raises:
        ModelError: It is missing, or its shape or dtype is another one.
    """
    if name not in tensors:
        raise ModelError(f"tensor {name} of a weight {weight_shape} of 4 bits is missing")
    tensor = tensors.pop(name)
    if tensor.shape != shape or tensor.dtype not in dtypes:
        known = " or ".join(map(str, dtypes))
        raise ModelError(
            f"{name} is {tensor.dtype} {tensor.shape}; a weight {weight_shape} of 4 bits has {known} {shape}"
        )
    return tensor


def _list_runs(inputs: int) -> list[tuple[int, int, int]]:
    """Return (first, end, inputs in low nibbles) of each run of `inputs` inputs in the order of kernels."""
    run_inputs = inputs - inputs % _RUN
    runs = [(first, first + _RUN, _BLOCK) for first in range(0, run_inputs, _RUN)]
    for first in range(run_inputs, inputs, _BLOCK):
        end = min(inputs, first + _BLOCK)
        runs.append((first, end, _BLOCK // 2 if end - first > _BLOCK // 2 else min(end - first, _BLOCK // 4)))
    return runs
