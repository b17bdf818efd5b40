"""Interface of stored number formats, and weights that are still in their stored tensors.

`model.loading.checkpoint` makes a `QuantisedWeight` for each weight that a checkpoint stores quantised. Cuts in
`model.layers.shard` slice it like an array. A block is a rectangle of elements that share one entry of a stored tensor,
such as a scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum
from math import lcm
from typing import Any, ClassVar, Protocol

import numpy as np

from model.errors import ModelError

Shape = tuple[int, ...]
ELEMENTS, SCALES = "elements", "scales"
"""Names of the stored tensors of a weight; a format may have further tensors."""
INPUT_SCALE = "input_scale"
"""Name of the stored tensor with the static scale of the rows that a weight multiplies."""

_ROWS_AT_ONCE = 256
"""Rows that are widened at a time; 256 rows of 18,432 columns take 19 MB in float32."""


@dataclass(frozen=True)
class TensorSpec:
    """Stored tensor of a weight: shape, dtype, and the block of the weight for each entry.

    An entry is an index pair of the first two axes. `block` is (rows, columns) of the weight [out, in]. The last block
    of an axis is shorter if the weight is no multiple of the block.
    """

    shape: Shape
    dtype: np.dtype
    block: tuple[int, int] = (1, 1)


class ConfigFields(Protocol):
    """Fields of the JSON object `quantization_config`, as formats read them (`model.config.Fields`)."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all fields."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, default: Any) -> Any:
        """Return the value of a field unchecked, or the default if it is absent or null."""

    def table(self, name: str) -> ConfigFields:
        """Return the object in a field.

        Raises:
            ModelError: The value is no object.
        """

    def count(self, name: str, default: int | None = None) -> int:
        """Return the positive integer in a field, or the default if it is absent or null.

        Raises:
            ModelError: The value is no positive integer, or there is neither a value nor a default.
        """

    def pair(self, name: str) -> tuple[int, int]:
        """Return the two positive integers in a field.

        Raises:
            ModelError: The value is not a list of two positive integers.
        """

    def unsupported(self, name: str, message: str) -> None:
        """Record, without raising, that no format supports the value of the field `name`; `message` says why."""


class ChipLimits(Protocol):
    """Capabilities of a chip on which formats depend (`simulate.hardware.Hardware`)."""

    @property
    def matmul_e4m3fn(self) -> bool:
        """Whether the Tensor engine multiplies float8_e4m3fn in place of float8_e4m3."""

    @property
    def mx(self) -> bool:
        """Whether the Tensor engine multiplies MX formats."""


class Scope(Enum):
    """Matrices of a launch that the kernel reads in a format together, or none of them."""

    matrix = "matrix"
    """Each matrix for itself."""
    rows = "rows"
    """The matrices that multiply the same rows, such as gate and up."""
    launch = "launch"
    """All matrices of the launch."""


class Container(Protocol):
    """Reader of the quantised weights of a checkpoint, as `quantization_config` of its config.json describes them.

    Every `Format` is the container of checkpoints whose weights all have that format. Other containers choose a format
    for each weight. Containers with `is_general` are read in all model families, other containers in families whose
    registry row names them.
    """

    is_general: ClassVar[bool] = True

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the container or format, as `quant_method` of config.json."""

    @classmethod
    @abstractmethod
    def from_config(cls, quantization_config: ConfigFields) -> Container | None:
        """Return the container that `quantization_config` of config.json describes; None if it is unsupported.

        Unsupported values are recorded with `quantization_config.unsupported`.

        Raises:
            ModelError: A field has a wrong type.
        """

    @property
    @abstractmethod
    def formats(self) -> tuple[Format, ...]:
        """Formats of the container's weights."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what kernels compute otherwise than config.json says; none for most formats."""
        return ()

    def adapt_to_chip(self, chip: ChipLimits) -> Container:
        """Return the container as kernels of a chip read its weights; most are the same for all chips."""
        return self

    def share_row_maxima(self) -> Container:
        """Return the container whose formats share row maxima where they compute a scale for each row."""
        return self

    @abstractmethod
    def find_format(self, name: str) -> Format | None:
        """Return the format that config.json gives to the matrix `name`, such as "lm_head.weight"; None for plain."""

    @abstractmethod
    def from_checkpoint(
        self, name: str, tensors: MutableMapping[str, np.ndarray], shape: Shape, dtype: np.dtype
    ) -> QuantisedWeight | None:
        """Remove the stored tensors of a weight from `tensors` and return the weight that they describe.

        Args:
            name: The weight's name in the layers.
            tensors: The checkpoint's tensors, mapped from its files.
            shape: The weight's shape in the layers.
            dtype: The dtype of weights that are not quantised, to which the widened weight is rounded.

        Returns:
            The weight; None if the checkpoint stores it plainly or not at all, and then no tensor is removed.

        Raises:
            ModelError: A tensor is missing, or has a wrong shape or dtype.
        """

    def check_weights(self, quantised: Collection[str], plain: Collection[str]) -> None:
        """Check the names of all weights of a checkpoint against config.json; a format has nothing to check.

        Args:
            quantised: Names of the weights that `from_checkpoint` returned.
            plain: Names of the other weights.

        Raises:
            ModelError: A weight is quantised, or plain, against what config.json says.
        """
        return None


