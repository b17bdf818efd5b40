"""Feed-forward block of a denoiser, with modulated norm and gate, and the projection of a text to the hidden size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.denoiser.modulation import ModulatedNorm
from model.layers.launch import Argument, Launch, StepShape, Value
from model.layers.layer import Stateless, States
from model.layers.mlp import FeedForward
from model.layers.weight import Weight


@dataclass(frozen=True)
class ModulatedFeedForward(FeedForward):
    """Feed-forward block whose norm and gate are those of `modulation`; `norm` and `after` are None."""

    modulation: ModulatedNorm | None = None

    @property
    def _modulation(self) -> ModulatedNorm:
        assert self.modulation is not None and self.norm is None and self.after is None
        return self.modulation

    def _list_norm_arguments(self, step: StepShape) -> dict[str, Argument]:
        return self._modulation.list_arguments(step) | self._modulation.list_gate_arguments(step)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [patches, hidden] of one image after the block, computed in NumPy."""
        y = self.multiply_normed(self._modulation.reference(x, numpy, states), numpy)
        return numpy.round(x + self._modulation.apply_gate(y, states))


@dataclass(frozen=True)
class TextProjection(Stateless):
    """Two linear layers with an activation between them, from an encoded text to rows of the hidden size.

    block   the linear layers as a plain feed-forward block without norm; ranks divide its inner size
    source  name of the encoded text, [images * text_rows, text_size], an input of the step
    output  name of the rows, [images * text_rows, hidden size]
    """

    block: FeedForward
    source: str
    output: str
    text_rows: int
    component: ClassVar[str] = "embedding"

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrices and biases."""
        return self.block.weights

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `mlp` without residual that writes the rows."""
        rows = step.sequences * self.text_rows
        (launch,) = self.block.launches(replace(step, tokens=rows))
        source = Value(self.source, (rows, self.block.up.inputs), step.activations)
        return (
            replace(
                launch,
                arguments={**launch.arguments, "x": source, "residual": False},
                results=(self.output,),
                label="of the text",
            ),
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the text's rows in `states`, [text_rows, hidden size], rounded."""
        text = numpy.round(states[self.source].reshape(self.text_rows, -1))
        states[self.output] = numpy.round(self.block.multiply_normed(text, numpy))
        return x
