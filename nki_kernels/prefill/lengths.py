"""Key lengths of attention_prefill: how many keys of each sequence its queries see; padding follows them.

Lengths are data, so no instruction depends on them. The keys behind a length become copies of the sequence's first key,
so that they change no maximum. Their values become 0, in the column of ones too, so they add nothing to a product.
Scores need no mask, unless biases are added to them. Padding may hold anything: its bits, as integers, are multiplied
by 0, since a product of numbers would keep NaN. 16-bit integers are exact in the float32 of the engines, 32-bit ones on
GpSimd.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.prefill.cached import COUNTED, mark_compared_positions
from nki_kernels.prefill.key_blocks import list_loaded_pieces, list_new_pieces, view_new_keys
from nki_kernels.tiles import MASKED, PARTITIONS, blocks, cast, load_repeated


class KeyLengths(nl.NKIObject):
    """Which keys of one sequence are behind its length, shared by its key/value heads.

    `hidden` is 1 for them, uint8 [128, block, 128] @ SBUF, every partition with all keys. `seen` is 1 for the other
    ones, [key in block, block] @ SBUF in `integer`, the integers as wide as the keys' dtype. `mask` [1, key] @ SBUF is
    0 for keys that are seen, else MASKED; None without biases, as scores need no mask then. `seen_keys` are results of
    `find_hidden`, kept by the start of their piece.
    """

    def __init__(self, prompts, sequence):
        lengths = prompts.step.key_lengths
        length = cast(load_repeated(lengths[sequence : sequence + 1, :], PARTITIONS), nl.float32)
        count = blocks(prompts.keys)
        self.integer = nl.int16 if prompts.dtype == nl.bfloat16 else nl.int32
        self.hidden = nl.ndarray((PARTITIONS, count, PARTITIONS), dtype=nl.uint8, buffer=nl.sbuf)
        # Keys lie along the free dimension, so each partition holds the whole predicate.
        at_once = COUNTED // PARTITIONS
        for first in range(0, count, at_once):
            last = min(count, first + at_once)
            mark_compared_positions(
                self.hidden[:, first:last, :],
                [[PARTITIONS, last - first], [1, PARTITIONS]],
                first * PARTITIONS,
                0,
                nl.greater_equal,
                length,
            )
        # Values have their keys on the partitions, so their predicate is one column for each block.
        self.seen = nl.ndarray((PARTITIONS, count), dtype=self.integer, buffer=nl.sbuf)
        mark_compared_positions(self.seen, [[PARTITIONS, count]], 0, 1, nl.less, length)
        self.seen_keys = {}
        self.mask = None
        if prompts.step.position_bias is not None:
            self.mask = nl.ndarray((1, prompts.keys), dtype=prompts.dtype, buffer=nl.sbuf)
            hidden = self.hidden.reshape((PARTITIONS, count * PARTITIONS))
            nisa.tensor_scalar(
                dst=self.mask, data=hidden[0:1, 0 : prompts.keys], op0=nl.multiply, operand0=MASKED
            )

    def find_hidden(self, piece):
        """Return `hidden` of the keys of a `Piece`, and its negation in `integer`: [128, block, key] @ SBUF each."""
        first = piece.start // PARTITIONS
        hidden = self.hidden[:, first : first + piece.count, 0 : piece.used]
        name = f"{piece.start}"
        if name in self.seen_keys:
            return hidden, self.seen_keys[name]
        seen = nl.ndarray(hidden.shape, dtype=self.integer, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=seen, data=hidden, op0=nl.equal, operand0=0.0)
        # The first keys are all keys of a short sequence, whose heads follow soon; all of a long one take much room.
        if piece.start < COUNTED:
            self.seen_keys[name] = seen
        return hidden, seen


def hide_keys(prompts, head):
    """Replace the keys of a `Head` behind its sequence's length by its first key, in `head.keys` @ SBUF."""
    for piece in list_new_pieces(prompts):
        hidden, seen = head.lengths.find_hidden(piece)
        for tile in range(prompts.depth_tiles):
            height = prompts.heights[tile]
            keys = view_new_keys(prompts, head, (tile, tile + 1, height), piece)[:, :, 0, :]
            # The Vector engine adds the first key, so it multiplies too, and does not wait for GpSimd.
            zero_hidden(keys, seen[0:height], nisa.engine.vector)
            # Zeros and the first key, or keys and 0: each sum has one term that is not 0, so it is exact.
            nisa.scalar_tensor_tensor(
                dst=keys,
                data=hidden[0:height],
                op0=nl.multiply,
                operand0=head.keys[0:height, 0, tile, 0:1],
                op1=nl.add,
                operand1=keys,
            )


def hide_values(launch, load):
    """Replace values of one `BlockLoad` behind their sequence's length by 0, in `head.values` @ SBUF; also their ones.

    The agenda calls it.
    """
    prompts, head = launch.prompts, load.head
    for piece in list_loaded_pieces(prompts, load.first):
        first = piece.start // PARTITIONS
        values = head.values[0 : piece.used, first : first + piece.count, :]
        seen = head.lengths.seen[0 : piece.used, first : first + piece.count]
        seen = seen.reshape((piece.used, piece.count, 1)).broadcast(2, prompts.value_depth + 1)
        zero_hidden(values, seen, nisa.engine.gpsimd)


def zero_hidden(tile, seen, engine):
    """Set elements of a tile in SBUF to 0, in place, where the integers `seen` of its shape are 0; else they are 1.

    Args:
        engine: multiplies the bits of a bfloat16 tile; GpSimd multiplies those of a float32 tile.
    """
    bits = tile.view(seen.dtype)
    engine = engine if seen.dtype == nl.int16 else nisa.engine.gpsimd
    nisa.tensor_tensor(dst=bits, data1=bits, data2=seen, op=nl.multiply, engine=engine)
