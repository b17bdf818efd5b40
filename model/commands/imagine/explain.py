"""`nkw imagine --explain`: trace of a pass of the denoiser, recomputed by the reference in plain numpy.

A trace follows the pass with the prompt for one image: the residual of its patches after every block, the rows of the
text to which they attend, and what guidance makes of the predictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from model.commands.generate.explain import Attended, Piece, describe_heads
from model.errors import ModelError
from model.layers.arithmetic import Arithmetic, Seen
from model.layers.denoiser.attention import TextAttention
from model.loading.component import LoadedComponent
from model.runners.component import Arrays, Component, ReferenceComponent
from model.runners.denoise import Guidance, ImageRequest, Sampling
from model.runners.pipelines.pipeline import Backend, ImagePipeline
from nkw.report import Hanging, Part, table

_PIECES = 12  # most pieces of a prompt that the text shows, those with the most attention
_HEADS = 3  # most heads of a layer in the text, those with the strongest attention
MAGNITUDES = {
    "latents": "noisy latents, scaled for the denoiser",
    "conditioned": "prediction with the prompt",
    "unconditioned": "prediction with the negative prompt",
    "difference": "their difference",
    "guided": "guided prediction",
}
"""Labels of arrays whose magnitudes are traced; the last three need two passes of guidance."""


@dataclass(frozen=True)
class TextPiece(Piece):
    """Token of the prompt, whose position is its row of the encoded text.

    `attention` is the attention weight that patches give the row, averaged over patches, heads and layers.
    """

    attention: float


@dataclass(frozen=True)
class BlockTrace:
    """Trace of a block of the denoiser.

    `norm` is the Euclidean norm of the residual after the block, averaged over the patches. `text_share` is the
    attention weight that patches give all rows of the text, averaged over patches and heads. `heads` have the row of
    the text with the largest weight of each head, averaged over the patches.
    """

    norm: float
    text_share: float
    heads: tuple[Attended, ...]


@dataclass(frozen=True)
class PassTrace:
    """Trace of pass `number` of `passes` for one image, counted from 1.

    `sigma` and `next_sigma` are the noise levels before and after the pass, in the measure of the schedule.
    `padding_rows` are the rows of the encoded text without a token, which get `padding_attention` together.
    `embedding_norm` is the norm of the residual before the first block. `magnitudes` are root mean squares of what
    `MAGNITUDES` names.
    """

    number: int
    passes: int
    prompt: str
    seed: int
    timestep: float
    sigma: float
    next_sigma: float
    pieces: tuple[TextPiece, ...]
    padding_rows: int
    padding_attention: float
    embedding_norm: float
    layers: tuple[BlockTrace, ...]
    magnitudes: Mapping[str, float]


class PassRecorder:
    """Backend that keeps what the denoiser is given in one pass.

    Args:
        backend: The backend that computes.
        pipeline: The model.
        sampling: Steps and guidance; two passes of guidance one by one are one pass here.
        number: Number of the pass, from 1.

    Raises:
        ModelError: There are fewer passes, or the model has no text encoder.
    """

    def __init__(self, backend: Backend, pipeline: ImagePipeline, sampling: Sampling, number: int) -> None:
        if not pipeline.text_encoders:
            raise ModelError(
                "--explain shows attention to tokens of the prompt; this model draws classes, without any"
            )
        self._trajectory = pipeline.plan(sampling.steps)
        if number > self._trajectory.passes:
            raise ModelError(
                f"--explain {number}: --steps {sampling.steps} takes {self._trajectory.passes} passes of the denoiser"
            )
        self._backend, self._pipeline, self._number = backend, pipeline, number
        self._is_guided = pipeline.is_guided_by_passes and sampling.is_guided
        self._guidance = sampling.guidance
        runs = 2 if self._is_guided and sampling.mode is Guidance.separate else 1
        self._runs, self._count = range((number - 1) * runs, number * runs), 0
        self._inputs: list[Mapping[str, np.ndarray]] = []

    def create(self, model: LoadedComponent, batch: int, name: str) -> Component:
        """Return the component of the other backend; the inputs of a denoiser are recorded."""
        component = self._backend.create(model, batch, name)
        return _RecordedComponent(component, self) if name == "denoiser" else component

    def record(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Count a run of the denoiser, and keep its inputs if it belongs to the pass."""
        if self._count in self._runs:
            self._inputs.append(inputs)
        self._count += 1

    def trace(self, requests: Sequence[ImageRequest], ranks: int) -> Iterator[PassTrace]:
        """Yield the trace of the recorded pass for each image.

        Args:
            requests: The images.
            ranks: Activations are rounded as on so many tensor-parallel ranks.
        """
        joined = {name: np.concatenate([run[name] for run in self._inputs]) for name in self._inputs[0]}
        denoiser = _ObservedDenoiser(self._pipeline, ranks)
        images = len(requests)
        for index, request in enumerate(requests):
            # With two passes of guidance, the negative prompts come before the prompts.
            row = index + images if self._is_guided else index
            observed = denoiser.run({name: array[row] for name, array in joined.items()})
            magnitudes = {"latents": joined["latents"][row], "conditioned": observed.prediction}
            if self._is_guided:
                negative = denoiser.run({name: array[index] for name, array in joined.items()}).prediction
                difference = observed.prediction - negative
                guided = negative + np.float32(self._guidance) * difference
                magnitudes |= {"unconditioned": negative, "difference": difference, "guided": guided}
            yield self._describe(request, observed, magnitudes)

    def _describe(
        self, request: ImageRequest, observed: _ObservedPass, magnitudes: Mapping[str, np.ndarray]
    ) -> PassTrace:
        """Return the trace of an image from what was observed; `magnitudes` are arrays here."""
        pieces = tuple(
            TextPiece(row, id, text, float(observed.attention[row]))
            for row, id, text in self._pipeline.list_tokens(request.prompt)
        )
        trajectory, index = self._trajectory, self._number - 1
        return PassTrace(
            self._number,
            trajectory.passes,
            request.prompt,
            request.seed,
            float(trajectory.timesteps[index]),
            float(trajectory.sigmas[index]),
            float(trajectory.sigmas[index + 1]),
            pieces,
            len(observed.attention) - len(pieces),
            float(np.delete(observed.attention, [piece.position for piece in pieces]).sum()),
            observed.embedding_norm,
            observed.blocks,
            {
                name: float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))
                for name, array in magnitudes.items()
            },
        )


