"""Weight arrays of layers on a rank, and the checkpoint tensors from which they are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar, overload

import numpy as np

from model.formats import Format, QuantisedWeight
from model.formats import Weight as StoredWeight
from model.formats.format import ELEMENTS
from model.layers.launch import StepShape, Value, WeightDtypes
from model.layers.precision import FLOAT32, cast_weight, choose_weight_dtype
from model.layers.shard import Cut, MatrixCut, Reordered, Row, Shape, Shard, Transposed, Whole

T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """Checkpoint tensor of a weight: the selected outputs, and the cut to a rank's part of them.

    name        name in the checkpoint
    shape       shape in the checkpoint
    cut         cut to a rank's part of the selected outputs
    outputs     (first, end, period): the outputs first … end of each run of `period` outputs; None for all
    transposed  whether the checkpoint stores [in, out] instead of [out, in]
    exact       whether the weight is float32 with any dtype of activations
    """

    name: str
    shape: Shape
    cut: Cut
    outputs: tuple[int, int, int] | None = None
    transposed: bool = False
    exact: bool = False

    def select(self, tensor: StoredWeight) -> StoredWeight:
        """Return the selected outputs of the checkpoint's tensor, [out, in] or [out]."""
        matrix = tensor.T if self.transposed else tensor
        if self.outputs is None:
            return matrix
        first, end, period = self.outputs
        if period == len(matrix):
            return matrix[first:end]
        inner_shape = matrix.shape[1:]
        return matrix.reshape(-1, period, *inner_shape)[:, first:end].reshape(-1, *inner_shape)

    @property
    def part_shape(self) -> Shape:
        """Shape of the selected outputs, [out, in] or [out]."""
        shape = self.shape[::-1] if self.transposed else self.shape
        if self.outputs is None:
            return shape
        first, end, period = self.outputs
        return (shape[0] // period * (end - first), *shape[1:])

    def rank_shape(self, shard: Shard) -> Shape:
        """Return the shape of a rank's part."""
        return self.cut.shape(self.part_shape, shard)

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a copy of a rank's part, in the dtype that HBM has it in with `activations`."""
        return self.cut.take(cast_weight(self.select(weights[self.name]), activations, self.exact), shard)


@dataclass(frozen=True)
class Zeros(Tensor):
    """Zeros in a weight with other tensors, whose dtype they have; no checkpoint contains them."""


KernelParameters = Callable[[str], Collection[str]]
"""Function of a kernel's name that returns the names of its parameters."""


@dataclass(frozen=True)
class Weight:
    """Weight array on a rank: parts of one or several tensors, concatenated along the last axis.

    `reader` is the kernel that reads the weight and its parameter. The kernel gets a quantised weight in its stored
    tensors if it has a parameter for each of them. Otherwise, or without a reader, the weight is widened when it is
    loaded. `component` is the component under which plans count the weight (`plan.sizes`); empty for the component of
    its layer.
    """

    name: str
    tensors: Sequence[Tensor]
    reader: tuple[str, str] | None = None
    component: str = ""

    def tensor_sizes(self) -> dict[str, int]:
        """Return the number of elements of each checkpoint tensor by name."""
        tensors = (tensor for tensor in self.tensors if not isinstance(tensor, Zeros))
        return {tensor.name: prod(tensor.shape) for tensor in tensors}

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have the same elements."""
        cuts = (
            tensor.cut.cut if isinstance(tensor.cut, Reordered) else tensor.cut for tensor in self.tensors
        )
        return all(isinstance(cut, (Whole, Row, Transposed)) for cut in cuts)

    def content_key(self, shard: Shard) -> object:
        """Return a key that is equal for ranks with the same elements."""
        return None if self.is_whole else shard.rank

    def shape(self, shard: Shard) -> Shape:
        """Return the shape of the array on a rank."""
        return _concatenate_shapes([tensor.rank_shape(shard) for tensor in self.tensors])

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a copy of a rank's array from a checkpoint, in the dtype of `device_dtype`."""
        dtype = self.device_dtype(weights, activations)
        arrays = [
            np.zeros(tensor.rank_shape(shard), dtype)
            if isinstance(tensor, Zeros)
            else tensor.take(weights, shard, activations).astype(dtype, copy=False)
            for tensor in self.tensors
        ]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)

    def kernel_format(
        self, weights: Mapping[str, StoredWeight], parameters: KernelParameters
    ) -> Format | None:
        """Return the format whose stored tensors the kernel reads; None if it reads a plain or widened weight.

        All tensors of the weight must have this format, and cuts that are a `MatrixCut`.
        """
        if self.reader is None:
            return None
        formats: set[Format | None] = set()
        for tensor in self.tensors:
            selected = None if isinstance(tensor, Zeros) else tensor.select(weights[tensor.name])
            is_kept = isinstance(selected, QuantisedWeight) and isinstance(tensor.cut, MatrixCut)
            formats.add(selected.format if is_kept and isinstance(selected, QuantisedWeight) else None)
        format = formats.pop() if len(formats) == 1 else None
        if format is None or not format.kernel_tensors:
            return None
        kernel, parameter = self.reader
        names = {parameter + suffix for suffix in map(_suffix, format.kernel_tensors)}
        return format if names <= set(parameters(kernel)) else None

    def take_stored(
        self, weights: Mapping[str, StoredWeight], shard: Shard, format: Format
    ) -> dict[str, np.ndarray]:
        """Return a rank's arrays by name: the stored tensors that the kernel reads, cut without widening."""
        stored_arrays: dict[str, list[np.ndarray]] = {name: [] for name in format.kernel_tensors}
        for tensor in self.tensors:
            selected, cut = tensor.select(weights[tensor.name]), tensor.cut
            assert isinstance(selected, QuantisedWeight) and isinstance(cut, MatrixCut)
            selection, stored = cut.select(selected.shape, shard), selected.stored()
            for name, spec in format.describe_tensors(selected.shape).items():
                if name in stored_arrays:
                    stored_arrays[name].append(selection.to_entries(spec.block).take(stored[name]))
        return {
            self.name + _suffix(name): arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
            for name, arrays in stored_arrays.items()
        }

    def dtype(self, dtypes: WeightDtypes) -> np.dtype:
        """Return the dtype of the array, from the dtypes of all weights."""
        return FLOAT32 if self.tensors[0].exact else dtypes.dtype_of(self.name)

    def device_dtype(self, weights: Mapping[str, StoredWeight], activations: np.dtype) -> np.dtype:
        """Return the dtype of the array with a dtype of activations; float32 if its tensors have several dtypes."""
        dtypes = {
            choose_weight_dtype(weights[tensor.name].dtype, activations, tensor.exact)
            for tensor in self.tensors
            if not isinstance(tensor, Zeros)
        }
        return dtypes.pop() if len(dtypes) == 1 else FLOAT32

    def describe(self, shard: Shard, dtypes: WeightDtypes) -> dict[str, tuple[Shape, np.dtype]]:
        """Return shape and dtype of each array on a rank by name: one array, or the tensors of the kernel's format."""
        format = dtypes.format_of(self.name)
        if format is None:
            return {self.name: (self.shape(shard), self.dtype(dtypes))}
        arrays = {}
        for name in format.kernel_tensors:
            shapes = []
            for tensor in self.tensors:
                assert isinstance(tensor.cut, MatrixCut)
                spec = format.describe_tensors(tensor.part_shape)[name]
                shapes.append(tensor.cut.select(tensor.part_shape, shard).to_entries(spec.block).shape)
            arrays[self.name + _suffix(name)] = (_concatenate_shapes(shapes), spec.dtype)
        return arrays

    def value(self, step: StepShape) -> Value:
        """Return the array as an argument of a launch; for weights that the kernel reads plain or widened."""
        return Value(self.name, self.shape(step.shard), self.dtype(step.weights))

    def arguments(self, parameter: str, step: StepShape) -> dict[str, Value]:
        """Return the arrays as arguments of a launch: `parameter`, and `…_scales` etc. if the kernel reads a format."""
        described = self.describe(step.shard, step.weights)
        return {
            name.replace(self.name, parameter, 1): Value(name, shape, dtype)
            for name, (shape, dtype) in described.items()
        }


