"""First and last layer of a denoiser: patches of latent images become rows of hidden states, and rows images again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from model.formats import Weight as StoredWeight
from model.layers.arithmetic import Arithmetic, Span
from model.layers.denoiser.conditions import create_bias, create_matrix
from model.layers.denoiser.modulation import ModulatedNorm
from model.layers.launch import FLOAT32, Argument, Launch, LeastWork, StepShape, Value
from model.layers.layer import Constant, Stateless, States
from model.layers.projection import Projection
from model.layers.shard import ROW, TRANSPOSED, Cut, MatrixCut, Reordered, Shape, Shard
from model.layers.weight import Tensor, Weight, create_argument

LATENTS = "latents"
"""Name of the latent images [images, channels, rows, columns], an input of the step."""


@dataclass(frozen=True)
class Patches(Cut):
    """Cut of a convolution [out, in, size, size], or of its matrix [out, in * size * size], whole on every rank.

    The array on a rank is [size, size, in, out].
    """

    size: int

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return (size, size, in, out)."""
        outputs, *inner_shape = tensor_shape
        return self.size, self.size, prod(inner_shape) // self.size**2, outputs

    def take(self, tensor: StoredWeight, shard: Shard) -> np.ndarray:
        """Return a contiguous copy of the weight as [size, size, in, out]."""
        weight = np.asarray(tensor).reshape(tensor.shape[0], -1, self.size, self.size)
        return np.ascontiguousarray(weight.transpose(2, 3, 1, 0))


def order_patch(channels: int, size: int) -> tuple[int, ...]:
    """Return the indices of (channel, row, column) elements of a patch in the order (row, column, channel)."""
    indices = np.arange(channels * size * size).reshape(channels, size, size)
    return tuple(indices.transpose(1, 2, 0).ravel().tolist())


