"""NumPy operations for `Layer.reference`, the comparison for kernels; they use neither kernels nor the simulator.

All arithmetic is float32. With bfloat16 activations, results are rounded to bfloat16 where a kernel stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import ml_dtypes
import numpy as np

from model.config import rope
from model.config.mixers import Positions
from model.config.rope import RopeParameters
from model.formats import Format, QuantisedWeight, Weight
from model.layers.cache_formats import PLAIN_CACHING, CacheRounding
from model.layers.precision import FLOAT32, cast_weight
from model.layers.projection import Projection
from model.layers.shard import WHOLE, Shard

_INT8, _E4M3, _E4M3FN = map(np.dtype, (np.int8, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn))
_LARGEST = {_INT8: 127.0, _E4M3: 240.0, _E4M3FN: 448.0}
"""Largest number of rows with a scale each, by dtype."""
_STATIC_ROWS = {_INT8: (1.0, -128.0, 127.0), _E4M3: (2.0, -224.0, 224.0), _E4M3FN: (1.0, -448.0, 448.0)}
"""Factor of a static scale, and least and largest number of rows with this scale, by dtype.

Static scales are for float8_e4m3fn, which ends at 448. Rows in float8_e4m3 take halves.
"""
_MX_LARGEST_EXPONENT = 7
"""Exponent of the largest element of a block in MXFP8."""
_LEAST_MAGNITUDE = 1.0e-30
"""Magnitude that a row has at least for its scale, so that a row of zeros stays zero."""


@dataclass(frozen=True)
class Span:
    """Positions `start` … `start + count - 1` of the tokens that a step computes."""

    start: int
    count: int


class Seen(Enum):
    """Intermediate results that a reference passes to `Arithmetic.observe`."""

    attention = "attention"
    experts = "experts"


class Arithmetic:
    """Products, norms, rotations and roundings over the weights of one model.

    Args:
        weights: The whole tensors by checkpoint name.
        dtype: The dtype of the activations.
        widened_bytes: Memory for float32 copies of the weights. If all copies fit, they are made once, here; otherwise
            each use makes its own.
        ranks: Tensor-parallel ranks whose partial sums are rounded before they are added.
        exact: Names of weights that stay float32 with bfloat16 activations.
        caching: Format and scales of the caches.
        row_formats: Formats before whose products kernels round rows, by the weight's name, of `find_row_formats`.
        ulysses_ranks: Ulysses ranks of each tensor-parallel rank, see `flattened`.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        dtype: np.dtype,
        widened_bytes: int,
        ranks: int = 1,
        exact: Collection[str] = (),
        caching: CacheRounding = PLAIN_CACHING,
        row_formats: Mapping[str, Format] = MappingProxyType({}),
        ulysses_ranks: int = 1,
    ) -> None:
        self._row_formats = row_formats
        self._input_scales = {
            name: weight.input_scale
            for name, weight in weights.items()
            if isinstance(weight, QuantisedWeight)
        }
        small = sum(weight.size for weight in weights.values()) * FLOAT32.itemsize <= widened_bytes
        self._weights, self._exact, self._dtype = weights, exact, dtype
        if small:
            self._weights = {name: widen(self._cast_for_device(name)) for name in weights}
            self._exact = frozenset(weights)  # rounded already
        self._ranks, self._ulysses_ranks, self.caching = ranks, ulysses_ranks, caching
        self._tables: dict[tuple[RopeParameters, int, int, bool], tuple[np.ndarray, np.ndarray]] = {}

    def _cast_for_device(self, name: str) -> Weight:
        """Return the whole weight `name` in the dtype that it has in HBM (`choose_weight_dtype`)."""
        return cast_weight(self._weights[name], self._dtype, name in self._exact)

    @property
    def flattened(self) -> Arithmetic:
        """This arithmetic where Ulysses ranks are tensor-parallel ranks too."""
        if self._ulysses_ranks == 1:
            return self
        arithmetic = copy(self)
        arithmetic._ranks, arithmetic._ulysses_ranks = self._ranks * self._ulysses_ranks, 1
        return arithmetic

    def observe(self, seen: Seen, *arrays: np.ndarray) -> None:
        """Receive intermediate results of a reference. This method does nothing; subclasses override it.

        Args:
            seen: Which results `arrays` are.
            arrays: For `Seen.attention` the attention weights [heads, tokens, positions]; for `Seen.experts` the expert
                ids and the routing weights, [tokens, K] each.
        """

    def round(self, x: np.ndarray) -> np.ndarray:
        """Return x rounded to the dtype of the activations, as float32; with float32 activations x itself."""
        return x if self._dtype == FLOAT32 else widen(x.astype(self._dtype))

    def load_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return the rows `ids` of the checkpoint table `name` in float32, [*ids.shape, columns]."""
        return widen(np.asarray(self._cast_for_device(name))[ids])

    def load_tensor(self, name: str) -> np.ndarray:
        """Return the whole checkpoint tensor `name` in float32, rounded to its dtype in HBM."""
        return widen(self._cast_for_device(name))

    def multiply(self, x: np.ndarray, projection: Projection) -> np.ndarray:
        """Return x [rows, in] @ matrix.T + bias of a projection [out, in]: float32 [rows, out], not rounded."""
        return x @ self._load_matrix(projection).T + self.load_bias(projection)

    def multiply_rows(self, x: np.ndarray, projection: Projection) -> np.ndarray:
        """Return what `multiply` does for rows x [rows, in] that `quantise_rows` has rounded."""
        return self.multiply(self.quantise_rows(x, projection), projection)

    def quantise_rows(self, x: np.ndarray, *projections: Projection) -> np.ndarray:
        """Return rows x [rows, in] rounded to 8 bits where the format of the projections' weights asks for it.

        Beside fp8 weights, each row is divided by its largest magnitude / 240, rounded to the dtype of the activations,
        rounded to float8_e4m3 and multiplied by the divisor. With float8_e4m3fn, the number is 448 instead of 240.
        Beside int8 weights, a row is divided by its largest magnitude / 127, rounded to integers and multiplied. Where
        weights have static scales, the divisor of all rows is the largest of these scales, and rows are clipped. Beside
        weights in an MX format, rows become MXFP8. Other rows are returned as they are.

        Args:
            x: The rows.
            projections: The projections that multiply the same rows.
        """
        format = self._row_formats.get(projections[0].tensor)
        if format is None or format.row_dtype is None:
            return x
        dtype = format.row_dtype
        if format.row_block is not None:
            return _round_to_mxfp8(self.round_to_bfloat16(x), format.row_block)
        inputs = [self._input_scales[projection.tensor] for projection in projections]
        static_scales = [scale for scale in inputs if scale is not None]
        if static_scales:
            factor, least, largest = map(np.float32, _STATIC_ROWS[dtype])
            scales = np.max(static_scales) * factor
            x = self.round(np.clip(x, least * scales, largest * scales))
        else:
            magnitudes = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(_LEAST_MAGNITUDE))
            scales = magnitudes * np.float32(1 / _LARGEST[dtype])
            largest = np.float32(_LARGEST[dtype])
            least = -largest
        divided = x * (1 / scales)
        rounded = np.rint(divided) if dtype == _INT8 else self.round(divided)
        return np.clip(rounded, least, largest).astype(dtype).astype(FLOAT32) * scales

    def rounds_to_mx(self, projection: Projection) -> bool:
        """Return whether `quantise_rows` rounds rows for a projection to MXFP8."""
        format = self._row_formats.get(projection.tensor)
        return format is not None and format.row_block is not None

    def round_to_bfloat16(self, x: np.ndarray) -> np.ndarray:
        """Return x rounded to bfloat16, as float32."""
        return widen(x.astype(ml_dtypes.bfloat16))

    def sum_partial_products(
        self,
        x: np.ndarray,
        projection: Projection,
        span: Callable[[int, Shard], slice],
    ) -> np.ndarray:
        """Return x [rows, in] @ matrix.T + bias of a row-parallel projection [out, in]: float32 [rows, out].

        The inputs of each rank go through `quantise_rows`; all inputs together if the ranks share row maxima. With
        several ranks, the partial product of each rank is rounded, and so is their sum before the bias. With one rank
        no product is rounded.

        Args:
            x: The inputs of all ranks.
            projection: The projection, whose inputs the ranks divide.
            span: Function of the number of inputs and of a rank's shard that returns the slice of the rank's inputs.
        """
        if self._ranks == 1:
            return self.multiply_rows(x, projection)
        weight = self._load_matrix(projection)
        column_spans = [span(x.shape[-1], Shard(rank, self._ranks)) for rank in range(self._ranks)]
        format = self._row_formats.get(projection.tensor)
        if format is not None and format.shares_row_maxima:
            quantised = self.quantise_rows(x, projection)
            inputs = [quantised[:, columns] for columns in column_spans]
        else:
            inputs = [self.quantise_rows(x[:, columns], projection) for columns in column_spans]
        partial = [
            self.round(rank_inputs @ weight[:, columns].T)
            for rank_inputs, columns in zip(inputs, column_spans)
        ]
        return self.round(np.sum(partial, axis=0)) + self.load_bias(projection)

    def sum_expert_products(
        self,
        shape: tuple[int, int],
        products: Sequence[tuple[np.ndarray, np.ndarray, Projection]],
        span: Callable[[int, Shard], slice],
    ) -> np.ndarray:
        """Return float32 [rows, out]: for every expert, the product x @ matrix.T is added to the expert's rows.

        Biases are not added. With several ranks, the sum of each rank is rounded, and so is the sum over the ranks.
        With one rank nothing is rounded.

        Args:
            shape: (rows, out) of the result.
            products: (row indices in the result, x [indices, in], projection [out, in]) of each expert.
            span: Function of the number of inputs and of a rank's shard that returns the slice of the rank's inputs.
        """
        total = np.zeros(shape, FLOAT32)
        for rank in range(self._ranks):
            partial = np.zeros(shape, FLOAT32)
            for rows, x, projection in products:
                columns = span(x.shape[-1], Shard(rank, self._ranks))
                partial[rows] += x[:, columns] @ self._load_matrix(projection)[:, columns].T
            total += partial if self._ranks == 1 else self.round(partial)
        return total if self._ranks == 1 else self.round(total)

    def _load_matrix(self, projection: Projection) -> np.ndarray:
        return widen(projection.weight(WHOLE).select(self._cast_for_device(projection.tensor)))

    def load_bias(self, projection: Projection) -> np.ndarray | np.float32:
        """Return the bias of a projection in float32, [out]; 0 if the projection has none."""
        if projection.bias is None:
            return np.float32(0)
        return widen(projection.bias_row(WHOLE).select(self._cast_for_device(projection.bias)))

    def normalise(
        self, x: np.ndarray, name: str | None, eps: float, bias: str | None = None, offset: float = 0.0
    ) -> np.ndarray:
        """Return the RMSNorm of x over the last axis, rounded to the activations' dtype; LayerNorm with a `bias`.

        Args:
            x: [..., size].
            name: The checkpoint tensor of the weight; None for a norm without weight and bias.
            eps: Added to the mean of squares.
            bias: The checkpoint tensor of a LayerNorm's bias, with which the mean is subtracted first.
            offset: Added to the weight before x is multiplied by it.
        """
        if bias is not None:
            x = x - np.mean(x, axis=-1, keepdims=True)
        root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
        if name is None:
            return self.round(x / root)
        normalised = x / root * (widen(self._cast_for_device(name)) + np.float32(offset))
        return self.round(normalised if bias is None else normalised + widen(self._cast_for_device(bias)))

    def rotate(self, heads: np.ndarray, positions: Positions, span: Span) -> np.ndarray:
        """Return heads [heads, tokens, head_dim] with rotary embeddings of the positions in `span`, rounded.

        Elements i and i + R/2 form a pair, where R is `positions.width`. Elements from R on are not rotated. The
        tables of cosines and sines are kept for later calls and grow on demand, up to `positions.limit` positions.
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
        return self.round(
            np.concatenate([first * cos - second * sin, second * cos + first * sin, unrotated], axis=-1)
        )


def _round_to_mxfp8(x: np.ndarray, block: int) -> np.ndarray:
    """Return rows x [rows, in] in MXFP8 as the Vector engine rounds them; `in` is a multiple of `block`.

    `block` elements share a scale, the power of two 2^-7 times that of the largest magnitude, and at least 2^-127. An
    element is divided by the scale and rounded to float8_e4m3fn.
    """
    blocks = x.reshape(len(x), -1, block)
    _, exponents = np.frexp(np.abs(blocks).max(axis=2, keepdims=True))
    scales = np.ldexp(np.float32(1), np.maximum(exponents - 1 - _MX_LARGEST_EXPONENT, -127))
    return ((blocks / scales).astype(ml_dtypes.float8_e4m3fn).astype(FLOAT32) * scales).reshape(x.shape)


def widen(tensor: Weight) -> np.ndarray:
    """Return a tensor as a float32 array; a float32 array is returned itself, and a quantised weight is widened."""
    return np.asarray(tensor).astype(FLOAT32, copy=False)
