"""Weights of 8 bits with scales: one for each block of rows and columns, for each row, or for the tensor.

Elements are float8_e4m3fn or int8. Kernels read weights with a scale for each row or for the tensor as they are
stored, but for one bit: chips before trn3 compute in e4m3, whose largest number is 240 instead of 448. For them
`pass_to_kernels` halves the elements and doubles the scales. Of the 254 finite codes, 16 change, the odd multiples of
2^-9 below 2^-5, by half of that times their scale. Elements of int8 reach kernels as they are. Weights with blocks of
128 rows and 128 columns, or multiples of them, reach kernels with parameters such as `w_up_block_scales`; other kernels
get them widened, and all kernels get weights of other blocks widened.

The value of element [i, j] of a weight [out, in] is element * scale[i // rows, j // columns], computed in float32.
Checkpoints with `quant_method` fp8 (DeepSeek-V3, Qwen3-FP8) and compressed-tensors (vLLM) use this format. In
compressed-tensors, `weight` has one element a byte, and `weight_packed` four int8 elements in an int32, each plus 128
and the first in the lowest byte (format `pack-quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from math import prod

import ml_dtypes
import numpy as np

from model.errors import ModelError
from model.formats.format import (
    ELEMENTS,
    INPUT_SCALE,
    SCALES,
    ChipLimits,
    ConfigFields,
    Container,
    Format,
    QuantisedWeight,
    Shape,
    TensorSpec,
)
from model.formats.groups import CLASSES, Group, Groups, read_skipped_modules

ELEMENT = np.dtype(ml_dtypes.float8_e4m3fn)
"""Dtype of the elements of fp8 weights."""
INT8, BYTE = np.dtype(np.int8), np.dtype(np.uint8)
BLOCK_SCALES = "block_scales"
"""Name of the stored tensor with the scales of blocks in kernels."""
KERNEL_BLOCK = 128
"""Rows and columns of a weight that share one of the `BLOCK_SCALES`."""
LARGEST = {ELEMENT: 448.0, INT8: 127.0}
"""Largest element by dtype."""

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of the names of scales in `fp8` and in compressed-tensors; both scales multiply."""
ACTIVATION_SUFFIXES = (".input_scale", ".activation_scale")
"""Suffixes of the names of static scales of the rows that a weight multiplies."""
_SCALE_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NUMBERS = np.arange(256, dtype=np.uint8).view(ELEMENT).astype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3)
"""Dtype of the elements of fp8 weights in kernels of chips that do not multiply float8_e4m3fn."""
_HALVES = (_NUMBERS / 2).astype(E4M3).view(np.uint8)
"""Code in e4m3 of half of each number of e4m3fn, rounded to nearest even."""


