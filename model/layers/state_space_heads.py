"""State-space layer of Mamba-2: each head has one decay, and the heads of a group share B and C.

    gate, u, steps = in(norm(x)), u convolved
    x + output(norm(scan(u, steps) * silu(gate)))

Ranks divide the heads like query heads, and the groups like key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.config.heads import HeadLayout
from model.config.mixers import StateSpaceHeads
from model.layers.arithmetic import Arithmetic
from model.layers.launch import FLOAT32, Launch, LeastWork, StepShape, Value
from model.layers.layer import States
from model.layers.mlp import apply_activation
from model.layers.norm import Norm
from model.layers.recurrent import RecurrentBlock, list_sequence_arguments
from model.layers.shard import Cut, Divided, by_kv_heads, by_query_heads
from model.layers.weight import Tensor, Weight


@dataclass(frozen=True)
class ScannedHeads(RecurrentBlock):
    """Mamba-2 layer: x + output(inner_norm(scan(convolution(inputs(norm(x)))))).

    `inputs` are the projections of gates, heads, B, C and time steps, which share one checkpoint tensor. `head_tensors`
    are the checkpoint tensors [heads] of the biases of time steps, the logarithms of decay rates, and D.
    """

    mixer: StateSpaceHeads
    head_tensors: tuple[str, str, str]
    inner_norm: Norm

    def _choose_cuts(self) -> tuple[Sequence[Cut], Divided]:
        return choose_input_cuts(self.mixer), by_query_heads(*self.mixer.divided, axis=1)

    @property
    def _head_weights(self) -> tuple[Weight, ...]:
        """Weights `dt_bias`, `a_log` and `d` of `head_tensors`, [1, heads of a rank] each."""
        cut, shape = by_query_heads(*self.mixer.divided), (self.mixer.heads,)
        named = zip(("dt_bias", "a_log", "d"), self.head_tensors)
        return tuple(Weight(f"{self.name}.{name}", (Tensor(tensor, shape, cut),)) for name, tensor in named)

    @property
    def _inner_weights(self) -> Sequence[Weight]:
        return (*self._head_weights, self._w_out, *self.inner_norm.weights)

    def _layout(self, step: StepShape) -> HeadLayout:
        return self.mixer.layout(step.ranks)

    def _find_state_shape(self, step: StepShape) -> tuple[int, ...]:
        return self.mixer.state, self._layout(step).heads_of_rank * self.mixer.head_dim

    def _launch_recurrence(self, step: StepShape, inner: Value, y: Value) -> Sequence[Launch]:
        """Return the launches of the convolution, which writes `u`, of the scan, which writes `y`, and of the norm.

        The norm writes `normed` with the shape of `y`, the input of the output projection.
        """
        return (
            self.convolution.launch(step, inner, "u", y.shape[1]),
            self._scan(step, inner, y.name),
            self.inner_norm.launch(step, y, "normed", "of the heads", None),
        )

    def _scan(self, step: StepShape, inner: Value, result: str) -> Launch:
        """Return the launch of `ssd`, which writes the gated heads to the array `result` and the state.

        It reads the convolved channels from the array `u`. The columns of `inner` are gates, channels before the
        convolution, and time steps; gates and time steps are read.
        """
        mixer, layout, state = self.mixer, self._layout(step), self._state(step)
        width = state.shape[2]
        u = Value("u", (step.tokens, width + 2 * layout.kv_heads_of_rank * mixer.state), step.activations)
        dt_bias, a_log, d = (weight.value(step) for weight in self._head_weights)
        size, elements = step.activations.itemsize, width * mixer.state
        moved = size * step.tokens * (u.shape[1] + 2 * width + layout.heads_of_rank)
        kept = 2 * FLOAT32.itemsize * step.sequences * elements
        operations = 6.0 * step.tokens * elements
        return Launch(
            "ssd",
            {
                "u": u,
                "steps": inner,
                "dt_bias": dt_bias,
                "a_log": a_log,
                "d": d,
                "gate": inner,
                "state": state,
                **list_sequence_arguments(step),
                "groups": layout.kv_heads_of_rank,
                "steps_first": width + u.shape[1],
                "dt_least": mixer.least_step,
                "dt_most": mixer.most_step,
            },
            (result, state.name),
            LeastWork(operations, float(moved + kept), operations),
            step.tokens,
        )

    def _compute_recurrence(
        self, inner: Sequence[np.ndarray], states: States, numpy: Arithmetic
    ) -> np.ndarray:
        """Return the normalised rows [tokens, heads * head_dim]: convolution, scan, gate and norm in NumPy.

        `inner` are the rows of gates, heads, B, C and time steps. Rows are rounded before the norm and by it. The
        states of the convolution and of the scan in `states` are read, or zeros if absent, and updated.
        """
        mixer = self.mixer
        gate, *convolved, steps = inner
        tokens = len(gate)
        u = self.convolution.reference(np.concatenate(convolved, axis=1), states, numpy)
        heads, into, out = np.split(u, (mixer.inner, mixer.inner + mixer.shared), axis=1)
        heads = heads.reshape(tokens, mixer.heads, mixer.head_dim)
        into, out = (
            np.repeat(groups.reshape(tokens, mixer.groups, mixer.state), mixer.heads // mixer.groups, axis=1)
            for groups in (into, out)
        )
        bias, logs, skip = (numpy.load_tensor(name) for name in self.head_tensors)
        steps = np.clip(np.logaddexp(0, steps + bias), mixer.least_step, mixer.most_step)
        zeros = np.zeros((mixer.heads, mixer.head_dim, mixer.state), np.float32)
        state = states.get(self._state_name, zeros)
        scanned = np.empty_like(heads)
        for token, dt in enumerate(steps):
            fed = (dt[:, None] * heads[token])[:, :, None] * into[token][:, None, :]
            state = np.exp(-np.exp(logs) * dt)[:, None, None] * state + fed
            scanned[token] = np.einsum("hpn,hn->hp", state, out[token])
        states[self._state_name] = state
        y = (scanned + heads * skip[:, None]).reshape(tokens, -1) * apply_activation(gate, "silu")
        return self.inner_norm.reference(numpy.round(y), numpy)


def choose_input_cuts(mixer: StateSpaceHeads) -> tuple[Cut, Cut, Cut, Cut, Cut]:
    """Return the cuts of the projections of gates, heads, B, C and time steps: B and C by groups, others by heads."""
    heads, groups = by_query_heads(*mixer.divided), by_kv_heads(*mixer.divided)
    return heads, heads, groups, groups, heads
