"""States of sequences through their prompts in `ssd`."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SYNC, transfer
from nki_kernels.recurrent.ssd_sizes import Sizes


@dataclass
class SequenceState(nl.NKIObject):
    """The state of a sequence, [n, column], from its slot and back.

    read, written: numbers of its slots, [1, 1]. wide: float32, None until it is loaded. rounded: the same in the dtype
    of products.
    """

    states: nl.NkiTensor
    read: nl.NkiTensor
    written: nl.NkiTensor
    sizes: Sizes
    wide: nl.NkiTensor | None = None
    rounded: nl.NkiTensor | None = None

    def load(self):
        """Load the states of this core's heads; zeros at the start of a sequence."""
        sizes = self.sizes
        self.wide = nl.ndarray((sizes.states, sizes.width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.wide, value=0.0, engine=nisa.engine.gpsimd)
        source = columns_of_slot(self.states, self.read, sizes)
        transfer(self.wide, source, SYNC, nisa.oob_mode.skip)
        self.rounded = self.wide
        if sizes.dtype != nl.float32:
            self.rounded = nl.ndarray(self.wide.shape, dtype=sizes.dtype, buffer=nl.sbuf)

    def round(self, columns, by_scalar):
        """Round columns of the states to the dtype of products, on the Scalar engine or on GpSimd."""
        rounded, wide = self.rounded[:, columns], self.wide[:, columns]
        if self.sizes.dtype == nl.float32:
            pass
        elif by_scalar:
            nisa.activation(dst=rounded, op=nl.copy, data=wide)
        else:
            nisa.tensor_copy(dst=rounded, src=wide, engine=nisa.engine.gpsimd)

    def store(self):
        """Store the states to their slot."""
        nisa.dma_copy(dst=columns_of_slot(self.states, self.written, self.sizes), src=self.wide)


def columns_of_slot(state, slot, sizes):
    """Return a view of HBM [n, column]: this core's columns of the state in the slot of a number [1, 1]."""
    pattern = [[sizes.inner, sizes.states], [1, sizes.width]]
    return state.ap(pattern=pattern, offset=sizes.left, scalar_offset=slot, indirect_dim=0)
