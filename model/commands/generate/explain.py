"""`nkw generate --explain`: the path of one token through the model, recomputed by the numpy reference.

The path is that of the last token before the one that is explained: its residual after every decoder layer, what its
heads attend to, which experts it passes, and the candidates that follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from model.config import ModelConfig
from model.families import compose
from model.formats import Weight
from model.layers.arithmetic import Arithmetic, Seen, Span
from model.layers.layer import States
from model.layers.precision import activation_dtype
from model.loading.tokenizer import Tokenizer
from nkw.parts import Hanging, Part, table

_CANDIDATES = 5
_PIECES = 12  # last pieces of the text that are shown
_HEADS = (
    4  # of a layer, in the text: those that attend most strongly to one position; beside experts one less
)


@dataclass(frozen=True)
class Piece:
    """A token of the text: its position, id and text."""

    position: int
    id: int
    text: str


@dataclass(frozen=True)
class Attended:
    """The position to which a head attends most strongly, and the attention weight there."""

    head: int
    position: int
    weight: float


@dataclass(frozen=True)
class Chosen:
    """An expert that the token passes, and the weight of its output."""

    expert: int
    weight: float


@dataclass(frozen=True)
class LayerPath:
    """A decoder layer: the Euclidean norm of the residual after it; no heads or no experts where it has none."""

    norm: float
    heads: tuple[Attended, ...]
    experts: tuple[Chosen, ...]


@dataclass(frozen=True)
class Candidate:
    """A token that may follow, with its probability at temperature 1."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class TokenPath:
    """How the new token `number`, counted from 1, came about; `pieces` are all tokens before it."""

    number: int
    chosen: Piece
    pieces: tuple[Piece, ...]
    embedding_norm: float
    layers: tuple[LayerPath, ...]
    candidates: tuple[Candidate, ...]


def token_path(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    tokenizer: Tokenizer,
    ids: Sequence[int],
    number: int,
    dtype: str = "float32",
) -> TokenPath:
    """The path to the new token `number`, which is the last of `ids`: prompt and new tokens up to this one."""
    activations = activation_dtype(dtype, config, weights)
    network, states = compose(config), States()
    numpy = _Observer(weights, activations, widened_bytes=2**30, exact=network.exact)
    before = ids[:-1]
    span = Span(0, len(before))
    (embedding,), *blocks, (head,) = network.sections
    x = embedding.reference(np.asarray(before), span, states, numpy)
    embedding_norm, layers = _norm(x), []
    for block in blocks:
        numpy.start_layer()
        for layer in block:
            x = layer.reference(x, span, states, numpy)
        layers.append(LayerPath(_norm(x), numpy.heads, numpy.experts))
    logits = head.reference(x, span, states, numpy)[-1].astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    likeliest = np.argsort(-logits, kind="stable")[:_CANDIDATES]
    candidates = (Candidate(int(id), tokenizer.shown(int(id)), float(probabilities[id])) for id in likeliest)
    pieces = [Piece(at, id, tokenizer.shown(int(id))) for at, id in enumerate(ids)]
    return TokenPath(number, pieces[-1], tuple(pieces[:-1]), embedding_norm, tuple(layers), tuple(candidates))


def text(path: TokenPath) -> list[Part]:
    """The path for a terminal: pieces of text, layers, candidates."""
    shown = path.pieces[-_PIECES:]
    hidden = len(path.pieces) - len(shown)
    parts: list[Part] = [
        "",
        Hanging(f"how new token {path.number}, {path.chosen.text!r}, came about, by the numpy reference"),
        "",
    ]
    rows: list[Sequence[Part]] = [(str(each.position), str(each.id), repr(each.text)) for each in shown]
    parts.append(table("position|id|text", rows, left=(2,)))
    if hidden:
        parts.append(f"positions 0 to {hidden - 1} come before")
    with_experts = any(each.experts for each in path.layers)
    heads = "layer|residual|strongest positions, by head" + ("|experts" if with_experts else "")
    rows = [("embedding", f"{path.embedding_norm:.2f}", "", *([""] if with_experts else []))]
    for number, layer in enumerate(path.layers):
        strongest = _strongest(layer, _HEADS - with_experts)
        own = [str(number), f"{layer.norm:.2f}", ", ".join(strongest)]
        if with_experts:
            own.append(", ".join(f"{each.expert}: {each.weight:.2f}" for each in layer.experts))
        rows.append(own)
    parts += ["", table(heads, rows, left=(0, 2, 3))]
    rows = [(repr(each.text), str(each.id), f"{each.probability:.3f}") for each in path.candidates]
    parts += ["", table("candidate|id|probability", rows)]
    return parts


def _strongest(layer: LayerPath, count: int) -> Iterator[str]:
    """The `count` heads that attend most strongly to one position, in the order of their numbers."""
    most = sorted(layer.heads, key=lambda each: -each.weight)[:count]
    for each in sorted(most, key=lambda each: each.head):
        yield f"{each.head}: {each.position} ({each.weight:.2f})"


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x[-1].astype(np.float64)))


class _Observer(Arithmetic):
    """Keeps what a decoder layer found for the last token."""

    def start_layer(self) -> None:
        """A decoder layer begins."""
        self.heads: tuple[Attended, ...] = ()
        self.experts: tuple[Chosen, ...] = ()

    def observe(self, seen: Seen, *arrays: np.ndarray) -> None:
        """Keep attention [heads, tokens, positions], or experts and their weights [tokens, experts of a token]."""
        if seen is Seen.attention:
            last = arrays[0][:, -1]
            self.heads = tuple(
                Attended(head, int(each.argmax()), float(each.max())) for head, each in enumerate(last)
            )
        else:
            ids, weights = (each[-1] for each in arrays)
            self.experts = tuple(Chosen(int(id), float(weight)) for id, weight in zip(ids, weights))