@dataclass(frozen=True)
class _RecordedComponent:
    """Denoiser whose inputs `recorder` receives."""

    component: Component
    recorder: PassRecorder

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Record the inputs, and return the outputs of the component."""
        self.recorder.record(inputs)
        return self.component.run(inputs)


@dataclass(frozen=True)
class _ObservedPass:
    """What a pass of the denoiser over one image shows.

    `attention` is the attention weight of each row of the text, [text_rows], averaged over patches, heads and blocks.
    """

    embedding_norm: float
    blocks: tuple[BlockTrace, ...]
    attention: np.ndarray
    prediction: np.ndarray


class _ObservedDenoiser:
    """Denoiser in NumPy whose residual and attention to the text are observed.

    Args:
        pipeline: The model.
        ranks: Activations are rounded as on so many tensor-parallel ranks.
    """

    def __init__(self, pipeline: ImagePipeline, ranks: int) -> None:
        self._config, self._sections = pipeline.denoiser_config, pipeline.denoiser.network.sections
        self._attention: list[np.ndarray] = []
        self._component = ReferenceComponent(pipeline.denoiser, ranks, partial(_Observer, self._attention))

    def run(self, inputs: Arrays) -> _ObservedPass:
        """Run a pass over one image, whose inputs are given, and return what was observed."""
        outputs = self._component.iterate_layers(inputs, {})
        norms, blocks = [], []
        attention = np.zeros(self._config.text_rows)
        *inner_sections, _ = self._sections
        for section in inner_sections:
            weights: list[np.ndarray] = []
            for layer in section:
                x = next(outputs)
                weights += self._take_text_weights(isinstance(layer, TextAttention))
            norms.append(float(np.linalg.norm(x.astype(np.float64), axis=-1).mean()))
            for by_head in weights:  # once in each block, never in the embedding
                blocks.append(_trace_block(norms[-1], by_head))
                attention[: by_head.shape[1]] += by_head.mean(axis=0)
        (prediction,) = deque(outputs, maxlen=1)
        return _ObservedPass(norms[0], tuple(blocks), attention / len(blocks), prediction)

    def _take_text_weights(self, has_text_alone: bool) -> list[np.ndarray]:
        """Return the weights of the text's rows of the layer computed last, [heads, rows], averaged over patches.

        Args:
            has_text_alone: Whether all keys are rows of the text; otherwise patches are the first ones.
        """
        patches = self._config.rows
        start = 0 if has_text_alone else patches
        weights = [array[:, :patches, start:].mean(axis=1, dtype=np.float64) for array in self._attention]
        self._attention.clear()
        return [by_head for by_head in weights if by_head.shape[1]]


def _trace_block(norm: float, weights: np.ndarray) -> BlockTrace:
    """Return the trace of a block with a norm and weights of the text's rows, [heads, rows]."""
    heads = (Attended(head, int(row.argmax()), float(row.max())) for head, row in enumerate(weights))
    return BlockTrace(norm, float(weights.sum(axis=1).mean()), tuple(heads))


