"""The launch list: which kernels a step of the model launches, in order, with which arguments.

Everything that runs, predicts or plans a model walks this list. It is written for one rank, by shapes alone: a `Value`
stands for an array, which a device binds on every rank by its name. All ranks launch the same kernels; the shapes are
those of the first rank, and the last rank's part of the vocabulary may be smaller.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from model.formats import Format
from model.layers.shard import Shape, Shard
from model.state import blocks_before

INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)


PARTITIONS = 128
"""Of a tile: one launch of a decode step has at most so many rows, each on a partition."""


def table_length(positions: int, block_size: int) -> int:
    """The positions that a table of pages names, so many or some more.

    Attention kernels lay a table's positions on 128 partitions, as many on each, and load at a time what a page has on
    one partition. So each gets a multiple of a page, or a power of two below it. For 528 positions in pages of 16 these
    are 1,024 in an eighth of the DMAs that 640 take: predicted for 16 sequences of a Gemma 3 1B on trn2, 8.8 ms a step
    against 12.0.
    """
    positions_per_partition = -(-positions // PARTITIONS)
    together = min(block_size, 1 << (positions_per_partition - 1).bit_length())
    return -(-positions_per_partition // together) * together * PARTITIONS


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

    That of a `full_step` one follows both its rows and its sequences, so that no smaller step tells.
    """

    rows = "rows"
    experts = "experts"
    square = "square"
    sequences = "sequences"
    full_step = "whole"


@dataclass(frozen=True)
class WeightDtypes:
    """The dtypes of the arrays of weights: the default, but for the arrays that `overrides` names with theirs.

    `formats` are those of the weights that kernels read in their stored tensors, by the names of the weights.
    """

    default: np.dtype
    overrides: frozenset[tuple[str, np.dtype]] = frozenset()
    formats: frozenset[tuple[str, Format]] = frozenset()

    @classmethod
    def from_names(
        cls, dtypes: Mapping[str, np.dtype], formats: Mapping[str, Format] = MappingProxyType({})
    ) -> WeightDtypes:
        """Return the dtypes of named arrays; the default is the one that most of them have."""
        counts = Counter(dtypes.values())
        default = max(counts, key=lambda dtype: (counts[dtype], dtype.name))
        overrides = frozenset((name, dtype) for name, dtype in dtypes.items() if dtype != default)
        return cls(default, overrides, frozenset(formats.items()))

    def dtype_of(self, name: str) -> np.dtype:
        """Return the dtype of an array."""
        return self._by_name.get(name, self.default)

    def format_of(self, weight: str) -> Format | None:
        """Return the format in which a kernel reads a weight; None of a plain one."""
        return self._formats.get(weight)

    @cached_property
    def _by_name(self) -> dict[str, np.dtype]:
        return dict(self.overrides)

    @cached_property
    def _formats(self) -> dict[str, Format]:
        return dict(self.formats)


