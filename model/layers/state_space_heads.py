"""The state space of Mamba-2, in place of attention and MLP: heads with one decay each, which share weights in groups.

    gate, u, steps = in(norm(x)), u convolved
    x + output(norm(scan(u, steps) * silu(gate)))

Ranks divide the heads like query heads, and the groups like key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from model.config.heads import HeadLayout
from model.config.mixers import StateSpaceHeads
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
from model.layers.shard import ROW, Cut, by_kv_heads, by_query_heads, query_span
from model.layers.weight import Tensor, Weight, value_of


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of a scan in a checkpoint, one number for each head: of time steps, decay rates and the skip."""

    step_bias: str
    rates: str
    skip: str

    @property
    def names(self) -> tuple[str, str, str]:
        """In the order of the arguments of `ssd`."""
        return self.step_bias, self.rates, self.skip


@dataclass(frozen=True)
class ScannedHeads:
    """x + output(inner_norm(scan(convolution(inner(norm(x)))))).

    `inputs` are the projections of gates, heads, both weights of states, and time steps, side by side in one tensor.
    """

    name: str
    hidden: int
    part: StateSpaceHeads
    norm: Norm
    inputs: tuple[Projection, ...]
    convolution: Convolution
    tensors: HeadTensors
    inner_norm: Norm
    output: Projection

    def _cuts(self) -> tuple[Cut, ...]:
        """How ranks divide each of the inputs."""
        return input_cuts(self.part)

    @property
    def _w_in(self) -> Weight:
        """[hidden, a rank's gates, heads, weights of states and time steps]."""
        tensors = (own.weight(cut) for own, cut in zip(self.inputs, self._cuts()))
        return Weight(f"{self.name}.w_in", tuple(tensors))

    @property
    def _b_in(self) -> Weight | None:
        if not self.part.bias:
            return None
        tensors = (own.bias_row(cut) for own, cut in zip(self.inputs, self._cuts()))
        return Weight(f"{self.name}.b_in", tuple(tensors))

    @property
    def _of_heads(self) -> tuple[Weight, ...]:
        """Rows [1, a rank's heads]: biases of time steps, logarithms of decay rates, and the skip."""
        cut, shape = by_query_heads(*self.part.divided), (self.part.heads,)
        named = zip(("dt_bias", "a_log", "d"), self.tensors.names)
        return tuple(Weight(f"{self.name}.{own}", (Tensor(each, shape, cut),)) for own, each in named)

    @property
    def _w_out(self) -> Weight:
        """[a rank's heads, hidden]."""
        cut = by_query_heads(*self.part.divided, axis=1)
        return Weight(f"{self.name}.w_out", (self.output.weight(cut),))

    @property
    def _b_out(self) -> Weight | None:
        return Weight(f"{self.name}.b_out", (self.output.bias_row(ROW),)) if self.part.bias else None

    @property
    def weights(self) -> Sequence[Weight]:
        """The norms, the projections, the convolution, and the numbers of heads."""
        biases = [each for each in (self._b_in, self._b_out) if each is not None]
        own = (self._w_in, *self.convolution.weights, *self._of_heads, self._w_out)
        return (*self.norm.weights, *own, *self.inner_norm.weights, *biases)

    def _layout(self, step: StepShape) -> HeadLayout:
        return HeadLayout(*self.part.divided, step.ranks)

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """The last inputs of the convolution, and the state of every head."""
        return (create_state_cache(step, self.convolution.state(step), self._state(step)),)

    def _state(self, step: StepShape) -> Value:
        width = self._layout(step).heads_of_rank * self.part.head_dim
        return Value(f"{self.name}.state", (slots(step), self.part.state, width), FLOAT32)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """None."""
        return {}

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """The projection, the convolution, the scan, its norm, and the output."""
        w_in, w_out, tokens = self._w_in.value(step), self._w_out.value(step), step.tokens
        x = Value("x", (step.own_rows, self.hidden), step.activations)
        inner = Value("inner", (tokens, w_in.shape[1]), step.activations)
        y = Value("scanned", (tokens, w_out.shape[0]), step.activations)
        normed = Value("normed", y.shape, y.dtype)
        enter: dict[str, Argument] = {
            "x": x,
            "norm_weight": self.norm.weight.value(step),
            "w_qkv": w_in,
            "eps": self.norm.eps,
            "q_size": w_in.shape[1],
            "kv_size": 0,
            "bias": value_of(self._b_in, step),
            **gathered_rows(step),
        }
        leave: dict[str, Argument] = {
            "o": normed,
            "w_o": w_out,
            "residual": x,
            "replica_group": Axis.tensor,
            "bias": value_of(self._b_out, step),
            "sequence_ranks": step.sequence_ranks,
        }
        return (
            Launch("qkv_projection", enter, (inner.name,), product(tokens, w_in), tokens),
            self.convolution.launch(step, inner, "u", y.shape[1]),
            self._scan(step, inner, y.name),
            self.inner_norm.launch(step, y, normed.name, "of the heads", None),
            Launch("output_projection", leave, ("x",), product(tokens, w_out), tokens),
        )

    def _scan(self, step: StepShape, inner: Value, result: str) -> Launch:
        """The scan of a rank's heads; gates lie before what is convolved, and time steps behind it."""
        own, layout, state = self.part, self._layout(step), self._state(step)
        width = state.shape[2]
        u = Value("u", (step.tokens, width + 2 * layout.kv_heads_of_rank * own.state), step.activations)
        dt_bias, a_log, d = (weight.value(step) for weight in self._of_heads)
        size, elements = step.activations.itemsize, width * own.state
        moved = size * step.tokens * (u.shape[1] + 2 * width + layout.heads_of_rank)
        kept = 2 * FLOAT32.itemsize * step.sequences * elements
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
                **sequence_arguments(step),
                "groups": layout.kv_heads_of_rank,
                "steps_first": width + u.shape[1],
                "dt_least": own.least_step,
                "dt_most": own.most_step,
            },
            (result, state.name),
            LeastWork(6.0 * step.tokens * elements, float(moved + kept)),
            step.tokens,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Token by token; rounded are the inner rows, the gated ones, and their norm."""
        own = self.part
        normed = self.norm.reference(x, numpy)
        gate, *convolved, steps = (numpy.rounded(numpy.product(normed, each)) for each in self.inputs)
        u = self.convolution.reference(np.concatenate(convolved, axis=1), states, numpy)
        heads, into, out = np.split(u, (own.inner, own.inner + own.shared), axis=1)
        heads = heads.reshape(len(x), own.heads, own.head_dim)
        into, out = (
            np.repeat(each.reshape(len(x), own.groups, own.state), own.heads // own.groups, axis=1)
            for each in (into, out)
        )
        bias, logs, skip = (numpy.tensor(name) for name in self.tensors.names)
        steps = np.clip(np.logaddexp(0, steps + bias), own.least_step, own.most_step)
        held = states.get(f"{self.name}.state", np.zeros((own.heads, own.head_dim, own.state), np.float32))
        scanned = np.empty_like(heads)
        for token, dt in enumerate(steps):
            fed = (dt[:, None] * heads[token])[:, :, None] * into[token][:, None, :]
            held = np.exp(-np.exp(logs) * dt)[:, None, None] * held + fed
            scanned[token] = np.einsum("hpn,hn->hp", held, out[token])
        states[f"{self.name}.state"] = held
        y = (scanned + heads * skip[:, None]).reshape(len(x), -1) * activated(gate, "silu")
        y = self.inner_norm.reference(numpy.rounded(y), numpy)
        span_of = partial(query_span, *own.divided)
        return numpy.rounded(x + numpy.summed_product(y, self.output, span_of))


def input_cuts(part: StateSpaceHeads) -> tuple[Cut, Cut, Cut, Cut, Cut]:
    """How ranks divide gates, heads, both weights of states, and time steps."""
    heads, groups = by_query_heads(*part.divided), by_kv_heads(*part.divided)
    return heads, heads, groups, groups, heads
