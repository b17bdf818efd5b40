"""Projections of attention to rows of another stream: queries, keys, values and outputs.

Queries and keys come from different rows, so no launch computes both. Keys and values may share one. Ranks divide the
heads.
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
    `matrices` has the letters of each matrix: "q", "k", "v", or "kv" for keys and values side by side, and "o".
    """

    component: ClassVar[str] = "attention"
    reads_stored: ClassVar[bool] = True
    matrices: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o")

    name: str
    hidden: int
    heads: GroupedAttention
    projections: AttentionProjections

    def _find_projections(self, letters: str) -> tuple[Sequence[Projection], Cut, Cut]:
        """Return (projections side by side, cut of their matrices, cut of their biases).

        The cuts divide the heads over the ranks, except that every rank has the whole bias of the output.

        Args:
            letters: "q", "k", "v", or "kv" for both, and "o" for the output.
        """
        query, key, value = self.projections.inputs
        query_heads, kv_heads = by_query_heads(*self.heads.divided), by_kv_heads(*self.heads.divided)
        if letters == "o":
            return (self.projections.output,), replace(query_heads, axis=1), ROW
        by_letter = {"q": query, "k": key, "v": value}
        cut = query_heads if letters == "q" else kv_heads
        return [by_letter[letter] for letter in letters], cut, cut

    def _matrix(self, letters: str) -> Weight:
        projections, cut, _ = self._find_projections(letters)
        kernel = ("output_projection", "w_o") if letters == "o" else ("qkv_projection", "w_qkv")
        reader = kernel if self.reads_stored else None
        tensors = tuple(projection.weight(cut) for projection in projections)
        return Weight(f"{self.name}.w_{letters}", tensors, reader)

    def _bias(self, letters: str) -> Weight | None:
        projections, _, cut = self._find_projections(letters)
        if projections[0].bias is None:
            return None
        return Weight(
            f"{self.name}.b_{letters}", tuple(projection.bias_row(cut) for projection in projections)
        )

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrices of the four projections, with the biases that the checkpoint has."""
        weights = [
            weight for letters in self.matrices for weight in (self._matrix(letters), self._bias(letters))
        ]
        return [weight for weight in weights if weight is not None]

    def _project(
        self,
        step: StepShape,
        rows: Value,
        letters: str,
        results: tuple[str, ...],
        label: str,
        norm: Norm | None = None,
    ) -> Launch:
        """Return the launch of `qkv_projection` that writes norm(rows) times matrices to the arrays `results`.

        Args:
            step: The step.
            rows: The rows, [rows, inputs of the projection].
            letters: Selects the projections as in `_find_projections`.
            results: Name of the result of each.
            label: Distinguishes the launch in reports.
            norm: The norm; None for none.
        """
        matrices = self._matrix(letters).arguments("w_qkv", step)
        norm_arguments = {} if norm is None else norm.list_arguments(step)
        columns = self._count_columns(step)
        sizes = {"q_size": columns} if len(letters) == 1 else {"q_size": 0, "kv_size": columns}
        return Launch(
            "qkv_projection",
            {
                "x": rows,
                **norm_arguments,
                **matrices,
                **sizes,
                "bias": create_argument(self._bias(letters), step),
                **list_row_arguments(step, self._matrix(letters)),
            },
            results,
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
