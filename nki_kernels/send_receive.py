"""send_receive: a matrix passes from each source rank to its target rank.

Dimensions:
    M, N   rows and columns, the same on the ranks of a pair.

Arguments:
    x                    [M, N] @ HBM, any dtype of a collective: what a source sends; a target's own x gives the shape
    source_target_pairs  list of (source, target) ranks, a compile-time value; no rank is twice a source or a target
    returns received     [M, N] @ HBM, x's dtype: on a target the x of its source, on any other rank its own x

Layout and tiling:
    None: HBM to HBM. A collective may not touch the arguments and results of a kernel. So x is first copied into a
    named internal buffer, and the result is copied out of another one.

Limits:
    Those of HBM.

Cost
    Three copies of M * N in HBM, two of them side by side, and one collective_permute, which reads and writes it
    once. The permute waits for both ranks of a pair. Bound: the collective's latency for small matrices.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

cores = (1,)


@nki.jit
def send_receive(x, source_target_pairs):
    """Return [M, N] @ HBM in x's dtype: the x of the rank that sends to this rank, or this rank's x if no rank does.

    source_target_pairs: list of (source, target) ranks, in which no rank is twice a source or a target. The x
    of a target has the shape of what it receives.
    """
    sent = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="send_receive_sent")
    nisa.dma_copy(dst=sent, src=x)
    # A rank that is no target keeps what it had here.
    arrived = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="send_receive_arrived")
    nisa.dma_copy(dst=arrived, src=x)
    ncc.collective_permute(srcs=[sent], dsts=[arrived], source_target_pairs=source_target_pairs)
    received = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=received, src=arrived)
    return received


def send_receive_reference(
    x: list[np.ndarray], source_target_pairs: list[tuple[int, int]]
) -> list[np.ndarray]:
    """Return the list of every rank's output, copies of the arrays in `x`, the list of every rank's matrix.

    Entry r is the matrix of the rank that sends to rank r, or rank r's own if no rank does.
    """
    source_of = {target: source for source, target in source_target_pairs}
    return [x[source_of.get(rank, rank)].copy() for rank in range(len(x))]
