"""How the operands of a model are made of the tensors of its files, as slices that a program without it can follow.

The loader is not described a second time: each weight is cut out of arrays that hold the numbers of a tensor's elements
in place of their values, and what comes out says where every element of the operand comes from.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod

import numpy as np
import safetensors

from model.commands.bundle.drawn import DrawnWeights
from model.config import ModelConfig
from model.device.bundling import STORED, Operand, Piece, WeightFile
from model.errors import ModelError
from model.families import compose
from model.layers.weight import Weight, Zeros
from model.loading.checkpoint import Checkpoint
from model.loading.weights import RankWeights
from model.network import Network

_MOST_PIECES = 4096
"""Of one operand; that of a projection reordered within each of 128 heads has 256."""


@dataclass(frozen=True)
class _Source:
    """A tensor of a file, or a part of one that begins with its element `first`."""

    tensor: str
    first: int


def weight_files(checkpoint: Checkpoint) -> tuple[WeightFile, ...]:
    """The files of a checkpoint with their digests."""
    found = []
    for path in checkpoint.files:
        digest, nbytes = sha256(), 0
        with open(path, "rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
                nbytes += len(part)
        found.append(WeightFile(path.name, nbytes, digest.hexdigest()))
    return tuple(found)


def operands_of(
    config: ModelConfig, checkpoint: Checkpoint | DrawnWeights, held: RankWeights, wanted: Container[str]
) -> tuple[Operand, ...]:
    """The recipe of every wanted weight that a rank holds.

    Raises ModelError for weights that are computed when they are loaded, as those in MXFP4 and those of eight bits with
    scales, and for operands of more than 4,096 pieces.
    """
    network = compose(config)
    sources = _sources(network, checkpoint)
    weights = {each.name: each for each in network.weights}
    return tuple(
        Operand(
            name,
            held.arrays[name].dtype.name,
            held.arrays[name].shape,
            sha256(held.arrays[name].tobytes()).hexdigest(),
            _pieces(weight, sources, held),
        )
        for name, weight in weights.items()
        if name in wanted
    )


def _sources(network: Network, checkpoint: Checkpoint | DrawnWeights) -> dict[str, _Source]:
    """Where the files hold the tensors of the layers, by their names there; drawn ones are by themselves."""
    if isinstance(checkpoint, DrawnWeights):
        return {name: _Source(name, 0) for name in checkpoint}
    stored: set[str] = set()
    for path in checkpoint.files:
        with safetensors.safe_open(path, framework="np") as file:
            stored |= {name for name in file.keys() if file.get_slice(name).get_dtype() in STORED}  # noqa: SIM118
    found = {name: _Source(name, 0) for name in checkpoint if name in stored}
    prefix = network.bare_prefix
    for name in checkpoint:
        if prefix and name.removeprefix(prefix) in stored:
            found.setdefault(name, _Source(name.removeprefix(prefix), 0))
    shapes = network.layer_tensor_shapes()
    for stack, parts in network.stacks.items():
        if stack in stored:
            for number, part in enumerate(parts):
                found[part] = _Source(stack, number * prod(shapes[part]))
    for name in checkpoint:
        if name not in found:
            what = "its file holds it packed, or in eight bits with scales"
            raise ModelError(
                f"{name} cannot be bundled: {what}, and an instance copies or rounds weights alone"
            )
    return found


def _pieces(weight: Weight, sources: Mapping[str, _Source], held: RankWeights) -> tuple[Piece, ...]:
    """The pieces of an operand; elements of no tensor are 0."""
    numbered: dict[str, np.ndarray] = {}
    starts: list[tuple[int, str]] = []
    first = 1  # 0 stands for no element
    total = sum(prod(each.shape) for each in weight.tensors)
    kind = np.int32 if total < 2**31 - 1 else np.int64
    for tensor in weight.tensors:
        if isinstance(tensor, Zeros) or tensor.name in numbered:
            continue
        size = prod(tensor.shape)
        numbered[tensor.name] = np.arange(first, first + size, dtype=kind).reshape(tensor.shape)
        starts.append((first, tensor.name))
        first += size
    integers = replace(weight, tensors=tuple(replace(tensor, exact=False) for tensor in weight.tensors))
    taken = integers.take(numbered, held.shard)
    bounds = np.array([begin for begin, _ in starts], kind)
    pieces = []
    for at, shape, number, strides in boxes_of(taken, (0,) * taken.ndim, bounds):
        if number:
            begin, name = max(each for each in starts if each[0] <= number)
            source = sources[name]
            pieces.append(Piece(source.tensor, source.first + number - begin, strides, at, shape))
        if len(pieces) > _MOST_PIECES:
            raise ModelError(f"{weight.name} is put together from more than {_MOST_PIECES:,} pieces")
    return tuple(pieces)


_Box = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""Where a box begins, its shape, the number of its first element, and the step of the numbers along each axis."""


def boxes_of(numbers: np.ndarray, at: Sequence[int], bounds: np.ndarray) -> Iterator[_Box]:
    """Boxes of one tensor in which the numbers of elements grow evenly along each axis, in the order of the operand.

    `bounds` are the first numbers of the tensors.
    """
    box = _even(numbers, bounds)
    if box is not None:
        yield tuple(at), numbers.shape, *box
        return
    for axis in range(numbers.ndim):
        rows = np.moveaxis(numbers, axis, 0)
        runs = list(_runs(rows, bounds))
        if len(runs) > 1:
            for begin, end in runs:
                part = np.moveaxis(rows[begin:end], 0, axis)
                yield from boxes_of(part, (*at[:axis], at[axis] + begin, *at[axis + 1 :]), bounds)
            return
    raise ModelError("a weight is put together in a way that a bundle's recipes do not express")


def _even(numbers: np.ndarray, bounds: np.ndarray) -> tuple[int, tuple[int, ...]] | None:
    """The first number and the step along each axis, where the numbers are of one tensor, or all 0, and grow evenly."""
    corner, last = int(numbers.flat[0]), int(numbers[(-1,) * numbers.ndim])
    if np.searchsorted(bounds, corner, "right") != np.searchsorted(bounds, last, "right"):
        return None
    steps, grown = [], np.array(corner, numbers.dtype)
    for axis, size in enumerate(numbers.shape):
        second = tuple(int(each == axis and size > 1) for each in range(numbers.ndim))
        steps.append(int(numbers[second]) - corner)
        along = (-1, *(1,) * (numbers.ndim - axis - 1))
        grown = grown + (np.arange(size, dtype=numbers.dtype) * steps[-1]).reshape(along)
    return (corner, tuple(steps)) if min(steps) >= 0 and np.array_equal(grown, numbers) else None


def _runs(rows: np.ndarray, bounds: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of rows: within a run, consecutive rows differ by one number, the same in every element."""
    begin = 0
    while begin < len(rows):
        end, step = begin + 1, None
        while end < len(rows):
            apart = rows[end] - rows[end - 1]
            first = int(apart.flat[0])
            before, after = (
                np.searchsorted(bounds, int(rows[each].flat[0]), "right") for each in (end - 1, end)
            )
            if before != after or first < 0 or step not in (None, first) or (apart != first).any():
                break
            end, step = end + 1, first
        yield begin, end
        begin = end
