"""Projections before and after attention, with their norms, rotary embeddings and gates.

    q, k, v, gate = qkv_projection(x)    norm and biases fused in; heads divided over the ranks; a gate in some families
    q, k    = norm(q), norm(k)           per head in the launch of qkv_projection, or over all heads in extra launches
    q, k    = rope(q), rope(k)           in the launch of qkv_projection, unless a norm over all heads comes before it
    x       = output_projection(o, x)    all-reduced over the ranks, plus x; a norm after it is a launch that adds x

A gate is as wide as the queries. `output_projection` multiplies the outputs of heads by the gate's sigmoid. With
sequence parallelism a rank holds some rows of x: the first launch gathers all rows, and the last launch returns each
rank's rows of the sum. Queries, keys, values and outputs have all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.config import rope
from model.config.mixers import GroupedAttention, HeadNorm, Positions
from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import (
    INT32,
    Argument,
    Axis,
    Launch,
    Phase,
    StepShape,
    Value,
    count_copy_work,
    count_product_work,
    list_gather_arguments,
)
from model.layers.layer import Constant
from model.layers.norm import Norm
from model.layers.precision import FLOAT32
from model.layers.projection import Projection
from model.layers.shard import ROW, Cut, Shard, by_kv_heads, by_query_heads
from model.layers.weight import Weight, create_argument, list_row_arguments


@dataclass(frozen=True)
class AttentionProjections:
    """Projections in a checkpoint. `inputs` are those of queries, keys, values and gates; later ones may be absent."""

    inputs: tuple[Projection, ...]
    output: Projection


@dataclass(frozen=True)
class RotaryTable:
    """Table of cosines (`index` 0) or sines (1), [count, half of the rotated elements of a head], float32.

    With longrope the table has 2 * count rows: first for short sequences, then for long ones.
    """

    positions: Positions
    count: int
    index: int

    def __call__(self, shard: Shard) -> np.ndarray:
        """Return the table [count or 2 * count, half of the rotated elements] float32, the same on every rank."""
        positions, short = self.positions, self.positions.rope.longest_short
        lengths = (self.count,) if short is None else (short, short + 1)
        tables = [
            rope.compute_tables(positions.rope, positions.width, positions.limit, self.count, length)
            for length in lengths
        ]
        return np.concatenate([table[self.index] for table in tables])


@dataclass(frozen=True)
class AttentionHeads:
    """Projections to heads and back, with the norms before and after them.

    `head_norms` are the norms of queries and of keys, or empty. `after` normalises the output. A layer with an `owner`
    projects queries only and reads the keys and values of that earlier layer.
    """

    name: str
    hidden: int
    heads: GroupedAttention
    norm: Norm | None
    projections: AttentionProjections
    head_norms: tuple[Norm, ...] = ()
    after: Norm | None = None
    owner: str | None = None
    component: ClassVar[str] = "attention"

    def _pair_inputs_with_cuts(self) -> Iterable[tuple[Projection, Cut]]:
        """Return (projection, cut to a rank's heads) of queries, keys, values and gates, as far as they are present."""
        heads, kv_heads = by_query_heads(*self.heads.divided), by_kv_heads(*self.heads.divided)
        return zip(self.projections.inputs, (heads, kv_heads, kv_heads, heads))

    @property
    def w_qkv(self) -> Weight:
        """Matrix of a rank's heads: [hidden, queries + keys + values + gates], or [hidden, queries] with an `owner`."""
        return Weight(
            f"{self.name}.w_qkv",
            tuple(projection.weight(cut) for projection, cut in self._pair_inputs_with_cuts()),
            reader=("qkv_projection", "w_qkv"),
        )

    @property
    def b_qkv(self) -> Weight | None:
        """Biases of the columns of `w_qkv`, [1, columns], 0 for projections without one; None if none has a bias."""
        if all(projection.bias is None for projection in self.projections.inputs):
            return None
        return Weight(
            f"{self.name}.b_qkv",
            tuple(projection.bias_row(cut) for projection, cut in self._pair_inputs_with_cuts()),
        )

    @property
    def w_o(self) -> Weight:
        """Matrix of the output projection, [a rank's heads * head_dim, hidden]."""
        cut = by_query_heads(*self.heads.divided, axis=1)
        tensors = (self.projections.output.weight(cut),)
        return Weight(f"{self.name}.w_o", tensors, reader=("output_projection", "w_o"))

    @property
    def b_o(self) -> Weight | None:
        """Bias of the output projection, [1, hidden] on every rank; None without a bias."""
        output = self.projections.output
        return None if output.bias is None else Weight(f"{self.name}.b_o", (output.bias_row(ROW),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norms, of both projections, and their biases."""
        norms = [norm for norm in (self.norm, *self.head_norms, self.after) if norm is not None]
        biases = [bias for bias in (self.b_qkv, self.b_o) if bias is not None]
        return (*(weight for norm in norms for weight in norm.weights), self.w_qkv, self.w_o, *biases)

    def _describe_tables(self, step: StepShape) -> tuple[Value | None, Value | None]:
        """Return the rotary tables of cosines and sines as arguments of launches, (None, None) without rotation.

        Each is float32 [positions, half of the rotated elements], or twice as many rows with longrope.
        """
        positions = self.heads.positions
        if positions is None:
            return None, None
        rows = min(step.cache_length, positions.limit) * (1 if positions.rope.longest_short is None else 2)
        shape = (rows, -(-positions.width // 2))
        cos, sin = (Value(f"{positions.name}.{function}", shape, FLOAT32) for function in ("cos", "sin"))
        return cos, sin

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute the rotary tables, by array name; empty without rotary embeddings.

        Layers with equal positions share the tables by name.
        """
        positions = self.heads.positions
        return {
            table.name: RotaryTable(positions, min(step.cache_length, positions.limit), index)
            for index, table in enumerate(self._describe_tables(step))
            if table is not None and positions is not None
        }

    @property
    def _whole_norms(self) -> bool:
        """Whether queries and keys are normalised over all heads of all ranks, not head by head or not at all."""
        return self.heads.head_norm is HeadNorm.width

    @property
    def _rotates_by_position(self) -> bool:
        """Whether row i of the rotary tables is for position i; False with longrope, True if nothing is rotated."""
        positions = self.heads.positions
        return positions is None or positions.rope.longest_short is None

    def _project(self, step: StepShape) -> list[Launch]:
        """Return the launches that compute the arrays q, k, v and gate from x, with q and k normalised and rotated.

        A layer with an `owner` computes q only. If `attention_decode` rotates (`_rotates_in_attention`), q and k are
        not rotated yet.
        """
        q, k, _ = self._describe_projected(step)
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        positions = Value("positions" if self._rotates_by_position else "rope_rows", (step.tokens, 1), INT32)
        matrices = self.w_qkv.arguments("w_qkv", step)
        arguments: dict[str, Argument] = {
            "x": x,
            **matrices,
            "q_size": q.shape[1],
            "kv_size": 0 if self.owner else k.shape[1],
            "bias": create_argument(self.b_qkv, step),
            "head_dim": self.heads.head_dim,
            "v_norm": self.heads.value_norm,
            **list_row_arguments(step, self.w_qkv),
            **list_gather_arguments(step),
        }
        arguments |= self._list_norm_arguments(step)
        if not self._whole_norms:
            arguments |= self._list_head_norm_arguments(step)
            if self.heads.positions is not None:
                arguments |= {"positions": positions, **self._list_rotation_arguments(step)}
        if self.heads.output_gate:
            arguments |= {"gate_size": q.shape[1]}
        names = ("q", "k", "v", "gate")[: len(self.projections.inputs)]
        launches = [
            Launch(
                "qkv_projection",
                arguments,
                names,
                count_product_work(step.tokens, matrices["w_qkv"]),
                step.tokens,
            )
        ]
        if not self._whole_norms:
            return launches
        for norm, rows, label in zip(self.head_norms, (q, k), ("queries", "keys")):
            launches.append(norm.launch(step, rows, rows.name, label, None))
        if self.heads.positions is not None and not self._rotates_in_attention(step):
            for rotated, label in ((q, "queries"), (k, "keys")):
                rotation = self._list_rotation_arguments(step)
                heads = rotated.shape[1] // self.heads.head_dim
                arguments = {"x": rotated, "positions": positions, **rotation, "heads": heads}
                launches.append(
                    Launch("rope", arguments, (rotated.name,), count_copy_work(rotated), step.tokens, label)
                )
        return launches

    def _list_norm_arguments(self, step: StepShape) -> dict[str, Argument]:
        """Return the arguments of `qkv_projection` for the norm of its input, or for the norms of heads alone."""
        if self.norm is not None:
            return self.norm.list_arguments(step)
        return (
            {"eps": norm.eps, "norm_offset": norm.offset}
            if (norm := next(iter(self.head_norms), None))
            else {}
        )

    def _rotates_in_attention(self, step: StepShape) -> bool:
        """Return whether `attention_decode` rotates q and k instead of the projection or a launch of `rope`.

        That is so in decode steps of layers that normalise q and k over all heads, without longrope.
        """
        return self._whole_norms and self._rotates_by_position and step.phase is Phase.decode

    def _list_head_norm_arguments(self, step: StepShape) -> dict[str, Value]:
        """Return the arguments `q_norm` and `k_norm`, [1, head_dim] each; empty without head norms."""
        return {
            parameter: norm.weight.value(step)
            for parameter, norm in zip(("q_norm", "k_norm"), self.head_norms)
        }

    def _list_rotation_arguments(self, step: StepShape) -> dict[str, Value]:
        """Return the arguments `cos` and `sin` (`RotaryTable`); empty without rotary embeddings."""
        return {
            parameter: table
            for parameter, table in zip(("cos", "sin"), self._describe_tables(step))
            if table is not None
        }

    def _project_output(self, step: StepShape) -> list[Launch]:
        """Return the launches that compute x + output_projection(o): one, or two with a norm `after`, which adds x."""
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        q, _, _ = self._describe_projected(step)
        o, rows = Value("o", q.shape, step.activations), step.tokens
        matrices = self.w_o.arguments("w_o", step)
        result = x if self.after is None else Value("attended", x.shape, x.dtype)
        arguments: dict[str, Argument] = {
            "o": o,
            **matrices,
            "residual": x if self.after is None else None,
            "replica_group": Axis.tensor,
            "bias": create_argument(self.b_o, step),
            "sequence_ranks": step.sequence_ranks,
            "gate": replace(q, name="gate") if self.heads.output_gate else None,
            **list_row_arguments(step, self.w_o, divides_columns=True),
        }
        launches = [
            Launch(
                "output_projection",
                arguments,
                (result.name,),
                count_product_work(rows, matrices["w_o"]),
                rows,
            )
        ]
        if self.after is not None:
            launches.append(self.after.launch(step, result, "x", "after attention", x))
        return launches

    def _describe_projected(self, step: StepShape) -> tuple[Value, Value, Value]:
        """Return the arrays q, k and v of a step as arguments of launches, [tokens, heads of the rank * head_dim]."""
        layout = self.heads.layout(step.ranks)
        q, k, v = (
            Value(name, (step.tokens, count * self.heads.head_dim), step.activations)
            for name, count in (
                ("q", layout.heads_of_rank),
                ("k", layout.kv_heads_of_rank),
                ("v", layout.kv_heads_of_rank),
            )
        )
        return q, k, v

    def _count_kv_heads(self, step: StepShape) -> int:
        return self.heads.layout(step.ranks).kv_heads_of_rank

    def _project_heads(self, normed: np.ndarray, span: Span, numpy: Arithmetic) -> list[np.ndarray]:
        """Return queries, keys and values of the normalised input [tokens, hidden], normalised and rotated.

        Each is [heads, tokens, head_dim] with the heads of all ranks. With an `owner` the list has queries only.
        """
        arrays = [
            numpy.round(numpy.multiply_rows(normed, projection)) for projection in self.projections.inputs[:3]
        ]
        queries_and_keys = range(min(2, len(arrays)))
        if self._whole_norms:
            for index, norm in zip(queries_and_keys, self.head_norms):
                arrays[index] = norm.reference(arrays[index], numpy)
        arrays = [array.reshape(len(normed), -1, self.heads.head_dim).swapaxes(0, 1) for array in arrays]
        if not self._whole_norms:
            for index, norm in zip(queries_and_keys, self.head_norms):
                arrays[index] = norm.reference(arrays[index], numpy)
        if self.heads.value_norm and self.norm is not None:
            arrays[2] = numpy.normalise(arrays[2], None, self.norm.eps)
        if self.heads.positions is not None:
            for index in queries_and_keys:
                arrays[index] = numpy.rotate(arrays[index], self.heads.positions, span)
        return arrays

    def _project_mixed(self, mixed: np.ndarray, normed: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return the output projection, [tokens, hidden], of the outputs of all heads.

        Args:
            mixed: Outputs of attention, [tokens, heads * head_dim]; multiplied by the gate's sigmoid with a gate.
            normed: Normalised input of the layer, [tokens, hidden], from which the gate is computed.
            numpy: The arithmetic.
        """
        if self.heads.output_gate:
            gate = numpy.round(numpy.multiply_rows(normed, self.projections.inputs[3]))
            mixed = numpy.round(mixed / (1 + np.exp(-gate)))
        output, head_span = self.projections.output, by_query_heads(*self.heads.divided).span
        return numpy.sum_partial_products(mixed, output, head_span)
