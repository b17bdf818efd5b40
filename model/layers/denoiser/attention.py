"""Attention of a denoiser: patches of an image attend to each other, and to the rows of a text.

    q, k, v = norm(x) @ w_qkv            self-attention; the norm is modulated
    x       = x + gate * (o @ w_o)

    q       = x @ w_q                    attention to a text, without norm and gate
    k, v    = text @ w_k, text @ w_v
    x       = x + o @ w_o

No keys are cached: every pass computes all of them. Ranks divide the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.config.mixers import GroupedAttention
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention_heads import AttentionHeads, AttentionProjections
from model.layers.denoiser.modulation import ModulatedNorm
from model.layers.launch import (
    INT32,
    Argument,
    Axis,
    Growth,
    Launch,
    LeastWork,
    StepShape,
    Value,
    count_product_work,
)
from model.layers.layer import Stateless, States
from model.layers.projection import Projection
from model.layers.shard import ROW, Cut, by_query_heads
from model.layers.softmax import attend
from model.layers.weight import Weight, create_argument


@dataclass(frozen=True)
class ImageAttention(AttentionHeads, Stateless):
    """Self-attention of the patches of each image; `norm` is None, and `modulation` gives the norm and the gate."""

    modulation: ModulatedNorm | None = None
    component: ClassVar[str] = "attention"

    @property
    def _modulation(self) -> ModulatedNorm:
        assert self.modulation is not None and self.norm is None
        return self.modulation

    def _list_norm_arguments(self, step: StepShape) -> dict[str, Argument]:
        return self._modulation.list_arguments(step)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of projection, attention and output projection with gate and residual."""
        (output,) = self._project_output(step)
        gated = {**output.arguments, **self._modulation.list_gate_arguments(step)}
        q, k, v = self._describe_projected(step)
        return [
            *self._project(step),
            launch_attention(q, k, v, self.heads, step),
            replace(output, arguments=gated),
        ]

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [patches, hidden] of one image after the layer, computed in NumPy."""
        normed = self._modulation.reference(x, numpy, states)
        query, keys, values = self._project_heads(normed, span, numpy)
        mixed = attend(query, keys, values, self.heads, span, numpy)
        y = self._project_mixed(mixed, normed, numpy)
        return numpy.round(x + self._modulation.apply_gate(y, states))


@dataclass(frozen=True)
class TextAttention(Stateless):
    """Attention of the patches of each image to the rows of its text.

    text       name of the array of the text's rows, [images * text_rows, text_size]
    lengths    name of the array of the number of rows that are no padding, int32 [images, 1]; an input of the step
    text_rows  rows of a text, padding included
    """

    name: str
    hidden: int
    heads: GroupedAttention
    projections: AttentionProjections
    text: str
    lengths: str
    text_rows: int
    component: ClassVar[str] = "attention"

    def _find_projection(self, letter: str) -> tuple[Projection, Cut, Cut]:
        """Return (projection, cut of its matrix, cut of its bias); `letter` is "q", "k", "v", or "o" for the output."""
        query_projection, key_projection, value_projection = self.projections.inputs
        by_heads = by_query_heads(*self.heads.divided)
        return {
            "q": (query_projection, by_heads, by_heads),
            "k": (key_projection, by_heads, by_heads),
            "v": (value_projection, by_heads, by_heads),
            "o": (self.projections.output, replace(by_heads, axis=1), ROW),
        }[letter]

    def _matrix(self, letter: str) -> Weight:
        projection, cut, _ = self._find_projection(letter)
        kernel = ("output_projection", "w_o") if letter == "o" else ("qkv_projection", "w_qkv")
        return Weight(f"{self.name}.w_{letter}", (projection.weight(cut),), reader=kernel)

    def _bias(self, letter: str) -> Weight | None:
        projection, _, cut = self._find_projection(letter)
        if projection.bias is None:
            return None
        return Weight(f"{self.name}.b_{letter}", (projection.bias_row(cut),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrices of the four projections, and their biases."""
        weights = [weight for letter in "qkvo" for weight in (self._matrix(letter), self._bias(letter))]
        return [weight for weight in weights if weight is not None]

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of queries, keys and values, of attention, and of the output with the residual."""
        x = Value("x", (step.tokens, self.hidden), step.activations)
        width = self.projections.inputs[1].inputs
        text = Value(self.text, (step.sequences * self.text_rows, width), step.activations)
        rank_width = self.heads.layout(step.ranks).heads_of_rank * self.heads.head_dim
        q, k, v = (
            Value(name, (rows.shape[0], rank_width), step.activations)
            for name, rows in (("q", x), ("k", text), ("v", text))
        )
        attention = launch_attention(q, k, v, self.heads, step, self.lengths, "to the text")
        matrices = self._matrix("o").arguments("w_o", step)
        output = Launch(
            "output_projection",
            {
                "o": Value("o", q.shape, step.activations),
                **matrices,
                "residual": x,
                "replica_group": Axis.tensor,
                "bias": create_argument(self._bias("o"), step),
            },
            ("x",),
            count_product_work(step.tokens, matrices["w_o"]),
            step.tokens,
            "of the text",
        )
        return [
            self._project(step, "q", x, q, "queries to the text"),
            self._project(step, "k", text, k, "keys of the text"),
            self._project(step, "v", text, v, "values of the text"),
            attention,
            output,
        ]

    def _project(self, step: StepShape, letter: str, rows: Value, projected: Value, label: str) -> Launch:
        """Return the launch of `qkv_projection` that multiplies rows by one of the matrices."""
        matrices = self._matrix(letter).arguments("w_qkv", step)
        return Launch(
            "qkv_projection",
            {
                "x": rows,
                **matrices,
                "q_size": projected.shape[1],
                "bias": create_argument(self._bias(letter), step),
            },
            (projected.name,),
            count_product_work(rows.shape[0], matrices["w_qkv"]),
            rows.shape[0],
            label,
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [patches, hidden] of one image after the layer, computed in NumPy."""
        length = int(states[self.lengths].item())
        text = states[self.text].reshape(self.text_rows, -1)[:length]
        projected, keys, values = (
            numpy.round(numpy.multiply(rows, projection))
            .reshape(len(rows), -1, self.heads.head_dim)
            .swapaxes(0, 1)
            for rows, projection in zip((x, text, text), self.projections.inputs)
        )
        mixed = attend(projected, keys, values, self.heads, span, numpy)
        head_span = by_query_heads(*self.heads.divided).span
        return numpy.round(x + numpy.sum_partial_products(mixed, self.projections.output, head_span))


