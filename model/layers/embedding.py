"""Embedding: the row of a table for every token id, scaled, and that of its position, where a model has such a table.

Every rank holds the whole tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import INT32, Argument, Launch, StepShape, Value, copied
from model.layers.layer import Stateless, States
from model.layers.shard import Whole
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class Embedding(Stateless):
    """x = scale * table[ids] + positions[position], in the dtype of the activations, which every kernel after it keeps.

    `learned` are the tensor and the rows of the table of positions, None where there is none.
    """

    name: str
    tensor: str
    vocabulary: int
    hidden: int
    scale: float = 1.0
    learned: tuple[str, int] | None = None
    component: ClassVar[str] = "embedding"

    @property
    def table(self) -> Weight:
        """[vocabulary, hidden]."""
        return Weight(f"{self.name}.table", (Tensor(self.tensor, (self.vocabulary, self.hidden), Whole()),))

    @property
    def position_table(self) -> Weight | None:
        """[positions, hidden]."""
        if self.learned is None:
            return None
        tensor, rows = self.learned
        return Weight(f"{self.name}.positions", (Tensor(tensor, (rows, self.hidden), Whole()),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The tables."""
        return (self.table, *((self.position_table,) if self.position_table else ()))

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """One kernel, for the rank's own rows."""
        ids = Value("ids", (step.local_rows, 1), INT32)
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        arguments: dict[str, Argument] = {
            "ids": ids,
            "table": self.table.value(step),
            "dtype": step.activations,
            "scale": self.scale,
        }
        if self.position_table is not None:
            arguments |= {
                "positions": Value("own_positions", ids.shape, INT32),
                "position_table": self.position_table.value(step),
            }
        return (Launch("embedding", arguments, ("x",), copied(x), step.local_rows),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """ids [tokens] -> [tokens, hidden]."""
        rows = numpy.rows(self.tensor, x) * np.float32(self.scale)
        if self.learned is not None:
            rows = rows + numpy.rows(self.learned[0], np.arange(span.start, span.start + span.count))
        return numpy.rounded(rows)
