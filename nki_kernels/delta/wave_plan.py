"""Units of `gated_delta`, each a chunk of 128 tokens of up to four heads of a sequence, and what all units share.

A wave is the units that pass the kernel's stages together: four in bfloat16, one in float32. `plan_units`
makes the units of all waves, `delta/wave_steps.py` their tiles and steps.
"""

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
    """What all units of a launch share.

    y: the kernel's result in HBM. norm_weight: [128, dv] float32. scratch: a list of ScratchBuffers, which
    waves use in turn. right_operands: for each level a list of tiles that units use in turn. differences:
    what turns sums of decays into those between tokens. It is None in float32, and for more than 128 heads,
    where these are taken directly.
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
    """Rows of a unit in SBUF: q, k [128, key heads * depth], v, z [128, heads * width], in the dtype of qkv."""

    q: nl.NkiTensor
    k: nl.NkiTensor
    v: nl.NkiTensor
    z: nl.NkiTensor


@dataclass
class Unit(nl.NKIObject):
    """A chunk of a sequence, and heads (first, end) of it.

    index: among all units. rows: (first, end) of the tokens in qkv. column: of the sequence and chunk in
    `ChunkDecays`. key_heads: (first, end) of the heads' key heads. wave_heads: (first, end) among the heads
    of its wave. state: of its heads and sequence, which the units of all its chunks share. is_last: whether
    it is the last chunk of its sequence. operands: None until they are loaded.
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
        """Load queries, keys, values and output gates z of the unit, a chunk of some heads, from HBM: set `operands`.

        Also load the state, if no earlier chunk of the sequence has. New SBUF tiles.
        """
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
        """Return the number of the unit's value heads."""
        return self.heads[1] - self.heads[0]

    def select_heads(self, tile):
        """Return a view of the unit's heads of a tile [row, head of the wave, column]."""
        return tile[:, self.wave_heads[0] : self.wave_heads[1], :]

    def select_columns(self, decays):
        """Return a view [128, head] of the unit's chunk and heads, of one of the tiles of `ChunkDecays`.

        Args:
            decays: the tile, [128, sequence and chunk, head].
        """
        return decays[:, self.column, self.heads[0] : self.heads[1]]

    def repeat_for_heads(self, tile):
        """Return a view of a tile [rows, key head, n] in which each key head is repeated for its value heads.

        The view is [rows, key head, value head of the key head, n].
        """
        rows, heads, size = tile.shape
        return tile.reshape((rows, heads, 1, size)).broadcast(2, self.count_heads() // heads)


def load_rows(array, rows, first, last):
    """Load rows (start, end), columns first … last - 1, of an array [T, .] in HBM to a new SBUF tile [128, columns].

    Rows of the tile from end - start on are zeros.
    """
    start, end = rows
    tile = nl.ndarray((PARTITIONS, last - first), dtype=array.dtype, buffer=nl.sbuf)
    if end - start < PARTITIONS:
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=tile[0 : end - start, :], src=array[start:end, first:last])
    return tile


def plan_units(arguments):
    """Return a list of waves, each a list of Units: a unit is a chunk of 128 tokens of a sequence and up to four heads.

    A wave has up to four units in bfloat16, and one in float32. The first chunks of all sequences come before
    the second ones. Units of the same sequence and heads share one `SequenceState`, which is not loaded yet.
    """
    sequences, heads = arguments.counts.shape[0], arguments.states.shape[1]
    tokens = arguments.qkv.shape[0] // sequences
    chunks = blocks(tokens)
    group = heads // arguments.key_heads
    size = WAVE_UNITS if arguments.qkv.dtype == nl.bfloat16 else 1
    states, waves, index = [], [], 0
    for sequence in range(sequences):
        for bounds in split_heads(heads, group):
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


def split_heads(heads, group):
    """Return ranges (first, end) of up to four value heads, for `group` value heads of each key head.

    A range has all heads of one or more key heads, or some heads of one key head if it has more than four.
    """
    if group <= HEADS:
        return ranges(0, heads, HEADS // group * group)
    result = []
    for first in range(0, heads, group):
        result.extend(ranges(first, first + group, HEADS))
    return result
