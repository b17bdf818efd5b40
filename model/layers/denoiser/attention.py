"""Attention of a denoiser: patches of an image attend to each other, and to the rows of a text.

    q, k, v = norm(x) @ w_qkv            self-attention; the norm is modulated
    x       = x + gate * (o @ w_o)

    q       = x @ w_q                    attention to a text, without norm and gate
    k, v    = text @ w_k, text @ w_v
    x       = x + o @ w_o

No keys are cached: every pass computes all of them. Tensor-parallel ranks divide the heads. Ulysses ranks divide the
rows, and exchange them for heads around self-attention (`ulysses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.config.mixers import GroupedAttention
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention_heads import AttentionHeads
from model.layers.denoiser.modulation import ModulatedNorm
from model.layers.denoiser.rotation import AxialRotation, ShiftedHeadNorm
from model.layers.denoiser.ulysses import gather_rows, scatter_rows
from model.layers.launch import (
    INT32,
    Argument,
    Growth,
    Launch,
    LeastWork,
    StepShape,
    Value,
)
from model.layers.layer import Constant, Stateless, States
from model.layers.projection import Projection
from model.layers.separate_projections import SeparateProjections
from model.layers.shard import Cut, MatrixCut, Reordered
from model.layers.softmax import attend
from model.layers.weight import Weight

MOST_BOUNDED_SCORE = 64.0
"""Largest magnitude of scores for which `attention_prefill` needs no maximum, `MAX_BOUNDED_SCORE` there."""
_ROUNDING = 1 + 2.0**-7
"""Factor of a score for the roundings of queries and keys to bfloat16, of 2^-9 each, with room for some more."""


@dataclass(frozen=True)
class ImageAttention(AttentionHeads, Stateless):
    """Self-attention of the rows of each image; `norm` is None, and `modulation` gives the norm and the gate.

    rotation  rotation of queries and keys by their patches; None without
    order     indices of a head's elements in the order of the kernels; empty for the order of the checkpoint
    """

    modulation: ModulatedNorm | None = None
    rotation: AxialRotation | None = None
    order: tuple[int, ...] = ()
    component: ClassVar[str] = "attention"

    @property
    def _modulation(self) -> ModulatedNorm:
        assert self.modulation is not None and self.norm is None
        assert all(norm.eps == self.modulation.eps for norm in self.head_norms)  # the kernel has one eps
        return self.modulation

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of projections and norms; without a gate there is no output projection."""
        if self._modulation.gate:
            return super().weights
        names = (f"{self.name}.w_o", f"{self.name}.b_o")
        return [weight for weight in super().weights if weight.name not in names]

    def _list_norm_arguments(self, step: StepShape) -> dict[str, Argument]:
        return self._modulation.list_arguments(step)

    def _pair_inputs_with_cuts(self) -> Iterable[tuple[Projection, Cut]]:
        pairs = super()._pair_inputs_with_cuts()
        if not self.order:
            return pairs
        return [
            (projection, Reordered(cut, self.order) if index < 2 and isinstance(cut, MatrixCut) else cut)
            for index, (projection, cut) in enumerate(pairs)
        ]

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute the tables of the rotation, by array name; empty without one."""
        return {} if self.rotation is None else self.rotation.list_constants(step)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of projection, attention and output projection with gate and residual.

        Ulysses ranks exchange rows for heads before attention, and heads for rows after it.
        """
        projected = self._describe_projected(step)
        gathers, projected = gather_rows(projected, step)
        attention = launch_attention(*projected, self.heads, step, is_bounded=self.name in step.bounded)
        scatters = scatter_rows(projected[0], step)
        return [
            self.launch_projection(step),
            *gathers,
            attention,
            *scatters,
            *self.list_output_launches(step),
        ]

    def list_bounded_layers(self, arrays: Mapping[str, np.ndarray]) -> list[str]:
        """Return the layer's name if its norms of heads bound scores by `MOST_BOUNDED_SCORE`, else no name."""
        return [self.name] if bound_scores([self], arrays) <= MOST_BOUNDED_SCORE else []

    def launch_projection(self, step: StepShape) -> Launch:
        """Return the launch that writes queries, keys and values, normalised and rotated."""
        (launch,) = self._project(step)
        if self.rotation is None:
            return launch
        return replace(launch, arguments={**launch.arguments, **self.rotation.list_arguments(step)})

    def list_output_launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of the output projection with gate and residual, which writes x.

        Attention in the last block of a stream has no gate and no output, so the list is empty.
        """
        if not self._modulation.gate:
            return ()
        (output,) = self._project_output(step)
        return [replace(output, arguments={**output.arguments, **self._modulation.list_gate_arguments(step)})]

    def describe_projected(self, step: StepShape) -> tuple[Value, Value, Value]:
        """Return queries, keys and values of a step as arguments of launches."""
        return self._describe_projected(step)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [patches, hidden] of one image after the layer, computed in NumPy."""
        query, keys, values = self.compute_heads(x, span, states, numpy)
        mixed = attend(query, keys, values, self.heads, span, numpy)
        return self.add_output(x, mixed, states, numpy)

    def compute_heads(
        self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic
    ) -> Sequence[np.ndarray]:
        """Return queries, keys and values of rows x of one image, [heads, rows, head_dim], normalised and rotated."""
        heads = self._project_heads(self._modulation.reference(x, numpy, states), span, numpy)
        if self.rotation is None:
            return heads
        return [self.rotation.rotate(heads[0], numpy), self.rotation.rotate(heads[1], numpy), heads[2]]

    def add_output(self, x: np.ndarray, mixed: np.ndarray, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the residual x plus the gated projection of the outputs of all heads, rounded; x without a gate."""
        if not self._modulation.gate:
            return x
        y = self._project_mixed(mixed, mixed, numpy)
        return numpy.round(x + self._modulation.apply_gate(y, states))


@dataclass(frozen=True)
class TextAttention(SeparateProjections, Stateless):
    """Attention of the patches of each image to the rows of its text.

    text       name of the array of the text's rows, [images * text_rows, text_size]
    lengths    name of the array of the number of rows that are no padding, int32 [images, 1]; an input of the step
    text_rows  rows of a text, padding included
    """

    matrices: ClassVar[tuple[str, ...]] = ("q", "kv", "o")

    text: str
    lengths: str
    text_rows: int

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of queries, keys and values, of attention, and of the output with the residual."""
        x = Value("x", (step.tokens, self.hidden), step.activations)
        width = self.projections.inputs[1].inputs
        text = Value(self.text, (step.sequences * self.text_rows, width), step.activations)
        q, k, v = (
            Value(name, (rows.shape[0], self._count_columns(step)), step.activations)
            for name, rows in (("q", x), ("k", text), ("v", text))
        )
        return [
            self._project(step, x, "q", (q.name,), "queries to the text"),
            self._project(step, text, "kv", (k.name, v.name), "keys and values of the text"),
            launch_attention(q, k, v, self.heads, step, self.lengths, "to the text"),
            self._project_output(step, "of the text"),
        ]

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [patches, hidden] of one image after the layer, computed in NumPy."""
        length = int(states[self.lengths].item())
        text = states[self.text].reshape(self.text_rows, -1)[:length]
        query, keys, values = (
            self._split_heads(numpy.round(numpy.multiply_rows(rows, projection)))
            for rows, projection in zip((x, text, text), self.projections.inputs)
        )
        return self._add_output(x, attend(query, keys, values, self.heads, span, numpy), numpy)


def bound_scores(streams: Sequence[ImageAttention], arrays: Mapping[str, np.ndarray]) -> float:
    """Return the largest magnitude that scores of rows of some streams can have; infinity without norms of heads.

    An RMSNorm makes the length of a head at most sqrt(head_dim), before its elements are multiplied by weights. A
    rotation keeps the length of a pair of elements, so the larger weight of a pair counts.

    Args:
        streams: Projections of streams whose rows attend to each other.
        arrays: Weights of a rank by name.
    """
    largest = []
    for norms in zip(*(stream.head_norms for stream in streams)):
        magnitudes = [norm.read_magnitudes(arrays) for norm in norms if isinstance(norm, ShiftedHeadNorm)]
        assert len(magnitudes) == len(streams), "norms of heads whose weights are held minus 1"
        largest.append(np.max(magnitudes, axis=0))
    if not largest:
        return float("inf")
    if streams[0].order:
        largest = [pairs.max(axis=0) for pairs in largest]
    heads = streams[0].heads
    return float(np.max(largest[0] * largest[1])) * heads.head_dim * heads.score_scale * _ROUNDING


def launch_attention(
    q: Value,
    k: Value,
    v: Value,
    heads: GroupedAttention,
    step: StepShape,
    lengths: str = "",
    label: str = "",
    text: tuple[Value, Value, Value] | None = None,
    is_bounded: bool = False,
) -> Launch:
    """Return the launch of attention of all rows of each image to all keys of this image, which writes "o".

    With a second stream, such as the rows of texts, rows of both attend to the keys of both. It writes "text_o" too.

    Args:
        q: Queries, [images * patches, width of the rank].
        k, v: Keys and values, [images * keys, width of the rank].
        heads: Heads of all ranks.
        step: The step.
        lengths: Name of the array of the number of keys that are seen, int32 [images, 1]; "" for all keys.
        label: Distinguishes launches of the kernel in reports.
        text: Queries, keys and values of the second stream.
        is_bounded: Whether no score exceeds `MOST_BOUNDED_SCORE`.
    """
    streams = [(q, k, v), *([] if text is None else [text])]
    keys = sum(stream_keys.shape[0] for _, stream_keys, _ in streams) // step.sequences
    operations = 4.0 * sum(queries.shape[0] for queries, _, _ in streams) * q.shape[1] * keys
    arguments: Mapping[str, Argument] = {
        "q": q,
        "k_cache": None,
        "v_cache": None,
        "k": k,
        "v": v,
        "scale": heads.score_scale,
        "num_kv_heads": k.shape[1] // heads.head_dim,
        "causal": False,
        "sequences": step.sequences,
        **({"key_lengths": Value(lengths, (step.sequences, 1), INT32)} if lengths else {}),
        **({} if text is None else dict(zip(("text_q", "text_k", "text_v"), text))),
        "bounded": is_bounded,
    }
    moved = sum(2 * queries.nbytes + keys.nbytes + values.nbytes for queries, keys, values in streams)
    return Launch(
        "attention_prefill",
        arguments,
        ("o", "text_o")[: len(streams)],
        LeastWork(operations, float(moved), operations),
        q.shape[0],
        label,
        Growth.square,
    )
