"""The launch list: which kernels a step of the model launches, in order, with which arguments.

Everything that runs, predicts or plans a model walks this list. It is written for one rank, by shapes alone: a `Value`
stands for an array, which a device binds on every rank by its name. All ranks launch the same kernels; the shapes are
those of the first rank, and the last rank's part of the vocabulary may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from model.layers.shard import Shape, Shard
from model.state import blocks_before

INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)


PARTITIONS = 128
"""Of a tile."""


def table_length(positions: int, block_size: int) -> int:
    """The positions that a table of pages names, so many or some more.

    Attention kernels lay a table's positions on 128 partitions, as many on each, and load at a time what a page has on
    one partition. So each gets a multiple of a page, or a power of two below it. For 528 positions in pages of 16 these
    are 1,024 in an eighth of the DMAs that 640 take: predicted for 16 sequences of a Gemma 3 1B on trn2, 8.8 ms a step
    against 12.0.
    """
    each = -(-positions // PARTITIONS)
    together = min(block_size, 1 << (each - 1).bit_length())
    return -(-each // together) * together * PARTITIONS


WindowPages = tuple[tuple[int, int], ...]
"""Windows whose layers have pages of their own, and how many."""


class Axis(Enum):
    """As an argument of a launch: the ranks that meet along an axis of the mesh.

    Along `tensor` they are a replica group, along `pipeline` pairs of a rank and its peer of the next stage.
    """

    tensor = "tp"
    pipeline = "pp"
    expert = "ep"


class Phase(Enum):
    """The kinds of steps: the prompts of all sequences, or as many more tokens of every sequence, mostly one."""

    prefill = "prefill"
    decode = "decode"


class Growth(Enum):
    """How the work of a launch follows the step: with its rows, their square, its sequences, or the experts reached.

    That of a `whole` one follows both its rows and its sequences, so that no smaller step tells.
    """

    rows = "rows"
    experts = "experts"
    square = "square"
    sequences = "sequences"
    whole = "whole"


@dataclass(frozen=True)
class Draws:
    """What the next tokens are drawn from: the likeliest `candidates`, as the head finds them.

    With `whole` they are found again in the `whole` vocabulary, whose logits are changed first; and log-probabilities
    are of all of it.
    """

    candidates: int
    whole: bool = False


@dataclass(frozen=True)
class Decoding:
    """What decodes beside the prompts of a step: sequences, new tokens of each, and positions that its tables name."""

    sequences: int
    new_tokens: int
    cache_length: int

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.new_tokens


@dataclass(frozen=True)
class StepShape:
    """The numbers that decide the shapes of a step: tokens of all sequences, ranks, dtypes.

    A state has room for `cache_length` positions, of which a sequence fills at most `context`. `activations` is the
    dtype of activations and states, `weights` that of the weights. The head picks `candidates` of the likeliest tokens.
    Experts are divided whole over `expert_ranks`.
    Prompts are `padded` where some of them, perhaps of another rank, is longer. With `cuts_sequence` the ranks cut
    the tokens of prompts among them (sequence parallelism). Launches have the shapes of `rank`.

    Where there is a `block_size`, states are pages of so many positions, and tables of pages name the `cache_length`
    positions of each sequence; a prefill step reads `prefix` of them, which were computed before it. Layers have
    `pages` pages; those with a window among `window_pages` have as many as stand beside it there. Recurrent layers have
    `slots` states, of which those of the step's sequences are read and written; with 0 there is one of each sequence.
    Where there are `draws`, the step also draws the next tokens. Where it `scores`, the head computes what follows each
    token of a prefill step, up to 128 at a time, not only the last one of each sequence.

    Where some sequences decode beside the prompts of a prefill step on pages, the first rows are those of `decoding`;
    `tokens` counts them too, and `sequences`, `cache_length` and `prefix` are those of the prompts.
    """

    phase: Phase
    tokens: int
    sequences: int
    cache_length: int
    context: int
    ranks: int
    activations: np.dtype
    weights: np.dtype
    candidates: int = 1
    padded: bool = False
    cuts_sequence: bool = False
    rank: int = 0
    pages: int = 0
    block_size: int = 0
    prefix: int = 0
    window_pages: WindowPages = ()
    draws: Draws | None = None
    scores: bool = False
    decoding: Decoding | None = None
    expert_ranks: int = 1
    slots: int = 0

    def of_window(self, window: int | None) -> StepShape:
        """This step as layers with a window see it: with their pages, where they have their own.

        Their tables begin with the first page that the step's first token of a sequence reads, so they are as long as
        the window and the step's tokens need, however long the sequence is.
        """
        pages = dict(self.window_pages).get(window) if window is not None else None
        if window is None or pages is None:
            return self
        before = (blocks_before(window, self.block_size) + 1) * self.block_size
        return replace(
            self,
            pages=pages,
            window_pages=(),
            cache_length=min(self.cache_length, table_length(before + self.new_tokens, self.block_size)),
            prefix=min(self.prefix, before),
        )

    def resized(self, rows: int) -> StepShape:
        """This step with `rows` tokens of the prompt, or `rows` sequences."""
        return replace(self, tokens=rows, sequences=1 if self.phase is Phase.prefill else rows)

    @property
    def sequence_ranks(self) -> int:
        """The ranks over which rows of the residual stream are cut; 1 where each holds all, as in decode steps."""
        return self.ranks if self.cuts_sequence and self.phase is Phase.prefill else 1

    @property
    def own_rows(self) -> int:
        """The rows of the residual stream that a rank holds."""
        return -(-self.tokens // self.sequence_ranks)

    @property
    def new_tokens(self) -> int:
        """Tokens of each sequence, where some decode of each prompt: more than one in a step that verifies drafts."""
        return self.prompts.tokens // self.sequences

    @property
    def prompts(self) -> StepShape:
        """This step without the sequences that decode beside its prompts."""
        own = self.decoding
        return self if own is None else replace(self, tokens=self.tokens - own.rows, decoding=None)

    @property
    def decoded(self) -> StepShape:
        """The sequences that decode beside the prompts, as a step of their own."""
        own = self.decoding
        assert own is not None, "nothing decodes beside the prompts"
        return replace(
            self,
            phase=Phase.decode,
            tokens=own.rows,
            sequences=own.sequences,
            cache_length=own.cache_length,
            prefix=0,
            decoding=None,
        )

    @property
    def head_rows(self) -> int:
        """Rows of which the head says what follows, where it does not for all in turn: new tokens, ends of prompts."""
        if self.phase is Phase.decode:
            return self.tokens
        return self.sequences + (0 if self.decoding is None else self.decoding.rows)

    @property
    def shard(self) -> Shard:
        """The rank whose shapes the launches have."""
        return Shard(self.rank, self.ranks, 0, self.expert_ranks)


class View(Enum):
    """Which view of the bound array a launch is given."""

    whole = "whole"
    last_rows = "last rows"


@dataclass(frozen=True)
class Value:
    """An array that a launch reads or returns, on one rank, by its shape as the launch sees it.

    A step binds it by its name: weights, states and constants of a layer, activations, and what comes with the step:
    the `ids` and `own_positions` of the rank's own rows, [own rows, 1] int32; `positions` of all, [tokens, 1] int32;
    the rows that the head takes, `ends`, [head rows, 1] int32, where prompts end, or all in turn where the step scores:
    numbers among own rows, and their count where another rank holds the row; and `rope_rows`, the rows of tables of
    rotations, [tokens, 1] int32, for models whose long sequences have other rotations. Where states are pages, `slots`,
    [tokens, 1] int32, are the page and the place in it that take each token, and `block_tables`, [sequences, blocks]
    int32, the pages of each sequence; beside sequences that decode, `prompt_tables` are those of the prompts. Layers
    with pages of their window have slots, tables and positions of their own (`of_window`), which count from a table's
    first page on. Recurrent layers read of each sequence, [sequences, 1] int32, the slot of its states, `state_slots`,
    its first new position, `starts`, and how many of its tokens are no padding, `counts`. Where the step draws, the
    arguments of `sample` for each row, by its names.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    view: View = View.whole

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize

    def last(self, rows: int) -> Value:
        """The last rows of the array."""
        return replace(self, shape=(rows, *self.shape[1:]), view=View.last_rows)

    def of(self, array: Any) -> Any:
        """The view of a bound array."""
        return array if self.view is View.whole else array[-self.shape[0] :]


