"""Rotation of heads by the row and the column of a patch, as FLUX has it.

Neighbouring elements 2i and 2i + 1 of a head form a pair in the checkpoint. Kernels rotate elements i and i + D/2, so
the columns of queries and keys, and the weights of their norms, are put in another order when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from model.formats import Weight as StoredWeight
from model.layers.arithmetic import Arithmetic
from model.layers.launch import FLOAT32, INT32, Argument, StepShape, Value
from model.layers.layer import Constant
from model.layers.norm import Norm
from model.layers.shard import TRANSPOSED, Cut, Reordered, Shape, Shard
from model.layers.weight import Tensor, Weight

_THETA = 10000.0
_POSITIONS, _TABLES = "patch_positions", ("rotation.cos", "rotation.sin")


def order_pairs(size: int) -> tuple[int, ...]:
    """Return the indices of a head's elements with the first ones of all pairs of neighbours before the second ones."""
    return (*range(0, size, 2), *range(1, size, 2))


@dataclass(frozen=True)
class AxialRotation:
    """Angles of the patches of an image.

    patches  rows and columns of patches
    sizes    elements of a head that do not turn, that turn by the row, and that turn by the column
    """

    patches: tuple[int, int]
    sizes: tuple[int, int, int]

    def compute_angles(self) -> np.ndarray:
        """Return the angles of all pairs of a head, float64 [patches, pairs]."""
        rows, columns = np.indices(self.patches).reshape(2, -1)
        axes = zip((np.zeros_like(rows), rows, columns), self.sizes)
        return np.concatenate(
            [
                positions[:, None] / _THETA ** (np.arange(0, size, 2, dtype=np.float64) / size)
                for positions, size in axes
            ],
            axis=1,
        )

    def list_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments `positions`, `cos` and `sin` of `qkv_projection` for the patches of all images."""
        shape = (self.patches[0] * self.patches[1], sum(self.sizes) // 2)
        cos, sin = (Value(name, shape, FLOAT32) for name in _TABLES)
        return {"positions": Value(_POSITIONS, (step.tokens, 1), INT32), "cos": cos, "sin": sin}

    def list_constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute the arrays of `list_arguments`, by name."""
        cos, sin = _TABLES
        return {
            _POSITIONS: _PatchPositions(step.sequences, self.patches[0] * self.patches[1]),
            cos: _RotationTable(self, 0),
            sin: _RotationTable(self, 1),
        }

    def rotate(self, heads: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return heads [heads, patches, D] of one image in the checkpoint's order of elements, rotated and rounded."""
        cos, sin = (function(self.compute_angles()).astype(FLOAT32) for function in (np.cos, np.sin))
        first, second = heads[..., ::2], heads[..., 1::2]
        turned = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return numpy.round(turned.reshape(heads.shape))


@dataclass(frozen=True)
class _PatchPositions:
    """Constant with the indices of the patches of images, which are rows of the tables of a rotation."""

    images: int
    patches: int

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return the indices of the patches that a rank has of each image, int32 [images * patches of the rank, 1]."""
        indices = np.arange(self.patches, dtype=np.int32)[shard.slice_ulysses_rows(self.patches)]
        return np.tile(indices, self.images)[:, None]


@dataclass(frozen=True)
class _RotationTable:
    """Constant with the cosines (`index` 0) or the sines (1) of a rotation."""

    rotation: AxialRotation
    index: int

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return the table [patches, pairs] float32, the same on every rank."""
        return (np.cos, np.sin)[self.index](self.rotation.compute_angles()).astype(FLOAT32)


@dataclass(frozen=True)
class _LessOne(Cut):
    """Cut that subtracts 1 from the elements that another cut takes."""

    cut: Cut

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return the shape of the other cut's result."""
        return self.cut.shape(tensor_shape, shard)

    def take(self, tensor: StoredWeight, shard: Shard) -> np.ndarray:
        """Return the part of the other cut minus 1, in the tensor's dtype."""
        elements = self.cut.take(tensor, shard)
        return elements - elements.dtype.type(1)


@dataclass(frozen=True)
class ShiftedHeadNorm(Norm):
    """RMSNorm of heads in a launch that adds 1 to the weights of all its norms, as modulated norms need it.

    So the weights are held minus 1, in float32, where this subtraction costs no digits that matter. `order` has the
    indices of a head's elements in the order in which the kernel has them; empty for the order of the checkpoint.
    """

    order: tuple[int, ...] = ()

    @property
    def weight(self) -> Weight:
        """Weight of the norm minus 1, [1, size] float32 on every rank."""
        cut = Reordered(TRANSPOSED, self.order) if self.order else TRANSPOSED
        return Weight(
            self.name, (Tensor(self.tensor, (self.size,), _LessOne(cut), exact=True),), component="norms"
        )

    def read_magnitudes(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the magnitudes of a rank's weights, float32 [2, size / 2]: first and second elements of pairs."""
        return np.abs(arrays[self.name] + FLOAT32.type(1)).reshape(2, -1)
