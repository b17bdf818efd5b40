"""Plain numpy for the references of layers: no kernel and no simulator.

Arithmetic is float32 throughout. With bfloat16 activations results are rounded to bfloat16 where a device stores them
between engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from model.config import rope
from model.config.mixers import Positions
from model.config.rope import RopeParameters
from model.formats import Weight
from model.layers.precision import FLOAT32, as_held
from model.layers.projection import Projection
from model.layers.shard import WHOLE, Shard


@dataclass(frozen=True)
class Span:
    """The positions of a step: `count` of them from `start` on."""

    start: int
    count: int


class Seen(Enum):
    """What layers let others observe: attention weights, or the experts that tokens choose."""

    attention = "attention"
    experts = "experts"


class Arithmetic:
    """Products and roundings of one model: `weights` whole and by their checkpoint names, activations of `dtype`.

    Weights of two bytes are widened once, when it is made, if all take at most `widened_bytes`, else at every use.
    `ranks` are those over which sums are taken. The weights `exact` are not rounded to the dtype of activations.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        dtype: np.dtype,
        widened_bytes: int,
        ranks: int = 1,
        exact: Collection[str] = (),
    ) -> None:
        small = sum(weight.size for weight in weights.values()) * FLOAT32.itemsize <= widened_bytes
        self._weights, self._exact, self._dtype = weights, exact, dtype
        if small:
            self._weights = {name: widened(self._device_weight(name)) for name in weights}
            self._exact = frozenset(weights)  # rounded already
        self._ranks = ranks
        self._tables: dict[tuple[RopeParameters, int, int, bool], tuple[np.ndarray, np.ndarray]] = {}

    def _device_weight(self, name: str) -> Weight:
        """A weight in the dtype in which HBM holds it."""
        return as_held(self._weights[name], self._dtype, name in self._exact)

    def observe(self, seen: Seen, *arrays: np.ndarray) -> None:
        """Called by layers with attention weights [heads, tokens, positions], or experts and weights [tokens, K]."""

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Values as the activations' dtype holds them, in float32."""
        return x if self._dtype == FLOAT32 else widened(x.astype(self._dtype))

    def rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows of a table."""
        return widened(np.asarray(self._device_weight(name))[ids])

    def tensor(self, name: str) -> np.ndarray:
        """A whole tensor of the checkpoint, such as a number, [1]."""
        return widened(self._device_weight(name))

    def product(self, x: np.ndarray, projection: Projection) -> np.ndarray:
        """x [rows, in] times a projection [out, in], plus its bias."""
        return x @ self._matrix(projection).T + self.bias(projection)

    def summed_product(
        self, x: np.ndarray, projection: Projection, span: Callable[[int, Shard], slice]
    ) -> np.ndarray:
        """As `product`, where every rank holds the part `span` of the inputs: partial products and sum are rounded."""
        if self._ranks == 1:
            return self.product(x, projection)
        weight = self._matrix(projection)
        column_spans = [span(x.shape[-1], Shard(rank, self._ranks)) for rank in range(self._ranks)]
        partial = [self.rounded(x[:, columns] @ weight[:, columns].T) for columns in column_spans]
        return self.rounded(np.sum(partial, axis=0)) + self.bias(projection)

    def sum_of_products(
        self,
        shape: tuple[int, int],
        products: Sequence[tuple[np.ndarray, np.ndarray, Projection]],
        span: Callable[[int, Shard], slice],
    ) -> np.ndarray:
        """Rows of `shape`, to which each of (numbers of rows, x, projection) adds its product, summed over ranks.

        Every rank holds the part `span` of the inputs; its sum and that of all ranks are rounded.
        """
        total = np.zeros(shape, FLOAT32)
        for rank in range(self._ranks):
            partial = np.zeros(shape, FLOAT32)
            for rows, x, projection in products:
                columns = span(x.shape[-1], Shard(rank, self._ranks))
                partial[rows] += x[:, columns] @ self._matrix(projection)[:, columns].T
            total += partial if self._ranks == 1 else self.rounded(partial)
        return total if self._ranks == 1 else self.rounded(total)

    def _matrix(self, projection: Projection) -> np.ndarray:
        return widened(projection.weight(WHOLE).select(self._device_weight(projection.tensor)))

    def bias(self, projection: Projection) -> np.ndarray | np.float32:
        """The bias of a projection, 0 where it has none."""
        if projection.bias is None:
            return np.float32(0)
        return widened(projection.bias_row(WHOLE).select(self._device_weight(projection.bias)))

    def norm(
        self, x: np.ndarray, name: str | None, eps: float, bias: str | None = None, offset: float = 0.0
    ) -> np.ndarray:
        """RMSNorm over the last axis, LayerNorm where there is a bias, without weight where it has no name; rounded."""
        if bias is not None:
            x = x - np.mean(x, axis=-1, keepdims=True)
        root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
        if name is None:
            return self.rounded(x / root)
        normalised = x / root * (widened(self._device_weight(name)) + np.float32(offset))
        return self.rounded(normalised if bias is None else normalised + widened(self._device_weight(bias)))

    def rotated(self, heads: np.ndarray, positions: Positions, span: Span) -> np.ndarray:
        """Pairs (i, i + R/2) of the first R elements of [heads, tokens, head_dim] turned by their position; rounded.

        The tables grow on demand, up to the limit of the positions.
        """
        turn, limit, end = positions.rope, positions.limit, span.start + span.count
        stretched = turn.longest_short is not None and end > turn.longest_short
        key = turn, positions.width, limit, stretched
        table_length = len(self._tables[key][0]) if key in self._tables else 0
        if end > table_length:
            count = max(end, min(2 * table_length, limit))
            self._tables[key] = rope.compute_tables(turn, positions.width, limit, count, end)
        cos, sin = (table[span.start : end] for table in self._tables[key])
        half = cos.shape[1]
        first, second, unrotated = np.split(heads, (half, 2 * half), axis=-1)
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin, unrotated], axis=-1)
        return self.rounded(turned)


def widened(tensor: Weight) -> np.ndarray:
    """An array in float32."""
    return np.asarray(tensor).astype(FLOAT32, copy=False)
