"""Token embeddings, scaled, plus learned position embeddings if the model has them.

Every rank holds the whole tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import INT32, Argument, Launch, StepShape, Value, count_copy_work
from model.layers.layer import Stateless, States
from model.layers.shard import Whole
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class Embedding(Stateless):
    """Embedding layer: x = scale * table[ids] + positions[position], in the dtype of the activations.

    `learned` is the checkpoint tensor and the number of rows of the position table, or None.
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
        """Table of token embeddings, [vocabulary, hidden] on every rank."""
        return Weight(f"{self.name}.table", (Tensor(self.tensor, (self.vocabulary, self.hidden), Whole()),))

    @property
    def position_table(self) -> Weight | None:
        """Table of learned position embeddings, [positions, hidden] on every rank; None without learned positions."""
        if self.learned is None:
            return None
        tensor, rows = self.learned
        return Weight(f"{self.name}.positions", (Tensor(tensor, (rows, self.hidden), Whole()),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Table of token embeddings, and table of positions if there is one."""
        return (self.table, *((self.position_table,) if self.position_table else ()))

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `embedding` that writes x [rows of the rank, hidden] from a rank's token ids `ids`.

        With learned positions it also reads `own_positions`, the positions of a rank's rows.
        """
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
        return (Launch("embedding", arguments, ("x",), count_copy_work(x), step.local_rows),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the embeddings [tokens, hidden] of the token ids x [tokens], float32 and rounded.

        They are scaled, and the learned positions of `span` are added.
        """
        rows = numpy.load_rows(self.tensor, x) * np.float32(self.scale)
        if self.learned is not None:
            rows = rows + numpy.load_rows(self.learned[0], np.arange(span.start, span.start + span.count))
        return numpy.round(rows)
