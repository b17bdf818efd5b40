"""Units of `gated_delta`, each a chunk of 128 tokens of up to four heads of a sequence, and what all units share."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.decay import ChunkDecays
from nki_kernels.delta.masks import ChunkConstants
from nki_kernels.delta.signature import Arguments
from nki_kernels.delta.state_slots import SequenceState, SlotNumbers
from nki_kernels.recurrent.ssd_between import Differences
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

HEADS = BANK // PARTITIONS
"""Heads whose [128, 128] tiles share a PSUM bank."""

WAVE_UNITS = 4
"""Units of a wave in bfloat16; in float32 a wave is one unit."""


@dataclass
class Prompt(nl.NKIObject):
    """What all units share.

    norm_weight: [128, dv] float32. scratch: ScratchBuffers, used in turn. right_operands: for each level, tiles that
    units use in turn. differences: None if sums between tokens are taken directly.
    """

    arguments: Arguments
    y: nl.NkiTensor
    constants: ChunkConstants
    norm_weight: nl.NkiTensor
    slots: SlotNumbers
    scratch: list
    right_operands: list
    decays: ChunkDecays
    differences: Differences | None


@dataclass
class Operands(nl.NKIObject):
    """Rows of a unit: q, k [128, key heads * depth], v, z [128, heads * width]."""

    q: nl.NkiTensor
    k: nl.NkiTensor
    v: nl.NkiTensor
    z: nl.NkiTensor


@dataclass
class Unit(nl.NKIObject):
    """A chunk of a sequence and heads (first, end).

    index: among all units. rows: (first, end) of the tokens. column: of the sequence and chunk in `ChunkDecays`.
    key_heads: (first, end). wave_heads: (first, end) among the heads of its wave. is_last: whether it is the last chunk
    of its sequence. operands: None until they are loaded.
    """

    index: int
    rows: tuple
    column: int
    heads: tuple
    key_heads: tuple
    wave_heads: tuple
    state: SequenceState
    is_last: bool
    operands: Operands | None = None

    def load(self, arguments, slots):
        """Load queries, keys, values and output gates; the state as well if it is not loaded."""
        (first, end), (first_key, end_key) = self.heads, self.key_heads
        qkv, depth, width = arguments.qkv, arguments.states.shape[2], arguments.states.shape[3]
        keys = arguments.key_heads * depth
        self.operands = Operands(
            q=load_rows(qkv, self.rows, first_key * depth, end_key * depth),
            k=load_rows(qkv, self.rows, keys + first_key * depth, keys + end_key * depth),
            v=load_rows(qkv, self.rows, 2 * keys + first * width, 2 * keys + end * width),
            z=load_rows(arguments.gates, self.rows, first * width, end * width),
        )
        self.state.load(arguments, slots)

    def count_heads(self):
        """Return the number of its heads."""
        return self.heads[1] - self.heads[0]

    def select_heads(self, tile):
        """Return its heads of a tile [row, head of the wave, column]."""
        return tile[:, self.wave_heads[0] : self.wave_heads[1], :]

    def select_columns(self, decays):
        """Return its columns [128, head] of one of the tiles of `ChunkDecays`."""
        return decays[:, self.column, self.heads[0] : self.heads[1]]

    def repeat_for_heads(self, tile):
        """Return a view of a tile [rows, key head, n] for value heads, [rows, key head, head of group, n]."""
        rows, heads, size = tile.shape
        return tile.reshape((rows, heads, 1, size)).broadcast(2, self.count_heads() // heads)


def load_rows(array, rows, first, last):
    """Load rows (first, end) and columns first … last of an array [T, .]: 128 rows, zeros after the last one."""
    start, end = rows
    tile = nl.ndarray((PARTITIONS, last - first), dtype=array.dtype, buffer=nl.sbuf)
    if end - start < PARTITIONS:
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=tile[0 : end - start, :], src=array[start:end, first:last])
    return tile


def plan_units(arguments):
    """Return lists of the units that go through the stages together; all first chunks come before the second ones."""
    sequences, heads = arguments.counts.shape[0], arguments.states.shape[1]
    tokens = arguments.qkv.shape[0] // sequences
    chunks = blocks(tokens)
    group = heads // arguments.key_heads
    size = WAVE_UNITS if arguments.qkv.dtype == nl.bfloat16 else 1
    states, waves, index = [], [], 0
    for sequence in range(sequences):
        for bounds in head_ranges(heads, group):
            states.append(SequenceState(sequence, bounds, []))
    for start, end in ranges(0, tokens):
        for state in states:
            if index % size == 0:
                waves.append([])
                wave_heads = 0
            (first, last), row = state.heads, state.sequence * tokens
            unit = Unit(
                index=index,
                rows=(row + start, row + end),
                column=state.sequence * chunks + start // PARTITIONS,
                heads=state.heads,
                key_heads=(first // group, (last - 1) // group + 1),
                wave_heads=(wave_heads, wave_heads + last - first),
                state=state,
                is_last=end == tokens,
            )
            waves[len(waves) - 1].append(unit)
            index, wave_heads = index + 1, wave_heads + last - first
    return waves


def head_ranges(heads, group):
    """Return ranges of up to four heads: those of whole key heads, or some of one."""
    if group <= HEADS:
        return ranges(0, heads, HEADS // group * group)
    result = []
    for first in range(0, heads, group):
        result.extend(ranges(first, first + group, HEADS))
    return result
