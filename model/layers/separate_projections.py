"""Projections of attention to rows of another stream: queries, keys, values and outputs have a matrix each.

Queries and keys come from different rows, so no launch computes both. Ranks divide the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.config.mixers import GroupedAttention
from model.layers.arithmetic import Arithmetic
from model.layers.attention_heads import AttentionProjections
from model.layers.launch import Axis, Launch, StepShape, Value, count_product_work
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.shard import ROW, Cut, by_kv_heads, by_query_heads
from model.layers.weight import Weight, create_argument, list_row_arguments


@dataclass(frozen=True)
class SeparateProjections:
    """Four projections of an attention layer, with their launches and their numpy model.

    `reads_stored` says whether kernels read quantised matrices as they are stored; otherwise they are widened.
    """

    component: ClassVar[str] = "attention"
    reads_stored: ClassVar[bool] = True

    name: str
    hidden: int
    heads: GroupedAttention
    projections: AttentionProjections

    def _find_projection(self, letter: str) -> tuple[Projection, Cut, Cut]:
        """Return (projection, cut of its matrix, cut of its bias); `letter` is "q", "k", "v" or "o" for the output.

        The cuts divide the heads over the ranks, except that every rank has the whole bias of the output.
        """
        query, key, value = self.projections.inputs
        query_heads, kv_heads = by_query_heads(*self.heads.divided), by_kv_heads(*self.heads.divided)
        return {
            "q": (query, query_heads, query_heads),
            "k": (key, kv_heads, kv_heads),
            "v": (value, kv_heads, kv_heads),
            "o": (self.projections.output, replace(query_heads, axis=1), ROW),
        }[letter]

    def _matrix(self, letter: str) -> Weight:
        projection, cut, _ = self._find_projection(letter)
        kernel = ("output_projection", "w_o") if letter == "o" else ("qkv_projection", "w_qkv")
        reader = kernel if self.reads_stored else None
        return Weight(f"{self.name}.w_{letter}", (projection.weight(cut),), reader)

    def _bias(self, letter: str) -> Weight | None:
        projection, _, cut = self._find_projection(letter)
        if projection.bias is None:
            return None
        return Weight(f"{self.name}.b_{letter}", (projection.bias_row(cut),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrices of the four projections, with the biases that the checkpoint has."""
        weights = [weight for letter in "qkvo" for weight in (self._matrix(letter), self._bias(letter))]
        return [weight for weight in weights if weight is not None]

    def _project(
        self, step: StepShape, rows: Value, letter: str, result: str, label: str, norm: Norm | None = None
    ) -> Launch:
        """Return the launch of `qkv_projection` that writes norm(rows) times a matrix to the array `result`.

        Args:
            step: The step.
            rows: The rows, [rows, inputs of the projection].
            letter: Selects the projection as in `_find_projection`.
            result: Name of the result.
            label: Distinguishes the launch in reports.
            norm: The norm; None for none.
        """
        matrices = self._matrix(letter).arguments("w_qkv", step)
        norm_arguments = {} if norm is None else norm.list_arguments(step)
        return Launch(
            "qkv_projection",
            {
                "x": rows,
                **norm_arguments,
                **matrices,
                "q_size": self._count_columns(step),
                "bias": create_argument(self._bias(letter), step),
                **list_row_arguments(step, self._matrix(letter)),
            },
            (result,),
            count_product_work(rows.shape[0], matrices["w_qkv"]),
            rows.shape[0],
            label,
        )

    def _count_columns(self, step: StepShape) -> int:
        """Return the columns of queries, keys, values and outputs on a rank."""
        return self.heads.layout(step.ranks).heads_of_rank * self.heads.head_dim

    def _project_output(self, step: StepShape, label: str) -> Launch:
        """Return the launch of `output_projection` that adds the projected array "o" to x."""
        x = Value("x", (step.tokens, self.hidden), step.activations)
        matrices = self._matrix("o").arguments("w_o", step)
        return Launch(
            "output_projection",
            {
                "o": Value("o", (step.tokens, self._count_columns(step)), step.activations),
                **matrices,
                "residual": x,
                "replica_group": Axis.tensor,
                "bias": create_argument(self._bias("o"), step),
                **list_row_arguments(step, self._matrix("o"), divides_columns=True),
            },
            ("x",),
            count_product_work(step.tokens, matrices["w_o"]),
            step.tokens,
            label,
        )

    def _split_heads(self, rows: np.ndarray) -> np.ndarray:
        """Return projected rows [rows, heads * head_dim] as [heads, rows, head_dim]."""
        return rows.reshape(len(rows), -1, self.heads.head_dim).swapaxes(0, 1)

    def _add_output(self, x: np.ndarray, mixed: np.ndarray, numpy: Arithmetic) -> np.ndarray:
        """Return x plus the projected outputs `mixed` [rows, heads * head_dim] of all heads, rounded."""
        head_span = by_query_heads(*self.heads.divided).span
        return numpy.round(x + numpy.sum_partial_products(mixed, self.projections.output, head_span))