Argument = Value | np.dtype | Axis | float | int | str | None


@dataclass(frozen=True)
class LeastWork:
    """The least that one rank has to do for a launch: operations (two for a multiply-add), and bytes of HBM to move."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel of `nki_kernels`, its arguments in order, and the names under which it returns values.

    `rows` are what it works on at a time, `repeat` how often a step launches it with other rows. Beyond `window` rows,
    where there is one, work that grows with the square of the rows grows with the rows. `parts` are launches
    that do the same one after another, where there are such.
    """

    kernel: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    work: LeastWork
    rows: int
    label: str = ""
    growth: Growth = Growth.rows
    window: int | None = None
    repeat: int = 1
    parts: tuple[Launch, ...] = ()

    @property
    def title(self) -> str:
        """The kernel, with what tells it from other launches of it in one layer."""
        return f"{self.kernel}, {self.label}" if self.label else self.kernel


def product(rows: int, *weights: Value, moved_bytes: float = 0.0) -> LeastWork:
    """Rows multiplied with matrices of weights, which are read once; and other bytes that have to be moved."""
    products = rows * sum(prod(each.shape) for each in weights)
    return LeastWork(2.0 * products, moved_bytes + sum(each.nbytes for each in weights))


def copied(value: Value) -> LeastWork:
    """An array read and written."""
    return LeastWork(0.0, 2.0 * value.nbytes)
