"""Recipes of operands: strided slices of the tensors of checkpoint files, which a bundle's program follows.

An operand is an array of a weight as a kernel takes it: the plain weight, or the elements and the scales of a weight of
8 bits. Recipes are derived from the loader: each weight is loaded from arrays with element ids in place of values, so
the result tells the source of every element of the operand.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod

import numpy as np
import safetensors

from model.commands.bundle.random_weights import DrawnWeights
from model.config import ModelConfig
from model.device.bundling import STORED, Operand, Piece, WeightFile
from model.errors import ModelError
from model.families import compose
from model.formats import Format, QuantisedWeight, Scaled
from model.formats.format import ELEMENTS, INPUT_SCALE, SCALES
from model.formats.scaled import ACTIVATION_SUFFIXES, INT8, SCALE_SUFFIXES
from model.layers.weight import Weight, Zeros
from model.loading.checkpoint import Checkpoint
from model.loading.weights import RankWeights
from model.network import Network

_SOURCE_SUFFIXES = {ELEMENTS: "", SCALES: ":scales", INPUT_SCALE: ":input_scale"}
"""Suffixes of the names of stored tensors among the sources of tensors."""

_MOST_PIECES = 4096
"""Most pieces of an operand; a projection that is reordered within each of 128 heads has 256."""


@dataclass(frozen=True)
class _Source:
    """Where the elements of a layer's tensor are: in a tensor of a file, from its element `first` on."""

    tensor: str
    first: int


def list_weight_files(checkpoint: Checkpoint) -> tuple[WeightFile, ...]:
    """Return the name, the bytes and the SHA-256 digest of each file of a checkpoint."""
    files = []
    for path in checkpoint.files:
        digest = sha256()
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(1 << 22), b""):
                digest.update(chunk)
            files.append(WeightFile(path.name, file.tell(), digest.hexdigest()))
    return tuple(files)


def build_operands(
    config: ModelConfig, checkpoint: Checkpoint, rank_weights: RankWeights, names: Container[str]
) -> tuple[Operand, ...]:
    """Return the recipes of the arrays in `names`, in the order of the network.

    Args:
        config: The model.
        checkpoint: The tensors.
        rank_weights: The loaded weights of the rank, whose dtypes, shapes and digests the recipes have.
        names: Names of the rank's arrays.

    Raises:
        ModelError: A weight is computed when it is loaded, such as one that is widened or packed, or an operand has
        more than 4,096 pieces.
    """
    network = compose(config)
    sources = _find_sources(network, checkpoint)
    weights = {weight.name: weight for weight in network.weights}
    operands = []
    for name, weight in weights.items():
        format = rank_weights.formats.get(name)
        if name not in names:
            continue
        if format is None:
            _check_plain(weight, checkpoint)
            ids, factors = _load_ids(weight, rank_weights), {name: 1.0}
        else:
            ids, factors = _load_stored_ids(weight, format, checkpoint, rank_weights)
        for array_name, factor in factors.items():
            array = rank_weights.arrays[array_name]
            operands.append(
                Operand(
                    array_name,
                    array.dtype.name,
                    array.shape,
                    sha256(array.tobytes()).hexdigest(),
                    _build_pieces(array_name, ids.arrays[array_name], ids.starts, sources),
                    factor,
                )
            )
    return tuple(operands)


def _find_sources(network: Network, checkpoint: Checkpoint) -> dict[str, _Source]:
    """Return the source in the checkpoint's files of each tensor, by the name that layers have for it.

    The scales of a weight of 8 bits have the name of the weight and one of `_SOURCE_SUFFIXES`. A tensor of
    `DrawnWeights` is its own source.

    Raises:
        ModelError: A file has a tensor packed.
    """
    if isinstance(checkpoint, DrawnWeights):
        return {name: _Source(name, 0) for name in checkpoint}
    stored: set[str] = set()
    for path in checkpoint.files:
        with safetensors.safe_open(path, framework="np") as file:
            stored |= {name for name in file.keys() if file.get_slice(name).get_dtype() in STORED}  # noqa: SIM118
    sources = {name: _Source(name, 0) for name in checkpoint if name in stored}
    prefix = network.bare_prefix
    for name in checkpoint:
        if prefix and name.removeprefix(prefix) in stored:
            sources.setdefault(name, _Source(name.removeprefix(prefix), 0))
    shapes = network.list_layer_tensor_shapes()
    for stack, members in network.stacks.items():
        if stack in stored:
            for index, member in enumerate(members):
                sources[member] = _Source(stack, index * prod(shapes[member]))
    for name in checkpoint:
        if name not in sources:
            raise ModelError(
                f"{name} cannot be bundled: its file holds it packed, and an instance copies or rounds weights alone"
            )
    for name in list(sources):
        weight = sources[name].tensor
        module = weight.rpartition(".")[0]
        for scale_name, tensors in (
            (SCALES, [weight + suffix for suffix in SCALE_SUFFIXES]),
            (INPUT_SCALE, [module + suffix for suffix in ACTIVATION_SUFFIXES]),
        ):
            for tensor in stored.intersection(tensors):
                sources[name + _SOURCE_SUFFIXES[scale_name]] = _Source(tensor, 0)
    return sources


