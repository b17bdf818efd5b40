"""The selective state space of Mamba, in place of attention and MLP.

    u, gate = in(norm(x)), the first half convolved
    x + output(scan(u, select(u)) * silu(gate))

Ranks divide the channels. Every one projects time steps and weights of its own channels, and the sum over the ranks
gives them to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model.config.mixers import StateSpace
from model.layers.arithmetic import Arithmetic, Span
from model.layers.cache import Cache
from model.layers.launch import (
    FLOAT32,
    Argument,
    Axis,
    Launch,
    LeastWork,
    StepShape,
    Value,
    gathered_rows,
    product,
)
from model.layers.layer import Constant, States
from model.layers.mlp import activated
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.recurrent import Convolution, create_state_cache, sequence_arguments, slots
from model.layers.shard import COLUMN_PARALLEL, ROW, ROW_PARALLEL, ROWS_PARALLEL, even_span
from model.layers.weight import Tensor, Weight, value_of


@dataclass(frozen=True)
class ScanTensors:
    """The tensors of a scan in a checkpoint: logarithms of decay rates [channels, state], and the skip [channels]."""

    rates: str
    skip: str


@dataclass(frozen=True)
class SelectiveStateSpace:
    """x + output(scan(convolution(inner(norm(x))))); `inputs` are the projections of channels and of gates."""

    name: str
    hidden: int
    part: StateSpace
    norm: Norm
    inputs: tuple[Projection, Projection]
    convolution: Convolution
    selection: Projection
    steps: Projection
    tensors: ScanTensors
    output: Projection

    @property
    def _w_in(self) -> Weight:
        """[hidden, channels and gates of a rank]."""
        return Weight(f"{self.name}.w_in", tuple(each.weight(COLUMN_PARALLEL) for each in self.inputs))

    @property
    def _b_in(self) -> Weight | None:
        if not self.part.bias:
            return None
        return Weight(f"{self.name}.b_in", tuple(each.bias_row(COLUMN_PARALLEL) for each in self.inputs))

    @property
    def _w_select(self) -> Weight:
        """[channels of a rank, rank of time steps + 2 states]."""
        return Weight(f"{self.name}.w_select", (self.selection.weight(ROW_PARALLEL),))

    @property
    def _of_scan(self) -> dict[str, Weight]:
        """What the scan takes of its channels, by the names of its parameters."""
        own, tensors = self.part, self.tensors
        rates = Tensor(tensors.rates, (own.inner, own.state), ROWS_PARALLEL)
        skip = Tensor(tensors.skip, (own.inner,), COLUMN_PARALLEL)
        return {
            "w_dt": Weight(f"{self.name}.w_dt", (self.steps.weight(COLUMN_PARALLEL),)),
            "dt_bias": Weight(f"{self.name}.b_dt", (self.steps.bias_row(COLUMN_PARALLEL),)),
            "a_log": Weight(f"{self.name}.a_log", (rates,)),
            "d": Weight(f"{self.name}.d", (skip,)),
        }

    @property
    def _w_out(self) -> Weight:
        """[channels of a rank, hidden]."""
        return Weight(f"{self.name}.w_out", (self.output.weight(ROW_PARALLEL),))

    @property
    def _b_out(self) -> Weight | None:
        return Weight(f"{self.name}.b_out", (self.output.bias_row(ROW),)) if self.part.bias else None

    @property
    def weights(self) -> Sequence[Weight]:
        """The norm, the projections, the convolution, and what the scan takes."""
        biases = [each for each in (self._b_in, self._b_out) if each is not None]
        scan = self._of_scan.values()
        own = (self._w_in, *self.convolution.weights, self._w_select, *scan, self._w_out)
        return (*self.norm.weights, *own, *biases)

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """The last inputs of the convolution, and the state of every channel."""
        return (create_state_cache(step, self.convolution.state(step), self._state(step)),)

    def _state(self, step: StepShape) -> Value:
        own = self._w_out.shape(step.shard)[0]
        return Value(f"{self.name}.state", (slots(step), own, self.part.state), FLOAT32)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """None."""
        return {}

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Two projections, the convolution between them, the scan, and the output."""
        own, tokens = self._w_out.shape(step.shard)[0], step.tokens
        x = Value("x", (step.own_rows, self.hidden), step.activations)
        inner = Value("inner", (tokens, 2 * own), step.activations)
        u = Value("u", (tokens, own), step.activations)
        y = Value("scanned", u.shape, u.dtype)
        w_select, w_out = self._w_select.value(step), self._w_out.value(step)
        selected = Value("selected", (tokens, w_select.shape[1]), step.activations)
        select: dict[str, Argument] = {
            "o": u,
            "w_o": w_select,
            "residual": None,
            "replica_group": Axis.tensor,
        }
        leave: dict[str, Argument] = {
            "o": y,
            "w_o": w_out,
            "residual": x,
            "replica_group": Axis.tensor,
            "bias": value_of(self._b_out, step),
            "sequence_ranks": step.sequence_ranks,
        }
        return (
            self._enter(step, x, inner),
            self.convolution.launch(step, inner, u.name),
            Launch(
                "output_projection",
                select,
                (selected.name,),
                product(tokens, w_select),
                tokens,
                "selection",
            ),
            self._scan(step, u, selected, inner, y.name),
            Launch("output_projection", leave, ("x",), product(tokens, w_out), tokens),
        )

    def _enter(self, step: StepShape, x: Value, inner: Value) -> Launch:
        """Channels and gates of the normalised rows, side by side."""
        w_in = self._w_in.value(step)
        return Launch(
            "qkv_projection",
            {
                "x": x,
                "norm_weight": self.norm.weight.value(step),
                "w_qkv": w_in,
                "eps": self.norm.eps,
                "q_size": w_in.shape[1],
                "kv_size": 0,
                "bias": value_of(self._b_in, step),
                **gathered_rows(step),
            },
            (inner.name,),
            product(step.tokens, w_in),
            step.tokens,
        )

    def _scan(self, step: StepShape, u: Value, selected: Value, gate: Value, result: str) -> Launch:
        """The scan of a rank's channels, whose gates lie behind them."""
        state = self._state(step)
        weights = {parameter: weight.value(step) for parameter, weight in self._of_scan.items()}
        channels, sequences = u.shape[1], step.sequences
        elements = channels * self.part.state
        kept = 2 * FLOAT32.itemsize * sequences * elements
        moved = 3 * u.nbytes + selected.nbytes + sum(value.nbytes for value in weights.values()) + kept
        operations = 2.0 * step.tokens * (channels * self.steps.inputs + 3 * elements)
        return Launch(
            "selective_scan",
            {
                "u": u,
                "projected": selected,
                **weights,
                "gate": gate,
                "state": state,
                **sequence_arguments(step),
                "gate_first": channels,
            },
            (result, state.name),
            LeastWork(operations, float(moved)),
            step.tokens,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Token by token; rounded are both halves of the inner rows, what is selected, and the gated rows."""
        normed = self.norm.reference(x, numpy)
        inner, gate = (numpy.rounded(numpy.product(normed, each)) for each in self.inputs)
        u = self.convolution.reference(inner, states, numpy)
        selected = numpy.rounded(numpy.summed_product(u, self.selection, even_span))
        rank, size = self.steps.inputs, self.part.state
        low, into, out = np.split(selected, (rank, rank + size), axis=1)
        steps = np.logaddexp(0, numpy.product(low, self.steps))[:, :, None]
        rates = -np.exp(numpy.tensor(self.tensors.rates))
        held = states.get(f"{self.name}.state", np.zeros_like(rates))
        scanned = np.empty_like(u)
        for token in range(len(u)):
            held = np.exp(steps[token] * rates) * held + steps[token] * u[token][:, None] * into[token]
            scanned[token] = held @ out[token]
        states[f"{self.name}.state"] = held
        y = (scanned + u * numpy.tensor(self.tensors.skip)) * activated(gate, "silu")
        return numpy.rounded(x + numpy.summed_product(numpy.rounded(y), self.output, even_span))