def launch_attention(
    q: Value,
    k: Value,
    v: Value,
    heads: GroupedAttention,
    step: StepShape,
    lengths: str = "",
    label: str = "",
) -> Launch:
    """Return the launch of attention of all rows of each image to all keys of this image, which writes "o".

    Args:
        q: Queries, [images * patches, width of the rank].
        k, v: Keys and values, [images * keys, width of the rank].
        heads: Heads of all ranks.
        step: The step.
        lengths: Name of the array of the number of keys that are seen, int32 [images, 1]; "" for all keys.
        label: Distinguishes launches of the kernel in reports.
    """
    operations = 4.0 * q.shape[0] * q.shape[1] * (k.shape[0] // step.sequences)
    arguments: Mapping[str, Argument] = {
        "q": q,
        "k_cache": None,
        "v_cache": None,
        "k": k,
        "v": v,
        "scale": heads.score_scale,
        "num_kv_heads": heads.layout(step.ranks).kv_heads_of_rank,
        "causal": False,
        "sequences": step.sequences,
        **({"key_lengths": Value(lengths, (step.sequences, 1), INT32)} if lengths else {}),
    }
    moved = 2 * q.nbytes + k.nbytes + v.nbytes
    return Launch(
        "attention_prefill",
        arguments,
        ("o",),
        LeastWork(operations, float(moved), operations),
        q.shape[0],
        label,
        Growth.square,
    )
