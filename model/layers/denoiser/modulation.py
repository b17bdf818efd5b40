"""Modulation: shifts, scales and gates of a denoiser's layers, one row for each image, from the timestep.

normed = layernorm(x) * (1 + scale) + shift       before a layer
x      = x + gate * layer(normed)                 after it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import Argument, Launch, LeastWork, StepShape, Value
from model.layers.layer import Stateless, States
from model.layers.shard import WHOLE
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class ModulatedNorm:
    """LayerNorm without weights, multiplied by 1 + scale and shifted, and the gate of the layer that it precedes.

    `shift`, `scale` and `gate` are names of arrays [images, size]; a layer without a gate has a `gate` of "".
    """

    size: int
    eps: float
    shift: str
    scale: str
    gate: str = ""
    offset: ClassVar[float] = 1.0

    @property
    def weights(self) -> Sequence[Weight]:
        """No weights: the rows are results of a layer `Modulation`."""
        return ()

    def list_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments of the norm of a kernel that normalises its input."""
        return {
            "norm_weight": self._describe(self.scale, step),
            "norm_bias": self._describe(self.shift, step),
            "norm_offset": self.offset,
            "eps": self.eps,
        }

    def list_gate_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the argument `residual_gate` of the kernel that adds the residual; empty without a gate."""
        return {"residual_gate": self._describe(self.gate, step)} if self.gate else {}

    def _describe(self, name: str, step: StepShape) -> Value:
        return Value(name, (step.sequences, self.size), step.activations)

    def reference(self, x: np.ndarray, numpy: Arithmetic, states: States) -> np.ndarray:
        """Return the modulated norm of x [rows, size] of one image, rounded."""
        centred = x - np.mean(x, axis=-1, keepdims=True)
        root = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(self.eps))
        return numpy.round(centred / root * (states[self.scale] + np.float32(1)) + states[self.shift])

    def apply_gate(self, y: np.ndarray, states: States) -> np.ndarray:
        """Return what a layer adds to the residual, y [rows, size], multiplied by its gate; not rounded."""
        return y * states[self.gate] if self.gate else y


@dataclass(frozen=True)
class TableModulation(Stateless):
    """Modulation of one block as the sum of a table of the checkpoint and rows of the timestep (adaLN-single).

    tensor  table [chunks, size] of the checkpoint
    source  name of the array of rows: [images, chunks * size], or [images, size] for all chunks
    chunks  names of the results, [images, size] each
    """

    name: str
    tensor: str
    size: int
    source: str
    chunks: tuple[str, ...]
    is_shared: bool = False
    component: ClassVar[str] = "norms"

    @property
    def _table(self) -> Weight:
        return Weight(f"{self.name}.table", (Tensor(self.tensor, (len(self.chunks), self.size), WHOLE),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The table."""
        return (self._table,)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `modulation` that writes the chunks."""
        width = self.size * (1 if self.is_shared else len(self.chunks))
        rows = Value(self.source, (step.sequences, width), step.activations)
        table = self._table.value(step)
        moved = 2 * rows.nbytes + table.nbytes
        return (
            Launch(
                "modulation",
                {"x": rows, "table": table, "chunks": len(self.chunks)},
                self.chunks,
                LeastWork(0.0, float(moved)),
                step.sequences,
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the chunks in `states`, [1, size] each, rounded."""
        rows = states[self.source].reshape(1, -1, self.size)
        sums = numpy.round(rows + numpy.load_tensor(self.tensor))
        states |= {name: sums[:, index] for index, name in enumerate(self.chunks)}
        return x
