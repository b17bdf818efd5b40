"""experts_combine: what the experts of all ranks made of this rank's tokens, plus the residual.

    y = x + sum over ranks s of results[r * T : (r + 1) * T] of rank s,   where r is the place of this rank

Dimensions
    T   tokens of each rank; N ranks; H hidden size.

Arguments
    results        [N * T, H] @ HBM, float32 or bfloat16: the sum of this rank's experts for the tokens of all ranks,
                   which lie as `experts_dispatch` leaves them
    x              [T, H] @ HBM, results' dtype: the residual of this rank's tokens
    replica_group  nki.collectives.ReplicaGroup
    ranks          compile-time int N: the length of this rank's list
    returns y      [T, H] @ HBM, results' dtype

Layout and tiling
    An all-to-all from HBM to HBM gives each rank the N parts of its own tokens. For each 128 of these, which lie on the
    partitions, the parts are added in float32, in the order of ranks.

Cores
    On a logical core of two physical ones the first does the work.

Limits
    H up to 8192, in float32 up to 4096.

Cost
    HBM: results three times, received parts twice, x and y once. Rounding to results' dtype: y. Bound: the collective.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.experts_decode import MAX_ROW_BYTES
from nki_kernels.precision import widened
from nki_kernels.tiles import expect_dims, expect_hidden, load, ranges


@nki.jit
def experts_combine(results, x, replica_group, ranks):
    """The sum over ranks of their results of this rank's tokens, plus the residual."""
    expect_dims(2, x, "x [T, H]")
    tokens, hidden = x.shape
    expect_hidden("experts_combine", x, hidden, MAX_ROW_BYTES)
    assert results.shape == (ranks * tokens, hidden) and results.dtype == x.dtype, (
        f"results are [{ranks * tokens}, {hidden}] {x.dtype}, not {results.shape} {results.dtype}"
    )
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y
    own = nl.ndarray(results.shape, dtype=x.dtype, buffer=nl.private_hbm, name="own_results")
    parts = nl.ndarray(results.shape, dtype=x.dtype, buffer=nl.private_hbm, name="received_results")
    nisa.dma_copy(dst=own, src=results)
    ncc.all_to_all(srcs=[own], dsts=[parts], replica_group=replica_group, collective_dim=0)
    for first, last in ranges(0, tokens):
        total = load(x[first:last, :], nl.float32)
        for rank in range(ranks):
            at = rank * tokens
            result = nl.ndarray(
                total.shape, dtype=x.dtype if rank + 1 == ranks else nl.float32, buffer=nl.sbuf
            )
            part = load(parts[at + first : at + last, :], x.dtype)
            nisa.tensor_tensor(dst=result, data1=total, data2=part, op=nl.add)
            total = result
        nisa.dma_copy(dst=y[first:last, :], src=total)
    return y


def experts_combine_reference(
    results: list[np.ndarray], x: list[np.ndarray], replica_group: object, ranks: int
) -> list[np.ndarray]:
    """On every rank of one group, given the arrays of all its ranks."""
    found = []
    for place, residual in enumerate(x):
        own = slice(place * len(residual), (place + 1) * len(residual))
        total = widened(residual) + np.sum([widened(each[own]) for each in results], axis=0)
        found.append(total.astype(residual.dtype))
    return found