class _Observer(Arithmetic):
    """Arithmetic of the numpy model that appends the attention weights of layers to a list.

    Args:
        attention: The list.
        *arguments, **options: As for `Arithmetic`.
    """

    def __init__(self, attention: list[np.ndarray], *arguments: Any, **options: Any) -> None:
        self._attention = attention
        super().__init__(*arguments, **options)

    def observe(self, seen: Seen, *arrays: np.ndarray) -> None:
        """Append attention weights [heads, rows, keys]."""
        if seen is Seen.attention:
            self._attention.append(arrays[0])


def describe_trace(trace: PassTrace) -> list[Part]:
    """Return a trace as parts of a report: tables of the prompt's pieces, of the layers, and of the predictions."""
    strongest = sorted(trace.pieces, key=lambda piece: -piece.attention)[:_PIECES]
    rows: list[Sequence[Part]] = [
        (str(piece.position), str(piece.id), repr(piece.text), f"{piece.attention:.1%}")
        for piece in sorted(strongest, key=lambda piece: piece.position)
    ]
    hidden = len(trace.pieces) - len(strongest)
    if hidden:
        total = sum(piece.attention for piece in trace.pieces) - sum(piece.attention for piece in strongest)
        rows.append(("", "", f"{hidden} other token{'s' * (hidden > 1)}", f"{total:.1%}"))
    if trace.padding_attention:
        rows.append(("", "", f"{trace.padding_rows} rows of padding", f"{trace.padding_attention:.1%}"))
    layers: list[Sequence[Part]] = [("embedding", f"{trace.embedding_norm:.2f}", "", "")]
    layers += [
        (
            str(number),
            f"{layer.norm:.2f}",
            f"{layer.text_share:.1%}",
            describe_heads(layer.heads, _HEADS, ".1%"),
        )
        for number, layer in enumerate(trace.layers)
    ]
    magnitudes = [
        (label, f"{trace.magnitudes[name]:.3f}")
        for name, label in MAGNITUDES.items()
        if name in trace.magnitudes
    ]
    return [
        "",
        Hanging(
            f"how pass {trace.number} of {trace.passes} for {trace.prompt!r:.60} (seed {trace.seed}) came about, by "
            "the numpy reference"
        ),
        Hanging(f"timestep {trace.timestep:.6g}, noise level {trace.sigma:.4g} to {trace.next_sigma:.4g}"),
        "",
        table("position|id|text|attention", rows, left=(2,)),
        "",
        table("layer|residual|on text|strongest positions of the text, by head", layers, left=(0, 3)),
        "",
        table("|root mean square", magnitudes),
    ]