@dataclass(frozen=True)
class DrawVariant:
    """One variant of the draw on the device: next tokens are drawn from the likeliest `candidates`.

    The candidates are those that the head picked out. With `full_vocabulary` the kernel changes the logits of the whole
    vocabulary first and picks out candidates again. Its log-probabilities are then of the whole vocabulary.
    """

    candidates: int
    full_vocabulary: bool = False


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step: all that the shapes of its launches depend on. Launches have the shapes of `rank`.

        tokens               rows of the step: the tokens of all sequences, padding included
        sequences            sequences of the step, which have equally many rows
        cache_length         positions that a cache holds of a sequence, or that a block table names
        context              positions that a sequence fills at most
        ranks, expert_ranks  tensor-parallel ranks; groups of them that divide the routed experts
        activations          dtype of activations and states
        weights              dtypes of weights
        candidates           how many of the likeliest tokens the head picks out
        padded               whether prompts are padded to the longest one, which another rank may have
        cuts_sequence        whether ranks cut the rows of prompts among them (sequence parallelism)
        block_size           positions of a page; 0 where states are not in pages
        pages                pages of each layer that has no pages for its window
        window_pages         the windows whose layers have pages of their own, and how many
        prefix               cached positions of each sequence that a prefill step reads
        slots                recurrent states of a layer; 0 where there is one for each sequence
        draws                how the step draws next tokens; None where it does not
        scores               whether the head takes all rows of a prefill step, and not only the last of each sequence
        decoding             the step of the sequences that decode beside the prompts of a prefill step, if any
        cache_dtype          the name of the cache's format (`CACHE_FORMATS`)

    The rows of `decoding` come before those of the prompts, and `tokens` counts both. `sequences`, `cache_length` and
    `prefix` are those of the prompts.
    """

    phase: Phase
    tokens: int
    sequences: int
    cache_length: int
    context: int
    ranks: int
    activations: np.dtype
    weights: WeightDtypes
    candidates: int = 1
    padded: bool = False
    cuts_sequence: bool = False
    rank: int = 0
    pages: int = 0
    block_size: int = 0
    prefix: int = 0
    window_pages: WindowPages = ()
    draws: DrawVariant | None = None
    scores: bool = False
    decoding: StepShape | None = None
    expert_ranks: int = 1
    slots: int = 0
    cache_dtype: str = "auto"

    def for_window(self, window: int | None) -> StepShape:
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

    def with_sizes(
        self,
        phase: Phase,
        sequences: int,
        new_tokens: int,
        cache_length: int,
        prefix: int = 0,
        decoding: StepShape | None = None,
    ) -> StepShape:
        """Return this step with other sizes; `new_tokens` are those of each sequence, without those of `decoding`."""
        tokens = sequences * new_tokens + (0 if decoding is None else decoding.tokens)
        return replace(
            self,
            phase=phase,
            tokens=tokens,
            sequences=sequences,
            cache_length=cache_length,
            prefix=prefix,
            decoding=decoding,
        )

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The sizes that buckets choose, as numbers and texts; `resize` reads them."""
        decoding = None if self.decoding is None else self.decoding.sizes
        return self.phase.value, self.sequences, self.new_tokens, self.cache_length, self.prefix, decoding

    def resize(self, sizes: Sequence[Any]) -> StepShape:
        """Return this step with the `sizes` of another."""
        phase, sequences, new_tokens, cache_length, prefix, decoding = sizes
        decoding_step = None if decoding is None else self.resize(decoding)
        return self.with_sizes(Phase(phase), sequences, new_tokens, cache_length, prefix, decoding_step)

    def __str__(self) -> str:
        cached = "" if self.phase is Phase.decode else f", {self.prefix} of them cached"
        decoding = "" if self.decoding is None else f", beside {self.decoding}"
        return f"{self.sequences} x {self.new_tokens} tokens, {self.cache_length} positions{cached}{decoding}"

    def resized(self, rows: int) -> StepShape:
        """This step with `rows` tokens of the prompt, or `rows` sequences."""
        return replace(self, tokens=rows, sequences=1 if self.phase is Phase.prefill else rows)

    @property
    def sequence_ranks(self) -> int:
        """The ranks over which rows of the residual stream are cut; 1 where each holds all, as in decode steps."""
        return self.ranks if self.cuts_sequence and self.phase is Phase.prefill else 1

    @property
    def local_rows(self) -> int:
        """The rows of the residual stream that a rank holds."""
        return -(-self.tokens // self.sequence_ranks)

    @property
    def new_tokens(self) -> int:
        """Tokens of each sequence, where some decode of each prompt: more than one in a step that verifies drafts."""
        return self.prompts.tokens // self.sequences

    @property
    def prompts(self) -> StepShape:
        """This step without the sequences that decode beside its prompts."""
        if self.decoding is None:
            return self
        return replace(self, tokens=self.tokens - self.decoding.tokens, decoding=None)

    @property
    def head_rows(self) -> int:
        """Rows that the head takes where it does not score all: each new token, and the last one of each prompt."""
        if self.phase is Phase.decode:
            return self.tokens
        return self.sequences + (0 if self.decoding is None else self.decoding.tokens)

    @property
    def shard(self) -> Shard:
        """The rank whose shapes the launches have."""
        return Shard(self.rank, self.ranks, 0, self.expert_ranks)


@dataclass(frozen=True)
class Value:
    """An array that a launch reads or returns, on one rank, by its shape as the launch sees it.

    A launch that `takes_last_rows` is given as many of the array's last rows as the shape says.

    A step binds it by its name to a weight, a state, a constant, an activation, or an input of the step. The inputs of
    a step are int32 arrays, and float32 ones for `sample`. The names are vLLM's.

        ids, own_positions  [rows of the rank, 1]  token ids and positions of the rows that the rank holds
        positions           [tokens, 1]            positions of all rows
        rope_rows           [tokens, 1]            rows of the rotation tables, where long sequences have others
        logits_indices      [head rows, 1]         the rows that the head takes, as numbers among those of the rank;
                                                   the number of its rows where another rank holds the row
        slot_mapping        [tokens, 1]            where in the pages each new token is written
        block_tables        [sequences, blocks]    the pages of each sequence
        prompt_tables       [prompts, blocks]      the pages of the prompts, where sequences decode with them
        state_slots         [sequences, 1]         the slot of each sequence's recurrent states
        num_computed_tokens [sequences, 1]         the position of its first new token
        num_scheduled_tokens [sequences, 1]        how many of its tokens are no padding

    Layers that have pages for their window have a slot mapping, tables and positions of their own. These positions
    count from the first page of the table (`StepShape.for_window`). A step that draws also has the arguments of
    `sample`.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    takes_last_rows: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize

    def last(self, rows: int) -> Value:
        """The last rows of the array."""
        return replace(self, shape=(rows, *self.shape[1:]), takes_last_rows=True)

    def view_of(self, array: Any) -> Any:
        """The view of a bound array."""
        return array[-self.shape[0] :] if self.takes_last_rows else array


Argument = Value | np.dtype | Axis | tuple[int, ...] | float | int | str | None


@dataclass(frozen=True)
class LeastWork:
    """The least that one rank has to do for a launch: operations (two for a multiply-add), and bytes of HBM to move.

    `beside_weights` are the operations among them whose operands are activations and states only.
    """

    operations: float
    bytes: float
    beside_weights: float = 0.0

    def __add__(self, other: LeastWork) -> LeastWork:
        return LeastWork(
            self.operations + other.operations,
            self.bytes + other.bytes,
            self.beside_weights + other.beside_weights,
        )


@dataclass(frozen=True)
class Launch:
    """One call of a kernel of `nki_kernels`: its arguments by parameter name, and the names of its results.

    The device binds `arguments` by the kernel's signature. A parameter that has a default may be left out.
    `results` are the names under which the step keeps what the kernel returns, in the kernel's order.

    One launch works on `rows` rows, and a step repeats it `repeat` times with other rows. `growth` says how its time
    follows the size of the step. With a `window`, quadratic growth becomes linear beyond that many rows. `fused` are
    the launches that this one replaces, if any.
    """

    kernel: str
    arguments: Mapping[str, Argument]
    results: tuple[str, ...]
    work: LeastWork
    rows: int
    label: str = ""
    growth: Growth = Growth.rows
    window: int | None = None
    repeat: int = 1
    fused: tuple[Launch, ...] = ()

    @property
    def values(self) -> Sequence[Value]:
        """The arrays among the arguments."""
        return [argument for argument in self.arguments.values() if isinstance(argument, Value)]

    @property
    def refusal(self) -> str | None:
        """The sentence with which the kernel refuses these shapes, or None where it takes them."""
        from model.device import ArrayShape, find_refusal  # takes as long to import as the rest of the model

        shapes = (
            (name, ArrayShape(argument.shape, argument.dtype) if isinstance(argument, Value) else argument)
            for name, argument in self.arguments.items()
        )
        return find_refusal(self.kernel, tuple(shapes))

    @property
    def title(self) -> str:
        """The kernel, with what tells it from other launches of it in one layer."""
        return f"{self.kernel}, {self.label}" if self.label else self.kernel


def gathered_rows(step: StepShape) -> dict[str, Argument]:
    """The arguments of `qkv_projection` that gather the rows which ranks hold in parts; none where each holds all."""
    if step.sequence_ranks == 1:
        return {}
    return {"replica_group": Axis.tensor, "sequence_ranks": step.sequence_ranks}


def product(rows: int, *weights: Value, moved_bytes: float = 0.0) -> LeastWork:
    """Rows multiplied with matrices of weights, which are read once; and other bytes that have to be moved."""
    products = rows * sum(prod(weight.shape) for weight in weights)
    return LeastWork(2.0 * products, moved_bytes + sum(weight.nbytes for weight in weights))


def copied(value: Value) -> LeastWork:
    """An array read and written."""
    return LeastWork(0.0, 2.0 * value.nbytes)


def split_into_launches(count: int, largest: int) -> list[tuple[int, int]]:
    """Return the sizes of launches that together take `count` rows or sequences, each with how often it is repeated."""
    full_launches, remainder = divmod(count, largest)
    return [(size, repeat) for size, repeat in ((largest, full_launches), (remainder, 1)) if size and repeat]


def largest_launch(most: int, launches: Callable[[int], Iterable[Launch]]) -> int:
    """Return the largest size, at most `most`, for which kernels take all launches; 1 where they refuse even that.

    Kernels that take a size take every smaller one.
    """

    def refused(size: int) -> bool:
        return any(launch.refusal is not None for launch in launches(size))

    return max(1, bisect_left(range(1, most), True, key=refused)) if refused(most) else most
