"""Blocks of two streams: rows of an image's patches (x) and of its text, which attend to each other.

Both streams stay arrays of their own through all blocks, so no rows are ever copied. Attention takes the queries, keys
and values of both as they are. Where both streams have the same weights, as in FLUX's single blocks, each has launches
of its own with these weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from model.layers.arithmetic import Arithmetic, Span
from model.layers.denoiser.attention import MOST_BOUNDED_SCORE, ImageAttention, bound_scores, launch_attention
from model.layers.denoiser.conditions import create_bias, create_matrix
from model.layers.denoiser.feed_forward import ModulatedFeedForward
from model.layers.denoiser.ulysses import flatten_launches, flatten_weights, gather_rows, scatter_rows
from model.layers.launch import Argument, Launch, StepShape, Value, count_product_work
from model.layers.layer import Constant, Stateless, States
from model.layers.projection import Projection
from model.layers.softmax import attend
from model.layers.weight import Weight, create_argument

TEXT_ROWS = "text_states"
"""Name of the array of the text's stream, [images * text rows, hidden]."""
_TEXT_NAMES = {"x": TEXT_ROWS, "q": "text_q", "k": "text_k", "v": "text_v", "o": "text_o"}
"""Names of the arrays of the text's stream by the names of the image's."""
_SECOND_NAMES = {"q": "second_q", "k": "second_k", "v": "second_v", "o": "second_o"}
"""Names of the arrays of the second attention of an image by the names of the first."""


def take_text_step(step: StepShape, text_rows: int) -> StepShape:
    """Return the step for the text stream: its rows are those of all texts.

    Ulysses ranks all have these rows, and divide heads and inner elements as tensor-parallel ranks do. A text has too
    few rows to divide: each rank would read all of the weights for a fraction of them.
    """
    return replace(step.flattened, tokens=step.sequences * text_rows)


def move_to_text(launch: Launch) -> Launch:
    """Return a launch with the arrays of the text's stream in place of the image's."""
    return _rename_arrays(launch, _TEXT_NAMES, "of the text")


def _rename_arrays(launch: Launch, names: Mapping[str, str], label: str) -> Launch:
    """Return a launch with other arrays.

    Args:
        launch: The launch.
        names: New names by old names; others stay.
        label: Label that distinguishes the launch in reports, after the label that it has.
    """
    arguments: dict[str, Argument] = {
        parameter: replace(argument, name=names.get(argument.name, argument.name))
        if isinstance(argument, Value)
        else argument
        for parameter, argument in launch.arguments.items()
    }
    results = tuple(names.get(name, name) for name in launch.results)
    label = f"{launch.label}, {label}" if launch.label else label
    return replace(launch, arguments=arguments, results=results, label=label)


@dataclass(frozen=True)
class TextLinear(Stateless):
    """Linear layer from an encoded text to the rows of its stream, computed by every rank.

    source  name of the encoded text, [images * text_rows, inputs of the projection], an input of the step
    """

    name: str
    source: str
    projection: Projection
    text_rows: int
    component: ClassVar[str] = "embedding"

    @property
    def _matrix(self) -> Weight:
        return replace(create_matrix(f"{self.name}.w", self.projection), reader=("qkv_projection", "w_qkv"))

    @property
    def _bias(self) -> Weight | None:
        return create_bias(f"{self.name}.b", self.projection)

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrix and bias."""
        return [weight for weight in (self._matrix, self._bias) if weight is not None]

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `qkv_projection` that writes the rows."""
        rows = step.sequences * self.text_rows
        matrices = self._matrix.arguments("w_qkv", step)
        arguments: dict[str, Argument] = {
            "x": Value(self.source, (rows, self.projection.inputs), step.activations),
            **matrices,
            "q_size": self.projection.outputs,
            "bias": create_argument(self._bias, step),
        }
        work = count_product_work(rows, matrices["w_qkv"])
        return (Launch("qkv_projection", arguments, (TEXT_ROWS,), work, rows, "of the text"),)

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; set the text's rows in `states`, [text_rows, outputs], rounded."""
        text = numpy.round(states[self.source].reshape(self.text_rows, -1))
        states[TEXT_ROWS] = numpy.round(numpy.multiply(text, self.projection))
        return x


@dataclass(frozen=True)
class TextFeedForward(Stateless):
    """Feed-forward block of the text's stream; x stays."""

    block: ModulatedFeedForward
    text_rows: int

    @property
    def weights(self) -> Sequence[Weight]:
        """Matrices and biases."""
        return flatten_weights(self.block.weights)

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launch of `mlp` that replaces the text's rows."""
        text_step = take_text_step(step, self.text_rows)
        return [move_to_text(launch) for launch in flatten_launches(self.block.launches(text_step))]

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x unchanged; replace the text's rows in `states`."""
        text_span = Span(0, self.text_rows)
        states[TEXT_ROWS] = self.block.reference(states[TEXT_ROWS], text_span, states, numpy.flattened)
        return x


