"""Works of latent attention on one rank: projections, expansion and attention of a prompt, and decode steps.

Shapes are one rank's: DeepSeek-V2-Lite on one rank and over 4, DeepSeek-V3 over 8 and 64. Of the query and key of a
head, 128 elements are not rotated and 64 are; a value has 128, a latent 512. A row is what the cache stores for a
position: a latent and the rotated part of its key. What one work computes for the next goes through HBM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from benchmarks.kernels.works import BFLOAT16, Shape, Work, build_step
from model.config import ModelConfig
from model.config.blocks import Block, Mlp, Norms
from model.config.mixers import LatentAttention, Positions
from model.config.rope import RopeParameters
from model.families import compose
from model.layers.launch import Launch, LeastWork, Phase, StepShape

LATENT, PLAIN, TURNED, VALUE = 512, 128, 64, 128
"""Elements of a latent, of the plain and of the rotated part of a head, of a value."""
ROW = LATENT + TURNED
TOKENS = (2048,)
SEQUENCES = (1, 16)
POSITIONS = (1024, 8192)


@dataclass(frozen=True)
class LatentShape(Shape):
    """Sizes of one rank's latent attention: its heads, and the rank of the queries' latent, 0 if queries have none."""

    heads: int
    query_rank: int

    @property
    def config(self) -> ModelConfig:
        """Configuration of a one-layer model with these sizes, for one rank."""
        longest = max(*TOKENS, *POSITIONS)
        rope = Positions(RopeParameters(10000.0), longest, TURNED)
        attention = LatentAttention(self.heads, self.query_rank, LATENT, PLAIN, TURNED, VALUE, rope)
        block = Block(attention, Mlp(self.width), Norms(1e-6))
        return ModelConfig(128, self.hidden, (block,), longest, False, model_type="deepseek_v3")


SHAPES = (
    LatentShape("V2-Lite", 2048, 10944, 16, 0),
    LatentShape("V2-Lite tp4", 2048, 2736, 4, 0),
    LatentShape("V3 tp8", 7168, 2304, 16, 1536),
    LatentShape("V3 tp64", 7168, 288, 2, 1536),
)


def latent_works() -> Iterator[Work]:
    """Yield the works of prompts, then those of decode steps."""
    for shape in SHAPES:
        for tokens in TOKENS:
            yield from _prefill(shape, tokens)
    for shape in SHAPES:
        for sequences in SEQUENCES:
            yield from _decode(shape, sequences)


def _launches(shape: LatentShape, step: StepShape) -> tuple[Launch, ...]:
    """Return the launches of the attention of one layer in a step."""
    (mixer, _) = compose(shape.config).blocks[0]
    return tuple(mixer.launches(step))


def _moved(*shapes: tuple[int, ...]) -> float:
    """Return the size in bytes of bfloat16 tensors of these shapes."""
    return float(BFLOAT16.itemsize * sum(map(prod, shapes)))


def _projections(shape: LatentShape, rows: int) -> LeastWork:
    """Return the least work of norms and projections from hidden states to queries and rows of the cache."""
    queries = shape.heads * (PLAIN + TURNED)
    weights = shape.hidden * ROW + (shape.query_rank or shape.hidden) * queries
    weights += shape.hidden * shape.query_rank
    return LeastWork(2.0 * rows * weights, _moved((weights,), (rows, shape.hidden + queries + ROW)))


def _expansion(shape: LatentShape, rows: int) -> LeastWork:
    """Return the least work of expanding rows to keys and values of all heads, and of writing the rows to the cache."""
    weights = LATENT * shape.heads * (PLAIN + VALUE)
    expanded = rows * shape.heads * (PLAIN + TURNED + VALUE)
    return LeastWork(2.0 * rows * weights, _moved((weights,), (expanded,), (2 * rows, ROW)))


def _attention(shape: LatentShape, rows: int) -> LeastWork:
    """Return the least work of attention from queries and expanded keys and values to outputs."""
    head_width = PLAIN + TURNED + VALUE
    pairs = rows * (rows + 1) / 2
    return LeastWork(2.0 * pairs * shape.heads * head_width, _moved((2 * rows * shape.heads, head_width)))


def _output(shape: LatentShape, rows: int) -> LeastWork:
    """Return the least work of the output projection plus the residual."""
    width = shape.heads * VALUE
    return LeastWork(
        2.0 * rows * width * shape.hidden, _moved((width, shape.hidden), (rows, width + 2 * shape.hidden))
    )


def _absorbed(shape: LatentShape, sequences: int, positions: int) -> LeastWork:
    """Return the least work of attention for one new token of each sequence, on the latents of the cache.

    It consists of projecting queries to latents, scores and weighted sums over rows of the cache, and projecting
    latents to outputs.
    """
    weights = LATENT * shape.heads * (PLAIN + VALUE)
    scored = sequences * positions * shape.heads * (ROW + LATENT)
    rows = sequences * (shape.heads * (PLAIN + TURNED + VALUE) + 2 * ROW)
    return LeastWork(
        2.0 * (sequences * weights + scored), _moved((weights,), (sequences * positions, ROW), (rows,))
    )


def _prefill(shape: LatentShape, tokens: int) -> Iterator[Work]:
    """Yield the works of one prompt of `tokens` tokens."""
    launches = _launches(shape, build_step(Phase.prefill, tokens, tokens))
    for name, least, kernel in (
        ("prefill latent projections", _projections(shape, tokens), "qkv_projection"),
        ("prefill latent expansion", _expansion(shape, tokens), "latent_keys_values"),
        ("prefill latent attention", _attention(shape, tokens), "attention_prefill"),
        ("prefill latent output", _output(shape, tokens), "output_projection"),
    ):
        yield Work(
            name, shape, tokens, least, tuple(launch for launch in launches if launch.kernel == kernel)
        )


def _decode(shape: LatentShape, sequences: int) -> Iterator[Work]:
    """Yield the works of a decode step of several sequences; attention is repeated for each of POSITIONS."""
    for positions in POSITIONS:
        launches = _launches(shape, build_step(Phase.decode, sequences, positions))
        attend = tuple(launch for launch in launches if launch.kernel == "latent_attention_decode")
        if positions == POSITIONS[0]:
            (*project, output) = (launch for launch in launches if launch not in attend)
            yield Work(
                "decode latent projections", shape, sequences, _projections(shape, sequences), tuple(project)
            )
            yield Work("decode latent output", shape, sequences, _output(shape, sequences), (output,))
        least = _absorbed(shape, sequences, positions)
        yield Work("decode latent attention", shape, sequences, least, attend, positions)
