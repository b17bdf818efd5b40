"""Errors of a quantised model against its original on held-out texts, layer by layer and split by their cause.

The variants are the original and four runs: with rounded weights, with rounded rows before products, with a cache in
fp8, and with the weights and rows of the scheme together. All are computed in float32, one layer after another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.layers.arithmetic import Arithmetic
from model.layers.layer import Layer, States
from model.layers.projection import Projection
from model.quantize.layer_weights import LayerWeights
from model.quantize.rounding import round_rows
from model.quantize.schemes import Numbers
from model.quantize.sequences import LastReaders, Sequences

ORIGINAL, WEIGHTS, ACTIVATIONS, CACHE, SCHEME = (
    "original",
    "weights only",
    "activations only",
    "cache only",
    "scheme",
)
_CACHED = (".keys", ".values")
_ROWS_AT_ONCE = 256
"""Rows of logits whose probabilities are computed at a time."""


@dataclass
class Measured:
    """Sums over the predicted tokens of the held-out texts for one variant.

    tokens  number of predicted tokens
    loss    sum of the losses in nats
    kl      sum of the KL divergences from the original's distribution
    same    number of tokens whose most probable token is that of the original
    """

    tokens: int = 0
    loss: float = 0.0
    kl: float = 0.0
    same: int = 0

    @property
    def mean_loss(self) -> float:
        """Mean loss in nats a token."""
        return self.loss / self.tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss."""
        return float(np.exp(self.mean_loss))

    def add(self, logits: np.ndarray, reference: np.ndarray, ids: Sequence[int]) -> None:
        """Add one sequence: its logits [tokens, vocabulary], those of the original, and its token ids."""
        targets = np.asarray(ids)[1:]
        self.tokens += len(targets)
        for first in range(0, len(targets), _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, len(targets)))
            predicted, expected = _log_softmax(logits[rows]), _log_softmax(reference[rows])
            self.loss -= float(predicted[np.arange(len(predicted)), targets[rows]].sum(dtype=np.float64))
            self.kl += float((np.exp(expected) * (expected - predicted)).sum(dtype=np.float64))
            self.same += int((predicted.argmax(axis=1) == expected.argmax(axis=1)).sum())


class RowRounding(Arithmetic):
    """Arithmetic that rounds the rows before products with quantised weights, as a runtime of the scheme does.

    Args:
        weights: Weights by name.
        exact: Names of weights that stay float32.
        numbers: Number format of the rows.
        names: Names of the quantised weights.
        plain_columns: Columns of a weight that are not rounded, by name; LLM.int8 has them.
    """

    def __init__(
        self,
        weights: LayerWeights,
        exact: frozenset[str],
        numbers: Numbers,
        names: Collection[str],
        plain_columns: Mapping[str, np.ndarray],
    ) -> None:
        super().__init__(weights, np.dtype(np.float32), 0, exact=exact)
        self._numbers, self._names, self._plain_columns = numbers, names, plain_columns

    def multiply(self, x: np.ndarray, projection: Projection) -> np.ndarray:
        """Return the product of the rounded rows."""
        return super().multiply(self._round(x, projection.tensor), projection)

    def sum_expert_products(self, shape, products, span):  # type: ignore[no-untyped-def]
        """Return the sum of `Arithmetic` with rounded rows."""
        rounded = [(rows, self._round(x, projection.tensor), projection) for rows, x, projection in products]
        return super().sum_expert_products(shape, rounded, span)

    def _round(self, x: np.ndarray, name: str) -> np.ndarray:
        if name not in self._names:
            return x
        plain = self.plain_columns(name)
        if plain is None or not len(plain):
            return round_rows(x, self._numbers)
        inner = x.copy()
        inner[:, plain] = 0
        rounded = round_rows(inner, self._numbers)
        rounded[:, plain] = x[:, plain]
        return rounded

    def plain_columns(self, name: str) -> np.ndarray | None:
        """Return the indices of the columns of a weight whose rows are not rounded; None for none."""
        return self._plain_columns.get(name)


class _RoundedCache(States):
    """States whose keys and values are rounded to fp8 e4m3 with one scale for each array."""

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        if name.endswith(_CACHED):
            array = round_rows(array.reshape(1, -1), Numbers.fp8).reshape(array.shape)
        super().__setitem__(name, array)

    def copy(self) -> _RoundedCache:
        """Return a shallow copy."""
        copied = _RoundedCache()
        copied.update(self)
        return copied


@dataclass
class Evaluation:
    """Held-out sequences in all variants, which `advance` computes by one layer at a time.

    original      weights of the original
    rounded       weights of the quantised model
    exact         names of weights that stay float32
    activations   number format of rows; None if the scheme rounds none
    names         names of the quantised weights
    plain_columns columns that a scheme does not round, by name; filled while layers are quantised
    """

    sequences: Sequence[Sequence[int]]
    last_readers: LastReaders
    original: LayerWeights
    rounded: LayerWeights
    exact: frozenset[str]
    activations: Numbers | None
    names: Collection[str]
    has_cache: bool
    plain_columns: dict[str, np.ndarray] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    layer_errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        float32 = np.dtype(np.float32)
        self._numpy: dict[str, Arithmetic] = {
            ORIGINAL: Arithmetic(self.original, float32, 0, exact=self.exact),
            WEIGHTS: Arithmetic(self.rounded, float32, 0, exact=self.exact),
        }
        if self.activations is not None:
            rows = self.activations, self.names, self.plain_columns
            self._numpy[ACTIVATIONS] = RowRounding(self.original, self.exact, *rows)
            self._numpy[SCHEME] = RowRounding(self.rounded, self.exact, *rows)
        if self.has_cache:
            self._numpy[CACHE] = self._numpy[ORIGINAL]
        self._runs = {
            name: Sequences(self.sequences, self.last_readers, _RoundedCache if name == CACHE else dict)
            for name in self._numpy
        }
        self.measured = {name: Measured() for name in self._numpy}

    def advance(self, layer: Layer, index: int, is_last: bool) -> None:
        """Compute the layer `index` of all variants, add its error, and after the last layer measure the logits.

        The error of a layer is the root mean square of the difference from the original, over that of the original,
        with all layers up to this one quantised.
        """
        squares = differences = 0.0
        changed = SCHEME if SCHEME in self._runs else WEIGHTS
        for number, ids in enumerate(self.sequences):
            original = self._advance(ORIGINAL, number, layer, index)
            squares += float(np.square(original, dtype=np.float64).sum())
            for name in self._runs:
                output = original if name == ORIGINAL else self._advance(name, number, layer, index)
                if name == changed:
                    differences += float(np.square(output - original, dtype=np.float64).sum())
                if is_last:
                    self.measured[name].add(output, original, ids)
                    self._runs[name].outputs[number] = output[:0]  # logits are large
        self.layer_errors.append((differences / squares) ** 0.5 if squares else 0.0)

    def _advance(self, name: str, number: int, layer: Layer, index: int) -> np.ndarray:
        return self._runs[name].advance(number, layer, index, self._numpy[name])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    logarithms: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logarithms