def _list_block_weights(block: ModulatedFeedForward | None) -> list[Weight]:
    """Return the weights of a feed-forward block, which plans count under its component; none without a block."""
    if block is None:
        return []
    return [replace(weight, component=weight.component or block.component) for weight in block.weights]


@dataclass(frozen=True)
class JointAttention(Stateless):
    """Attention of each image's patches and its text's rows to each other.

    image, text   projections of the streams, which may have the same weights; those of `text` describe x, and are used
                  for the text's rows
    feed_forward  block of the image that reads the same rows as the projections and is added to the same residual, as
                  in FLUX's single blocks; None without
    text_feed_forward  the same of the text, which may have the same weights
    second        projections with which the image attends to itself too, from the same rows (SD3.5); None without
    """

    name: str
    image: ImageAttention
    text: ImageAttention
    text_rows: int
    feed_forward: ModulatedFeedForward | None = None
    text_feed_forward: ModulatedFeedForward | None = None
    second: ImageAttention | None = None
    component: ClassVar[str] = "attention"

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of both streams, each once, of the second attention and of the feed-forward blocks."""
        weights = [*self.image.weights, *([] if self.second is None else self.second.weights)]
        weights += flatten_weights(self.text.weights)
        weights += _list_block_weights(self.feed_forward)
        weights += flatten_weights(_list_block_weights(self.text_feed_forward))
        return list({weight.name: weight for weight in weights}.values())

    def constants(self, step: StepShape) -> Mapping[str, Constant]:
        """Return the functions that compute the tables of the image's rotation, by array name."""
        return self.image.constants(step)

    def list_bounded_layers(self, arrays: Mapping[str, np.ndarray]) -> list[str]:
        """Return the names of this layer and of the second attention whose scores are at most `MOST_BOUNDED_SCORE`."""
        is_bounded = bound_scores((self.image, self.text), arrays) <= MOST_BOUNDED_SCORE
        second = [] if self.second is None else self.second.list_bounded_layers(arrays)
        return [*([self.name] if is_bounded else []), *second]

    def launches(self, step: StepShape) -> Sequence[Launch]:
        """Return the launches of both streams' projections, of joint attention, and of both outputs.

        All projections precede outputs and the feed-forward block, which replace the rows that they read. Ulysses ranks
        exchange rows for heads before attention, and heads for rows after it.
        """
        text_step = take_text_step(step, self.text_rows)
        gathers, image = gather_rows(self.image.describe_projected(step), step)
        text = self.text.describe_projected(text_step)
        attention = launch_attention(
            *image,
            self.image.heads,
            step,
            text=(
                replace(text[0], name="text_q"),
                replace(text[1], name="text_k"),
                replace(text[2], name="text_v"),
            ),
            is_bounded=self.name in step.bounded,
        )
        blocks: list[Launch] = []
        if self.feed_forward is not None:
            blocks += self.feed_forward.launches(step)
        if self.text_feed_forward is not None:
            blocks += map(move_to_text, flatten_launches(self.text_feed_forward.launches(text_step)))
        text_outputs = flatten_launches(self.text.list_output_launches(text_step))
        second: list[Launch] = []
        if self.second is not None:
            second += [
                _rename_arrays(launch, _SECOND_NAMES, "second") for launch in self.second.launches(step)
            ]
        return [
            self.image.launch_projection(step),
            move_to_text(self.text.launch_projection(text_step)),
            *second[:1],
            *blocks,
            *gathers,
            attention,
            *scatter_rows(image[0], step),
            *self.image.list_output_launches(step),
            *map(move_to_text, text_outputs),
            *second[1:],
        ]

    def reference(self, x: np.ndarray, span: Span, states: States, numpy: Arithmetic) -> np.ndarray:
        """Return x [patches, hidden] of one image after the block; replace the text's rows in `states`."""
        text, text_span = states[TEXT_ROWS], Span(0, self.text_rows)
        streams = (
            self.image.compute_heads(x, span, states, numpy),
            self.text.compute_heads(text, text_span, states, numpy),
        )
        query, keys, values = (np.concatenate(arrays, axis=1) for arrays in zip(*streams))
        joint = Span(0, span.count + self.text_rows)
        mixed = attend(query, keys, values, self.image.heads, joint, numpy)
        if self.feed_forward is not None:
            x = self.feed_forward.reference(x, span, states, numpy)
        if self.text_feed_forward is not None:
            text = self.text_feed_forward.reference(text, text_span, states, numpy.flattened)
        states[TEXT_ROWS] = self.text.add_output(text, mixed[span.count :], states, numpy.flattened)
        first = self.image.add_output(x, mixed[: span.count], states, numpy)
        if self.second is None:
            return first
        query, keys, values = self.second.compute_heads(x, span, states, numpy)
        mixed = attend(query, keys, values, self.second.heads, span, numpy)
        return self.second.add_output(first, mixed, states, numpy)
