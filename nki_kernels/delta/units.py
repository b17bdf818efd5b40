"""Records of `gated_delta`'s pipeline: units (a chunk of 128 tokens of some heads) and waves of them, with their tiles.

Tiles are None until the step that computes them, see `delta/steps.py`. i and j are tokens of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.language as nl

from nki_kernels.delta.blocks import BlockInverse
from nki_kernels.delta.decay import ChunkDecays
from nki_kernels.delta.masks import ChunkConstants
from nki_kernels.delta.signature import Arguments
from nki_kernels.delta.states import SlotNumbers
from nki_kernels.recurrent.ssd_between import Differences
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

HEADS = BANK // PARTITIONS
"""Heads whose [128, 128] tiles share a PSUM bank."""

PAIR = 2
"""Heads whose products with the state share a tile of PSUM."""

WAVE_UNITS = 4
"""Units of a wave in bfloat16; in float32 a wave is one unit."""


@dataclass
class Prompt(nl.NKIObject):
    """What all units share.

    norm_weight: [128, dv] float32. scratch: ScratchBuffers, used in turn. right_operands: for each level, tiles that
    units use in turn. decays: None until the first operands are on their way. differences: None if sums between tokens
    are taken directly.
    """

    arguments: Arguments
    y: nl.NkiTensor
    constants: ChunkConstants
    norm_weight: nl.NkiTensor
    slots: SlotNumbers
    scratch: list
    right_operands: list
    decays: ChunkDecays | None = None
    differences: Differences | None = None


@dataclass
class StatePair(nl.NKIObject):
    """States [depth, head, width] of up to two heads: in float32, and in the dtype of products."""

    wide: nl.NkiTensor
    narrow: nl.NkiTensor


@dataclass
class SequenceState(nl.NKIObject):
    """The state of heads (first, end) of a sequence: a StatePair for every two heads, none until it is loaded."""

    sequence: int
    heads: tuple
    pairs: list


@dataclass
class Operands(nl.NKIObject):
    """Rows of a unit: q, k [128, key heads * depth], v, z [128, heads * width]."""

    q: nl.NkiTensor
    k: nl.NkiTensor
    v: nl.NkiTensor
    z: nl.NkiTensor


@dataclass
class SumRows(nl.NKIObject):
    """Operands whose product has the logarithms of the decays between tokens; they begin at partition `row`."""

    keys: nl.NkiTensor
    queries: nl.NkiTensor
    row: int


@dataclass
class Scores(nl.NKIObject):
    """What needs neither the inverse nor the state.

    sums: SumRows, or None if sums are taken directly. key_rows: keys over their lengths, [j, key head, depth].
    norm_offset: what the norm adds to the mean of squares, [i, key head]. decay: [j, head, i], of the key j up to i,
    times beta. query_columns, key_columns: [depth, key head, i]. attended: P transposed, [j, head, i]. keys_before,
    keys_after: keys times the decay before and after them, the latter with beta, [j, head, depth]. gate_factors:
    [i, head, width].
    """

    sums: SumRows | None = None
    key_rows: nl.NkiTensor | None = None
    norm_offset: nl.NkiTensor | None = None
    decay: nl.NkiTensor | None = None
    query_columns: nl.NkiTensor | None = None
    key_columns: nl.NkiTensor | None = None
    attended: nl.NkiTensor | None = None
    keys_before: nl.NkiTensor | None = None
    keys_after: nl.NkiTensor | None = None
    gate_factors: nl.NkiTensor | None = None


@dataclass
class ChunkInverse(nl.NKIObject):
    """-A transposed, [j, head, i], and the inverse of the triangle as far as its blocks are joined.

    x, y: blocks of both halves, and transposed, [row of both halves, head, column]. right: the right operand of a
    level's second products. joined_x, joined_y: these products, in PSUM. corner: the block of y that joins the halves,
    [column, head, row]. reading: -(X exp(G) k) transposed, [depth, head, i].
    """

    negated: nl.NkiTensor
    x: nl.NkiTensor | None = None
    y: nl.NkiTensor | None = None
    right: nl.NkiTensor | None = None
    joined_x: nl.NkiTensor | None = None
    joined_y: nl.NkiTensor | None = None
    corner: nl.NkiTensor | None = None
    reading: nl.NkiTensor | None = None


@dataclass
class Outputs(nl.NKIObject):
    """Outputs of a unit, [i, head, width]: q S in PSUM, the same decayed, o in PSUM, its roots [i, head], and y.

    writes: u of every two heads, which lacks the factor beta, in the dtype of products. roots: first the means of
    squares, then their inverse roots.
    """

    writes: list
    queried: nl.NkiTensor | None = None
    decayed: nl.NkiTensor | None = None
    o: nl.NkiTensor | None = None
    roots: nl.NkiTensor | None = None
    y: nl.NkiTensor | None = None


@dataclass
class Unit(nl.NKIObject):
    """A chunk of a sequence and heads (first, end).

    index: among all units. rows: (first, end) of the tokens. column: of the sequence and chunk in `ChunkDecays`.
    key_heads: (first, end). wave_heads: (first, end) among the heads of its wave. is_last: whether it is the last chunk
    of its sequence.
    """

    index: int
    rows: tuple
    column: int
    heads: tuple
    key_heads: tuple
    wave_heads: tuple
    state: SequenceState
    is_last: bool
    scores: Scores
    outputs: Outputs
    operands: Operands | None = None
    inverse: ChunkInverse | None = None

    def group(self):
        """Return how many of its heads share a key head."""
        return (self.heads[1] - self.heads[0]) // (self.key_heads[1] - self.key_heads[0])

    def columns(self, decays):
        """Return its columns [128, head] of one of the tiles of `ChunkDecays`."""
        first, end = self.heads
        return decays[:, self.column, first:end]

    def head_pairs(self):
        """Return a HeadPair for every two of its heads."""
        pairs = []
        for first, end in ranges(0, self.heads[1] - self.heads[0], PAIR):
            pairs.append(HeadPair(self, len(pairs), first, end))
        return pairs


@dataclass
class HeadPair(nl.NKIObject):
    """Up to two heads of a unit, first … end of the unit's heads.

    values: X v, later less what the state predicts, [i, head, width] in PSUM.
    """

    unit: Unit
    index: int
    first: int
    end: int
    values: nl.NkiTensor | None = None


@dataclass
class Wave(nl.NKIObject):
    """Units that go through the stages together, of `heads` heads in all.

    negated: -A transposed of all heads, [j, head, i]. inversion: its blocks.
    """

    index: int
    units: list
    heads: int
    negated: nl.NkiTensor | None = None
    inversion: BlockInverse | None = None


def plan_waves(arguments):
    """Return the waves of all units: all first chunks come before the second ones."""
    size = WAVE_UNITS if arguments.qkv.dtype == nl.bfloat16 else 1
    waves = []
    for units in split_units(plan_units(arguments), size):
        heads = 0
        for unit in units:
            count = unit.heads[1] - unit.heads[0]
            unit.wave_heads = (heads, heads + count)
            heads += count
        waves.append(Wave(len(waves), units, heads))
    return waves


def split_units(units, size):
    """Return lists of up to `size` units."""
    lists = []
    for first, end in ranges(0, len(units), size):
        lists.append(units[first:end])
    return lists


def plan_units(arguments):
    """Return the chunks of all sequences and head ranges, all first chunks before the second ones."""
    sequences, heads = arguments.counts.shape[0], arguments.states.shape[1]
    tokens = arguments.qkv.shape[0] // sequences
    chunks = blocks(tokens)
    group = heads // arguments.key_heads
    states = []
    for sequence in range(sequences):
        for first, last in head_ranges(heads, group):
            states.append(SequenceState(sequence, (first, last), []))
    units = []
    for start, end in ranges(0, tokens):
        chunk = start // PARTITIONS
        for state in states:
            row, column = state.sequence * tokens, state.sequence * chunks + chunk
            first, last = state.heads
            unit = Unit(
                index=len(units),
                rows=(row + start, row + end),
                column=column,
                heads=state.heads,
                key_heads=(first // group, (last - 1) // group + 1),
                wave_heads=(0, last - first),
                state=state,
                is_last=chunk + 1 == chunks,
                scores=Scores(),
                outputs=Outputs([]),
            )
            units.append(unit)
    return units


def head_ranges(heads, group):
    """Return ranges of up to four heads: those of whole key heads, or some of one."""
    if group <= HEADS:
        return ranges(0, heads, HEADS // group * group)
    result = []
    for first in range(0, heads, group):
        result.extend(ranges(first, first + group, HEADS))
    return result


@dataclass
class BlockLevel(nl.NKIObject):
    """A level of the inverses of a wave's blocks: those of `size` rows are joined two by two."""

    wave: Wave
    size: int


@dataclass
class JoinLevel(nl.NKIObject):
    """A level, an index of `LEVELS`, at which a unit's blocks are joined two by two."""

    unit: Unit
    level: int
