"""Gated delta rule of Qwen3-Next in place of attention; each value head has a state.

    q, k, v, z, b, a = in(norm(x)); q, k and v are convolved
    x + output(norm(rule(q, k, v, b, a)) * silu(z))

The norm is over each head. Ranks divide the key heads together with the value heads that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.config.mixers import GatedDelta
from model.layers.arithmetic import Arithmetic
from model.layers.attention import split_sequences
from model.layers.launch import FLOAT32, Launch, LeastWork, Phase, StepShape, Value
from model.layers.layer import States
from model.layers.mlp import apply_activation
from model.layers.norm import Norm
from model.layers.recurrent import RecurrentBlock, list_sequence_arguments
from model.layers.shard import Cut, Divided, by_query_heads
from model.layers.weight import Tensor, Weight

_LENGTH_EPS = np.float32(1e-6)
"""Added to the squared lengths of queries and keys: `l2norm` of transformers' modeling_qwen3_next.py."""


@dataclass(frozen=True)
class DeltaHeads(RecurrentBlock):
    """Gated delta layer: x + output(inner_norm(rule(convolution(inputs(norm(x))))) * gate).

    `inputs` are the projections of queries, keys, values, gates, strengths and decays. `inner_norm` normalises a head.
    `rates_tensor` and `step_bias_tensor` [value heads] have the logarithms of decay rates and the biases of time steps.
    """

    mixer: GatedDelta
    rates_tensor: str
    step_bias_tensor: str
    inner_norm: Norm

    def _choose_cuts(self) -> tuple[Sequence[Cut], Divided]:
        divided = self.mixer.divided
        return [by_query_heads(*divided)] * len(self.inputs), by_query_heads(*divided, axis=1)

    @property
    def _head_weights(self) -> tuple[Weight, Weight]:
        """Weights `a_log`, logarithms of decay rates, and `dt_bias`, biases of time steps, [1, value heads] each."""
        cut, shape = by_query_heads(*self.mixer.divided), (self.mixer.heads,)
        rates = Weight(f"{self.name}.a_log", (Tensor(self.rates_tensor, shape, cut),))
        return rates, Weight(f"{self.name}.dt_bias", (Tensor(self.step_bias_tensor, shape, cut),))

    @property
    def _inner_weights(self) -> Sequence[Weight]:
        return (*self._head_weights, self._w_out, *self.inner_norm.weights)

    def _find_state_shape(self, step: StepShape) -> tuple[int, ...]:
        """Return the shape of a sequence's state on a rank: (value heads of the rank, key_dim, value_dim)."""
        mixer = self.mixer
        return self._w_out.shape(step.shard)[0] // mixer.value_dim, mixer.key_dim, mixer.value_dim

    def _launch_recurrence(self, step: StepShape, inner: Value, y: Value) -> Sequence[Launch]:
        """Return the launches of the convolution and of the delta rule.

        The convolution writes `u`, and the rule reads `u` and the gates in `inner` and writes `y`. In a decode step the
        rule has several launches if the step has more than 128 tokens.
        """
        sizes = [(step.sequences, 1)] if step.phase is Phase.prefill else split_sequences(step)
        rules = (self._apply_rule(step, inner, y, sequences, repeat) for sequences, repeat in sizes)
        return (self.convolution.launch(step, inner, "u"), *rules)

    def _apply_rule(self, step: StepShape, inner: Value, y: Value, sequences: int, repeat: int) -> Launch:
        """Return the launch of the delta rule and the gated norm for the new tokens of `sequences` sequences.

        The columns of `inner` are the channels before the convolution, then z, b and a; the kernel reads the latter. A
        launch for fewer tokens than the step reads the last rows. The results are `y` and the states, written in place.
        """
        tokens = sequences * step.new_tokens
        if tokens < step.tokens:
            step = replace(step, tokens=tokens, sequences=sequences)
            inner = inner.take_last(tokens)
        mixer, state = self.mixer, self._state(step)
        u = Value("u", (tokens, self.convolution.state(step).shape[2]), step.activations)
        a_log, dt_bias = (weight.value(step) for weight in self._head_weights)
        elements = state.shape[1] * mixer.key_dim * mixer.value_dim
        kept = 2 * FLOAT32.itemsize * step.sequences * elements
        # Four multiply-adds an element: by the decay, by the key, of the update, and by the query.
        operations = 8.0 * tokens * elements
        is_single_token = step.phase is Phase.decode and step.new_tokens == 1
        return Launch(
            "gated_delta_step" if is_single_token else "gated_delta",
            {
                "qkv": u,
                "gates": inner,
                "a_log": a_log,
                "dt_bias": dt_bias,
                "norm_weight": self.inner_norm.weight.value(step),
                "states": state,
                **list_sequence_arguments(step),
                "key_heads": state.shape[1] * mixer.key_heads // mixer.heads,
                "eps": self.inner_norm.eps,
                "first": u.shape[1],
            },
            (y.name, state.name),
            LeastWork(operations, float(inner.nbytes + y.nbytes + kept), operations),
            tokens,
            repeat=repeat,
        )

    def _compute_recurrence(
        self, inner: Sequence[np.ndarray], states: States, numpy: Arithmetic
    ) -> np.ndarray:
        """Return the gated rows [tokens, value heads * value_dim], rounded: convolution, delta rule, norm and gate.

        `inner` are the rows of q, k, v, z, b and a, [tokens, …] each. The states of the convolution and of the rule in
        `states` are read, or zeros if absent, and updated.
        """
        mixer = self.mixer
        *convolved, z, b, a = inner
        tokens = len(z)
        u = self.convolution.reference(np.concatenate(convolved, axis=1), states, numpy)
        key_width = mixer.key_heads * mixer.key_dim
        *rows, v = np.split(u, (key_width, 2 * key_width), axis=1)
        q, k = (self._normalise(heads.reshape(tokens, mixer.key_heads, mixer.key_dim)) for heads in rows)
        v = v.reshape(tokens, mixer.heads, mixer.value_dim)
        logs, bias = (numpy.load_tensor(name) for name in (self.rates_tensor, self.step_bias_tensor))
        decays = np.exp(-np.exp(logs) * np.logaddexp(0, a + bias))
        strengths = 1 / (1 + np.exp(-b))
        zeros = np.zeros((mixer.heads, mixer.key_dim, mixer.value_dim), np.float32)
        state = states.get(self._state_name, zeros)
        mixed = np.empty_like(v)
        for token in range(tokens):
            state = decays[token][:, None, None] * state
            new = strengths[token][:, None] * (v[token] - np.einsum("hkv,hk->hv", state, k[token]))
            state = state + k[token][:, :, None] * new[:, None, :]
            mixed[token] = np.einsum("hkv,hk->hv", state, q[token])
        states[self._state_name] = state
        mixed *= np.float32(mixer.key_dim**-0.5)
        root = np.sqrt(np.mean(mixed * mixed, axis=-1, keepdims=True) + np.float32(self.inner_norm.eps))
        mixed = mixed / root * numpy.load_tensor(self.inner_norm.tensor)
        return numpy.round(mixed.reshape(tokens, -1) * apply_activation(z, "silu"))

    def _normalise(self, heads: np.ndarray) -> np.ndarray:
        """Divide each head [key_dim] by its Euclidean length and repeat it for the value heads that share it.

        Maps [tokens, key heads, key_dim] to [tokens, value heads, key_dim].
        """
        lengths = np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + _LENGTH_EPS)
        return np.repeat(heads / lengths, self.mixer.heads // self.mixer.key_heads, axis=1)
