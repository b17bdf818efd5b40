"""Embedding: the row of a table for every token id. Every rank holds the whole table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import INT32, Launch, StepShape, Tensor, Value, Weight, copied
from model.layers.layer import Stateless, States
from model.layers.shard import Whole


@dataclass(frozen=True)
class Embedding(Stateless):
    """x = table[ids], in the dtype of the activations, which every kernel after it keeps."""

    name: str
    tensor: str
    vocabulary: int
    hidden: int

    @property
    def table(self) -> Weight:
        """[vocabulary, hidden]."""
        return Weight(f"{self.name}.table", (Tensor(self.tensor, (self.vocabulary, self.hidden), Whole()),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The table."""
        return (self.table,)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """One gather."""
        ids = Value("ids", (step.tokens, 1), INT32)
        x = Value("x", (step.tokens, self.hidden), step.activations)
        arguments = (ids, self.table.value(step), step.activations)
        return (Launch("embedding", arguments, ("x",), copied(x), step.tokens),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """ids [tokens] -> [tokens, hidden]."""
        return numpy.rows(self.tensor, x)
