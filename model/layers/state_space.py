"""Selective state-space layer of Mamba.

    u, gate = in(norm(x)), u convolved
    x + output(scan(u, select(u)) * silu(gate))

Ranks divide the channels. `select` projects the channels to time steps, B and C, and all-reduces them over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.config.mixers import StateSpace
from model.layers.arithmetic import Arithmetic
from model.layers.launch import FLOAT32, Axis, Launch, LeastWork, StepShape, Value, count_product_work
from model.layers.layer import States
from model.layers.mlp import apply_activation
from model.layers.projection import Projection
from model.layers.recurrent import RecurrentBlock, list_sequence_arguments
from model.layers.shard import COLUMN_PARALLEL, ROW_PARALLEL, ROWS_PARALLEL, Cut, Divided, slice_evenly
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class SelectiveStateSpace(RecurrentBlock):
    """Mamba layer: x + output(scan(convolution(inputs(norm(x))))).

    `inputs` are the projections of channels and of gates. `selection` projects channels to low-rank time steps, B and
    C; `steps` projects low-rank time steps to channels. `rates_tensor` [channels, state] has the logarithms of decay
    rates, and `skip_tensor` [channels] has D.
    """

    mixer: StateSpace
    selection: Projection
    steps: Projection
    rates_tensor: str
    skip_tensor: str

    def _choose_cuts(self) -> tuple[Sequence[Cut], Divided]:
        return (COLUMN_PARALLEL, COLUMN_PARALLEL), ROW_PARALLEL

    @property
    def _w_select(self) -> Weight:
        """Matrix of `selection`, [a rank's channels, rank of time steps + 2 * state]."""
        return Weight(f"{self.name}.w_select", (self.selection.weight(ROW_PARALLEL),))

    @property
    def _scan_weights(self) -> dict[str, Weight]:
        """Weights of a rank's channels by the parameters of `selective_scan` that read them."""
        rates = Tensor(self.rates_tensor, (self.mixer.inner, self.mixer.state), ROWS_PARALLEL)
        skip = Tensor(self.skip_tensor, (self.mixer.inner,), COLUMN_PARALLEL)
        return {
            "w_dt": Weight(f"{self.name}.w_dt", (self.steps.weight(COLUMN_PARALLEL),)),
            "dt_bias": Weight(f"{self.name}.b_dt", (self.steps.bias_row(COLUMN_PARALLEL),)),
            "a_log": Weight(f"{self.name}.a_log", (rates,)),
            "d": Weight(f"{self.name}.d", (skip,)),
        }

    @property
    def _inner_weights(self) -> Sequence[Weight]:
        return (self._w_select, *self._scan_weights.values(), self._w_out)

    def _find_state_shape(self, step: StepShape) -> tuple[int, ...]:
        return self._w_out.shape(step.shard)[0], self.mixer.state

    def _launch_recurrence(self, step: StepShape, inner: Value, y: Value) -> Sequence[Launch]:
        """Return the launches of the convolution, which writes `u`, the selection, and the scan, which writes `y`.

        The selection projects `u` to time steps, B and C of every token, summed over the ranks.
        """
        u, w_select = Value("u", y.shape, y.dtype), self._w_select.value(step)
        selected = Value("selected", (step.tokens, w_select.shape[1]), step.activations)
        return (
            self.convolution.launch(step, inner, u.name),
            Launch(
                "output_projection",
                {"o": u, "w_o": w_select, "replica_group": Axis.tensor},
                (selected.name,),
                count_product_work(step.tokens, w_select),
                step.tokens,
                "selection",
            ),
            self._scan(step, u, selected, inner, y.name),
        )

    def _scan(self, step: StepShape, u: Value, selected: Value, gate: Value, result: str) -> Launch:
        """Return the launch of `selective_scan`, which writes the gated rows to the array `result` and the state.

        Args:
            step: The step.
            u: Convolved channels, [tokens, channels of a rank].
            selected: Low-rank time steps, B and C, [tokens, rank + 2 * state].
            gate: Projected rows, whose columns are a rank's channels, then their gates; the gates are read.
            result: Name of the array [tokens, channels of a rank].
        """
        state = self._state(step)
        weights = {parameter: weight.value(step) for parameter, weight in self._scan_weights.items()}
        channels, sequences = u.shape[1], step.sequences
        elements = channels * self.mixer.state
        kept = 2 * FLOAT32.itemsize * sequences * elements
        moved = 3 * u.nbytes + selected.nbytes + sum(value.nbytes for value in weights.values()) + kept
        scanned = 6.0 * step.tokens * elements
        operations = 2.0 * step.tokens * channels * self.steps.inputs + scanned
        return Launch(
            "selective_scan",
            {
                "u": u,
                "projected": selected,
                **weights,
                "gate": gate,
                "state": state,
                **list_sequence_arguments(step),
                "gate_first": channels,
            },
            (result, state.name),
            LeastWork(operations, float(moved), scanned),
            step.tokens,
        )

    def _compute_recurrence(
        self, inner: Sequence[np.ndarray], states: States, numpy: Arithmetic
    ) -> np.ndarray:
        """Return the gated rows [tokens, channels], rounded: convolution, selection, scan and gate in NumPy.

        `inner` are the rows of the channels and of the gates. The selection is rounded too. The states of the
        convolution and of the scan in `states` are read, or zeros if absent, and updated.
        """
        convolved, gate = inner
        u = self.convolution.reference(convolved, states, numpy)
        selected = numpy.round(numpy.sum_partial_products(u, self.selection, slice_evenly))
        rank, size = self.steps.inputs, self.mixer.state
        low, into, out = np.split(selected, (rank, rank + size), axis=1)
        steps = np.logaddexp(0, numpy.multiply(low, self.steps))[:, :, None]
        rates = -np.exp(numpy.load_tensor(self.rates_tensor))
        state = states.get(self._state_name, np.zeros_like(rates))
        scanned = np.empty_like(u)
        for token in range(len(u)):
            state = np.exp(steps[token] * rates) * state + steps[token] * u[token][:, None] * into[token]
            scanned[token] = state @ out[token]
        states[self._state_name] = state
        return numpy.round(
            (scanned + u * numpy.load_tensor(self.skip_tensor)) * apply_activation(gate, "silu")
        )