@dataclass(frozen=True)
class PositionTable:
    """Sines and cosines of the row and the column of each patch, [patches, size] float32.

    patches        rows and columns of patches
    size           elements of a hidden state: a quarter each of sines and cosines of the column, then of the row
    base           patches of a row in images of the size for which positions are defined
    interpolation  factor by which positions are divided
    """

    patches: tuple[int, int]
    size: int
    base: int
    interpolation: float

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return the rows of the table that a rank has; angles are computed in float64."""
        rows, columns = (
            np.arange(count, dtype=np.float32)
            / np.float32(count / self.base)
            / np.float32(self.interpolation)
            for count in self.patches
        )
        quarter = self.size // 4
        frequencies = 1.0 / 10000.0 ** (np.arange(quarter) / quarter)
        grid = np.broadcast_to(columns, self.patches), np.broadcast_to(rows[:, None], self.patches)
        angles = [positions.reshape(-1, 1) * frequencies for positions in grid]
        table = np.concatenate([function(angle) for angle in angles for function in (np.sin, np.cos)], axis=1)
        return table[shard.slice_ulysses_rows(len(table))].astype(np.float32)


@dataclass(frozen=True)
class Cropped(Cut):
    """Cut of the middle of a square table [1, most * most, size] as [rows * columns, size], or a rank's rows of it."""

    most: int
    patches: tuple[int, int]

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return (rows * columns of the rank, size)."""
        return prod(self.patches) // shard.ulysses_ranks, tensor_shape[-1]

    def take(self, tensor: StoredWeight, shard: Shard) -> np.ndarray:
        """Return a copy of the middle rows and columns of the table, as far as a rank has them."""
        return self.crop(np.asarray(tensor))[shard.slice_ulysses_rows(prod(self.patches))]

    def crop(self, table: np.ndarray) -> np.ndarray:
        """Return a copy of the middle rows and columns; with an odd rest there is one more after them than before."""
        rows, columns = (
            slice((self.most - count) // 2, (self.most - count) // 2 + count) for count in self.patches
        )
        grid = table.reshape(self.most, self.most, -1)
        return grid[rows, columns].reshape(prod(self.patches), -1).copy()


@dataclass(frozen=True)
class PositionWeight(Weight):
    """Table of positions on a rank, whose rows Ulysses ranks divide."""

    def compute_content_key(self, shard: Shard) -> object:
        """Return a hashable key that is equal for ranks with the same rows."""
        return shard.ulysses_rank


@dataclass(frozen=True)
class StoredPositions:
    """Table of positions in a checkpoint, [1, most * most, size], of which an image takes the middle.

    tensor   checkpoint tensor
    most     rows and columns of the table
    patches  rows and columns of patches
    size     elements of a hidden state
    """

    tensor: str
    most: int
    patches: tuple[int, int]
    size: int

    def describe_weight(self, name: str) -> Weight:
        """Return the table of an image as a weight called `name`."""
        cut = Cropped(self.most, self.patches)
        return PositionWeight(name, (Tensor(self.tensor, (1, self.most**2, self.size), cut),))

    def load(self, numpy: Arithmetic) -> np.ndarray:
        """Return the table of an image for a reference, float32 [patches, size]."""
        return Cropped(self.most, self.patches).crop(numpy.load_tensor(self.tensor))


@dataclass(frozen=True)
class PatchInput(Stateless):
    """First layer: x [images * patches, hidden] = patches of the latent images times a matrix, plus positions.

    tensor     checkpoint tensor of the convolution [hidden, channels, patch, patch], with a bias
    shape      channels, rows and columns of a latent image
    positions  what is added to the rows of an image; None for nothing
    is_matrix  whether the checkpoint has the convolution as a matrix [hidden, channels * patch * patch]
    """

    name: str
    tensor: str
    hidden: int
    patch_size: int
    shape: tuple[int, int, int]
    positions: PositionTable | StoredPositions | None
    is_matrix: bool = False
    component: ClassVar[str] = "embedding"

    @property
    def _matrix(self) -> Weight:
        inputs: tuple[int, ...] = (self.shape[0], self.patch_size, self.patch_size)
        shape = (self.hidden, *((prod(inputs),) if self.is_matrix else inputs))
        return Weight(f"{self.name}.w", (Tensor(f"{self.tensor}.weight", shape, Patches(self.patch_size)),))

    @property
    def _bias(self) -> Weight:
        return Weight(f"{self.name}.b", (Tensor(f"{self.tensor}.bias", (self.hidden,), ROW),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrix, bias, and the table of positions if the checkpoint has one."""
        weights = (self._matrix, self._bias)
        if isinstance(self.positions, StoredPositions):
            return (*weights, self.positions.describe_weight(f"{self.name}.positions"))
        return weights

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the function that computes the table of positions, if there is one."""
        if isinstance(self.positions, PositionTable):
            return {f"{self.name}.positions": self.positions}
        return {}

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `patch_embedding` that writes x; Ulysses ranks divide the rows of latent images."""
        channels, rows, columns = self.shape
        shape = (step.sequences, channels, rows // step.ulysses_ranks, columns)
        latents = Value(LATENTS, shape, step.activations)
        matrix = self._matrix.value(step)
        arguments: dict[str, Argument] = {
            "x": latents,
            "w": matrix,
            "bias": self._bias.value(step),
        }
        x = Value("x", (step.tokens, self.hidden), step.activations)
        moved = sum(array.nbytes for array in (latents, matrix, x))
        if self.positions is not None:
            name = f"{self.name}.positions"
            table = Value(name, (step.tokens // step.sequences, self.hidden), FLOAT32)
            if isinstance(self.positions, StoredPositions):
                table = self.positions.describe_weight(name).value(step)
            arguments["added"] = table
            moved += table.nbytes
        operations = 2.0 * step.tokens * prod(matrix.shape)
        return (
            Launch("patch_embedding", arguments, ("x",), LeastWork(operations, float(moved)), step.tokens),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [patches, hidden] of a latent image x [channels, rows, columns]; the image and x are rounded."""
        channels, rows, columns = self.shape
        patch = self.patch_size
        cells = numpy.round(x).reshape(channels, rows // patch, patch, columns // patch, patch)
        patches = cells.transpose(1, 3, 0, 2, 4).reshape(-1, channels * patch * patch)
        matrix = numpy.load_tensor(f"{self.tensor}.weight").reshape(self.hidden, -1)
        y = patches @ matrix.T + numpy.load_tensor(f"{self.tensor}.bias")
        if isinstance(self.positions, PositionTable):
            y = y + self.positions(Shard(0, 1))
        elif self.positions is not None:
            y = y + self.positions.load(numpy)
        return numpy.round(y)


@dataclass(frozen=True)
class PatchOutput(Stateless):
    """Last layer: x = images [images, channels, rows, columns] of modulated, projected rows of hidden states.

    projection     its outputs are (row in the patch, column in the patch, channel), or begin with the channel
    patches        rows and columns of patches
    channels       channels of the result
    channel_first  whether the projection's outputs begin with the channel
    """

    name: str
    norm: ModulatedNorm
    projection: Projection
    patches: tuple[int, int]
    patch_size: int
    channels: int
    channel_first: bool = False
    component: ClassVar[str] = "head"

    @property
    def _cut(self) -> MatrixCut:
        if not self.channel_first:
            return TRANSPOSED
        return Reordered(TRANSPOSED, order_patch(self.channels, self.patch_size))

    @property
    def _matrix(self) -> Weight:
        return create_matrix(f"{self.name}.w", self.projection, self._cut)

    @property
    def _bias(self) -> Weight | None:
        return create_bias(f"{self.name}.b", self.projection, self._cut)

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrix and bias."""
        return [weight for weight in (self._matrix, self._bias) if weight is not None]

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `patch_output`; Ulysses ranks divide the rows of latent images."""
        x, matrix = Value("x", (step.tokens, self.norm.size), step.activations), self._matrix.value(step)
        arguments: dict[str, Argument] = {
            "x": x,
            "w": matrix,
            "bias": create_argument(self._bias, step),
            **self.norm.list_arguments(step),
            "rows": self.patches[0] // step.ulysses_ranks,
            "columns": self.patches[1],
            "patch": self.patch_size,
        }
        moved = x.nbytes + matrix.nbytes + step.tokens * matrix.shape[1] * step.activations.itemsize
        operations = 2.0 * step.tokens * prod(matrix.shape)
        return (Launch("patch_output", arguments, ("x",), LeastWork(operations, float(moved)), step.tokens),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the image [channels, rows, columns] of the rows x [patches, hidden], rounded."""
        normed = self.norm.reference(x, numpy, states)
        y = numpy.round(numpy.multiply(normed, self.projection))
        (rows, columns), patch = self.patches, self.patch_size
        if self.channel_first:
            cells = y.reshape(rows, columns, self.channels, patch, patch).transpose(0, 1, 3, 4, 2)
        else:
            cells = y.reshape(rows, columns, patch, patch, self.channels)
        return cells.transpose(4, 0, 2, 1, 3).reshape(self.channels, rows * patch, columns * patch)