@dataclass(frozen=True)
class _Ids:
    """Arrays of a rank with element ids in place of values, by name; and the first id of each tensor, ascending.

    An id of 0 marks an element without source.
    """

    arrays: Mapping[str, np.ndarray]
    starts: Sequence[tuple[int, str]]


def _check_plain(weight: Weight, checkpoint: Checkpoint) -> None:
    """Raise ModelError if a weight is widened when it is loaded: an instance copies and rounds numbers alone."""
    for tensor in weight.tensors:
        if not isinstance(tensor, Zeros) and isinstance(checkpoint[tensor.name], QuantisedWeight):
            raise ModelError(
                f"{tensor.name} cannot be bundled: its kernel gets it widened, and an instance copies weights of 8 "
                "bits with a scale for each output or tensor, or plain ones; bundle a model of these"
            )


def _load_ids(weight: Weight, rank_weights: RankWeights) -> _Ids:
    """Return the ids of a plain weight of a rank."""
    element_ids: dict[str, np.ndarray] = {}
    starts: list[tuple[int, str]] = []
    first = 1  # an id of 0 marks an element without source
    elements = sum(prod(tensor.shape) for tensor in weight.tensors)
    dtype = np.int32 if elements < 2**31 - 1 else np.int64
    for tensor in weight.tensors:
        if isinstance(tensor, Zeros) or tensor.name in element_ids:
            continue
        starts.append((first, tensor.name))
        ids = np.arange(first, first + prod(tensor.shape), dtype=dtype)
        element_ids[tensor.name] = ids.reshape(tensor.shape)
        first += ids.size
    integers = replace(weight, tensors=tuple(replace(tensor, exact=False) for tensor in weight.tensors))
    return _Ids({weight.name: integers.take(element_ids, rank_weights.shard)}, starts)


def _load_stored_ids(
    weight: Weight, format: Format, checkpoint: Checkpoint, rank_weights: RankWeights
) -> tuple[_Ids, dict[str, float]]:
    """Return the ids of the elements and scales of a weight of 8 bits, and the factor of each array by name.

    Elements of fp8 are halved for chips that multiply float8_e4m3, so that their scales are doubled.

    Raises:
        ModelError: The weight has another format than `Scaled` with a scale for each output or tensor.
    """
    if not isinstance(format, Scaled) or SCALES not in format.kernel_tensors:
        raise ModelError(
            f"{weight.name} cannot be bundled: its format is computed when it is loaded, and an instance copies "
            "weights of 8 bits with a scale for each output or tensor alone"
        )
    # The loader changes neither int8 elements nor their scales, so that ids come out as they went in.
    integers = replace(format, element=INT8)
    id_weights: dict[str, QuantisedWeight] = {}
    starts: list[tuple[int, str]] = []
    first = 1
    for tensor in weight.tensors:
        stored = checkpoint[tensor.name]
        assert isinstance(stored, QuantisedWeight), "a stored format has quantised tensors"
        if tensor.name in id_weights:
            continue
        tensors = {}
        for name in format.kernel_tensors:
            starts.append((first, tensor.name + _SOURCE_SUFFIXES[name]))
            size = stored.tensors[name].size
            tensors[name] = np.arange(first, first + size).reshape(stored.tensors[name].shape)
            first += size
        id_weights[tensor.name] = replace(stored, format=integers, tensors=tensors)
    arrays = weight.take_stored(id_weights, rank_weights.shard, integers)
    factors = {name: 2.0 if format.has_halves and name != weight.name else 1.0 for name in arrays}
    return _Ids(arrays, starts), factors


