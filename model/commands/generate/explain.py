"""`nkw generate --explain`: trace of a new token, recomputed by the reference in plain numpy.

A trace follows the last token before the new token: its residual after every decoder layer, the strongest attention of
its heads, its experts, and the candidates for the new token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.families import compose
from model.formats import Weight
from model.layers.arithmetic import Arithmetic, Seen, Span
from model.layers.layer import States
from model.layers.precision import choose_activation_dtype
from model.loading.tokenizer import Tokenizer
from nkw.report import Hanging, Part, table

_CANDIDATES = 5
_PIECES = 12  # most pieces that the text shows, the last ones
_HEADS = 4  # most heads of a layer in the text, those with the strongest attention; one less beside experts


@dataclass(frozen=True)
class Piece:
    """Token of the text before the new token: its position, id and text."""

    position: int
    id: int
    text: str


@dataclass(frozen=True)
class Attended:
    """Position to which a head of the last token gives the largest attention weight, and that weight."""

    head: int
    position: int
    weight: float


@dataclass(frozen=True)
class Chosen:
    """Expert to which the last token is routed, and the weight of the expert's output."""

    expert: int
    weight: float


@dataclass(frozen=True)
class LayerTrace:
    """Trace of a decoder layer for the last token.

    `norm` is the Euclidean norm of the residual after the layer. `experts` is empty for a layer without experts.
    """

    norm: float
    heads: tuple[Attended, ...]
    experts: tuple[Chosen, ...]


@dataclass(frozen=True)
class Candidate:
    """Candidate for the new token: its id, its text and its probability at temperature 1."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class TokenTrace:
    """Trace of the new token `chosen`, which is new token `number` counted from 1.

    `pieces` are all tokens before it. `embedding_norm` is the norm of the residual before the first layer. `candidates`
    are the 5 most likely tokens.
    """

    number: int
    chosen: Piece
    pieces: tuple[Piece, ...]
    embedding_norm: float
    layers: tuple[LayerTrace, ...]
    candidates: tuple[Candidate, ...]


def trace_token(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    tokenizer: Tokenizer,
    ids: Sequence[int],
    number: int,
    dtype: str = "float32",
) -> TokenTrace:
    """Compute the last step before a new token again, with the numpy reference, and return the trace of the token.

    Args:
        config: The model.
        weights: The weights of the model by name.
        tokenizer: The model's tokenizer.
        ids: The prompt and the new tokens up to the explained token, which is the last id.
        number: Number of the explained token among the new tokens, from 1.
        dtype: Dtype of activations: float32, bfloat16 or auto.
    """
    activations = choose_activation_dtype(dtype, config, weights)
    network, states = compose(config), States()
    numpy = _Observer(weights, activations, widened_bytes=2**30, exact=network.exact)
    span = Span(0, len(ids) - 1)
    (embedding,), *blocks, (head,) = network.sections
    x = embedding.reference(np.asarray(ids[:-1]), span, states, numpy)
    embedding_norm, layers = _compute_norm(x), []
    for block in blocks:
        numpy.start_layer()
        for layer in block:
            x = layer.reference(x, span, states, numpy)
        layers.append(LayerTrace(_compute_norm(x), numpy.heads, numpy.experts))
    logits = head.reference(x, span, states, numpy)[-1].astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    likeliest = np.argsort(-logits, kind="stable")[:_CANDIDATES]
    candidates = (Candidate(int(id), tokenizer.shown(int(id)), float(probabilities[id])) for id in likeliest)
    pieces = [Piece(position, id, tokenizer.shown(int(id))) for position, id in enumerate(ids)]
    return TokenTrace(
        number, pieces[-1], tuple(pieces[:-1]), embedding_norm, tuple(layers), tuple(candidates)
    )


def describe_trace(trace: TokenTrace) -> list[Part]:
    """Return a trace as parts of a report: tables of the last 12 pieces, of the layers, and of the candidates."""
    shown = trace.pieces[-_PIECES:]
    hidden = len(trace.pieces) - len(shown)
    rows: list[Sequence[Part]] = [(str(piece.position), str(piece.id), repr(piece.text)) for piece in shown]
    lines: list[Part] = [
        "",
        Hanging(f"how new token {trace.number}, {trace.chosen.text!r}, came about, by the numpy reference"),
        "",
        table("position|id|text", rows, left=(2,)),
    ]
    if hidden:
        lines.append(f"positions 0 to {hidden - 1} come before")
    with_experts = any(layer.experts for layer in trace.layers)
    heads = "layer|residual|strongest positions, by head" + ("|experts" if with_experts else "")
    rows = [("embedding", f"{trace.embedding_norm:.2f}", "", *([""] if with_experts else []))]
    for number, layer in enumerate(trace.layers):
        row = [str(number), f"{layer.norm:.2f}", describe_heads(layer.heads, _HEADS - with_experts)]
        if with_experts:
            row.append(", ".join(f"{expert.expert}: {expert.weight:.2f}" for expert in layer.experts))
        rows.append(row)
    lines += ["", table(heads, rows, left=(0, 2, 3))]
    rows = [
        (repr(candidate.text), str(candidate.id), f"{candidate.probability:.3f}")
        for candidate in trace.candidates
    ]
    return [*lines, "", table("candidate|id|probability", rows)]


def describe_heads(heads: Sequence[Attended], count: int, number_format: str = ".2f") -> str:
    """Return the `count` heads of a layer with the largest attention weights as text, in the order of heads.

    Args:
        heads: The heads.
        count: Number of heads in the text.
        number_format: Format of a weight.
    """
    strongest = sorted(heads, key=lambda head: -head.weight)[:count]
    in_order = sorted(strongest, key=lambda head: head.head)
    return ", ".join(f"{head.head}: {head.position} ({head.weight:{number_format}})" for head in in_order)


def _compute_norm(x: np.ndarray) -> float:
    """Return the Euclidean norm of the last row of `x`, the residual of the last token."""
    return float(np.linalg.norm(x[-1].astype(np.float64)))


class _Observer(Arithmetic):
    """Arithmetic of the numpy reference that also keeps the attention and the experts of the last token.

    `heads` and `experts` are those of the layers since the last `start_layer`.
    """

    def start_layer(self) -> None:
        """Forget the heads and experts of the previous decoder layer."""
        self.heads: tuple[Attended, ...] = ()
        self.experts: tuple[Chosen, ...] = ()

    def observe(self, seen: Seen, *arrays: np.ndarray) -> None:
        """Keep what a layer computed for the last token, in `heads` or in `experts`.

        Args:
            seen: What the arrays are.
            *arrays: Attention weights [heads, tokens, positions], or ids and weights of experts, each [tokens, K].
        """
        if seen is Seen.attention:
            self.heads = tuple(
                Attended(head, int(weights.argmax()), float(weights.max()))
                for head, weights in enumerate(arrays[0][:, -1])
            )
        else:
            ids, weights = (array[-1] for array in arrays)
            self.experts = tuple(Chosen(int(id), float(weight)) for id, weight in zip(ids, weights))
