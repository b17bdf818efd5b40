"""Launch lists: the kernels that a step of a model launches, in order, with their arguments.

A launch is one call of a kernel. A step is one pass of the model over some tokens; `StepShape` has its sizes. Every
`Layer.launches` returns a launch list, and execution, prediction and planning use it. It describes one rank by shapes
alone: a `Value` represents an array, and a device binds the array to it by name on every rank. All ranks launch the
same kernels. The shapes are those of rank 0; the last rank's part of the vocabulary may be smaller.
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
from model.layers.cache_formats import AUTO, UNSCALED, CacheScales
from model.layers.shard import Shape, Shard
from model.state import count_blocks_before

INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)
UINT8 = np.dtype(np.uint8)
_PACKED = {"uint8": 2, "uint16": 4, "uint32": 4}
"""Weights in an integer, by its dtype."""


PARTITIONS = 128
"""Partitions of a tile, and so the most rows of one launch in a decode step."""


def compute_table_length(positions: int, block_size: int) -> int:
    """Return the length in positions of a block table for `positions` positions: a multiple of 128, at least as many.

    `block_size` is the number of positions of a page.

    Attention kernels divide the positions of a table evenly over 128 partitions. One DMA loads the positions of a page
    that are on one partition. So each partition gets a multiple of a page, or a power of two of positions below a page.
    For 528 positions in pages of 16, a table of 1,024 positions takes an eighth of the DMAs that 640 take: predicted
    for 16 sequences of Gemma 3 1B on trn2, 8.8 ms a step instead of 12.0 ms.
    """
    positions_per_partition = -(-positions // PARTITIONS)
    unit = min(block_size, 1 << (positions_per_partition - 1).bit_length())
    return -(-positions_per_partition // unit) * unit * PARTITIONS


WindowPages = tuple[tuple[int, int], ...]
"""Pairs of a window and the number of pages of the layers with this window."""


class Axis(Enum):
    """Axis of the mesh, as an argument of a launch that communicates along it.

    All mean replica groups but `pipeline`, which means pairs of a rank and its peer in the next stage. `flattened` is
    `tensor` and `ulysses` together.
    """

    tensor = "tp"
    pipeline = "pp"
    expert = "ep"
    ulysses = "ulysses"
    flattened = "tp and ulysses"


class Phase(Enum):
    """Phase of a step: `prefill` computes prompts, `decode` the same number of new tokens of each sequence."""

    prefill = "prefill"
    decode = "decode"


class Growth(Enum):
    """Size of a step with which the work of a launch grows: rows, their square, sequences, or selected experts.

    The work of a `full_step` launch depends on rows and sequences, so it cannot be scaled from a smaller step.
    """

    rows = "rows"
    experts = "experts"
    square = "square"
    sequences = "sequences"
    full_step = "whole"


@dataclass(frozen=True)
class WeightDtypes:
    """Dtypes of weight arrays: `overrides` has the arrays that differ from the default.

    `formats` has the formats of the weights that kernels read in their stored tensors. Both have pairs with the name of
    the array or weight first.
    """

    default: np.dtype
    overrides: frozenset[tuple[str, np.dtype]] = frozenset()
    formats: frozenset[tuple[str, Format]] = frozenset()

    @classmethod
    def from_names(
        cls, dtypes: Mapping[str, np.dtype], formats: Mapping[str, Format] = MappingProxyType({})
    ) -> WeightDtypes:
        """Create the record from dtypes by array name and formats by weight name.

        The most frequent dtype becomes the default. `dtypes` must not be empty.
        """
        counts = Counter(dtypes.values())
        default = max(counts, key=lambda dtype: (counts[dtype], dtype.name))
        overrides = frozenset((name, dtype) for name, dtype in dtypes.items() if dtype != default)
        return cls(default, overrides, frozenset(formats.items()))

    def find_dtype(self, name: str) -> np.dtype:
        """Return the dtype of the array `name`; the default if no override has this name."""
        return self._by_name.get(name, self.default)

    def find_format(self, weight: str) -> Format | None:
        """Return the format whose stored tensors a kernel reads for `weight`; None if it reads one plain array."""
        return self._formats.get(weight)

    @cached_property
    def _by_name(self) -> dict[str, np.dtype]:
        return dict(self.overrides)

    @cached_property
    def _formats(self) -> dict[str, Format]:
        return dict(self.formats)


@dataclass(frozen=True)
class DrawVariant:
    """Compiled variant of sampling on the device, which draws from the likeliest `candidates`.

    The head selects the candidates. With `full_vocabulary` the kernel first changes the logits of the whole vocabulary
    and selects candidates again. Log-probabilities are then normalised over the whole vocabulary.
    """

    candidates: int
    full_vocabulary: bool = False


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step, which determine the shapes of its launches on rank `rank`.

        tokens               rows of the step: the tokens of all sequences, padding included; with Ulysses ranks the
                             rows of a rank
        sequences            sequences of the step, each with the same number of rows
        cache_length         positions of a sequence in the cache, or of a block table
        context              most positions of a sequence
        ranks, expert_ranks  tensor-parallel ranks; groups of them that divide the routed experts
        ulysses_ranks        groups of tensor-parallel ranks that divide the rows of each sequence, and around attention
                             its heads instead
        activations          dtype of activations and states
        weights              dtypes of weights
        candidates           likeliest tokens that the head selects
        padded               whether prompts are padded to the longest one, which another rank may have
        cuts_sequence        whether ranks divide the rows of prompts (sequence parallelism)
        block_size           positions of a page; 0 without pages
        pages                pages of each layer that has no pages for its window
        window_pages         windows whose layers have pages of their own, and the number of these pages
        prefix               cached positions of each sequence that a prefill step reads
        slots                slots of recurrent states; 0 for one state for each sequence
        draws                variant of sampling on the device; None without sampling
        scores               whether the head takes all rows of a prefill step instead of the last row of each sequence
        decoding             the step of the sequences that decode together with the prompts of a prefill step, if any
        cache_dtype          name of the cache format (`CACHE_FORMATS`)
        cache_scales         scales of the caches, if the format has any
        lnc                  physical cores of a rank, among which kernels divide their work
        bounded              names of layers of attention whose norms of heads bound scores (`list_bounded_layers`)
        sorted_expert_width  width of an expert on a rank up to which few rows are sorted by expert; 0 on chips without
                             loops over registers (`find_sorted_expert_width`)

    The rows of `decoding` come before the rows of the prompts, and `tokens` counts both. `sequences`, `cache_length`
    and `prefix` describe the prompts.
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
    ulysses_ranks: int = 1
    slots: int = 0
    cache_dtype: str = AUTO
    cache_scales: CacheScales = UNSCALED
    lnc: int = 1
    bounded: frozenset[str] = frozenset()
    sorted_expert_width: float = 0.0

    def for_window(self, window: int | None) -> StepShape:
        """Return this step with the sizes that layers with an attention window of `window` positions use.

        If `window_pages` has the window, `pages` becomes the number of its pages, and `cache_length` and `prefix`
        shrink to what such layers read. Otherwise, and for a window of None, the step is returned unchanged.

        A block table of such layers begins with the first page that the sequence's first new token reads. So its length
        depends on the window and the new tokens, and not on the length of the sequence.
        """
        pages = dict(self.window_pages).get(window) if window is not None else None
        if window is None or pages is None:
            return self
        before = (count_blocks_before(window, self.block_size) + 1) * self.block_size
        return replace(
            self,
            pages=pages,
            window_pages=(),
            cache_length=min(
                self.cache_length, compute_table_length(before + self.new_tokens, self.block_size)
            ),
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
        """Return this step with other sizes; `tokens` is computed from them, and all further fields stay.

        Args:
            phase: The phase.
            sequences: Sequences, without the sequences of `decoding`.
            new_tokens: New tokens of each sequence.
            cache_length: Positions of a sequence in the cache, or of a block table.
            prefix: Cached positions of each sequence that a prefill step reads.
            decoding: The step of the sequences that decode together with prompts; None if no sequence does.
        """
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
        """Phase, sequences, new tokens, cache length, prefix, and the same of `decoding` or None, for JSON.

        A step is compiled for each bucket, which is one choice of these sizes. `resize` reads them in this order.
        """
        decoding = None if self.decoding is None else self.decoding.sizes
        return self.phase.value, self.sequences, self.new_tokens, self.cache_length, self.prefix, decoding

    def resize(self, sizes: Sequence[Any]) -> StepShape:
        """Return this step with the sizes in the tuple or list `sizes`, in the order of the property `sizes`."""
        phase, sequences, new_tokens, cache_length, prefix, decoding = sizes
        decoding_step = None if decoding is None else self.resize(decoding)
        return self.with_sizes(Phase(phase), sequences, new_tokens, cache_length, prefix, decoding_step)

    def __str__(self) -> str:
        cached = "" if self.phase is Phase.decode else f", {self.prefix} of them cached"
        decoding = "" if self.decoding is None else f", beside {self.decoding}"
        return f"{self.sequences} x {self.new_tokens} tokens, {self.cache_length} positions{cached}{decoding}"

    def with_rows(self, rows: int) -> StepShape:
        """Return this step with `rows` tokens: of one prompt in prefill, one for each of `rows` sequences in decode.

        All further fields, such as `cache_length`, stay.
        """
        return replace(self, tokens=rows, sequences=1 if self.phase is Phase.prefill else rows)

    @property
    def sequence_ranks(self) -> int:
        """Ranks that divide the rows of the hidden states; 1 without sequence parallelism and in decode steps."""
        return self.ranks if self.cuts_sequence and self.phase is Phase.prefill else 1

    @property
    def local_rows(self) -> int:
        """Number of rows of the hidden states on a rank, rounded up where ranks divide them."""
        return -(-self.tokens // self.sequence_ranks)

    @property
    def new_tokens(self) -> int:
        """New tokens of each sequence with padding, or of each prompt in a step that mixes prompts with decoding.

        A decode step has more than 1 where it verifies draft tokens.
        """
        return self.prompts.tokens // self.sequences

    @property
    def prompts(self) -> StepShape:
        """This step without the rows of the sequences that decode together with its prompts."""
        if self.decoding is None:
            return self
        return replace(self, tokens=self.tokens - self.decoding.tokens, decoding=None)

    @property
    def head_rows(self) -> int:
        """Number of rows of the head in a step without `scores`.

        Counted are all tokens of sequences that decode, and the last token of each prompt.
        """
        if self.phase is Phase.decode:
            return self.tokens
        return self.sequences + (0 if self.decoding is None else self.decoding.tokens)

    @property
    def flattened(self) -> StepShape:
        """This step where Ulysses ranks are tensor-parallel ranks too, for layers of rows that all ranks have."""
        return replace(self, ranks=self.ranks * self.ulysses_ranks, ulysses_ranks=1)

    @property
    def shard(self) -> Shard:
        """Shard of tensor-parallel rank `rank` and the first expert-parallel and Ulysses rank.

        The launches have its shapes.
        """
        return Shard(self.rank, self.ranks, 0, self.expert_ranks, 0, self.ulysses_ranks)


@dataclass(frozen=True)
class Value:
    """Array that a launch reads or returns on one rank: its name, and its shape and dtype in the launch.

    With `takes_last_rows` the launch reads only the last rows of the array, as many as the shape has.

    A step binds the name to a weight, a state, a constant, an activation, or an input of the step. The inputs of a step
    are int32, or float32 for `sample`. Their names are those of vLLM where vLLM has them.

        ids, own_positions  [rows of the rank, 1]  token ids and positions of a rank's rows
        positions           [tokens, 1]            positions of all rows
        rope_rows           [tokens, 1]            rows of the rotary tables, if long sequences use other rows
        logits_indices      [head rows, 1]         rows that the head takes, as indices among the rank's rows; the
                                                   number of the rank's rows if another rank has the row
        slot_mapping        [tokens, 1]            slot in the pages to which each new token is written
        block_tables        [sequences, blocks]    pages of each sequence
        prompt_tables       [prompts, blocks]      pages of the prompts, if sequences decode with them
        state_slots         [sequences, 1]         slot of each sequence's recurrent states
        num_computed_tokens [sequences, 1]         position of the first new token of each sequence
        num_scheduled_tokens [sequences, 1]        new tokens of each sequence, without padding

    Layers that have pages for their window have a slot mapping, tables and positions of their own. These positions
    count from the first page of the table (`StepShape.for_window`). A step that draws also has the inputs of `sample`.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    takes_last_rows: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array in the launch."""
        return prod(self.shape) * self.dtype.itemsize

    def take_last(self, rows: int) -> Value:
        """Return a value of the same array of which a launch reads only the last `rows` rows."""
        return replace(self, shape=(rows, *self.shape[1:]), takes_last_rows=True)

    def take_view(self, array: Any) -> Any:
        """Return a view of the rows of `array` that the launch reads: all, or with `takes_last_rows` the last ones."""
        return array[-self.shape[0] :] if self.takes_last_rows else array


Argument = Value | np.dtype | Axis | tuple[int, ...] | float | int | str | None


@dataclass(frozen=True)
class LeastWork:
    """Least work of a launch on one rank: operations (two for a multiply-add), and bytes moved from and to HBM.

    `beside_weights` counts the operations among them that use activations and states only.
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

    The device binds `arguments` to the kernel's signature; parameters with defaults may be absent. `results` are the
    names in the step for what the kernel returns, in the kernel's order.

    One launch computes `rows` rows, and a step repeats it `repeat` times with other rows. `growth` is the size of the
    step with which its time grows. With a `window`, quadratic growth becomes linear beyond that many rows. `fused` has
    the launches that this launch replaces, if any.
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
        """Arguments that are arrays, in the order of `arguments`."""
        return [argument for argument in self.arguments.values() if isinstance(argument, Value)]

    @property
    def refusal(self) -> str | None:
        """Sentence why the kernel refuses the shapes and settings in `arguments`; None if it takes them."""
        from model.device import ArrayShape, find_refusal  # takes as long to import as the rest of the model

        shapes = (
            (name, ArrayShape(argument.shape, argument.dtype) if isinstance(argument, Value) else argument)
            for name, argument in self.arguments.items()
        )
        return find_refusal(self.kernel, tuple(shapes))

    @property
    def title(self) -> str:
        """Name of the kernel and, after a comma, the label that distinguishes launches of one kernel in a layer."""
        return f"{self.kernel}, {self.label}" if self.label else self.kernel


