"""Weight arrays of layers on a rank, and the checkpoint tensors from which they are made.

A layer describes each array that its kernels read as a `Weight` of one or several `Tensor`s. `model.loading.weights`
takes the arrays from a checkpoint; launches and plans read names, shapes and dtypes only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeVar, overload

import numpy as np

from model.errors import ModelError
from model.formats import Container, Format, QuantisedWeight
from model.formats import Weight as StoredWeight
from model.formats.format import ELEMENTS, Scope
from model.layers.launch import StepShape, Value, WeightDtypes
from model.layers.precision import FLOAT32, cast_weight, choose_weight_dtype
from model.layers.shard import Cut, MatrixCut, Reordered, Row, Shape, Shard, Transposed, Whole

T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """Checkpoint tensor of a weight: the selected elements, and the cut to a rank's part of them.

    name        name in the checkpoint
    shape       shape in the checkpoint
    cut         cut to a rank's part of the selected elements
    outputs     (first, end, period): the outputs first … end of each run of `period` outputs; None for all
    inputs      (first, end): the inputs first … end of a matrix; None for all
    transposed  whether the checkpoint stores [in, out] instead of [out, in]
    exact       whether the weight is float32 with any dtype of activations
    """

    name: str
    shape: Shape
    cut: Cut
    outputs: tuple[int, int, int] | None = None
    transposed: bool = False
    exact: bool = False
    inputs: tuple[int, int] | None = None

    def select(self, tensor: StoredWeight) -> StoredWeight:
        """Return the selected elements of the checkpoint's tensor for all ranks, [out, in] or [out]; not yet cut."""
        matrix = tensor.T if self.transposed else tensor
        if self.inputs is not None:
            matrix = matrix[:, self.inputs[0] : self.inputs[1]]
        if self.outputs is None:
            return matrix
        first, end, period = self.outputs
        if period == len(matrix):
            return matrix[first:end]
        inner_shape = matrix.shape[1:]
        return matrix.reshape(-1, period, *inner_shape)[:, first:end].reshape(-1, *inner_shape)

    @property
    def part_shape(self) -> Shape:
        """Shape of the selected elements of all ranks, [out, in] or [out]."""
        shape = self.shape[::-1] if self.transposed else self.shape
        if self.inputs is not None:
            shape = (shape[0], self.inputs[1] - self.inputs[0])
        if self.outputs is None:
            return shape
        first, end, period = self.outputs
        return (shape[0] // period * (end - first), *shape[1:])

    @property
    def can_stay_stored(self) -> bool:
        """Whether kernels can read the selected elements as a format stores them.

        They are one run of the checkpoint's outputs with all inputs, not transposed, and their `MatrixCut` cuts scales
        likewise.
        """
        is_run = self.inputs is None and (self.outputs is None or self.outputs[2] == self.shape[0])
        return is_run and not self.transposed and isinstance(self.cut, MatrixCut)

    def find_rank_shape(self, shard: Shard) -> Shape:
        """Return the shape of what `take` returns for a rank: its part of the selected outputs in the cut's layout."""
        return self.cut.shape(self.part_shape, shard)

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a copy of a rank's part of the selected elements of `weights[self.name]`, in the layout of `cut`.

        Its dtype is that of `choose_weight_dtype`: float32 for an `exact` tensor, the stored dtype with float32
        activations, bfloat16 with bfloat16 activations.
        """
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
    its layer. `partners` are the other matrices that the same launch multiplies, and `row_partners` those of them that
    multiply the same rows, see `Format.scope`.
    """

    name: str
    tensors: Sequence[Tensor]
    reader: tuple[str, str] | None = None
    component: str = ""
    partners: Sequence[Weight] = ()
    row_partners: Sequence[Weight] = ()

    def count_tensor_elements(self) -> dict[str, int]:
        """Return the number of elements of each whole checkpoint tensor of the weight by name, without `Zeros`."""
        tensors = (tensor for tensor in self.tensors if not isinstance(tensor, Zeros))
        return {tensor.name: prod(tensor.shape) for tensor in tensors}

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all elements, because no tensor's cut divides it."""
        cuts = (
            tensor.cut.cut if isinstance(tensor.cut, Reordered) else tensor.cut for tensor in self.tensors
        )
        return all(isinstance(cut, (Whole, Row, Transposed)) for cut in cuts)

    def compute_content_key(self, shard: Shard) -> object:
        """Return a hashable key that is equal for ranks whose arrays have the same elements, so they can share one."""
        return None if self.is_whole else shard.rank

    def shape(self, shard: Shard) -> Shape:
        """Return the shape of the array on a rank: the tensors' parts side by side along the last axis."""
        return _concatenate_shapes([tensor.find_rank_shape(shard) for tensor in self.tensors])

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a new array of a rank from checkpoint tensors by name, in the dtype of `choose_device_dtype`.

        Quantised tensors are widened, and `Zeros` are filled in.
        """
        dtype = self.choose_device_dtype(weights, activations)
        arrays = [
            np.zeros(tensor.find_rank_shape(shard), dtype)
            if isinstance(tensor, Zeros)
            else tensor.take(weights, shard, activations).astype(dtype, copy=False)
            for tensor in self.tensors
        ]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)

    def find_kernel_format(
        self, weights: Mapping[str, StoredWeight], parameters: KernelParameters
    ) -> Format | None:
        """Return the format whose stored tensors the kernel in `reader` reads; None if it reads one plain array.

        The kernel reads stored tensors if every tensor of the weight has the same quantised format and
        `can_stay_stored`, if the kernel has a parameter for each stored tensor, and if all weights in the format's
        `scope` have it. Otherwise it may read the `plain_rows_format`. `parameters` returns a kernel's parameter names.
        """
        return self._find_read_format(lambda weight: weight._find_common_format(weights), parameters)

    def _find_read_format(
        self, find_common_format: Callable[[Weight], Format | None], parameters: KernelParameters
    ) -> Format | None:
        """Return what `find_kernel_format` returns; `find_common_format` returns the format of a weight's tensors."""
        format = None if self.reader is None else find_common_format(self)
        while format is not None:
            partners = self._list_partners(format)
            if self._is_read_stored(format, parameters) and all(
                find_common_format(partner) == format for partner in partners
            ):
                return format
            format = format.plain_rows_format
        return None

    def _list_partners(self, format: Format) -> Sequence[Weight]:
        """Return the other weights in the `scope` of a format."""
        if format.scope is Scope.launch:
            return self.partners
        return self.row_partners if format.scope is Scope.rows else ()

    def _find_common_format(self, weights: Mapping[str, StoredWeight]) -> Format | None:
        """Return the quantised format of all tensors of the weight in a checkpoint; None if they have none in common.

        It is also None if a tensor cannot stay stored.
        """
        formats: set[Format | None] = set()
        for tensor in self.tensors:
            selected = None if isinstance(tensor, Zeros) else tensor.select(weights[tensor.name])
            if isinstance(selected, QuantisedWeight) and tensor.can_stay_stored:
                formats.add(selected.format)
            else:
                formats.add(None)
        return formats.pop() if len(formats) == 1 else None

    def _is_read_stored(self, format: Format, parameters: KernelParameters) -> bool:
        """Return whether the kernel in `reader` has a parameter for each `kernel_tensors` and `kernel_options`.

        It is one of the format's `kernels` too, if the format names any.
        """
        if self.reader is None or not format.kernel_tensors:
            return False
        kernel, parameter = self.reader
        if format.kernels is not None and kernel not in format.kernels:
            return False
        tensors = {parameter + _suffix(name) for name in format.kernel_tensors}
        return tensors.union(format.kernel_options) <= set(parameters(kernel))

    def find_planned_format(self, container: Container | None, parameters: KernelParameters) -> Format | None:
        """Return this weight's format in `container` if the kernel in `reader` reads its stored tensors, else None.

        Without a checkpoint the container's groups say which tensors are quantised. The other rules, and `parameters`,
        are those of `find_kernel_format`.
        """
        if container is None:
            return None
        return self._find_read_format(lambda weight: weight._plan_common_format(container), parameters)

    def _plan_common_format(self, container: Container) -> Format | None:
        """Return the format that a container's groups give all tensors of the weight, as `_find_common_format`."""
        formats = {
            container.find_format(tensor.name)
            if tensor.can_stay_stored and not isinstance(tensor, Zeros)
            else None
            for tensor in self.tensors
        }
        return formats.pop() if len(formats) == 1 else None

    def can_be_cut(self, format: Format, ranks: int) -> bool:
        """Return whether each of `ranks` tensor-parallel ranks gets whole blocks that share a scale, or a part of one.

        Tensors that others follow, along the last axis, have whole blocks of columns on a rank. Otherwise the weight is
        widened when it is loaded. The other weights in the format's `scope` can be cut too.
        """
        return self.find_cut_block(format, ranks) is None

    def find_cut_block(self, format: Format, ranks: int) -> tuple[int, int] | None:
        """Return (rows, columns) of the blocks of a weight [out, in] inside which a part of a rank begins or ends.

        It may be a block of another weight in the format's `scope`. None if each of `ranks` tensor-parallel ranks gets
        whole blocks, or a part of one. Tensors that others follow, along the last axis, need whole blocks of columns.
        """
        blocks = (
            spec.block
            for weight in (self, *self._list_partners(format))
            for index, tensor in enumerate(weight.tensors)
            for spec in format.describe_kernel_tensors(tensor.part_shape).values()
            if not isinstance(tensor.cut, MatrixCut)
            or not _cuts_into_blocks(tensor.cut, tensor.part_shape, ranks, spec.block)
            or (
                weight._is_followed(index) and tensor.find_rank_shape(Shard(0, ranks))[1] % spec.block[0] != 0
            )
        )
        return next(blocks, None)

    def _is_followed(self, index: int) -> bool:
        """Return whether the array has columns of other tensors after those of tensor `index`."""
        return index + 1 < len(self.tensors)

    def find_format(self, shard: Shard, dtypes: WeightDtypes) -> Format | None:
        """Return the format of the arrays that a rank holds; None for one plain or widened array."""
        format = dtypes.find_format(self.name)
        return format if format is not None and self.can_be_cut(format, shard.ranks) else None

    def take_stored(
        self, weights: Mapping[str, StoredWeight], shard: Shard, format: Format
    ) -> dict[str, np.ndarray]:
        """Return a rank's copies of the stored tensors that the kernel reads, cut without widening, by array name.

        The names are those of `describe`: the weight's name for the elements, and the name with a suffix such as
        `_scales`. `format` is the result of `find_kernel_format`.

        Raises:
            ModelError: The rank's part does not consist of whole blocks that share a scale.
        """
        stored_arrays: dict[str, list[np.ndarray]] = {name: [] for name in format.kernel_tensors}
        for tensor in self.tensors:
            selected, cut = tensor.select(weights[tensor.name]), tensor.cut
            assert isinstance(selected, QuantisedWeight) and isinstance(cut, MatrixCut)
            selection = cut.select(selected.shape, shard)
            kernel_tensors = format.pass_to_kernels(selected.cut_stored())
            for name, spec in format.describe_kernel_tensors(selected.shape).items():
                array = selection.to_entries(spec.block).take(kernel_tensors[name])
                stored_arrays[name].append(format.arrange(name, array))
        return {
            self.name + _suffix(name): arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
            for name, arrays in stored_arrays.items()
        }

    def dtype(self, dtypes: WeightDtypes) -> np.dtype:
        """Return the dtype of the plain or widened array in HBM: float32 if `exact`, else the entry in `dtypes`."""
        return FLOAT32 if self.tensors[0].exact else dtypes.find_dtype(self.name)

    def choose_device_dtype(self, weights: Mapping[str, StoredWeight], activations: np.dtype) -> np.dtype:
        """Return the dtype of the plain or widened array in HBM, for checkpoint tensors by name and activations.

        It is the common result of `choose_weight_dtype` for all tensors; float32 if they differ.
        """
        dtypes = {
            choose_weight_dtype(weights[tensor.name].dtype, activations, tensor.exact)
            for tensor in self.tensors
            if not isinstance(tensor, Zeros)
        }
        return dtypes.pop() if len(dtypes) == 1 else FLOAT32

    def describe(self, shard: Shard, dtypes: WeightDtypes) -> dict[str, tuple[Shape, np.dtype]]:
        """Return shape and dtype of each array that a rank holds for this weight, by array name.

        That is one array named like the weight. For a weight with a format in `dtypes` these are the format's stored
        tensors, with names such as `….w_up` and `….w_up_scales`.
        """
        format = self.find_format(shard, dtypes)
        if format is None:
            return {self.name: (self.shape(shard), self.dtype(dtypes))}
        arrays = {}
        for name in format.kernel_tensors:
            shapes = []
            for tensor in self.tensors:
                assert isinstance(tensor.cut, MatrixCut)
                spec = format.describe_kernel_tensors(tensor.part_shape)[name]
                shape = tensor.cut.select(tensor.part_shape, shard).to_entries(spec.block).shape
                shapes.append(format.arrange_shape(name, shape))
            arrays[self.name + _suffix(name)] = (_concatenate_shapes(shapes), spec.dtype)
        return arrays

    def value(self, step: StepShape) -> Value:
        """Return the single plain or widened array as an argument of a launch; see `arguments` for stored tensors."""
        return Value(self.name, self.shape(step.shard), self.dtype(step.weights))

    def arguments(self, parameter: str, step: StepShape) -> dict[str, Value]:
        """Return the arrays as arguments of a launch by the kernel's parameter names.

        The plain array or the elements are the argument `parameter`. If the kernel reads stored tensors, further
        arguments are `<parameter>_scales` and the like.
        """
        described = self.describe(step.shard, step.weights)
        return {
            name.replace(self.name, parameter, 1): Value(name, shape, dtype)
            for name, (shape, dtype) in described.items()
        }


def list_row_arguments(step: StepShape, *weights: Weight, divides_columns: bool = False) -> dict[str, bool]:
    """Return the arguments of a launch that quantise the rows that it multiplies; empty if rows stay as they are.

    Rows are quantised, `quantises_rows`, if a rank holds one of the weights in a format that does so. If several ranks
    divide the columns of the rows, the ranks may share the row maxima, `shares_row_maxima`.

    Args:
        step: The step.
        weights: The weights that the launch reads.
        divides_columns: Whether tensor-parallel ranks divide the columns of rows that the launch quantises.
    """
    formats = [
        format
        for weight in weights
        if (format := weight.find_format(step.shard, step.weights)) is not None and format.quantises_rows
    ]
    arguments = {"quantises_rows": True} if formats else {}
    if divides_columns and step.ranks > 1 and any(format.shares_row_maxima for format in formats):
        arguments["shares_row_maxima"] = True
    return arguments


class Numbered(Sequence[T]):
    """Sequence whose element i is `create(numbers[i])`, called at each read; layers may have very many experts."""

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


@lru_cache(maxsize=1024)
def _cuts_into_blocks(cut: MatrixCut, shape: Shape, ranks: int, block: tuple[int, int]) -> bool:
    """Return whether `Selection.to_entries` accepts the parts of all `ranks` ranks of a weight of a shape [out, in]."""
    try:
        for rank in range(ranks):
            cut.select(shape, Shard(rank, ranks)).to_entries(block)
    except ModelError:
        return False
    return True


def _suffix(stored_tensor: str) -> str:
    """Return what array names append for a stored tensor of a format: "_scales" for "scales", "" for the elements."""
    return "" if stored_tensor == ELEMENTS else f"_{stored_tensor}"


@dataclass(frozen=True)
class StackedWeight(Weight):
    """Weight array [a rank's experts, …] with one tensor for each expert; all tensors have the same shape."""

    component: str = "experts"

    def _is_followed(self, index: int) -> bool:
        """Return False: each tensor is a matrix of its own in the stack."""
        return False

    def count_tensor_elements(self) -> dict[str, int]:
        """Return one entry: the number of elements of all experts' tensors, under the first expert's tensor name."""
        first = self.tensors[0]
        return {first.name: len(self.tensors) * prod(first.shape)}

    def compute_content_key(self, shard: Shard) -> object:
        """Return a hashable key that is equal for ranks with the same experts and the same part of each of them."""
        return super().compute_content_key(shard), shard.expert_rank

    def _local_tensors(self, shard: Shard) -> Sequence[Tensor]:
        """Return the tensors of a rank's experts: an equal run of consecutive experts for each expert-parallel rank."""
        count = len(self.tensors) // shard.expert_ranks
        return self.tensors[shard.expert_rank * count : (shard.expert_rank + 1) * count]

    def shape(self, shard: Shard) -> Shape:
        """Return [experts of the rank, …], followed by the shape of a rank's part of one expert's tensor."""
        return (len(self._local_tensors(shard)), *self.tensors[0].find_rank_shape(shard))

    def find_planned_format(self, container: Container | None, parameters: KernelParameters) -> Format | None:
        """Return what `Weight.find_planned_format` returns for the first expert's tensor, as all have the same cut."""
        return Weight(self.name, self.tensors[:1], self.reader).find_planned_format(container, parameters)

    def find_cut_block(self, format: Format, ranks: int) -> tuple[int, int] | None:
        """Return what `Weight.find_cut_block` returns for the first expert's tensor, as all have the same cut."""
        return Weight(self.name, self.tensors[:1]).find_cut_block(format, ranks)

    def take_stored(
        self, weights: Mapping[str, StoredWeight], shard: Shard, format: Format
    ) -> dict[str, np.ndarray]:
        """Return a rank's copies of the stored tensors of its experts by array name, [experts of the rank, …] each.

        The names are those of `describe`. `format` is the result of `find_kernel_format`.

        Raises:
            ModelError: The rank's part does not consist of whole blocks that share a scale.
        """
        tensors = self._local_tensors(shard)
        stacks: dict[str, np.ndarray] = {}
        for index, tensor in enumerate(tensors):
            arrays = Weight(self.name, (tensor,)).take_stored(weights, shard, format)
            for name, array in arrays.items():
                if index == 0:
                    stacks[name] = np.empty((len(tensors), *array.shape), array.dtype)
                stacks[name][index] = array
        return stacks

    def describe(self, shard: Shard, dtypes: WeightDtypes) -> dict[str, tuple[Shape, np.dtype]]:
        """Return shape and dtype of each array that a rank holds, [experts of the rank, …], by array name.

        That is one array named like the weight, or the stored tensors of a format such as `….w_up_scales`.
        """
        if self.find_format(shard, dtypes) is None:
            return super().describe(shard, dtypes)
        count = len(self._local_tensors(shard))
        expert_arrays = Weight(self.name, self.tensors[:1]).describe(shard, dtypes)
        return {name: ((count, *shape), dtype) for name, (shape, dtype) in expert_arrays.items()}

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a new array of a rank, [experts of the rank, …], in the dtype that `choose_device_dtype` returns.

        Quantised experts are widened one at a time, so that only one widened copy is alive.
        """
        tensors = self._local_tensors(shard)
        shape = (len(tensors), *tensors[0].find_rank_shape(shard))
        result = np.empty(shape, self.choose_device_dtype(weights, activations))
        for index, tensor in enumerate(tensors):
            result[index] = tensor.take(weights, shard, activations)
        return result


@dataclass(frozen=True)
class StackedRow(StackedWeight):
    """Weight array [a rank's experts, length] with one vector for each expert."""

    def shape(self, shard: Shard) -> Shape:
        """Return [experts of the rank, length]."""
        return (len(self._local_tensors(shard)), self.tensors[0].find_rank_shape(shard)[1])

    def take(
        self, weights: Mapping[str, StoredWeight], shard: Shard, activations: np.dtype = FLOAT32
    ) -> np.ndarray:
        """Return a new array [experts of the rank, length], in the dtype that `choose_device_dtype` returns."""
        return super().take(weights, shard, activations)[:, 0]


def create_argument(weight: Weight | None, step: StepShape) -> Value | None:
    """Return `weight.value(step)`, the weight's array as an argument of a launch; None for a weight of None."""
    return None if weight is None else weight.value(step)
