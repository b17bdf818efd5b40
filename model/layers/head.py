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
    count_copy_work,
    count_product_work,
    find_largest_launch,
    split_into_launches,
)
from model.layers.layer import Constant, Stateless, States
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.sample import count_candidates, create_sample_launch
from model.layers.shard import VOCABULARY_PARALLEL, slice_vocabulary
from model.layers.weight import Weight, create_argument

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
        """Matrix [hidden, vocabulary of a rank]; a logit is a row of normalised hidden states times a column."""
        tensors = (self._projection.weight(VOCABULARY_PARALLEL),)
        return Weight(f"{self.name}.w_head", tensors, reader=("lm_head", "w_head"))

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the norm and of the projection."""
        return (*self.norm.weights, self.w_head)

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the function that computes the first token id of a rank's part of the vocabulary, [1, 1] int32."""
        return {
            f"{self.name}.first_token": lambda shard: np.array(
                [[slice_vocabulary(self.vocabulary, shard).start]], np.int32
            )
        }

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches that select the head's rows, compute logits, and draw tokens if the step has `draws`.

        The rows are the last one of each prompt and all of sequences that decode. They are selected by an extra launch
        in a prefill step of several sequences, of padded prompts, or of divided rows. A step that scores takes all
        rows, in equal launches that are repeated, each after a launch that selects its rows.
        """
        if step.scores:
            rows = self._find_most_rows(step, step.tokens)
            pieces = -(-step.tokens // rows)
            return [
                replace(launch, repeat=pieces)
                for launch in (self._pick_rows(step, rows), *self._launches(step, rows, 1))
            ]
        launches = [
            launch
            for rows, repeat in split_into_launches(
                step.head_rows, self._find_most_rows(step, step.head_rows)
            )
            for launch in self._launches(step, rows, repeat)
        ]
        if step.phase is Phase.prefill and (step.sequences > 1 or step.padded or step.sequence_ranks > 1):
            return [self._pick_rows(step, step.head_rows), *launches]
        return launches

    def _find_most_rows(self, step: StepShape, rows: int) -> int:
        """Return the most rows from 1 to `rows` that each kernel of the head takes in one launch."""
        return find_largest_launch(rows, lambda size: self._launches(step, size, 1))

    def _pick_rows(self, step: StepShape, rows: int) -> Launch:
        """Return the launch of `embedding` that replaces x by its rows `logits_indices` [rows, 1], a step's input.

        With sequence parallelism each rank looks up its rows, and the ranks exchange them, so all get [rows, hidden].
        """
        arguments: dict[str, Argument] = {
            "ids": Value("logits_indices", (rows, 1), INT32),
            "table": Value("x", (step.local_rows, self.hidden), step.activations),
            "dtype": step.activations,
        }
        if step.sequence_ranks > 1:
            arguments |= {"replica_group": Axis.tensor}
        work = count_copy_work(Value("x", (rows, self.hidden), step.activations))
        return Launch("embedding", arguments, ("x",), work, rows, "last rows", Growth.sequences)

    def _launches(self, step: StepShape, rows: int, repeat: int) -> Sequence[Launch]:
        """Return the launch of `lm_head` for the last `rows` rows of x, and of `sample` if the step has `draws`.

        Each has the repeat count `repeat`.
        """
        x = Value("x", (step.tokens, self.hidden), step.activations).take_last(rows)
        matrices = self.w_head.arguments("w_head", step)
        first_token = Value(f"{self.name}.first_token", (1, 1), INT32)
        draws = step.draws
        wanted = step.candidates if draws is None or draws.full_vocabulary else draws.candidates
        launch = Launch(
            "lm_head",
            {
                "x": x,
                "norm_weight": self.norm.weight.value(step),
                **matrices,
                "eps": self.norm.eps,
                "top_k": count_candidates(wanted, self.vocabulary, step.ranks),
                "vocab_offset": first_token,
                "replica_group": Axis.tensor,
                "num_ranks": step.ranks,
                "softcap": self.softcap,
                "norm_bias": create_argument(self.norm.bias_weight, step),
                "norm_offset": self.norm.offset,
                "scale": self.scale,
            },
            HEAD_RESULTS,
            count_product_work(rows, matrices["w_head"]),
            rows,
            growth=Growth.sequences,
            repeat=repeat,
        )
        if draws is None:
            return [launch]
        return [launch, create_sample_launch(step, draws, self.vocabulary, first_token, rows, repeat)]

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return the logits [tokens, vocabulary] of all rows of x in float32, scaled and capped."""
        logits = numpy.multiply(self.norm.reference(x, numpy), self._projection) * np.float32(self.scale)
        if self.softcap is None:
            return logits
        return np.float32(self.softcap) * np.tanh(logits / np.float32(self.softcap))
