"""The shipped kernels keep to budgets, and move through HBM what the Cost sections of their headers say.

Shapes are those of one rank of a Llama-3.1-8B on eight: hidden size 4096, 4 heads of 128 with one key/value head, an
intermediate size of 1792, 16,032 of the vocabulary; prompts of 1,024 tokens. per_layer_input has those of Gemma 4 E2B.
Latent attention has those of DeepSeek-V3 on eight ranks.
The router has those of Qwen3-30B-A3B, the experts of a decode step those of OLMoE-1B-7B, conv1d those of Whisper; the
gated delta rule those of a rank of Qwen3-Next-80B-A3B on eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import nki.language as nl
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
from nki_kernels import ladder
from nki_kernels.experts.block_layout import count_blocks, has_loop, plan_blocks
from simulate.testing import Predicted
from tests.deep import deep_except
from tests.kernels.accuracy import in_order
from tests.kernels.accuracy import named as named_arguments

TOLERATED = 1.1
"""A budget of time is today's prediction and a tenth: what is meant to cost more says so here."""

EPS = 1e-5
KERNEL_TESTS = Path(__file__).resolve().parents[1] / "kernels"


def narrow(*shape: int) -> np.ndarray:
    return np.zeros(shape, ml_dtypes.bfloat16)


def wide(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ids(rows: int) -> np.ndarray:
    return np.zeros((rows, 1), np.int32)


def passes(rows: int, depth: int) -> int:
    """Return how often weights are read: a group of rows has at most 512, and at most 16,384 elements per partition."""
    padded = -(-depth // 128) * 128
    return -(-rows // min(512, max(128, 16384 // padded * 128)))


@dataclass(frozen=True)
class Work:
    """A launch, how often it reads each argument, and the bytes it moves besides: results, internal buffers, caches.

    predicted_us: what it was predicted to take on trn2 when this was written.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    reads: dict[str, float | Fraction]
    other_bytes: int
    predicted_us: float = 0.0
    ranks: int = 1

    @property
    def hbm_bytes(self) -> int:
        """The bytes of all ranks together."""
        names = self.kernel.func.__code__.co_varnames
        sizes = {
            name: argument.nbytes
            for name, argument in zip(names, self.arguments)
            if isinstance(argument, np.ndarray)
        }
        read = sum(times * sizes[name] for name, times in self.reads.items())
        assert read == int(read)
        return self.ranks * (int(read) + self.other_bytes)


def group(ranks: int) -> ReplicaGroup:
    return ReplicaGroup([list(range(ranks))])


def matmul(rows: int, depth: int, columns: int, predicted_us: float = 0.0) -> Work:
    arguments = (narrow(rows, depth), narrow(depth, columns))
    reads = {"a": 1, "b": -(-rows // max(128, 32768 // -(-depth // 128) // 128 * 128))}
    return Work(kernels.matmul, arguments, reads, rows * columns * 2, predicted_us)


def embedding(
    tokens: int, vocabulary: int, hidden: int, predicted_us: float = 0.0, dtype: Any = nl.float32
) -> Work:
    arguments = (ids(tokens), narrow(vocabulary, hidden), dtype)
    reads = {"ids": 1, "table": tokens / vocabulary}
    written = tokens * hidden * np.dtype(dtype).itemsize
    return Work(kernels.embedding, arguments, reads, written, predicted_us)


def rmsnorm(tokens: int, hidden: int, predicted_us: float = 0.0) -> Work:
    arguments = (narrow(tokens, hidden), narrow(1, hidden), EPS)
    reads = {"x": 1, "weight": 1}
    return Work(kernels.rmsnorm, arguments, reads, tokens * hidden * 2, predicted_us)


def qkv_projection(tokens: int, hidden: int, q: int, kv: int, predicted_us: float = 0.0) -> Work:
    width = q + 2 * kv
    arguments = in_order(
        kernels.qkv_projection,
        x=narrow(tokens, hidden),
        norm_weight=narrow(1, hidden),
        w_qkv=narrow(hidden, width),
        eps=EPS,
        q_size=q,
        kv_size=kv,
    )
    columns = 65536 // 2 // -(-hidden // 128) // 512 * 512  # that stay in SBUF, for more than 128 rows
    reads = {"x": -(-width // columns) if tokens > 128 else 1, "norm_weight": 1, "w_qkv": 1}
    return Work(kernels.qkv_projection, arguments, reads, tokens * width * 2, predicted_us)


def rope(tokens: int, heads: int, size: int, positions: int, predicted_us: float = 0.0) -> Work:
    table = wide(positions, size // 2)
    arguments = (narrow(tokens, heads * size), ids(tokens), table, table.copy(), heads)
    reads = {"x": 1, "positions": 1, "cos": tokens / positions, "sin": tokens / positions}
    return Work(kernels.rope, arguments, reads, tokens * heads * size * 2, predicted_us)


def attention_prefill(tokens: int, heads: int, kv: int, length: int, predicted_us: float = 0.0) -> Work:
    size = 128
    q, k, v = narrow(tokens, heads * size), narrow(tokens, kv * size), narrow(tokens, kv * size)
    arguments = (q, narrow(1, kv, size, length), narrow(1, kv, length, size), size**-0.5, k, v)
    return Work(
        kernels.attention_prefill,
        arguments,
        {"q": 1, "k": 1, "v": 1},
        q.nbytes + k.nbytes + v.nbytes,
        predicted_us,
    )


def attention_decode(heads: int, kv: int, length: int, predicted_us: float = 0.0) -> Work:
    size = 128
    q, k, v = narrow(1, heads * size), narrow(1, kv * size), narrow(1, kv * size)
    arguments = (q, narrow(1, kv, size, length), narrow(1, kv, length, size), ids(1), size**-0.5, k, v)
    # Values go through the product and to the cache; the position to all partitions, and to each row of both caches.
    reads = {"q": 1, "k": 1, "v": 2, "k_cache": 1, "v_cache": 1, "positions": (128 + 1) * kv}
    return Work(kernels.attention_decode, arguments, reads, q.nbytes + k.nbytes + v.nbytes, predicted_us)


def attention_mixed(
    sequences: int, tokens: int, heads: int, kv: int, length: int, predicted_us: float = 0.0
) -> Work:
    size, page, rows = 128, 16, sequences + tokens
    q, k, v = narrow(rows, heads * size), narrow(rows, kv * size), narrow(rows, kv * size)
    cached_pages, new = sequences * length // page, -(-tokens // page)
    caches = narrow(cached_pages + new, page, kv, size), narrow(cached_pages + new, page, kv, size)
    tables = np.zeros((sequences, length // page), np.int32), np.zeros((1, new), np.int32)
    arguments = (q, *caches, ids(rows), size**-0.5, sequences, k, v, kv, ids(rows), *tables)
    # New keys of prompts and all new values go to the caches from HBM. A partition holds part of a page, or pages.
    reads = {
        "q": 1,
        "k": (sequences + 2 * tokens) / rows,
        "v": 2,
        "k_cache": cached_pages / (cached_pages + new),
        "v_cache": cached_pages / (cached_pages + new),
        "positions": 128 * kv * sequences / rows,
        "slots": kv,
        "block_tables": max(1, page * 128 // length),
    }
    return Work(kernels.attention_mixed, arguments, reads, q.nbytes + k.nbytes + v.nbytes, predicted_us)


def attention_block_decode(hidden: int, heads: int, kv: int, length: int, predicted_us: float = 0.0) -> Work:
    size = 128
    q, k = narrow(1, heads * size), narrow(1, kv * size)
    w_qkv, w_o = narrow(hidden, (heads + 2 * kv) * size), narrow(heads * size, hidden)
    caches = narrow(1, kv, size, length), narrow(1, kv, length, size)
    x = narrow(1, hidden)
    arguments = (x, narrow(1, hidden), w_qkv, EPS, q.shape[1], k.shape[1], *caches, ids(1), size**-0.5, w_o)
    # Between norm and residual only k and v go to HBM, to the caches.
    reads = {
        "x": 1,
        "norm_weight": 1,
        "w_qkv": 1,
        "w_o": 1,
        "k_cache": 1,
        "v_cache": 1,
        "positions": (128 + 1) * kv,
    }
    written = 2 * k.nbytes + x.nbytes
    return Work(kernels.attention_block_decode, arguments, reads, written, predicted_us)


def decoder_layer_decode(
    hidden: int, heads: int, kv: int, length: int, inner: int, predicted_us: float = 0.0
) -> Work:
    block = attention_block_decode(hidden, heads, kv, length)
    up, down = narrow(hidden, inner), narrow(inner, hidden)
    arguments = in_order(
        kernels.decoder_layer_decode,
        **named_arguments(kernels.attention_block_decode, block.arguments),
        mlp_norm_weight=narrow(1, hidden),
        w_gate=up,
        w_up=up.copy(),
        w_down=down,
    )
    between = 2 * hidden * 2  # hidden states as rows: stored, and loaded as the residual
    reads = dict.fromkeys(("mlp_norm_weight", "w_gate", "w_up", "w_down"), 1)
    return Work(
        kernels.decoder_layer_decode,
        arguments,
        {**block.reads, **reads},
        block.other_bytes + between,
        predicted_us,
    )


def output_projection(
    tokens: int, depth: int, hidden: int, predicted_us: float = 0.0, ranks: int = 1
) -> Work:
    y = narrow(tokens, hidden)
    arguments: tuple[Any, ...] = (narrow(tokens, depth), narrow(depth, hidden), y)
    reads = {"o": 1, "w_o": 1, "residual": 1}
    arguments += (group(ranks),) if ranks > 1 else ()
    return Work(kernels.output_projection, arguments, reads, y.nbytes, predicted_us, ranks)


def mlp(tokens: int, hidden: int, inner: int, predicted_us: float = 0.0, ranks: int = 1) -> Work:
    x, down = narrow(tokens, hidden), narrow(inner, hidden)
    arguments = in_order(
        kernels.mlp,
        x=x,
        norm_weight=narrow(1, hidden),
        w_gate=down.T.copy(),
        w_up=down.T.copy(),
        w_down=down,
        eps=EPS,
        replica_group=group(ranks) if ranks > 1 else None,
    )
    times = -(-tokens // 512)
    reads = {"x": 1 + (tokens > 128), "norm_weight": 1, "w_gate": times, "w_up": times, "w_down": times}
    return Work(kernels.mlp, arguments, reads, x.nbytes, predicted_us, ranks)


def per_layer_input(tokens: int, hidden: int, width: int, layers: int, predicted_us: float = 0.0) -> Work:
    """Return the work of the second of some layers."""
    arguments = (
        *(narrow(tokens, hidden), narrow(hidden, width), narrow(tokens, layers * width)),
        *(narrow(width, hidden), width),
    )
    reads = {"x": 1, "w_gate": 1, "inputs": 1 / layers, "w_output": 1}
    return Work(kernels.per_layer_input, arguments, reads, tokens * hidden * 2, predicted_us)


PACKED = (1, 80, 129)
"""Of the channels of convolutions here those that leave so much of the array idle that all taps are packed."""


def conv1d(mels: int, width: int, as_rows: bool, predicted_us: float = 0.0) -> Work:
    """Return the work of a convolution of Whisper: of log-mel spectra, or of what that gives, to rows."""
    bias = narrow(1, width)
    arguments: tuple[Any, ...] = (narrow(1, mels, 3000), narrow(3, mels, width), bias, 1, 1, "gelu")
    reads: dict[str, float] = dict.fromkeys(("x", "w", "bias"), 1)
    if mels in PACKED:
        reads["x"] = 3 - 2 / 3000  # for each of three taps, less one column of padding for two of them
    if as_rows:
        arguments = (narrow(1, width, 3000), narrow(3, width, width), bias, 2, 1, "gelu", True)
        arguments += (narrow(1500, width),)
        at_once = 8192 // -(-width // 128) // 256 * 128  # results of a stripe, of which two share a column
        reads |= {"added": 1, "x": 1 + (-(-1500 // at_once) - 1) / 3000}
    return Work(kernels.conv1d, arguments, reads, 2 * width * (1500 if as_rows else 3000), predicted_us)


def conv2d(images: int, channels: int, size: int, outputs: int, predicted_us: float = 0.0) -> Work:
    """Return the work of a window of 3 x 3 over images that are loaded whole."""
    weights, bias = narrow(3, 3, channels, outputs), narrow(1, outputs)
    arguments = (narrow(images, channels, size, size), weights, bias, (1, 1), (1, 1), "relu")
    written = images * outputs * size * size * 2
    reads: dict[str, float] = dict.fromkeys(("x", "w", "bias"), 1)
    if channels in PACKED:
        reads["x"] = (3 - 2 / size) ** 2
    return Work(kernels.conv2d, arguments, reads, written, predicted_us)


def upsample_conv2d(images: int, channels: int, size: int, outputs: int, predicted_us: float = 0.0) -> Work:
    """Return the work of images that are loaded whole."""
    arguments = (
        narrow(images, channels, size, size),
        narrow(3, 3, channels, outputs),
        narrow(1, outputs),
        "silu",
    )
    written = images * outputs * 4 * size * size * 2
    return Work(
        kernels.upsample_conv2d, arguments, dict.fromkeys(("x", "w", "bias"), 1), written, predicted_us
    )


def patch_embedding(images: int, channels: int, size: int, outputs: int, predicted_us: float = 0.0) -> Work:
    """Return the work of patches of 2 x 2, whose positions are read for each image."""
    x, patches = narrow(images, channels, size, size), (size // 2) ** 2
    arguments = (x, narrow(2, 2, channels, outputs), narrow(1, outputs), narrow(patches, outputs))
    reads: dict[str, float] = {"x": 1, "w": 1, "bias": 1, "added": images}
    return Work(kernels.patch_embedding, arguments, reads, images * patches * outputs * 2, predicted_us)


def patch_output(images: int, size: int, hidden: int, channels: int, predicted_us: float = 0.0) -> Work:
    """Return the work of square images of `size` x `size` patches of 2 x 2."""
    x, columns = narrow(images * size * size, hidden), 4 * channels
    arguments = (
        *(x, narrow(hidden, columns), narrow(images, hidden), narrow(images, hidden)),
        *(1e-6, size, size, 2, narrow(1, columns)),
    )
    reads = dict.fromkeys(("x", "w", "norm_weight", "norm_bias", "bias"), 1)
    return Work(kernels.patch_output, arguments, reads, len(x) * columns * 2, predicted_us)


def timestep_embedding(images: int, hidden: int, predicted_us: float = 0.0) -> Work:
    arguments = in_order(
        kernels.timestep_embedding,
        t=wide(images, 1),
        w_1=narrow(256, hidden),
        b_1=narrow(1, hidden),
        w_2=narrow(hidden, hidden),
        b_2=narrow(1, hidden),
        added=narrow(images, hidden),
    )
    reads = dict.fromkeys(("t", "w_1", "b_1", "w_2", "b_2", "added"), 1)
    return Work(kernels.timestep_embedding, arguments, reads, images * hidden * 2, predicted_us)


def modulation(images: int, depth: int, hidden: int, predicted_us: float = 0.0) -> Work:
    """Return the work of 6 chunks with a bias, whose weights are read once."""
    arguments = (narrow(images, depth), narrow(depth, 6 * hidden), narrow(1, 6 * hidden))
    return Work(
        kernels.modulation, arguments, {"x": 1, "w": 1, "bias": 1}, images * 6 * hidden * 2, predicted_us
    )


def added_table(images: int, hidden: int, predicted_us: float = 0.0) -> Work:
    """Return the work of a table of 6 chunks that is added to embeddings, read once for each image."""
    arguments = in_order(kernels.modulation, x=narrow(images, 6 * hidden), table=narrow(6, hidden))
    return Work(
        kernels.modulation, arguments, {"x": 1, "table": images}, images * 6 * hidden * 2, predicted_us
    )


def group_norm(images: int, channels: int, size: int, loads: int, predicted_us: float = 0.0) -> Work:
    """Return the work of 32 groups of channels, whose pixels are loaded once or twice."""
    x = narrow(images, channels, size, size)
    arguments = (x, narrow(1, channels), narrow(1, channels), 32, 1e-6, "silu")
    return Work(
        kernels.group_norm, arguments, {"x": loads, "weight": images, "bias": images}, x.nbytes, predicted_us
    )


def pool(
    kernel: Callable[..., Any], images: int, channels: int, size: int, predicted_us: float = 0.0
) -> Work:
    """Return the work of windows of 2 x 2 that do not overlap."""
    x = narrow(images, channels, size, size)
    return Work(kernel, (x, (2, 2)), {"x": 1}, x.nbytes // 4, predicted_us)


def copy_pages(copies: int, pages: int, block: int, heads: int, predicted_us: float = 0.0) -> Work:
    caches = [narrow(pages, block, heads, 128) for _ in "kv"]
    copied = copies / pages
    reads = {"cache": copied, "other": copied, "sources": 1, "destinations": 1}
    written = 2 * copies * block * heads * 128 * 2
    return Work(kernels.copy_pages, (*caches, ids(copies), ids(copies)), reads, written, predicted_us)


def pack_pages(count: int, pages: int, block: int, predicted_us: float = 0.0) -> Work:
    """Return the work of packing pages of one head; the number of a page is read for each of its rows."""
    packed = np.zeros((pages, block + 4, 1, 64), np.uint8), np.zeros((pages, block, 1, 68), np.uint8)
    caches = [narrow(2 * count, block, 1, 128) for _ in "kv"]
    reads = {"k_cache": 0.5, "v_cache": 0.5, "sources": block, "destinations": block + 1}
    written = count * (packed[0][0].nbytes + packed[1][0].nbytes)
    return Work(kernels.pack_pages, (*packed, *caches, ids(count), ids(count)), reads, written, predicted_us)


def copy_states(
    copies: int, slots: int, states: Sequence[tuple[int, ...]], predicted_us: float = 0.0
) -> Work:
    """Return the work of copies in rows on several partitions; each row reads the number of its slot."""
    arrays = [wide(slots, *shape) for shape in states]
    copied = dict.fromkeys(("cache", "other"), copies / slots)
    written = copies * sum(array.nbytes for array in arrays) // slots
    rows = 128 // copies
    reads = {**copied, "sources": rows, "destinations": rows}
    arguments = (*arrays, ids(copies), ids(copies))
    return Work(kernels.copy_pages, arguments, reads, written, predicted_us)


def router(tokens: int, hidden: int, experts: int, top: int, predicted_us: float = 0.0) -> Work:
    x = narrow(tokens, hidden)
    arguments = (x, narrow(1, hidden), narrow(hidden, experts), EPS, top)
    reads = {"x": 1, "norm_weight": 1, "w_router": 1}
    return Work(kernels.router, arguments, reads, x.nbytes + tokens * top * 8, predicted_us)


def expert_arguments(tokens: int, hidden: int, experts: int, inner: int, top: int) -> tuple[Any, ...]:
    return in_order(
        kernels.experts_decode,
        residual=narrow(tokens, hidden),
        n=narrow(tokens, hidden),
        weights=wide(tokens, top),
        ids=np.zeros((tokens, top), np.int32),
        w_gate=narrow(experts, hidden, inner),
        w_up=narrow(experts, hidden, inner),
        w_down=narrow(experts, inner, hidden),
    )


def experts_decode(
    tokens: int, hidden: int, experts: int, inner: int, top: int, predicted_us: float = 0.0
) -> Work:
    """Return the work where a token's weights are read onto every partition if each choice has its own product."""
    few = tokens * top <= experts
    times = min(1, tokens * top / experts)
    reads: dict[str, float] = {"residual": 1, "n": 1, "ids": 1, "weights": 128 if few else 1}
    reads |= dict.fromkeys(("w_gate", "w_up", "w_down"), times)
    arguments = expert_arguments(tokens, hidden, experts, inner, top)
    return Work(kernels.experts_decode, arguments, reads, tokens * hidden * 2, predicted_us)


def experts_prefill(
    tokens: int, hidden: int, experts: int, inner: int, top: int, predicted_us: float = 0.0
) -> Work:
    """Return the work where a block reads an expert; its tokens are written, filled and read, and results twice.

    Choices are taken to be balanced. Where a loop follows, its table of blocks is written, and tokens come as lists.
    """
    layout = plan_blocks(tokens * top, experts, hidden, inner, 2, True)
    size = layout.rows
    count = count_blocks(layout) - (layout.dealt if has_loop(layout) else 0)
    reads: dict[str, float] = {"residual": 1, "ids": 1, "weights": 1, "n": count * size / tokens}
    reads |= dict.fromkeys(("w_gate", "w_up", "w_down"), count / experts)
    order = 4 * (2 * count * size + tokens * top)
    if has_loop(layout):
        room = -(-tokens // 128) * 128
        order = 4 * (experts * room + size + count * size + 2 * layout.dealt)
    results = 2 * hidden * (count * size + tokens * top)
    arguments = expert_arguments(tokens, hidden, experts, inner, top)
    return Work(
        kernels.experts_prefill, arguments, reads, tokens * hidden * 2 + order + results, predicted_us
    )


def gated_delta(
    sequences: int, tokens: int, key_heads: int, heads: int, predicted_us: float = 0.0, step: bool = False
) -> Work:
    """Return the work where all states are read and written; rows of heads stand on every partition with tokens.

    A step has its numbers of a sequence, and queries and keys of its heads, on 32 partitions of their own.
    Of each head and chunk of a prompt, halves of a triangle and blocks of 16 pass through HBM, and the inverses of the
    blocks, transposed and not, come back with zeros that three buffers for the heads of four units get at first. Three
    parts of two sums of decays for each token pass through it as well.
    """
    rows, size = sequences * tokens, 128
    states = wide(sequences, heads, size, size)
    arguments = (
        narrow(rows, (2 * key_heads + heads) * size),
        narrow(rows, heads * (size + 2)),
        *(narrow(1, heads), narrow(1, heads), narrow(1, size)),
        *(states, ids(sequences), ids(sequences), ids(sequences)),
        *(key_heads, EPS),
    )
    reads: dict[str, float] = dict.fromkeys(("qkv", "gates", "states", "state_slots", "starts"), 1)
    if step:  # queries and keys once more, for each of two heads
        reads["qkv"] += 2 * 2 * key_heads / (2 * key_heads + heads)
        reads |= {"state_slots": 32, "starts": 32}
    reads |= dict.fromkeys(("a_log", "dt_bias", "norm_weight"), rows if step else 128)
    reads["counts"] = 1 if step else 128
    kernel = kernels.gated_delta_step if step else kernels.gated_delta
    other = states.nbytes + rows * heads * size * 2
    if not step:
        chunks = sequences * -(-tokens // 128)
        half, blocks, sums = 2 * 64 * 64 * 2, 8 * 16 * 16 * 2, 2 * 3 * 128 * 2
        other += chunks * heads * (half + blocks + 2 * blocks + 2 * half + 2 * sums)
        other += 3 * 2 * half * min(chunks, 4) * heads
    return Work(kernel, arguments, reads, other, predicted_us)


def experts_dispatch(tokens: int, hidden: int, top: int, ranks: int, predicted_us: float = 0.0) -> Work:
    """Return the work where all is copied before it meets and after; all partitions read the first expert's number."""
    choices = narrow(tokens, hidden), wide(tokens, top), np.zeros((tokens, top), np.int32)
    size = sum(array.nbytes for array in choices)
    arguments = (*choices, 8, group(ranks), ranks, np.zeros((1, 1), np.int32))
    reads = {"n": 1, "weights": 1, "ids": 1, "first": 128}
    return Work(kernels.experts_dispatch, arguments, reads, (2 + 3 * ranks) * size, predicted_us, ranks)


def experts_combine(tokens: int, hidden: int, ranks: int, predicted_us: float = 0.0) -> Work:
    """Return the work where results are copied before they meet; what is received is read once."""
    results, residual = narrow(ranks * tokens, hidden), narrow(tokens, hidden)
    arguments = (results, group(ranks), ranks, residual)
    other = 4 * results.nbytes + residual.nbytes
    reads = {"results": 1, "residual": 1}
    return Work(kernels.experts_combine, arguments, reads, other, predicted_us, ranks)


def lm_head(rows: int, hidden: int, columns: int, top: int, predicted_us: float = 0.0) -> Work:
    x = narrow(rows, hidden)
    arguments = (x, narrow(1, hidden), narrow(hidden, columns), EPS, top, ids(1))
    reads = {"x": 1, "norm_weight": 1, "w_head": 1, "vocab_offset": rows}
    other = rows * columns * 4 + rows * -(-top // 8) * 8 * 8
    return Work(kernels.lm_head, arguments, reads, other, predicted_us)


def sample(rows: int, columns: int, predicted_us: float = 0.0, candidates: bool = False) -> Work:
    column = tuple(wide(rows, 1) for _ in range(5))
    arguments = (
        wide(rows, columns),
        *column,
        64,
        *((np.zeros((rows, columns), np.int32),) if candidates else ()),
    )
    names = ("logits", "uniform", "temperature", "top_k", "top_p", "min_p")
    reads = dict.fromkeys((*names, "ids") if candidates else names, 1)
    return Work(kernels.sample, arguments, reads, rows * 8 + rows * 64 * 8, predicted_us)


def all_reduce(rows: int, columns: int, ranks: int, predicted_us: float = 0.0) -> Work:
    x = narrow(rows, columns)
    return Work(kernels.all_reduce, (x, group(ranks)), {"x": 1}, 5 * x.nbytes, predicted_us, ranks)


def send_receive(rows: int, columns: int, predicted_us: float = 0.0) -> Work:
    """Return the work of two ranks that each send x to the other one."""
    x, pairs = narrow(rows, columns), [(0, 1), (1, 0)]
    return Work(kernels.send_receive, (x, pairs), {"x": 2}, 6 * x.nbytes, predicted_us, 2)


def exchange_heads(
    rows: int, width: int, ranks: int, predicted_us: float = 0.0, to_rows: bool = False
) -> Work:
    """Return the work of one sequence: arrays are copied before and after they meet."""
    options = group(ranks), ranks
    if to_rows:
        outputs = narrow(rows, width // ranks)
        arguments = (outputs, *options, None, None, 1, True)
        return Work(kernels.exchange_heads, arguments, {"q": 1}, 5 * outputs.nbytes, predicted_us, ranks)
    q, k, v = (narrow(rows // ranks, width) for _ in range(3))
    reads = dict.fromkeys(("q", "k", "v"), 1)
    return Work(kernels.exchange_heads, (q, *options, k, v), reads, 3 * 5 * q.nbytes, predicted_us, ranks)


def latent_attention_decode(sequences: int, heads: int, length: int, predicted_us: float = 0.0) -> Work:
    q, kv, o = narrow(sequences, heads * 192), narrow(sequences, 576), narrow(sequences, heads * 128)
    w_uk, w_uv, table = narrow(heads * 128, 512), narrow(512, heads * 128), wide(length, 32)
    cache, positions = narrow(sequences, length, 576), ids(sequences)
    arguments = (q, kv, cache, positions, 192**-0.5, narrow(1, 512), EPS, table, table.copy(), w_uk, w_uv)
    # Positions go to all partitions, to the rotation and to the places of the new rows.
    reads = dict.fromkeys(("q", "kv", "cache", "norm_weight", "w_uk", "w_uv"), 1) | {"positions": 128 + 2}
    reads |= dict.fromkeys(("cos", "sin"), sequences / length)
    return Work(kernels.latent_attention_decode, arguments, reads, kv.nbytes + o.nbytes, predicted_us)


def latent_keys_values(tokens: int, heads: int, predicted_us: float = 0.0) -> Work:
    kv, cache, positions, table = narrow(tokens, 576), narrow(1, tokens, 576), ids(tokens), wide(tokens, 32)
    w_uk, w_uv = narrow(heads * 128, 512), narrow(512, heads * 128)
    arguments = (kv, cache, positions, narrow(1, 512), EPS, table, table.copy(), w_uk, w_uv, heads)
    reads = dict.fromkeys(("kv", "positions", "norm_weight", "w_uk", "w_uv", "cos", "sin"), 1)
    written = kv.nbytes + tokens * heads * (192 + 128) * 2
    return Work(kernels.latent_keys_values, arguments, reads, written, predicted_us)


def rung(kernel: Callable[..., Any], a: int, b: int, predicted_us: float = 0.0) -> Work:
    """Return the work of a_t.T @ b for M = 1024, K = 512, N = 2048, reading a_t `a` times and b `b` times."""
    arguments = (narrow(512, 1024), narrow(512, 2048))
    return Work(kernel, arguments, {"a_t": a, "b": b}, 1024 * 2048 * 2, predicted_us)


REALISTIC = (
    matmul(1024, 4096, 1792, 201.7),
    embedding(1024, 128256, 4096, 205.8),
    rmsnorm(1024, 4096, 52.0),
    qkv_projection(1024, 4096, 512, 128, 95.0),
    rope(1024, 4, 128, 8192, 28.9),
    attention_prefill(1024, 4, 1, 2048, 41.7),
    attention_decode(4, 1, 8192, 21.3),
    attention_mixed(16, 512, 4, 1, 2048, 114.0),
    latent_attention_decode(4, 16, 4096, 104.5),
    latent_keys_values(1024, 16, 93.4),
    attention_block_decode(4096, 4, 1, 8192, 41.5),
    decoder_layer_decode(4096, 4, 1, 8192, 1792, 149.0),
    output_projection(1024, 512, 4096, 71.6),
    mlp(1024, 4096, 1792, 625.4),
    per_layer_input(1024, 1536, 256, 35, 51.1),
    conv1d(80, 384, False, 21.6),
    conv1d(384, 384, True, 32.5),
    conv1d(128, 1280, False, 52.5),
    conv1d(1280, 1280, True, 223.7),
    conv2d(8, 128, 28, 128, 34.3),
    upsample_conv2d(1, 128, 32, 128, 21.1),
    patch_embedding(1, 16, 64, 1024, 19.5),
    patch_output(1, 64, 1152, 8, 40.5),
    patch_output(1, 64, 3072, 16, 85.4),
    timestep_embedding(1, 3072, 56.0),
    modulation(1, 3072, 3072, 283.3),
    added_table(2, 1152, 4.5),
    group_norm(1, 256, 64, 1, 31.5),
    group_norm(1, 64, 256, 2, 148.9),
    pool(kernels.max_pool, 8, 64, 112, 41.9),
    pool(kernels.average_pool, 8, 64, 112, 59.5),
    copy_pages(1, 512, 16, 8, 10.0),
    copy_pages(16, 512, 16, 8, 12.7),
    copy_pages(128, 512, 16, 8, 56.4),
    pack_pages(1, 512, 16, 17.3),
    pack_pages(16, 512, 16, 33.2),
    pack_pages(16, 512, 128, 268.3),
    pack_pages(64, 512, 16, 134.4),
    copy_states(1, 64, ((32, 128, 128), (8192, 3)), 27.1),
    copy_states(16, 64, ((32, 128, 128), (8192, 3)), 334.6),
    router(1024, 2048, 128, 8, 45.3),
    experts_decode(1, 2048, 64, 1024, 8, 281.7),
    experts_decode(16, 2048, 64, 1024, 8, 2120.1),
    experts_prefill(1024, 2048, 8, 1024, 2, 511.3),
    experts_dispatch(1024, 2048, 8, 4, 200.0),
    experts_combine(1024, 2048, 4, 251.0),
    gated_delta(1, 2048, 2, 4, 201.8),
    gated_delta(16, 1, 2, 4, 45.2, step=True),
    lm_head(1, 4096, 16032, 8, 328.0),
    lm_head(1, 4096, 16032, 64, 345.0),
    lm_head(64, 4096, 16032, 64, 379.2),
    sample(64, 64, 33.0, candidates=True),
    sample(1, 128256, 91.7),
    sample(64, 16032, 142.6),
    all_reduce(1024, 4096, 8, 172.7),
    send_receive(1024, 4096, 186.4),
    exchange_heads(4096, 3072, 8, 106.5),
    exchange_heads(4096, 3072, 8, 68.2, to_rows=True),
    rung(ladder.tile_by_tile, a=4, b=8, predicted_us=74.5),
)

RAGGED = (
    *(matmul(rows, 300, 700) for rows in (1, 127, 128, 129, 511, 512, 513)),
    *(matmul(1025, depth, 520) for depth in (4096, 4224, 4225, 8192, 8193)),
    *(embedding(tokens, 1000, 260) for tokens in (1, 127, 128, 129)),
    *(embedding(tokens, 1000, 260, dtype=nl.bfloat16) for tokens in (1, 127, 128, 129)),
    *(rmsnorm(tokens, 260) for tokens in (1, 127, 128, 129)),
    *(qkv_projection(tokens, 260, 256, 64) for tokens in (1, 129, 512, 513)),
    *(qkv_projection(513, hidden, 256, 64) for hidden in (4096, 4097, 5376, 5377)),
    *(qkv_projection(129, 8192, q, 64) for q in (384, 385, 1408)),
    *(rope(tokens, 2, 64, 1024) for tokens in (1, 127, 128, 129)),
    *(attention_prefill(tokens, 4, 2, 600) for tokens in (1, 127, 128, 129, 600)),
    *(attention_decode(heads, 2, length) for heads, length in ((2, 129), (16, 2500))),
    *(attention_mixed(3, tokens, 4, 2, 256) for tokens in (1, 127, 128, 129)),
    *(output_projection(tokens, 300, 700) for tokens in (1, 129, 513)),
    output_projection(129, 300, 700, ranks=2),
    *(mlp(tokens, 260, 300) for tokens in (1, 129, 513)),
    mlp(400, 260, 5000),
    mlp(129, 260, 300, ranks=3),
    *(per_layer_input(tokens, 260, 40, 2) for tokens in (1, 127, 128, 129)),
    *(latent_keys_values(tokens, 3) for tokens in (1, 127, 128, 129, 900)),
    *(conv1d(mels, 130, False) for mels in (127, 128, 129)),
    *(conv1d(mels, 130, True) for mels in (1, 127, 128, 129)),
    *(conv2d(3, channels, 9, 130) for channels in (1, 127, 128, 129)),
    *(upsample_conv2d(3, channels, 9, 130) for channels in (1, 127, 128, 129)),
    *(patch_embedding(3, channels, 12, 130) for channels in (1, 16, 64)),
    *(patch_output(3, size, 260, 16) for size in (1, 11, 12, 23)),
    *(timestep_embedding(images, 260) for images in (1, 127, 128)),
    *(modulation(images, 260, 130) for images in (1, 127, 128)),
    *(added_table(images, 130) for images in (1, 21, 22, 128)),
    *(group_norm(3, channels, 9, 1) for channels in (32, 96, 128, 160)),
    *(pool(kernels.max_pool, 2, channels, 12) for channels in (1, 63, 64, 65)),
    *(pool(kernels.average_pool, 2, channels, 12) for channels in (1, 63, 64, 65)),
    *(router(tokens, 260, 12, 3) for tokens in (1, 127, 128, 129)),
    *(experts_decode(tokens, 260, 12, 140, 3) for tokens in (1, 4, 5, 128)),
    *(experts_prefill(tokens, 260, 12, 140, 3) for tokens in (127, 128, 129, 1500)),
    *(experts_dispatch(tokens, 260, 3, 2) for tokens in (1, 63, 64, 65)),
    *(experts_combine(tokens, 260, 3) for tokens in (1, 127, 128, 129)),
    *(gated_delta(2, tokens, 1, 2) for tokens in (1, 127, 128, 129)),
    *(gated_delta(sequences, 1, 1, 2, step=True) for sequences in (1, 5, 128)),
    lm_head(3, 260, 700, 9),
    lm_head(2, 260, 20000, 8),
    sample(3, 700),
    all_reduce(129, 300, 3),
    send_receive(129, 300),
    *(exchange_heads(3 * rows, 300, 3) for rows in (1, 127, 128, 129)),
    *(exchange_heads(3 * rows, 300, 3, to_rows=True) for rows in (1, 127, 128, 129)),
    rung(ladder.hoisted, a=1, b=8),
    rung(ladder.blocked, a=1, b=2),
)


def named(works: Sequence[Work], budget: Callable[[Work], Any]) -> list[Any]:
    def shape(work: Work) -> str:
        return "x".join(map(str, work.arguments[0].shape))

    return [
        pytest.param(work, id=f"{work.kernel.__name__}-{shape(work)}-{number}", marks=budget(work))
        for number, work in enumerate(works)
    ]


def check(work: Work, predicted: Predicted) -> None:
    traffic = predicted.profile.traffic
    assert {
        tensor.name: tensor.reads for tensor in traffic if tensor.argument and tensor.read_bytes
    } == pytest.approx(work.reads, rel=1e-12)
    assert predicted.hbm_bytes == work.hbm_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    named(
        REALISTIC,
        lambda work: pytest.mark.nki_budget(
            time_us=TOLERATED * work.predicted_us, hbm_bytes=work.hbm_bytes, target="trn2"
        ),
    ),
)
def test_a_kernel_keeps_to_its_budget(work: Work, nki_budget) -> None:
    check(work, nki_budget.ranks(work.kernel, [work.arguments] * work.ranks, trips=0))


@pytest.mark.slow
@pytest.mark.nki_targets("trn1", "trn2", "trn3")
@pytest.mark.parametrize(
    "work", deep_except(named(RAGGED, lambda work: pytest.mark.nki_budget(hbm_bytes=work.hbm_bytes)), 10)
)
def test_a_kernel_moves_what_its_header_says(work: Work, nki_budget) -> None:
    check(work, nki_budget.ranks(work.kernel, [work.arguments] * work.ranks, trips=0))


@pytest.mark.slow
@pytest.mark.nki_targets("trn1", "trn2", "trn3")
@pytest.mark.nki_budget(hbm_bytes=800_000)
def test_one_channel_is_read_once_for_each_tap_of_a_pack(nki_budget) -> None:
    """Six stripes of results: neighbours share the columns between the first and the last tap that read a row.

    trn2 and trn3 leave the array to other stripes and load the channel once, for three taps. trn1 packs two taps. The
    second row of a stripe begins a column later than the first one, and both end with its last window.
    """
    seams, columns = 5, 3000
    loaded = 2 * columns + 3 * seams if nki_budget.target == "trn1" else columns + 2 * seams
    work = conv1d(1, 130, False)
    predicted = nki_budget.ranks(work.kernel, [work.arguments])
    check(replace(work, reads={"x": Fraction(loaded, columns), "w": 1, "bias": 1}), predicted)


def test_every_shipped_kernel_has_a_budget() -> None:
    shipped = {name for name in kernels.__all__ if not name.endswith("_reference")}
    budgeted = {work.kernel.__name__ for work in REALISTIC}
    assert budgeted <= shipped | {"tile_by_tile"}
    tests = {name: KERNEL_TESTS / f"test_{name}.py" for name in shipped - budgeted}
    assert [
        name for name, path in tests.items() if "nki_budget" not in path.read_text(encoding="utf-8")
    ] == []