@dataclass(frozen=True)
class Scaled(Format):
    """Format with a scale for each block of `rows` by `columns` elements; None for all elements of an axis.

    `element` is the dtype of the elements, float8_e4m3fn or int8. With `has_quantised_rows` rows are rounded to fp8 or
    int8, as the elements, before products. Each row has a scale that is computed from the row. With
    `has_static_rows` too, all rows have the static scale that the checkpoint stores for the weight. Kernels get
    elements of fp8 in the dtype `fp8`, float8_e4m3 or float8_e4m3fn, as the chip multiplies them. With
    `shares_row_maxima` a row whose columns ranks divide has the scale of all its columns.
    """

    method: str
    rows: int | None
    columns: int | None
    element: np.dtype = ELEMENT
    has_quantised_rows: bool = False
    has_static_rows: bool = False
    fp8: np.dtype = E4M3
    shares_row_maxima: bool = False

    def adapt_to_chip(self, chip: ChipLimits) -> Scaled:
        """Return the format with elements of fp8 in the dtype that a chip multiplies."""
        return replace(self, fp8=ELEMENT if chip.matmul_e4m3fn else E4M3)

    def share_row_maxima(self) -> Scaled:
        """Return the format with `shares_row_maxima` if rows have scales that are computed, else the format itself."""
        computes_scales = self.has_quantised_rows and not self.has_static_rows
        return replace(self, shares_row_maxima=True) if computes_scales else self

    @property
    def depends_on_chip(self) -> bool:
        """Whether elements are fp8."""
        return self.element != INT8

    @property
    def name(self) -> str:
        """`quant_method` of config.json, "fp8" or "compressed-tensors"."""
        return self.method

    @classmethod
    def from_config(cls, quantization_config: ConfigFields) -> Container:
        """Return the container of `quant_method` fp8: one format, with the blocks of `weight_block_size`.

        Without `weight_block_size` the whole weight has one scale. Modules in `modules_to_not_convert` or
        `ignored_layers`, and the head, are planned as plain. A checkpoint's tensors decide which weights are quantised.

        Raises:
            ModelError: A field has a wrong type.
        """
        encoding = quantization_config.get("fmt", "e4m3")
        if encoding not in ("e4m3", "float8_e4m3fn"):
            quantization_config.unsupported(
                "fmt", f"{encoding!r:.60}; weights of eight bits are widened from e4m3"
            )
        has_blocks = "weight_block_size" in quantization_config
        block = quantization_config.pair("weight_block_size") if has_blocks else (None, None)
        skipped = read_skipped_modules(quantization_config, "modules_to_not_convert", "ignored_layers")
        is_static = quantization_config.get("activation_scheme", "dynamic") == "static"
        if is_static and has_blocks:
            quantization_config.unsupported(
                "activation_scheme", "'static' with weight_block_size; weights of blocks have dynamic rows"
            )
        format = replace(cls("fp8", *block), has_quantised_rows=is_static, has_static_rows=is_static)
        remarks = (describe_quantised_rows("activation_scheme", format),) if is_static else ()
        return Groups("fp8", (Group("fp8", CLASSES, format),), skipped, remarks=remarks)

    @property
    def kernel_element(self) -> np.dtype:
        """Dtype of the elements that kernels read: int8, or `fp8`."""
        return INT8 if self.element == INT8 else self.fp8

    @property
    def has_halves(self) -> bool:
        """Whether kernels read half of each element, and twice the scales."""
        return self.kernel_element == E4M3

    @property
    def row_dtype(self) -> np.dtype | None:
        """The `kernel_element` with `has_quantised_rows`, else None."""
        return self.kernel_element if self.has_quantised_rows else None

    @property
    def kernel_tensors(self) -> tuple[str, ...]:
        """Elements and scales of rows or of blocks; none for blocks that do not consist of 128 rows and 128 columns.

        The static scale of rows follows, if there is one.
        """
        if self.columns is None and self.rows in (None, 1):
            return (ELEMENTS, SCALES, INPUT_SCALE) if self.has_static_rows else (ELEMENTS, SCALES)
        if self.rows is None or self.columns is None:
            return ()
        return (
            (ELEMENTS, BLOCK_SCALES) if self.rows % KERNEL_BLOCK == self.columns % KERNEL_BLOCK == 0 else ()
        )

    @property
    def plain_rows_format(self) -> Format | None:
        """This format with rows as they are if it rounds them, else None."""
        if not self.has_quantised_rows:
            return None
        return replace(self, has_quantised_rows=False, has_static_rows=False, shares_row_maxima=False)

    def describe_kernel_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of the elements [out, in] of the `kernel_element`, and of float32 scales.

        Scales of rows are [out, 1], those of blocks have an entry for each 128 rows and 128 columns.
        """
        rows, columns = shape
        elements = TensorSpec(shape, self.kernel_element)
        if BLOCK_SCALES in self.kernel_tensors:
            counts = -(-rows // KERNEL_BLOCK), -(-columns // KERNEL_BLOCK)
            scales = TensorSpec(counts, np.dtype(np.float32), (KERNEL_BLOCK, KERNEL_BLOCK))
            return {ELEMENTS: elements, BLOCK_SCALES: scales}
        specs = {ELEMENTS: elements, SCALES: TensorSpec((rows, 1), np.dtype(np.float32), (1, columns))}
        return specs | self._describe_input_scale(shape)

    def _describe_input_scale(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return the description of the static scale of rows of a weight [out, in], if the format has one."""
        spec = TensorSpec((1, 1), np.dtype(np.float32), (shape[0], shape[1]))
        return {INPUT_SCALE: spec} if self.has_static_rows else {}

    def pass_to_kernels(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the elements [out, in] and the scales that `describe_kernel_tensors` describes.

        Elements of float8_e4m3 are half of the stored ones, and their scales twice the stored ones. So is the static
        scale of rows, which become halves too.
        """
        elements, scales = np.asarray(tensors[ELEMENTS]), tensors[SCALES]
        specs = self.describe_kernel_tensors(elements.shape)
        input_scale = {name: tensors[name] for name in specs if name == INPUT_SCALE}
        if self.has_halves:
            elements = _HALVES[elements.view(np.uint8)].view(E4M3)
            scales = scales * np.float32(2)
            input_scale = {name: scale * np.float32(2) for name, scale in input_scale.items()}
        if BLOCK_SCALES not in specs:
            return {ELEMENTS: elements, SCALES: np.broadcast_to(scales, specs[SCALES].shape), **input_scale}
        assert self.rows is not None and self.columns is not None
        rows, columns = specs[BLOCK_SCALES].shape
        by_row = np.repeat(scales, self.rows // KERNEL_BLOCK, axis=0)[:rows]
        return {
            ELEMENTS: elements,
            BLOCK_SCALES: np.repeat(by_row, self.columns // KERNEL_BLOCK, axis=1)[:, :columns],
        }

    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of the elements [out, in] and scales [blocks of rows, blocks of columns] float32.

        With static scales of rows, INPUT_SCALE [1, 1] float32 follows.
        """
        rows, columns = block = self.rows or shape[0], self.columns or shape[1]
        scales = -(-shape[0] // rows), -(-shape[1] // columns)
        return {
            ELEMENTS: TensorSpec(shape, self.element),
            SCALES: TensorSpec(scales, np.dtype(np.float32), block),
            **self._describe_input_scale(shape),
        }

    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove elements and scales of the weight `name` from `tensors` and return the weight; it widens to `dtype`.

        A static scale of the weight's inputs is removed too; a format without static scales of rows has no use for it.
        Returns None, and removes nothing, unless the tensor `name` has the format's elements in the weight's shape, or
        int8 elements are packed in a tensor `…_packed`.

        Raises:
            ModelError: Scales are missing, have a wrong shape or dtype, or one is not a finite number above 0.
        """
        elements, packing, dtype_in_file = tensors.get(name), None, self.element
        if self.element == INT8 and f"{name}_packed" in tensors and len(shape) == 2:
            elements, packing, dtype_in_file = take_bytes(name, tensors, shape), OffsetBytes(), BYTE
        if elements is None or elements.dtype != dtype_in_file or elements.shape != shape or len(shape) != 2:
            return None  # other shapes and dtypes are refused as those of any tensor
        input_scale = take_input_scale(name, tensors)
        scale_names = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in tensors]
        if not scale_names:
            missing = name + SCALE_SUFFIXES[0]
            raise ModelError(f"{name} has eight bits and no scales; tensor {missing} is missing")
        scales = tensors.pop(scale_names[0])
        spec = self.describe_tensors(shape)[SCALES]
        if scales.shape != spec.shape and not (1 in spec.shape and prod(scales.shape) == prod(spec.shape)):
            sizes = " by ".join(map(str, spec.block))
            raise ModelError(
                f"{scale_names[0]} has shape {scales.shape}; blocks of {sizes} in {shape} have {spec.shape}"
            )
        if scales.dtype not in _SCALE_DTYPES.values():
            known = ", ".join(_SCALE_DTYPES)
            raise ModelError(f"{scale_names[0]} has dtype {scales.dtype}; known are {known}")
        scales = scales.reshape(spec.shape).astype(spec.dtype)
        check_scales(scale_names[0], scales, name)
        stored = {ELEMENTS: elements, SCALES: scales}
        if self.has_static_rows:
            if input_scale is None:
                raise ModelError(
                    f"{name} has no static scale of its rows, which quantization_config asks for; tensor "
                    f"{name.rpartition('.')[0]}{ACTIVATION_SUFFIXES[0]} is missing"
                )
            stored[INPUT_SCALE] = input_scale
        tensors.pop(name, None)
        weight = QuantisedWeight.from_tensors(self, stored, shape, dtype)
        return replace(weight, packing=packing)

    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return each element times the scale of its block, float32 [out, in]."""
        elements, scales = tensors[ELEMENTS], tensors[SCALES]
        if self.element == INT8:
            wide = elements.astype(np.float32)
        else:
            wide = np.empty(elements.shape, np.float32)
            # `clip` changes no code and lets numpy write in place: 3 times as fast as an index.
            np.take(_NUMBERS, elements.view(np.uint8), out=wide, mode="clip")
        height, width = elements.shape
        rows, columns = self.describe_tensors(elements.shape)[SCALES].block
        by_column = scales[:, np.arange(width) // columns]
        for index, first in enumerate(range(0, height, rows)):
            wide[first : first + rows] *= by_column[index]
        return wide

    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return elements and float32 scales of numbers [out, in]; elements are rounded to nearest even.

        A block's scale is its largest magnitude / 448 for fp8, / 127 for int8, or 1 for a block of zeros. A static
        scale of rows does not follow from the weight, and is 1.
        """
        largest = LARGEST[self.element]
        specs = self.describe_tensors(array.shape)
        rows, columns = specs[SCALES].block
        most = np.maximum.reduceat(np.abs(array), np.arange(0, array.shape[0], rows), axis=0)
        most = np.maximum.reduceat(most, np.arange(0, array.shape[1], columns), axis=1)
        scales = np.where(most > 0, most / largest, 1).astype(np.float32)
        wide = np.repeat(np.repeat(scales, rows, 0), columns, 1)[: array.shape[0], : array.shape[1]]
        quotients = np.clip(array / wide, -largest, largest)
        elements = np.rint(quotients) if self.element == INT8 else quotients
        packed = {ELEMENTS: elements.astype(self.element), SCALES: scales}
        return packed | ({INPUT_SCALE: np.ones((1, 1), np.float32)} if self.has_static_rows else {})


def describe_quantised_rows(field: str, format: Scaled) -> str:
    """Return a sentence on the rows of linear layers that the field `field` of config.json says are quantised."""
    numbers = "int8" if format.element == INT8 else "fp8"
    kernels = (
        "mlp does so, with the static scales of the checkpoint"
        if format.has_static_rows
        else "mlp and the projections of attention do so"
    )
    return (
        f"config.json quantises input rows of linear layers to {numbers} ({field}); {kernels}, and other kernels "
        "multiply them in the dtype of activations."
    )


def check_scales(name: str, scales: np.ndarray, weight: str) -> None:
    """Raise ModelError unless all scales of the tensor `name` of a weight are finite and above 0."""
    is_wrong = ~(np.isfinite(scales) & (scales > 0))
    if is_wrong.any():
        raise ModelError(
            f"{name} contains {scales[is_wrong][0]}; scales are finite and above 0: quantise {weight} again"
        )


def take_input_scale(name: str, tensors: MutableMapping[str, np.ndarray]) -> np.ndarray | None:
    """Remove the static scale of the rows that the weight `name` multiplies from `tensors`.

    Returns:
        The scale, float32 [1, 1]; None if the checkpoint has none.

    Raises:
        ModelError: There are several such scales, or one that is not a finite number above 0.
    """
    scale = None
    for suffix in ACTIVATION_SUFFIXES:
        scale_name = name.rpartition(".")[0] + suffix
        if scale_name in tensors:
            scales = tensors.pop(scale_name)
            if scales.size != 1 or scales.dtype not in _SCALE_DTYPES.values():
                raise ModelError(
                    f"{scale_name} is {scales.dtype} {scales.shape}; a static scale of rows is one number, of "
                    f"{', '.join(_SCALE_DTYPES)}"
                )
            scale = scales.astype(np.float32).reshape(1, 1)
            check_scales(scale_name, scale, name)
    return scale


@dataclass(frozen=True)
class OffsetBytes:
    """Packing of int8 elements as bytes, each plus 128 (`format.Packing`)."""

    def unpack(
        self, format: Format, tensors: Mapping[str, np.ndarray], shape: Shape, rows: range, columns: range
    ) -> dict[str, np.ndarray]:
        """Return the stored tensors of `format` for the elements [rows, columns], see `format.Packing`."""
        stored = format.shard(tensors, shape, rows, columns)
        return {**stored, ELEMENTS: (stored[ELEMENTS] ^ np.uint8(128)).view(INT8)}


def check_shape(name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape) -> None:
    """Remove `<name>_shape` from `tensors`, if it is there; raise ModelError if it differs from a weight's shape."""
    listed = tuple(tensors.pop(f"{name}_shape", np.array(shape)).reshape(-1).tolist())
    if listed != shape:
        raise ModelError(f"{name}_shape contains {listed!r:.40}; config.json asks for {shape}")


def take_bytes(name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """Remove `<name>_packed` and `<name>_shape` from `tensors` and return the elements' bytes, uint8 [out, in], a view.

    `<name>_packed` has four bytes in each int32.

    Raises:
        ModelError: The tensor is not int32 with a quarter of the columns, rounded up, or `<name>_shape` differs.
    """
    packed_name = f"{name}_packed"
    packed, expected = tensors[packed_name], (shape[0], -(-shape[1] // 4))
    if packed.dtype != np.int32 or packed.shape != expected:
        raise ModelError(
            f"{packed_name} is {packed.dtype} {packed.shape}; int8 elements {shape} are packed as int32 {expected}"
        )
    check_shape(name, tensors, shape)
    tensors.pop(packed_name)
    return np.ascontiguousarray(packed).view(BYTE)[:, : shape[1]]
