"""Attention of a text encoder with biases by relative position, which texts do not pay to their padding.

The biases of all heads come from one table of the checkpoint, which the layers share. A weight has them by distance, so
that a kernel reads them without a look-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from model.formats import Weight as StoredWeight
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention import Attention
from model.layers.launch import INT32, Launch, StepShape, Value
from model.layers.layer import States
from model.layers.shard import Cut, Rows, Shape, Shard, by_query_heads
from model.layers.softmax import attend
from model.layers.weight import Tensor, Weight

TEXT_LENGTHS = "text_lengths"
"""Input with the number of tokens of each text without padding, [sequences, 1] int32."""


@dataclass(frozen=True)
class RelativePositions:
    """Buckets of T5's distances between the tokens of texts of `rows` tokens.

    Half of the `buckets` are for keys after their query. Of each half, half are for one distance each, and the
    remaining ones for distances that grow to `most_distance`; the last one is for all beyond it.
    """

    buckets: int
    most_distance: int
    rows: int

    def list_buckets(self) -> np.ndarray:
        """Return the bucket of each distance key - query from 1 - rows to rows - 1, int64 [2 * rows - 1].

        Logarithms are float32, as in transformers.
        """
        distances = np.arange(1 - self.rows, self.rows)
        half = self.buckets // 2
        exact = half // 2
        magnitudes = np.abs(distances)
        growth = np.log(np.maximum(magnitudes, 1).astype(np.float32) / np.float32(exact))
        growth = growth / np.float32(math.log(self.most_distance / exact)) * np.float32(half - exact)
        large = np.minimum(exact + growth.astype(np.int64), half - 1)
        return np.where(magnitudes < exact, magnitudes, large) + half * (distances > 0)


@dataclass(frozen=True)
class DistanceCut(Cut):
    """Cut of a table [buckets, heads] to the biases of a rank's heads by distance, [heads, 2 * rows - 1]."""

    positions: RelativePositions
    heads: Rows

    def shape(self, tensor_shape: Shape, shard: Shard) -> Shape:
        """Return (heads of the first rank, distances)."""
        return self.heads.shape((tensor_shape[1], 2 * self.positions.rows - 1), shard)

    def take(self, tensor: StoredWeight, shard: Shard) -> np.ndarray:
        """Return a copy of the biases of a rank's heads by distance, with zeros for padding heads."""
        return self.heads.take(np.asarray(tensor)[self.positions.list_buckets()].T, shard)


@dataclass(frozen=True)
class RelativeAttention(Attention):
    """Attention without a causal mask to the tokens of a text, with a bias for each head and distance.

    `table` is the checkpoint tensor [buckets, heads] of the biases.
    """

    table: str = field(kw_only=True)
    relative: RelativePositions = field(kw_only=True)

    @property
    def _bias(self) -> Weight:
        """Biases of a rank's heads by distance, [heads of the rank, 2 * rows - 1]; equal in all layers."""
        cut = DistanceCut(self.relative, Rows(by_query_heads(*self.heads.divided).span))
        return Weight("position_bias", (Tensor(self.table, (self.relative.buckets, self.heads.heads), cut),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of attention and the biases."""
        return (*super().weights, self._bias)

    def _prefill(self, step: StepShape) -> Launch:
        """Return the launch of `attention_prefill` with the biases and the numbers of keys of each text."""
        launch = super()._prefill(step)
        lengths = Value(TEXT_LENGTHS, (step.sequences, 1), INT32)
        return replace(
            launch,
            arguments={
                **launch.arguments,
                "position_bias": self._bias.value(step),
                "key_lengths": lengths,
            },
        )

    def _append_to_cache(
        self, new: Sequence[np.ndarray], states: States, numpy: Arithmetic
    ) -> Sequence[np.ndarray]:
        """Return the keys and values of the text without padding, [heads, length, head_dim] each."""
        length = int(np.ravel(states[TEXT_LENGTHS])[0])
        return [array[:, :length] for array in new]

    def _attend(
        self, query: np.ndarray, keys: np.ndarray, values: np.ndarray, span: Span, numpy: Arithmetic
    ) -> np.ndarray:
        """Return the outputs of all heads, [tokens, heads * head_dim]; arguments as in `Attention`."""
        biases = numpy.load_tensor(self.table)[self.relative.list_buckets()].T
        tokens, length = query.shape[1], keys.shape[1]
        columns = np.arange(length) - np.arange(tokens)[:, None] + tokens - 1
        return attend(query, keys, values, self.heads, span, numpy, bias=biases[:, columns])