def list_gather_arguments(step: StepShape) -> dict[str, Argument]:
    """Return the arguments `replica_group` and `sequence_ranks` with which `qkv_projection` gathers rows of all ranks.

    The dict is empty if every rank has all rows of the step, without sequence parallelism.
    """
    if step.sequence_ranks == 1:
        return {}
    return {"replica_group": Axis.tensor, "sequence_ranks": step.sequence_ranks}


def count_product_work(rows: int, *weights: Value, moved_bytes: float = 0.0) -> LeastWork:
    """Return the least work of multiplying `rows` rows by each of `weights`, which are read from HBM once.

    `moved_bytes` are added to the bytes of the weights. The rows themselves are not counted. A byte of uint8 is two
    weights of 4 bits, an integer of 16 or 32 bits four weights in an MX format.
    """
    products = rows * sum(prod(weight.shape) * _PACKED.get(weight.dtype.name, 1) for weight in weights)
    return LeastWork(2.0 * products, moved_bytes + sum(weight.nbytes for weight in weights))


def count_copy_work(value: Value) -> LeastWork:
    """Return the least work of a copy: no operations, and the bytes of `value` read once and written once."""
    return LeastWork(0.0, 2.0 * value.nbytes)


def split_into_launches(count: int, largest: int) -> list[tuple[int, int]]:
    """Split `count` rows or sequences into launches of at most `largest`; return (launch size, repeats) of each size.

    A remainder is a smaller launch after the full ones: 300 in launches of 128 are [(128, 2), (44, 1)].
    """
    full_launches, remainder = divmod(count, largest)
    return [(size, repeat) for size, repeat in ((largest, full_launches), (remainder, 1)) if size and repeat]


def find_largest_launch(most: int, launches: Callable[[int], Iterable[Launch]]) -> int:
    """Return the largest size from 1 to `most` for which kernels take all launches; 1 if they refuse size 1 too.

    `launches` returns the launches of a size, such as a number of rows. The binary search relies on kernels that take
    every size below a size that they take.
    """

    def is_refused(size: int) -> bool:
        return any(launch.refusal is not None for launch in launches(size))

    return max(1, bisect_left(range(1, most), True, key=is_refused)) if is_refused(most) else most
