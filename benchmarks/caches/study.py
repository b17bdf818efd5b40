"""Loss of a model in numpy whose caches are quantised page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.caches.schemes import PAGE, LatentBasis, Store, quantise_keys_and_values, quantise_latents
from model.config import ModelConfig
from model.families import compose
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention import Attention
from model.layers.cache_formats import CACHE_FORMATS, PLAIN_CACHING, UNSCALED, CacheRounding
from model.layers.layer import States
from model.layers.precision import FLOAT32
from model.llm.cache_scales import calibrate_on_tokens
from model.loading.checkpoint import Checkpoint

BITS = (8, 4, 2)
INT4_PAGES = (16, 128)
"""Positions of a page for which the format int4 is measured."""


@dataclass(frozen=True)
class Row:
    """Result of a scheme: mean loss of a predicted token in nats, and its change by the scheme."""

    scheme: str
    loss: float
    change: float


def measure_loss(
    config: ModelConfig,
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    store: Store | None = None,
    caching: CacheRounding = PLAIN_CACHING,
) -> float:
    """Return the mean loss of the predicted tokens of texts, each cut at the context, in nats.

    Args:
        config: The model, a decoder of grouped attention.
        checkpoint: Its weights.
        texts: Token ids.
        store: Scheme that quantises pages which no later token writes to; None for no such scheme.
        caching: Format that rounds all keys and values.
    """
    network = compose(config)
    numpy = Arithmetic(checkpoint, FLOAT32, 2**30, 1, network.exact, caching)
    attention = [layer for layer in network.layers if isinstance(layer, Attention)]
    total, count = 0.0, 0
    for text in texts:
        ids = list(text[: config.context])
        states: States = {}
        size = len(ids) if store is None else PAGE
        for first in range(0, len(ids), size):
            chunk = ids[first : first + size]
            x = np.asarray(chunk)
            for layer in network.layers:
                x = layer.reference(x, Span(first, len(chunk)), states, numpy)
            targets = ids[first + 1 : first + 1 + len(chunk)]
            logits = x[: len(targets)].astype(np.float64)
            largest = logits.max(axis=1)
            normalisers = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
            total += float((normalisers - logits[np.arange(len(targets)), targets]).sum())
            count += len(targets)
            if store is not None and len(chunk) == PAGE:
                for layer in attention:
                    keys, values = (states[f"{layer.name}.{name}"] for name in ("keys", "values"))
                    keys[:, first:], values[:, first:] = store(
                        layer, keys[:, first:], values[:, first:], first
                    )
    return total / count


def list_rows(
    config: ModelConfig,
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    calibration: Sequence[int],
    bits: Sequence[int] = BITS,
) -> list[Row]:
    """Return the losses with caches of float32, of fp8 and int8 with static scales, of int4, and of few bits.

    Args:
        config: The model.
        checkpoint: Its weights.
        texts: Token ids of the texts.
        calibration: Token ids whose largest magnitudes determine the static scales.
        bits: Bits of the schemes in pages.
    """
    base = measure_loss(config, checkpoint, texts)
    rows = [Row("float32", base, 0.0)]

    def add(scheme: str, store: Store | None, caching: CacheRounding = PLAIN_CACHING) -> None:
        loss = measure_loss(config, checkpoint, texts, store, caching)
        rows.append(Row(scheme, loss, loss - base))

    for name in ("fp8", "fp8_e5m2", "int8"):
        format, scales, words = CACHE_FORMATS[name], UNSCALED, "without scales"
        if format.largest:
            scales, words = (
                calibrate_on_tokens(config, checkpoint, format, calibration),
                "static scale of a head",
            )
        add(f"{name}, {words}", None, CacheRounding(format, scales))
    for page in INT4_PAGES:
        caching = CacheRounding(CACHE_FORMATS["int4"], UNSCALED, page)
        add(f"int4, pages of {page}", None, caching)
    for count in bits:
        add(f"{count} bits, keys by channel of a page, values by token", quantise_keys_and_values(count))
    bases = create_bases(config, checkpoint)
    for count in bits:
        add(f"{count} bits, latent rows, a scale a token", quantise_latents(count, bases))
    return rows


def create_bases(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, LatentBasis]:
    """Return the basis of the latent rows of each layer with rotated keys, by the layer's name."""
    return {
        layer.name: LatentBasis.from_weights(*_load_projections(checkpoint, layer), layer.heads.positions)
        for layer in compose(config).layers
        if isinstance(layer, Attention) and layer.heads.positions is not None
    }


def _load_projections(checkpoint: Checkpoint, layer: Attention) -> list[np.ndarray]:
    """Return the matrices of keys and of values, [outputs, hidden] float32 each."""
    return [
        np.asarray(checkpoint[projection.tensor]).astype(np.float32)
        for projection in layer.cached_projections.values()
    ]


def format_rows(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| cache | loss | change |", "|---|---:|---:|"]
    lines += [f"| {row.scheme} | {row.loss:.4f} | {row.change:+.4f} |" for row in rows]
    return "\n".join(lines)