class Format(Container, Protocol):
    """Storage of a weight [out, in] in one or several tensors, from which `widen` computes its numbers.

    `kernel_tensors` are the stored tensors, elements first, that a kernel with parameters for all of them reads: for a
    parameter `w_up` these are `w_up`, `w_up_scales` and so on. Other kernels get the widened weight. All kernels get
    the widened weight if the tuple is empty. Kernels multiply by one scale for each output, and `mlp` also by scales of
    groups of 4-bit inputs: `pass_to_kernels` converts the stored tensors where a checkpoint has them otherwise.
    """

    @property
    def formats(self) -> tuple[Format, ...]:
        """This format alone."""
        return (self,)

    def find_format(self, name: str) -> Format | None:
        """Return this format for every name."""
        return self

    def adapt_to_chip(self, chip: ChipLimits) -> Format:
        """Return the format as kernels of a chip read its weights."""
        return self

    @property
    def depends_on_chip(self) -> bool:
        """Whether `adapt_to_chip` returns another format for some chips."""
        return False

    @property
    def kernel_tensors(self) -> tuple[str, ...]:
        """Stored tensors that kernels read, elements first; empty if kernels get the widened weight."""
        return ()

    @property
    def row_dtype(self) -> np.dtype | None:
        """Dtype of 8 bits to which kernels with the option `quantises_rows` round rows before products; None: none."""
        return None

    @property
    def quantises_rows(self) -> bool:
        """Whether rows are rounded to `row_dtype` before products."""
        return self.row_dtype is not None

    @property
    def shares_row_maxima(self) -> bool:
        """Whether rows whose columns ranks divide have the scales of the columns of all ranks, not of each rank's."""
        return False

    def share_row_maxima(self) -> Format:
        """Return the format with `shares_row_maxima` if it computes a scale for each row, else the format itself."""
        return self

    @property
    def row_block(self) -> int | None:
        """Number of consecutive elements that share a scale in rounded rows, a power of two; None for whole rows."""
        return None

    @property
    def scope(self) -> Scope:
        """Matrices that have the format together: all of a launch that rounds their rows."""
        return Scope.launch if self.quantises_rows else Scope.matrix

    @property
    def plain_rows_format(self) -> Format | None:
        """Format of the same elements with rows as they are; None: without rounded rows kernels get the weight widened.

        It is the format of kernels that cannot apply static scales, and of launches with matrices of other formats.
        """
        return None

    @property
    def kernels(self) -> tuple[str, ...] | None:
        """Kernels that read the format; None for all that have the parameters."""
        return None

    @property
    def kernel_options(self) -> tuple[str, ...]:
        """Parameters that a kernel has, besides those of the `kernel_tensors`, if it reads weights of this format."""
        return ()

    @abstractmethod
    def describe_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return the descriptions of the stored tensors of a weight of a shape [out, in], by their names in the format.

        The names are "elements", mostly "scales", and others of the format.
        """

    @abstractmethod
    def widen(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the numbers of a weight from all its stored tensors by name, as a new array float32 [out, in].

        This function is the definition of the format.
        """

    @abstractmethod
    def pack(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return stored tensors by name for float32 numbers [out, in], the opposite of `widen`.

        Each number is rounded to the nearest that the format has.
        """

    def describe_kernel_tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """Return descriptions of the `kernel_tensors` of a weight [out, in], as `pass_to_kernels` returns them."""
        specs = self.describe_tensors(shape)
        return {name: specs[name] for name in self.kernel_tensors}

    def pass_to_kernels(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the `kernel_tensors` of a weight or of a part, made from its stored tensors."""
        return {name: tensors[name] for name in self.kernel_tensors}

    def arrange(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return a rank's part of the kernel tensor `name`, as its cut lays it out, in the order that kernels read."""
        return array

    def arrange_shape(self, name: str, shape: Shape) -> Shape:
        """Return the shape of what `arrange` returns for an array of a shape."""
        return shape

    def shard(
        self, tensors: Mapping[str, np.ndarray], shape: Shape, rows: range, columns: range
    ) -> dict[str, np.ndarray]:
        """Return the entries of stored tensors for the elements [rows, columns] of a weight, as views by name.

        A stored tensor with one entry for each block of the weight is cut to the blocks that contain these elements.

        Args:
            tensors: Stored tensors of the whole weight by name.
            shape: Shape [out, in] of the whole weight.
            rows: Outputs of the part.
            columns: Inputs of the part.

        Raises:
            ModelError: A range begins inside a block and ends after it; the blocks of a part must begin with the part.
        """
        return {
            name: tensors[name][slice_blocks(rows, spec.block[0]), slice_blocks(columns, spec.block[1])]
            for name, spec in self.describe_tensors(shape).items()
        }


class Packing(Protocol):
    """Arrangement of a weight's tensors in files where it differs from the stored tensors of the weight's format."""

    def unpack(
        self, format: Format, tensors: Mapping[str, np.ndarray], shape: Shape, rows: range, columns: range
    ) -> dict[str, np.ndarray]:
        """Return what `Format.shard` returns for the elements [rows, columns] of a weight of a shape [out, in].

        Args:
            format: The weight's format.
            tensors: Tensors of the whole weight as files have them, by names of this packing.
            shape: Shape [out, in] of the whole weight.
            rows: Outputs of the part.
            columns: Inputs of the part.
        """


@dataclass(frozen=True)
class QuantisedWeight:
    """Weight, or part of a weight, in its stored tensors; `np.asarray` widens it, and a slice only its elements.

    The class has the methods of an array that cuts use. `rows` and `columns` are ranges of the whole weight [out, in],
    whose stored tensors are `tensors`. If it `is_transposed`, its shape is [in, out]. Widened numbers are rounded once
    to `dtype`. With a `packing`, `tensors` are those of the files, and parts are unpacked when they are used.
    """

    format: Format
    tensors: Mapping[str, np.ndarray]
    rows: range
    columns: range
    dtype: np.dtype
    is_transposed: bool = False
    whole_shape: tuple[int, int] = (0, 0)
    packing: Packing | None = None

    @classmethod
    def from_tensors(
        cls,
        format: Format,
        tensors: Mapping[str, np.ndarray],
        shape: Shape,
        dtype: np.dtype,
    ) -> QuantisedWeight:
        """Return the whole weight of a shape [out, in] with these stored tensors; it widens to `dtype`."""
        rows, columns = shape
        return cls(format, tensors, range(rows), range(columns), dtype, whole_shape=(rows, columns))

    @property
    def input_scale(self) -> np.ndarray | None:
        """Static scale of the rows that the weight multiplies, float32 [1, 1]; None if each row has its own, or none.

        It is the scale in the files, for numbers of their dtype.
        """
        return self.tensors.get(INPUT_SCALE)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [out, in], or [in, out] of a transposed weight."""
        shape = len(self.rows), len(self.columns)
        return shape[::-1] if self.is_transposed else shape

    @property
    def ndim(self) -> int:
        """Number of axes, 2."""
        return 2

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.columns)

    @property
    def T(self) -> QuantisedWeight:
        """Transpose, still in its stored tensors."""
        return replace(self, is_transposed=not self.is_transposed)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | tuple[slice, slice]) -> QuantisedWeight:
        slices = key if isinstance(key, tuple) else (key, slice(None))
        rows, columns = slices[::-1] if self.is_transposed else slices
        return replace(self, rows=self.rows[rows], columns=self.columns[columns])

    def astype(self, dtype: Any, copy: bool = False) -> QuantisedWeight:
        """Return the weight, still in its stored tensors, with another dtype for widened numbers; ignores `copy`."""
        return replace(self, dtype=np.dtype(dtype))

    def reshape(self, *shape: int) -> np.ndarray:
        """Return the widened elements as a plain array of the shape `shape`, in the order of this weight's axes."""
        return np.asarray(self).reshape(*shape)

    def cut_stored(self) -> dict[str, np.ndarray]:
        """Return the entries of the stored tensors for this part of the weight, by name, never transposed.

        Raises:
            ModelError: The part begins inside a block and ends after it.
        """
        return self._shard(self.rows, self.columns)

    def _shard(self, rows: range, columns: range) -> dict[str, np.ndarray]:
        """Return the entries of the format's stored tensors for elements [rows, columns] of the whole weight."""
        if self.packing is not None:
            return self.packing.unpack(self.format, self.tensors, self.whole_shape, rows, columns)
        return self.format.shard(self.tensors, self.whole_shape, rows, columns)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        wide = self.to_array()
        return wide if dtype is None else wide.astype(dtype, copy=False)

    def to_array(self) -> np.ndarray:
        """Return the numbers of this part as a new array of `shape` in `dtype`; numbers out of range are infinite."""
        result = np.empty((len(self.rows), len(self.columns)), self.dtype)
        specs = self.format.describe_tensors(self.whole_shape)
        row_block, column_block = (lcm(*(spec.block[axis] for spec in specs.values())) for axis in (0, 1))
        for rows in _split_into_ranges(self.rows, specs[ELEMENTS].block[0], row_block, _ROWS_AT_ONCE):
            for columns in _split_into_ranges(
                self.columns, specs[ELEMENTS].block[1], column_block, self.whole_shape[1]
            ):
                numbers = self.format.widen(self._shard(rows, columns))
                kept_rows, kept_columns = _intersect(rows, self.rows), _intersect(columns, self.columns)
                with np.errstate(over="ignore"):
                    result[_slice_within(kept_rows, self.rows), _slice_within(kept_columns, self.columns)] = (
                        numbers[_slice_within(kept_rows, rows), _slice_within(kept_columns, columns)]
                    )
        return result.T if self.is_transposed else result


Weight = np.ndarray | QuantisedWeight
"""A tensor of the layers: plain, or in the tensors of a format."""


def slice_blocks(elements: range, block: int) -> slice:
    """Return the slice of blocks, of `block` elements each, that contain a range of elements along an axis.

    Raises:
        ModelError: The range begins inside a block and ends after it.
    """
    if not elements:
        return slice(0, 0)
    first, last = elements.start // block, (elements.stop - 1) // block
    if elements.start % block and first != last:
        raise ModelError(
            f"elements {elements.start} to {elements.stop} of a quantised weight begin inside a block of {block} "
            "elements; a part of a weight begins with a block, or is inside one"
        )
    return slice(first, last + 1)


def _split_into_ranges(elements: range, unit: int, block: int, most: int) -> Iterator[range]:
    """Yield ranges, in order, that together cover `elements`, each of at most `most` elements or of one unit.

    A range consists of whole units of `unit` elements, so the first and the last range may go beyond `elements`. It
    begins with a block of `block` elements, or is inside one block.
    """
    first, end = elements.start - elements.start % unit, elements.stop + -elements.stop % unit
    most = max(unit, most - most % unit)
    while first < end:
        end_of_block = first - first % block + block
        if first % block or most < block:
            last = min(end, end_of_block, first + most)
        else:
            last = min(end, first + most // block * block)
        yield range(first, last)
        first = last


def _intersect(one: range, other: range) -> range:
    """Return the intersection of two ranges with step 1."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _slice_within(inner: range, outer: range) -> slice:
    """Return the slice of an array over `outer` that has the elements of `inner`, a range inside `outer`."""
    return slice(inner.start - outer.start, inner.stop - outer.start)