class Numbered(Sequence[T]):
    """Sequence whose elements are created from integers when they are read; layers may have very many experts."""

    def __init__(self, numbers: range, create: Callable[[int], T]) -> None:
        self._numbers, self._create = numbers, create

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Numbered[T]: ...

    def __getitem__(self, index: int | slice) -> T | Numbered[T]:
        numbers = self._numbers[index]
        return self._create(numbers) if isinstance(numbers, int) else Numbered(numbers, self._create)


def _concatenate_shapes(shapes: Sequence[Shape]) -> Shape:
    *first_sizes, widths = zip(*shapes)
    return (*(sizes[0] for sizes in first_sizes), sum(widths))


def _suffix(stored_tensor: str) -> str:
    """Return `_` and the name of a tensor of a format, such as `_scales`, or an empty string for the elements."""
    return "" if stored_tensor == ELEMENTS else f"_{stored_tensor}"


@dataclass(frozen=True)
class StackedWeight(Weight):
    """Weight array [a rank's experts, …] with one tensor for each expert; all tensors have the same shape."""

    component: str = "experts"

    def tensor_sizes(self) -> dict[str, int]:
        """Return the number of elements of all tensors under the name of the first expert's tensor."""
        first = self.tensors[0]
        return {first.name: len(self.tensors) * prod(first.shape)}

    def content_key(self, shard: Shard) -> object:
        """Return a key that is equal for ranks with the same elements."""
        return super().content_key(shard), shard.expert_rank

    def _local_tensors(self, shard: Shard) -> Sequence[Tensor]:
        """Return the tensors of a rank's experts."""
        count = len(self.tensors) // shard.expert_ranks
        return self.tensors[shard.expert_rank * count : (shard.expert_rank + 1) * count]

    def shape(self, shard: Shard) -> Shape:
        """Return the shape of the array on a rank."""
        return (len(self._local_tensors(shard)), *self.tensors[0].rank_shape(shard))

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a copy of a rank's array from a checkpoint; only one expert is widened at a time."""
        tensors = self._local_tensors(shard)
        shape = (len(tensors), *tensors[0].rank_shape(shard))
        result = np.empty(shape, self.device_dtype(weights, activations))
        for index, tensor in enumerate(tensors):
            result[index] = tensor.take(weights, shard, activations)
        return result


@dataclass(frozen=True)
class StackedRow(StackedWeight):
    """Weight array [a rank's experts, length] with one vector for each expert."""

    def shape(self, shard: Shard) -> Shape:
        """Return [experts, length] of a rank."""
        return (len(self._local_tensors(shard)), self.tensors[0].rank_shape(shard)[1])

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a copy [experts of the rank, length] from a checkpoint, in the dtype of `device_dtype`."""
        return super().take(weights, shard, activations)[:, 0]


def value_of(weight: Weight | None, step: StepShape) -> Value | None:
    """Return a weight as an argument of a launch; None for an absent weight."""
    return None if weight is None else weight.value(step)
