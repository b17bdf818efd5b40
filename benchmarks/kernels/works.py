"""Works of one rank's decoder layer and head, with the least operations and bytes that each of them needs.

A work is a part of a step, independent of how many kernels do it. Its launches come from the model's launch list, so a
kernel that takes over another one's part changes the rows of the table, not this file. Shapes are one rank's:
Llama-3.1-8B over 8 ranks, 70B over 32 and over 64. Activations, weights and caches are bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.config.blocks import Block, Mlp, Norms
from model.config.mixers import GroupedAttention, Positions
from model.config.rope import RopeParameters
from model.device import can_divide_among
from model.families import compose
from model.layers.joint import join_launches
from model.layers.launch import Argument, Launch, LeastWork, Phase, StepShape, Value, WeightDtypes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HEAD_SIZE = 128
TOKENS = (2048, 4096, 8192)
SEQUENCES = (1, 4, 16, 64)
POSITIONS = (1024, 4096, 8192)
WHISPERS = (("tiny", 80, 384), ("large-v3", 128, 1280))
"""Names, mel bands and widths."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one rank's layer: hidden size, and its part of the width of an MLP or of each expert."""

    name: str
    hidden: int
    width: int


@dataclass(frozen=True)
class RankShape(Shape):
    """Sizes of one rank's model: also its query heads, key/value heads, and part of the vocabulary."""

    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def config(self) -> ModelConfig:
        """Configuration of a one-layer model with these sizes, for one rank."""
        longest = max(POSITIONS)
        rope = Positions(RopeParameters(500000.0), longest, HEAD_SIZE)
        attention = GroupedAttention(self.heads, self.kv_heads, HEAD_SIZE, positions=rope)
        block = Block(attention, Mlp(self.width), Norms(1e-5))
        return ModelConfig(self.vocabulary, self.hidden, (block,), longest, False, model_type="llama")


SHAPES = (
    RankShape("8B tp8", 4096, 1792, 4, 1, 16032),
    RankShape("70B tp32", 8192, 896, 2, 1, 4008),
    RankShape("70B tp64", 8192, 448, 1, 1, 2004),
)


@dataclass(frozen=True)
class Work:
    """A part of a step on one rank.

    rows: tokens of a prompt, sequences of a decode step, or, without a `shape`, the size of a square matmul; 0 if the
    name says everything. least: operations and bytes of HBM that it needs at least. launches: the launches that do
    it. positions: length of each sequence's cache in a decode step.
    """

    name: str
    shape: Shape | None
    rows: int
    least: LeastWork
    launches: tuple[Launch, ...]
    positions: int = 0

    @property
    def title(self) -> str:
        """Title of the row: phase and work, shape, size."""
        if not self.rows:
            return self.name
        if self.shape is None:
            return f"{self.name}, {self.rows}^3"
        rows = f"{'T' if self.name.startswith('prefill') else 'B'}={self.rows}"
        return f"{self.name}, {self.shape.name}, {rows}" + (f" S={self.positions}" if self.positions else "")


def works() -> Iterator[Work]:
    """Yield the works of dense decoder layers and heads, and Whisper's convolutions, in the order of the table."""
    yield from dense_works()
    for name, bands, width in WHISPERS:
        yield _convolution(f"convolution of the spectrum, Whisper {name}", bands, width, 1)
        yield _convolution(f"convolution to rows, Whisper {name}", width, width, 2)


def dense_works() -> Iterator[Work]:
    """Yield the matmuls and the works of dense decoder layers and heads, in the order of the table."""
    for transposed in (True, False):
        for size in (2048, 4096):
            yield _matmul(size, transposed)
    for shape in SHAPES:
        for tokens in TOKENS:
            yield from _prefill(shape, tokens)
    for shape in SHAPES:
        for sequences in SEQUENCES:
            yield from _decode(shape, sequences)
    for shape in SHAPES:
        for sequences in SEQUENCES:
            for positions in POSITIONS:
                yield from _decode_attention(shape, sequences, positions)


def divided_works() -> Iterator[Work]:
    """Yield the works that both cores of a logical core share: those of `works` without a shape, and those of 70B tp32.

    The launches are those of a model whose ranks have two physical cores: a launch is replaced by the launches that it
    fuses only if its kernel uses one core.
    """
    for work in works():
        if work.shape is None or work.shape.name == "70B tp32":
            launches = (single for launch in work.launches for single in _divide_launch(launch))
            yield replace(work, launches=tuple(launches))


def _divide_launch(launch: Launch) -> tuple[Launch, ...]:
    """Return a launch whose kernel divides its work over two cores, else the launches that it fuses, or itself."""
    return (launch,) if can_divide_among(launch.kernel, lnc=2) else launch.fused or (launch,)


def _matmul(size: int, transposed: bool) -> Work:
    """Return the work of a square matmul, with `a` stored transposed or not."""
    a, b = (Value(name, (size, size), BFLOAT16) for name in "ab")
    least = LeastWork(2.0 * size**3, 3.0 * size * size * BFLOAT16.itemsize)
    launch = Launch("matmul", {"a": a, "b": b, "a_transposed": int(transposed)}, ("c",), least, size)
    return Work("matmul aT.b" if transposed else "matmul a.b", None, size, least, (launch,))


