"""The arrays of weights that layers hold on a rank, and the tensors of a checkpoint that they are made of."""

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
from model.layers.precision import FLOAT32, as_held, held_dtype
from model.layers.shard import Cut, MatrixCut, Reordered, Row, Shape, Shard, Transposed, Whole

T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, the part of it that a weight is made of, and what one rank holds of that.

    The part is (first, end, period): the outputs first … end of every so many, all where `outputs` is None. A
    `transposed` tensor is [in, out]. An `exact` one is float32 whatever dtype the others have.
    """

    name: str
    shape: Shape
    cut: Cut
    outputs: tuple[int, int, int] | None = None
    transposed: bool = False
    exact: bool = False

    def select(self, tensor: StoredWeight) -> StoredWeight:
        """The part of the checkpoint's tensor, [out, in] or [out]."""
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
        """The shape of the part of the checkpoint's tensor, [out, in] or [out]."""
        shape = self.shape[::-1] if self.transposed else self.shape
        if self.outputs is None:
            return shape
        first, end, period = self.outputs
        return (shape[0] // period * (end - first), *shape[1:])

    def rank_shape(self, shard: Shard) -> Shape:
        """The shape of what a rank holds."""
        return self.cut.shape(self.part_shape, shard)

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """What a rank holds beside activations of a dtype, copied from a checkpoint."""
        return self.cut.take(as_held(self.select(weights[self.name]), activations, self.exact), shard)


@dataclass(frozen=True)
class Zeros(Tensor):
    """Zeros beside parts of other tensors, whose dtype they take; no checkpoint holds them."""


KernelParameters = Callable[[str], Collection[str]]
"""The parameter names of a kernel, by its name."""


@dataclass(frozen=True)
class Weight:
    """An array of weights that one rank holds: parts of one or several tensors, side by side.

    `reader` is the kernel that reads it, and the parameter: a quantised weight goes there in its stored tensors if the
    kernel has a parameter for each of them. Without a reader it is widened when it is loaded. `component` is the
    component of the model that plans count it to (`plan.sizes`), by default that of its layer.
    """

    name: str
    tensors: Sequence[Tensor]
    reader: tuple[str, str] | None = None
    component: str = ""

    def tensor_sizes(self) -> dict[str, int]:
        """Return the elements of the checkpoint's tensors, by their names."""
        tensors = (tensor for tensor in self.tensors if not isinstance(tensor, Zeros))
        return {tensor.name: prod(tensor.shape) for tensor in tensors}

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the same elements."""
        cuts = (
            tensor.cut.cut if isinstance(tensor.cut, Reordered) else tensor.cut for tensor in self.tensors
        )
        return all(isinstance(cut, (Whole, Row, Transposed)) for cut in cuts)

    def content_key(self, shard: Shard) -> object:
        """What ranks have in common that hold the same elements."""
        return None if self.is_whole else shard.rank

    def shape(self, shard: Shard) -> Shape:
        """The shape of the array on a rank."""
        return _side_by_side([tensor.rank_shape(shard) for tensor in self.tensors])

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """The array of a rank, copied from a checkpoint; parts of several dtypes have the one that holds them all."""
        dtype = self.held_dtype(weights, activations)
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
        """Return the format whose stored tensors the kernel reads; None where it reads a plain or widened weight.

        All tensors of the weight have to have the format, and cuts that select outputs and inputs.
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
        """Return the arrays of a rank by name: the stored tensors that the kernel reads, cut without widening."""
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
        """The array's dtype among those of all weights."""
        return FLOAT32 if self.tensors[0].exact else dtypes.dtype_of(self.name)

    def held_dtype(self, weights: Mapping[str, StoredWeight], activations: np.dtype) -> np.dtype:
        """The dtype of the array beside activations of a dtype, which holds all of the checkpoint's tensors."""
        dtypes = {
            held_dtype(weights[tensor.name].dtype, activations, tensor.exact)
            for tensor in self.tensors
            if not isinstance(tensor, Zeros)
        }
        return dtypes.pop() if len(dtypes) == 1 else FLOAT32

    def describe(self, shard: Shard, dtypes: WeightDtypes) -> dict[str, tuple[Shape, np.dtype]]:
        """Return the shapes and dtypes of the arrays on a rank, by their names."""
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
            arrays[self.name + _suffix(name)] = (_side_by_side(shapes), spec.dtype)
        return arrays

    def value(self, step: StepShape) -> Value:
        """The array as an argument of a launch, of a weight that the kernel reads plain or widened."""
        return Value(self.name, self.shape(step.shard), self.dtype(step.weights))

    def arguments(self, parameter: str, step: StepShape) -> dict[str, Value]:
        """Return the arrays as arguments of a launch: the parameter, and where the kernel reads them `…_scales` etc."""
        described = self.describe(step.shard, step.weights)
        return {
            name.replace(self.name, parameter, 1): Value(name, shape, dtype)
            for name, (shape, dtype) in described.items()
        }


class Numbered(Sequence[T]):
    """One thing for each of some numbers, made when it is read: the experts of a layer may be very many."""

    def __init__(self, numbers: range, make: Callable[[int], T]) -> None:
        self._numbers, self._make = numbers, make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Numbered[T]: ...

    def __getitem__(self, index: int | slice) -> T | Numbered[T]:
        numbers = self._numbers[index]
        return self._make(numbers) if isinstance(numbers, int) else Numbered(numbers, self._make)


def _side_by_side(shapes: Sequence[Shape]) -> Shape:
    *first_sizes, widths = zip(*shapes)
    return (*(sizes[0] for sizes in first_sizes), sum(widths))


def _suffix(stored_tensor: str) -> str:
    """Return what the names of a stored tensor's array and parameter have behind those of the elements."""
    return "" if stored_tensor == ELEMENTS else f"_{stored_tensor}"


@dataclass(frozen=True)
class StackedWeight(Weight):
    """Tensors of one shape, one of each expert of a rank, one behind the other: [experts, …]."""

    component: str = "experts"

    def tensor_sizes(self) -> dict[str, int]:
        """Return the elements of the tensors of all experts, by the name of the first one's."""
        first = self.tensors[0]
        return {first.name: len(self.tensors) * prod(first.shape)}

    def content_key(self, shard: Shard) -> object:
        """What ranks have in common that hold the same elements."""
        return super().content_key(shard), shard.expert_rank

    def _local_tensors(self, shard: Shard) -> Sequence[Tensor]:
        """Those of the experts that a rank holds."""
        count = len(self.tensors) // shard.expert_ranks
        return self.tensors[shard.expert_rank * count : (shard.expert_rank + 1) * count]

    def shape(self, shard: Shard) -> Shape:
        """The shape of the array on a rank."""
        return (len(self._local_tensors(shard)), *self.tensors[0].rank_shape(shard))

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """The array of a rank, copied from a checkpoint, expert by expert."""
        tensors = self._local_tensors(shard)
        result = np.empty(
            (len(tensors), *tensors[0].rank_shape(shard)), self.held_dtype(weights, activations)
        )
        for index, tensor in enumerate(tensors):
            result[index] = tensor.take(weights, shard, activations)
        return result


@dataclass(frozen=True)
class StackedRow(StackedWeight):
    """Vectors of one length, one of each expert: the rows of a matrix."""

    def shape(self, shard: Shard) -> Shape:
        """[experts, length] on a rank."""
        return (len(self._local_tensors(shard)), self.tensors[0].rank_shape(shard)[1])

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """The matrix of a rank, copied from a checkpoint."""
        return super().take(weights, shard, activations)[:, 0]


def value_of(weight: Weight | None, step: StepShape) -> Value | None:
    """The array as an argument of a launch, where there is one."""
    return None if weight is None else weight.value(step)