def _build_pieces(
    operand: str, ids: np.ndarray, starts: Sequence[tuple[int, str]], sources: Mapping[str, _Source]
) -> tuple[Piece, ...]:
    """Return the pieces of an operand, each a strided slice of one tensor; elements outside of all pieces are 0.

    Args:
        operand: Name of the operand.
        ids: Ids of its elements.
        starts: The first id of each tensor, ascending.
        sources: Sources of the tensors by name.

    Raises:
        ModelError: There are more than 4,096 pieces, or the operand is not made of strided slices.
    """
    tensor_starts = np.array([start for start, _ in starts], ids.dtype)
    pieces = []
    boxes = split_into_strided_boxes(ids, (0,) * ids.ndim, tensor_starts)
    for origin, shape, element_id, strides in boxes:
        if element_id:
            tensor_start, name = max(start for start in starts if start[0] <= element_id)
            source = sources[name]
            offset = source.first + element_id - tensor_start
            pieces.append(Piece(source.tensor, offset, strides, origin, shape))
        if len(pieces) > _MOST_PIECES:
            raise ModelError(
                f"{operand} cannot be bundled: it is put together from more than {_MOST_PIECES:,} strided slices "
                "of checkpoint tensors; bundle another layer"
            )
    return tuple(pieces)


_Box = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""Origin and shape of a box, the id of its first element, and the step of the ids along each axis."""


def split_into_strided_boxes(
    element_ids: np.ndarray, origin: Sequence[int], tensor_starts: np.ndarray
) -> Iterator[_Box]:
    """Yield boxes of an operand whose element ids form an arithmetic progression along every axis, inside one tensor.

    Together they cover the operand. They come in the order of its first axis that has to be divided.

    Args:
        element_ids: Ids of the elements of an operand, or of a box of it.
        origin: Index of its first element in the operand.
        tensor_starts: The first ids of the tensors, ascending.

    Raises:
        ModelError: The ids cannot be divided into such boxes.
    """
    strides = _find_strides(element_ids, tensor_starts)
    if strides is not None:
        yield tuple(origin), element_ids.shape, int(element_ids.flat[0]), strides
        return
    for axis in range(element_ids.ndim):
        rows = np.moveaxis(element_ids, axis, 0)
        runs = list(_split_into_runs(rows, tensor_starts))
        if len(runs) > 1:
            for begin, end in runs:
                box = np.moveaxis(rows[begin:end], 0, axis)
                box_origin = (*origin[:axis], origin[axis] + begin, *origin[axis + 1 :])
                yield from split_into_strided_boxes(box, box_origin, tensor_starts)
            return
    raise ModelError("a weight cannot be bundled: its elements are not strided slices of checkpoint tensors")


def _find_strides(element_ids: np.ndarray, tensor_starts: np.ndarray) -> tuple[int, ...] | None:
    """Return the step of the ids along each axis of an array of ids.

    Returns:
        The steps, or None if a step varies or is negative, or if the ids belong to several tensors.
    """
    corner, last = int(element_ids.flat[0]), int(element_ids[(-1,) * element_ids.ndim])
    if np.searchsorted(tensor_starts, corner, "right") != np.searchsorted(tensor_starts, last, "right"):
        return None
    steps, progression = [], np.array(corner, element_ids.dtype)
    for axis, size in enumerate(element_ids.shape):
        neighbour = tuple(int(index == axis and size > 1) for index in range(element_ids.ndim))
        steps.append(int(element_ids[neighbour]) - corner)
        along = (-1, *(1,) * (element_ids.ndim - axis - 1))
        progression = progression + (np.arange(size, dtype=element_ids.dtype) * steps[-1]).reshape(along)
    return tuple(steps) if min(steps) >= 0 and np.array_equal(progression, element_ids) else None


def _split_into_runs(rows: np.ndarray, tensor_starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of rows: consecutive rows of a run differ by one number, equal in all elements.

    Rows of different tensors are in different runs.

    Args:
        rows: Element ids, divided along the first axis.
        tensor_starts: The first ids of the tensors, ascending.
    """
    begin = 0
    while begin < len(rows):
        end, step = begin + 1, None
        while end < len(rows):
            difference = rows[end] - rows[end - 1]
            first = int(difference.flat[0])
            before, after = (
                np.searchsorted(tensor_starts, int(rows[index].flat[0]), "right") for index in (end - 1, end)
            )
            if before != after or first < 0 or step not in (None, first) or (difference != first).any():
                break
            end, step = end + 1, first
        yield begin, end
        begin = end