def _convolution(name: str, channels: int, outputs: int, stride: int) -> Work:
    """Return the work of a convolution with a window of 3 over 3,000 columns.

    With stride 2 the result is stored as rows, and positions are added to it.
    """
    outputs_length, sizes = 3000 // stride, ((1, channels, 3000), (3, channels, outputs), (1, outputs))
    x, w, bias = (Value(name, size, BFLOAT16) for name, size in zip(("x", "w", "bias"), sizes))
    arguments: dict[str, Argument] = {"x": x, "w": w, "bias": bias}
    if stride == 2:
        arguments |= {"as_rows": 1, "added": Value("positions", (outputs_length, outputs), BFLOAT16)}
    read = [argument for argument in arguments.values() if isinstance(argument, Value)]
    moved = sum(value.nbytes for value in read) + _moved(outputs_length * outputs)
    least = LeastWork(2.0 * outputs_length * 3 * channels * outputs, moved)
    arguments |= {"stride": stride, "padding": 1, "activation": "gelu"}
    launch = Launch("conv1d", arguments, ("y",), least, outputs_length)
    return Work(name, None, 0, least, (launch,))


def _moved(*counts: float) -> float:
    """Return the size in bytes of so many bfloat16 elements."""
    return BFLOAT16.itemsize * sum(counts)


@dataclass(frozen=True)
class _LayerWork:
    """The least work of each part of a layer for `rows` tokens; each part reads and writes its activations in HBM."""

    shape: RankShape
    rows: int

    @property
    def _queries(self) -> int:
        """Width of the queries of all heads."""
        return self.shape.heads * HEAD_SIZE

    @property
    def _keys(self) -> int:
        """Width of the keys, or of the values, of all heads."""
        return self.shape.kv_heads * HEAD_SIZE

    def product(self, weights: int, *activations: int) -> LeastWork:
        """Return the least work of rows times weights.

        weights: number of weights, read once. activations: elements per row that are read or written.
        """
        return LeastWork(
            2.0 * self.rows * weights,
            _moved(weights, *(self.rows * activation for activation in activations)),
        )

    def qkv(self) -> LeastWork:
        """Return the least work of the QKV projection."""
        width = self._queries + 2 * self._keys
        return self.product(self.shape.hidden * width, self.shape.hidden, width)

    def output(self) -> LeastWork:
        """Return the least work of the output projection with the residual."""
        hidden = self.shape.hidden
        return self.product(self._queries * hidden, self._queries, 2 * hidden)

    def mlp(self) -> LeastWork:
        """Return the least work of the MLP with its three weight matrices."""
        hidden = self.shape.hidden
        return self.product(3 * hidden * self.shape.width, 2 * hidden)

    def head(self) -> LeastWork:
        """Return the least work of the vocabulary head; its logits need not be stored: a step returns ids."""
        return self.product(self.shape.hidden * self.shape.vocabulary, self.shape.hidden)

    def prompt(self) -> LeastWork:
        """Return the least work of attention of a prompt with itself.

        Keys and values are read, and written to the caches.
        """
        pairs = self.rows * (self.rows + 1) / 2
        activations = self.rows * (2 * self._queries + 4 * self._keys)
        return LeastWork(4.0 * pairs * self._queries, _moved(activations))

    def step(self, positions: int) -> LeastWork:
        """Return the least work of attention of one token of each sequence with its cache of `positions`."""
        cached = self.rows * positions
        activations = self.rows * (2 * self._queries + 4 * self._keys)
        return LeastWork(4.0 * cached * self._queries, _moved(2 * cached * self._keys, activations))

    def block(self, positions: int) -> LeastWork:
        """Return the least work of a decode step's attention block, from norm to output projection.

        Intermediate results of its parts need not go through HBM and are not counted.
        """
        hidden = self.shape.hidden
        weights = hidden * (2 * self._queries + 2 * self._keys)
        step = self.step(positions)
        moved = _moved(weights, 2 * self.rows * hidden, 2 * self.rows * (positions + 1) * self._keys)
        return LeastWork(2.0 * self.rows * weights + step.operations, moved)

    def layer(self, positions: int) -> LeastWork:
        """Return the least work of a layer of a decode step: its attention block and its MLP."""
        block, mlp = self.block(positions), 3 * self.shape.hidden * self.shape.width
        return LeastWork(block.operations + 2.0 * self.rows * mlp, block.bytes + _moved(mlp))


def build_step(phase: Phase, rows: int, positions: int, candidates: int = 1) -> StepShape:
    """Return the shape of a step: one prompt of `rows` tokens, or a decode step of `rows` sequences.

    positions: length of the caches. candidates: number of best tokens that the head returns.
    """
    sequences = 1 if phase is Phase.prefill else rows
    return StepShape(
        phase, rows, sequences, positions, positions, 1, BFLOAT16, WeightDtypes(BFLOAT16), candidates
    )


