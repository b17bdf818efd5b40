"""Head of a model: the final norm, the logits, and the likeliest tokens over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.launch import (
    INT32,
    Argument,
    Axis,
    Growth,
    Launch,
    Phase,
    StepShape,
    Value,
    copied,
    largest_launch,
    product,
    split_into_launches,
)
from model.layers.layer import Constant, Stateless, States
from model.layers.norm import Norm, bias_of
from model.layers.projection import Projection
from model.layers.sample import candidates_held, sample_launch
from model.layers.shard import VOCABULARY_PARALLEL, Shard, vocabulary_span
from model.layers.weight import Weight

LOGITS, VALUES, TOKENS = HEAD_RESULTS = ("logits", "values", "tokens")
"""Names of the results of lm_head: logits, and the largest logits of each row with their tokens."""


@dataclass(frozen=True)
class Head(Stateless):
    """Head layer: logits for the last token of each prompt and for each new token of sequences that decode.

    Ranks divide the vocabulary. `tensor` [vocabulary, hidden] is the embedding table if the weights are tied. Logits
    are multiplied by `scale` and then capped by `softcap`.
    """

    name: str
    tensor: str
    vocabulary: int
    hidden: int
    norm: Norm
    scale: float = 1.0
    softcap: float | None = None
    component: ClassVar[str] = "head"

    @property
    def _projection(self) -> Projection:
        return Projection(self.tensor, self.vocabulary, self.hidden)

    @property
    def w_head(self) -> Weight:
        """Matrix of a rank's part of the vocabulary, [hidden, tokens]."""
        return Weight(f"{self.name}.w_head", (self._projection.weight(VOCABULARY_PARALLEL),))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norm and of the projection."""
        return (*self.norm.weights, self.w_head)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the first token id of a rank's part of the vocabulary, [1, 1] int32."""

        def first(shard: Shard) -> np.ndarray:
            return np.array([[vocabulary_span(self.vocabulary, shard).start]], np.int32)

        return {f"{self.name}.first_token": first}

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches that select the last row of each prompt, compute logits, and draw tokens.

        A step that scores takes all rows, in equal launches that are repeated.
        """
        if step.scores:
            rows = self._most_rows(step, step.tokens)
            pieces = -(-step.tokens // rows)
            return [
                replace(launch, repeat=pieces)
                for launch in (self._pick_rows(step, rows), *self._launches(step, rows, 1))
            ]
        launches = [
            launch
            for rows, repeat in split_into_launches(step.head_rows, self._most_rows(step, step.head_rows))
            for launch in self._launches(step, rows, repeat)
        ]
        if step.phase is Phase.prefill and (step.sequences > 1 or step.padded or step.sequence_ranks > 1):
            return [self._pick_rows(step, step.head_rows), *launches]
        return launches

    def _most_rows(self, step: StepShape, rows: int) -> int:
        """The most of so many rows that the kernels of the head take together."""
        return largest_launch(rows, lambda size: self._launches(step, size, 1))

    def _pick_rows(self, step: StepShape, rows: int) -> Launch:
        """Return the launch of `embedding` that selects the rows `logits_indices` [rows, 1] of all ranks' x."""
        x = Value("x", (step.local_rows, self.hidden), step.activations)
        picked = copied(Value("x", (rows, self.hidden), step.activations))
        arguments: dict[str, Argument] = {
            "ids": Value("logits_indices", (rows, 1), INT32),
            "table": x,
            "dtype": step.activations,
        }
        if step.sequence_ranks > 1:
            arguments |= {"replica_group": Axis.tensor}
        return Launch("embedding", arguments, ("x",), picked, rows, "last rows", Growth.sequences)

    def _launches(self, step: StepShape, rows: int, repeat: int) -> Sequence[Launch]:
        x = Value("x", (step.tokens, self.hidden), step.activations).last(rows)
        w_head = self.w_head.value(step)
        first = Value(f"{self.name}.first_token", (1, 1), INT32)
        draws = step.draws
        wanted = step.candidates if draws is None or draws.full_vocabulary else draws.candidates
        arguments: dict[str, Argument] = {
            "x": x,
            "norm_weight": self.norm.weight.value(step),
            "w_head": w_head,
            "eps": self.norm.eps,
            "top_k": candidates_held(wanted, self.vocabulary, step.ranks),
            "vocab_offset": first,
            "replica_group": Axis.tensor,
            "num_ranks": step.ranks,
            "softcap": self.softcap,
            "norm_bias": bias_of(self.norm, step),
            "norm_offset": self.norm.offset,
            "scale": self.scale,
        }
        work, growth = product(rows, w_head), Growth.sequences
        launch = Launch("lm_head", arguments, HEAD_RESULTS, work, rows, growth=growth, repeat=repeat)
        return (
            [launch] if draws is None else [launch, sample_launch(step, self.vocabulary, first, rows, repeat)]
        )

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the logits [tokens, vocabulary] in float32, scaled and capped."""
        logits = numpy.product(self.norm.reference(x, numpy), self._projection) * np.float32(self.scale)
        if self.softcap is None:
            return logits
        return np.float32(self.softcap) * np.tanh(logits / np.float32(self.softcap))
