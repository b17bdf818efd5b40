"""all_reduce: the sum of a matrix over the ranks of a replica group, on every rank.

Dimensions:
    M, N   rows and columns, the same on every rank.

Arguments:
    x              [M, N] @ HBM, any float dtype or int32
    replica_group  nki.collectives.ReplicaGroup, a compile-time value
    returns total  [M, N] @ HBM, x's dtype

Layout and tiling:
    None: HBM to HBM. A collective may not touch the arguments and results of a kernel. So the operand is first
    copied into a named internal buffer, and the result is copied out of another one.

Limits:
    Those of HBM.

Cost
    Two copies of M * N in HBM and one all-reduce, each reading and writing it once. Bound: the collective's
    latency for small matrices.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.precision import widened

cores = (1,)


@nki.jit
def all_reduce(x, replica_group):
    """Return the sum of x [M, N] over the ranks of a group, in x's dtype.

    Every rank of the group gets the same sum, in a new tensor in shared HBM.
    """
    partial = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm, name="all_reduce_partial")
    nisa.dma_copy(dst=partial, src=x)
    summed = sum_over_ranks(partial, replica_group, "all_reduce_total")
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=total, src=summed)
    return total


def sum_over_ranks(partial, replica_group, name):
    """Return the sum of `partial` over the ranks of a group, in a new private HBM buffer of its shape and dtype.

    Args:
        partial: a buffer in private HBM: a collective may not touch the arguments and results of a kernel.
        name: the name of the new buffer.
    """
    total = nl.ndarray(partial.shape, dtype=partial.dtype, buffer=nl.private_hbm, name=name)
    ncc.all_reduce(srcs=[partial], dsts=[total], replica_group=replica_group, op=nl.add)
    return total


def all_reduce_reference(x: list[np.ndarray], replica_group: object) -> list[np.ndarray]:
    """Return a list with the sum of the matrices of all ranks, once for each rank.

    The sum is taken in float32 and rounded to the dtype of the matrices. `x` has one matrix per rank of one
    group; `replica_group` is not read.
    """
    total = np.sum([widened(one) for one in x], axis=0).astype(x[0].dtype)
    return [total] * len(x)