def _launches(shape: RankShape, step: StepShape) -> tuple[Launch, ...]:
    """Return the launches of one decoder layer in a step."""
    (layers,) = compose(shape.config).blocks
    return tuple(launch for layer in layers for launch in layer.launches(step))


def _named(launches: tuple[Launch, ...], *kernels: str) -> tuple[Launch, ...]:
    """Return the launches of some kernels, in their order."""
    return tuple(launch for launch in launches if launch.kernel in kernels)


def _prefill(shape: RankShape, tokens: int) -> Iterator[Work]:
    """Yield the works of one layer for a prompt of `tokens` tokens."""
    all_of_layer = _launches(shape, build_step(Phase.prefill, tokens, tokens))
    layer_work = _LayerWork(shape, tokens)
    for name, least, kernels in (
        ("prefill norm + qkv + rope", layer_work.qkv(), ("qkv_projection", "rope")),
        ("prefill attention", layer_work.prompt(), ("attention_prefill",)),
        ("prefill output projection", layer_work.output(), ("output_projection",)),
        ("prefill norm + MLP", layer_work.mlp(), ("mlp",)),
    ):
        yield Work(name, shape, tokens, least, _named(all_of_layer, *kernels))


def _decode(shape: RankShape, sequences: int) -> Iterator[Work]:
    """Yield the works of projections, MLP and head for a decode step."""
    step = build_step(Phase.decode, sequences, POSITIONS[0])
    layer_work = _LayerWork(shape, sequences)
    qkv, _, output = _alone(shape, sequences, POSITIONS[0])
    yield Work("decode norm + qkv", shape, sequences, layer_work.qkv(), (qkv,))
    yield Work("decode output projection", shape, sequences, layer_work.output(), (output,))
    mlp = _named(_launches(shape, step), "mlp")
    yield Work("decode norm + MLP", shape, sequences, layer_work.mlp(), mlp)
    head = compose(shape.config).sections[-1][0]
    for candidates in (8, 64):
        launches = tuple(head.launches(replace(step, candidates=candidates)))
        yield Work(f"decode head, top {candidates}", shape, sequences, layer_work.head(), launches)


def _alone(shape: RankShape, sequences: int, positions: int) -> tuple[Launch, Launch, Launch]:
    """Return separate launches of QKV projection, attention and output projection for a decode step.

    The model does them inside one larger launch.
    """
    hidden, queries, keys = shape.hidden, shape.heads * HEAD_SIZE, shape.kv_heads * HEAD_SIZE

    def value(name: str, *sizes: int, dtype: Any = BFLOAT16) -> Value:
        return Value(name, sizes, np.dtype(dtype))

    x = value("x", sequences, hidden)
    project: dict[str, Argument] = {
        "x": x,
        "norm_weight": value("norm", 1, hidden),
        "w_qkv": value("w_qkv", hidden, queries + 2 * keys),
        "eps": 1e-5,
        "q_size": queries,
        "kv_size": keys,
    }
    attend: dict[str, Argument] = {
        "q": value("q", sequences, queries),
        "k": value("k", sequences, keys),
        "v": value("v", sequences, keys),
        "k_cache": value("keys", sequences, shape.kv_heads, HEAD_SIZE, positions),
        "v_cache": value("values", sequences, shape.kv_heads, positions, HEAD_SIZE),
        "positions": value("positions", sequences, 1, dtype=np.int32),
        "scale": HEAD_SIZE**-0.5,
        "num_kv_heads": shape.kv_heads,
        "cos": value("cos", positions, HEAD_SIZE // 2, dtype=np.float32),
        "sin": value("sin", positions, HEAD_SIZE // 2, dtype=np.float32),
    }
    finish: dict[str, Argument] = {
        "o": value("o", sequences, queries),
        "w_o": value("w_o", queries, hidden),
        "residual": x,
    }
    no_work = LeastWork(0.0, 0.0)
    return (
        Launch("qkv_projection", project, ("q", "k", "v"), no_work, sequences),
        Launch("attention_decode", attend, ("o", "keys", "values"), no_work, sequences),
        Launch("output_projection", finish, ("x",), no_work, sequences),
    )


def _decode_attention(shape: RankShape, sequences: int, positions: int) -> Iterator[Work]:
    """Yield the works that read the cache in a decode step: attention, attention block, and whole layer."""
    layer = _launches(shape, build_step(Phase.decode, sequences, positions))
    layer_work = _LayerWork(shape, sequences)
    block = tuple(launch for launch in layer if launch.kernel != "mlp")
    for name, least, launches in (
        ("decode rope + attention", layer_work.step(positions), _alone(shape, sequences, positions)[1:2]),
        ("decode attention block", layer_work.block(positions), block),
        ("decode layer", layer_work.layer(positions), tuple(join_launches(layer))),
    ):
        yield Work(name, shape, sequences, least, launches, positions)
