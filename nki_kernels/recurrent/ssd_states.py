"""States of sequences through their prompts in `ssd`.

A state stays in SBUF from the first chunk of its sequence, which loads it, to the last one, which stores it.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SYNC, transfer
from nki_kernels.recurrent.ssd_sizes import Sizes


@dataclass
class SequenceState(nl.NKIObject):
    """The state of a sequence for the local heads, [n, column], from its slot and back.

    states: all slots in HBM. read, written: numbers of its slots, [1, 1] int32 in SBUF. wide: float32 in
    SBUF, None until it is loaded. rounded: the same in u's dtype, for products; in float32 launches the same
    tile.
    """

    states: nl.NkiTensor
    read: nl.NkiTensor
    written: nl.NkiTensor
    sizes: Sizes
    wide: nl.NkiTensor | None = None
    rounded: nl.NkiTensor | None = None

    def load(self):
        """Load the state from its slot to a new float32 SBUF tile, `wide`; zeros if the sequence starts at position 0.

        Also set `rounded`: a new tile in u's dtype without contents, or in float32 launches `wide` itself.
        """
        sizes = self.sizes
        self.wide = nl.ndarray((sizes.states, sizes.width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.wide, value=0.0, engine=nisa.engine.gpsimd)
        source = view_slot(self.states, self.read, sizes)
        transfer(self.wide, source, SYNC, nisa.oob_mode.skip)
        self.rounded = self.wide
        if sizes.dtype != nl.float32:
            self.rounded = nl.ndarray(self.wide.shape, dtype=sizes.dtype, buffer=nl.sbuf)

    def round_columns(self, columns, by_scalar):
        """Copy a slice of the columns of `wide` to `rounded`, in u's dtype; does nothing in float32 launches.

        Args:
            by_scalar: whether the Scalar engine copies; else GpSimd does.
        """
        rounded, wide = self.rounded[:, columns], self.wide[:, columns]
        if self.sizes.dtype == nl.float32:
            pass
        elif by_scalar:
            nisa.activation(dst=rounded, op=nl.copy, data=wide)
        else:
            nisa.tensor_copy(dst=rounded, src=wide, engine=nisa.engine.gpsimd)

    def store(self):
        """Store the float32 state, `wide`, to the sequence's slot in HBM."""
        nisa.dma_copy(dst=view_slot(self.states, self.written, self.sizes), src=self.wide)


def view_slot(state, slot, sizes):
    """Return a view of the local heads' columns of the state in a slot: [n, column] in HBM.

    Args:
        slot: the number of the slot, a tile [1, 1] int32 in SBUF, read at run time.
    """
    pattern = [[sizes.inner, sizes.states], [1, sizes.width]]
    return state.ap(pattern=pattern, offset=sizes.left, scalar_offset=slot, indirect_dim=0)
