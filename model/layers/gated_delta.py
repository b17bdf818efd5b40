"""The gated delta rule of Qwen3-Next, in place of attention: a state for each value head.

    q, k, v, z, b, a = in(norm(x)), of which q, k and v are convolved
    x + output(rule(q, k, v, b, a), each head normalised and gated by z)

Ranks divide the key heads, each with the value heads that share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from model.config.mixers import GatedDelta
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention import chunks
from model.layers.cache import Cache
from model.layers.launch import (
    FLOAT32,
    Argument,
    Axis,
    Launch,
    LeastWork,
    Phase,
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
from model.layers.shard import by_query_heads, query_span
from model.layers.weight import Tensor, Weight

_LENGTH_EPS = np.float32(1e-6)
"""Added to the squared lengths of queries and keys: `l2norm` of transformers' modeling_qwen3_next.py."""


@dataclass(frozen=True)
class DeltaTensors:
    """The tensors of the rule in a checkpoint, one number for each value head: of decay rates and of time steps."""

    rates: str
    step_bias: str


@dataclass(frozen=True)
class DeltaHeads:
    """x + output(rule(convolution(inner(norm(x))))).

    `inputs` are the projections of queries, keys, values, gates, strengths and decays. `inner_norm` is that of a head.
    """

    name: str
    hidden: int
    part: GatedDelta
    norm: Norm
    inputs: tuple[Projection, ...]
    convolution: Convolution
    tensors: DeltaTensors
    inner_norm: Norm
    output: Projection

    @property
    def _w_in(self) -> Weight:
        """[hidden, a rank's columns of all inputs]."""
        cut = by_query_heads(*self.part.divided)
        return Weight(f"{self.name}.w_in", tuple(own.weight(cut) for own in self.inputs))

    @property
    def _of_heads(self) -> tuple[Weight, Weight]:
        """Rows [1, a rank's value heads]: logarithms of decay rates, and biases of time steps."""
        cut, shape = by_query_heads(*self.part.divided), (self.part.heads,)
        rates = Weight(f"{self.name}.a_log", (Tensor(self.tensors.rates, shape, cut),))
        return rates, Weight(f"{self.name}.dt_bias", (Tensor(self.tensors.step_bias, shape, cut),))

    @property
    def _w_out(self) -> Weight:
        """[a rank's value heads, hidden]."""
        return Weight(f"{self.name}.w_out", (self.output.weight(by_query_heads(*self.part.divided, axis=1)),))

    @property
    def weights(self) -> Sequence[Weight]:
        """The norms, the projections, the convolution, and the numbers of heads."""
        own = (self._w_in, *self.convolution.weights, *self._of_heads, self._w_out)
        return (*self.norm.weights, *own, *self.inner_norm.weights)

    def caches(self, step: StepShape) -> Sequence[Cache]:
        """The last inputs of the convolution, and the state of every value head."""
        return (create_state_cache(step, self.convolution.state(step), self._state(step)),)

    def _state(self, step: StepShape) -> Value:
        """[slots, a rank's value heads, elements of a key, of a value]."""
        own = self.part
        heads = self._w_out.shape(step.shard)[0] // own.value_dim
        return Value(f"{self.name}.state", (slots(step), heads, own.key_dim, own.value_dim), FLOAT32)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """None."""
        return {}

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """The projection, the convolution, the rule, and the output."""
        w_in, w_out, tokens = self._w_in.value(step), self._w_out.value(step), step.tokens
        x = Value("x", (step.own_rows, self.hidden), step.activations)
        inner = Value("inner", (tokens, w_in.shape[1]), step.activations)
        y = Value("scanned", (tokens, w_out.shape[0]), step.activations)
        enter: dict[str, Argument] = {
            "x": x,
            "norm_weight": self.norm.weight.value(step),
            "w_qkv": w_in,
            "eps": self.norm.eps,
            "q_size": w_in.shape[1],
            "kv_size": 0,
            "norm_offset": self.norm.offset,
            **gathered_rows(step),
        }
        leave: dict[str, Argument] = {
            "o": y,
            "w_o": w_out,
            "residual": x,
            "replica_group": Axis.tensor,
            "sequence_ranks": step.sequence_ranks,
        }
        return (
            Launch("qkv_projection", enter, (inner.name,), product(tokens, w_in), tokens),
            self.convolution.launch(step, inner, "u"),
            *(self._rule(step, inner, y, *each) for each in self._at_once(step)),
            Launch("output_projection", leave, ("x",), product(tokens, w_out), tokens),
        )

    def _at_once(self, step: StepShape) -> list[tuple[int, int]]:
        """How many sequences each launch of the rule takes, and how often it is repeated for others."""
        return [(step.sequences, 1)] if step.phase is Phase.prefill else chunks(step)

    def _rule(self, step: StepShape, inner: Value, y: Value, sequences: int, repeat: int) -> Launch:
        """The rule and the gated norm of a rank's heads; gates lie behind what is convolved."""
        tokens = sequences * step.new_tokens
        if tokens < step.tokens:
            step = replace(step, tokens=tokens, sequences=sequences)
            inner = inner.last(tokens)
        own, state = self.part, self._state(step)
        u = Value("u", (tokens, self.convolution.state(step).shape[2]), step.activations)
        a_log, dt_bias = (weight.value(step) for weight in self._of_heads)
        elements = state.shape[1] * own.key_dim * own.value_dim
        kept = 2 * FLOAT32.itemsize * step.sequences * elements
        one_each = step.phase is Phase.decode and step.new_tokens == 1
        key_heads = state.shape[1] * own.key_heads // own.heads
        return Launch(
            "gated_delta_step" if one_each else "gated_delta",
            {
                "qkv": u,
                "gates": inner,
                "a_log": a_log,
                "dt_bias": dt_bias,
                "norm_weight": self.inner_norm.weight.value(step),
                "states": state,
                **sequence_arguments(step),
                "key_heads": key_heads,
                "eps": self.inner_norm.eps,
                "first": u.shape[1],
            },
            (y.name, state.name),
            LeastWork(6.0 * tokens * elements, float(inner.nbytes + y.nbytes + kept)),
            tokens,
            repeat=repeat,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Token by token; rounded are the inner rows, and the gated ones."""
        own, count = self.part, len(x)
        normed = self.norm.reference(x, numpy)
        *convolved, z, b, a = (numpy.rounded(numpy.product(normed, each)) for each in self.inputs)
        u = self.convolution.reference(np.concatenate(convolved, axis=1), states, numpy)
        key_width = own.key_heads * own.key_dim
        *turned, v = np.split(u, (key_width, 2 * key_width), axis=1)
        q, k = (self._unit(each.reshape(count, own.key_heads, own.key_dim)) for each in turned)
        v = v.reshape(count, own.heads, own.value_dim)
        logs, bias = (numpy.tensor(name) for name in (self.tensors.rates, self.tensors.step_bias))
        decays = np.exp(-np.exp(logs) * np.logaddexp(0, a + bias))
        strengths = 1 / (1 + np.exp(-b))
        name = f"{self.name}.state"
        held = states.get(name, np.zeros((own.heads, own.key_dim, own.value_dim), np.float32))
        mixed = np.empty_like(v)
        for token in range(count):
            held = decays[token][:, None, None] * held
            new = strengths[token][:, None] * (v[token] - np.einsum("hkv,hk->hv", held, k[token]))
            held = held + k[token][:, :, None] * new[:, None, :]
            mixed[token] = np.einsum("hkv,hk->hv", held, q[token])
        states[name] = held
        mixed *= np.float32(own.key_dim**-0.5)
        root = np.sqrt(np.mean(mixed * mixed, axis=-1, keepdims=True) + np.float32(self.inner_norm.eps))
        mixed = mixed / root * numpy.tensor(self.inner_norm.tensor)
        y = numpy.rounded(mixed.reshape(count, -1) * activated(z, "silu"))
        return numpy.rounded(x + numpy.summed_product(y, self.output, partial(query_span, *own.divided)))

    def _unit(self, heads: np.ndarray) -> np.ndarray:
        """Key heads [tokens, heads, elements] divided by their lengths, one for each value head."""
        lengths = np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + _LENGTH_EPS)
        return np.repeat(heads / lengths, self.part.heads // self.part.key_heads, axis=1)
