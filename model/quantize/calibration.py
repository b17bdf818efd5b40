"""Calibration: texts as token ids, and statistics of the inputs of linear weights while a layer computes them.

The inputs come from the layers' numpy references. Weights that read the same array share one statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from model.errors import ModelError
from model.formats import Weight
from model.layers.arithmetic import Arithmetic
from model.layers.projection import Projection
from model.layers.shard import Shard
from model.loading.tokenizer import Tokenizer

LONGEST_TEXT = 2048
"""Most tokens of one sequence; longer texts, or texts longer than the model's context, are cut into pieces."""
_SEPARATOR = "<|endoftext|>"


def split_texts(content: str) -> list[str]:
    """Return the texts of a file: parts between lines `<|endoftext|>`, or else the whole file; blank ones left out."""
    texts = "".join(
        "\0" if line.strip() == _SEPARATOR else line for line in content.splitlines(keepends=True)
    ).split("\0")
    return [text.strip() for text in texts if text.strip()]


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], context: int, ends: Sequence[int]
) -> list[list[int]]:
    """Return sequences of at least 2 token ids, each with the tokenizer's special tokens and the first end token.

    Args:
        tokenizer: Tokenizer of the model.
        texts: The texts.
        context: Most positions of the model.
        ends: End tokens of the model; may be empty.
    """
    most = min(context, LONGEST_TEXT)
    sequences = []
    for text in texts:
        ids = [*tokenizer.encode(text), *ends[:1]]
        sequences += [ids[first : first + most] for first in range(0, len(ids), most)]
    return [ids for ids in sequences if len(ids) > 1]


@dataclass
class InputStatistics:
    """Statistics of the rows that a linear weight [out, in] reads.

    rows      number of rows
    sums      sum of the magnitudes of each column, float64 [in]
    largest   largest magnitude of each column, float32 [in]
    products  sum of the products of columns x.T @ x, float32 [in, in]; None if it is not asked for
    """

    columns: int
    has_products: bool
    rows: int = 0
    sums: np.ndarray = field(init=False)
    largest: np.ndarray = field(init=False)
    products: np.ndarray | None = field(init=False)

    def __post_init__(self) -> None:
        self.sums = np.zeros(self.columns)
        self.largest = np.zeros(self.columns, np.float32)
        self.products = np.zeros((self.columns, self.columns), np.float32) if self.has_products else None

    def add(self, x: np.ndarray) -> None:
        """Add the rows of x, float32 [rows, in]."""
        magnitudes = np.abs(x)
        self.rows += len(x)
        self.sums += magnitudes.sum(axis=0, dtype=np.float64)
        self.largest = np.maximum(self.largest, magnitudes.max(axis=0, initial=0))
        if self.products is not None:
            self.products += x.T @ x

    def scale(self, factors: np.ndarray) -> None:
        """Multiply all columns by factors [in] above 0, as if the rows had been multiplied before."""
        self.sums *= factors
        self.largest *= factors
        if self.products is not None:
            self.products *= factors[:, None] * factors


class Recorder(Arithmetic):
    """Arithmetic that keeps statistics of the inputs of all projections.

    statistics  by name of the weight; weights that read one array share one object
    readers     weights that read the result of a norm as it is, by name of the norm's weight
    offsets     number added to the weight of a norm without bias, by name of the norm's weight
    """

    def __init__(self, weights: Mapping[str, Weight], exact: frozenset[str], has_products: bool) -> None:
        """Keep `weights`, float32 by name, without copying; a weight that is replaced there later is used then."""
        super().__init__(weights, np.dtype(np.float32), 0, exact=exact)
        self.statistics: dict[str, InputStatistics] = {}
        self.offsets: dict[str, float] = {}
        self.readers: dict[str, list[str]] = {}
        self._has_products = has_products
        self._last: tuple[np.ndarray, InputStatistics] | None = None
        self._normalised: tuple[np.ndarray, str] | None = None

    def multiply(self, x: np.ndarray, projection: Projection) -> np.ndarray:
        """Record the inputs and return the product of `Arithmetic`."""
        self._record(x, projection.tensor)
        return super().multiply(x, projection)

    def sum_expert_products(
        self,
        shape: tuple[int, int],
        products: Sequence[tuple[np.ndarray, np.ndarray, Projection]],
        span: Callable[[int, Shard], slice],
    ) -> np.ndarray:
        """Record the inputs of each expert and return the sum of `Arithmetic`."""
        for _, x, projection in products:
            self._record(x, projection.tensor)
        return super().sum_expert_products(shape, products, span)

    def normalise(
        self, x: np.ndarray, name: str | None, eps: float, bias: str | None = None, offset: float = 0.0
    ) -> np.ndarray:
        """Return the result of `Arithmetic`, and recognise it when a projection reads it."""
        normalised = super().normalise(x, name, eps, bias, offset)
        self._normalised = None if name is None else (normalised, name)
        if name is not None and bias is None:
            self.offsets[name] = offset
        return normalised

    def _record(self, x: np.ndarray, name: str) -> None:
        if self._last is not None and self._last[0] is x:
            self.statistics.setdefault(name, self._last[1])
        else:
            if name not in self.statistics:
                self.statistics[name] = InputStatistics(x.shape[1], self._has_products)
            self.statistics[name].add(x)
            self._last = x, self.statistics[name]
        if self._normalised is not None and self._normalised[0] is x:
            readers = self.readers.setdefault(self._normalised[1], [])
            if name not in readers:
                readers.append(name)


def require_texts(texts: Sequence[str], path: object) -> None:
    """Raise ModelError if there are no texts; `path` names their file."""
    if not texts:
        raise ModelError(f"{path} has no text; give a file with texts like those that the model will read")
