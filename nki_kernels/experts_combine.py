"""experts_combine: what the experts of all ranks made of this rank's tokens, plus the residual.

    y = residual + sum over ranks s of results[r * T : (r + 1) * T] of rank s,   where r is the place of this rank

With biases plus sum over k of weights[:, k] * b_down[e], where e = ids[:, k].

Dimensions:
    T   tokens of each rank; N ranks; H hidden size; E experts; K experts of a token.

Arguments:
    results        [N * T, H] @ HBM, float32 or bfloat16: the sum of this rank's experts for the tokens of all ranks,
                   which lie as `experts_dispatch` leaves them
    replica_group  nki.collectives.ReplicaGroup
    ranks          compile-time int N: the length of this rank's list
    residual       [T, H] @ HBM, results' dtype, of this rank's tokens; or None: nothing is added
    weights, ids   [T, K] @ HBM, float32 and int32: the choices of this rank's tokens, with b_down only
    b_down         [E, H] @ HBM, float32 or bfloat16: biases that no rank has added to its results; or None
    absent         compile-time bool: choices of E are experts of other ranks, of weight 0
    returns y      [T, H] @ HBM, results' dtype

Layout and tiling:
    An all-to-all from HBM to HBM gives each rank the N parts of its own tokens. For each 128 of these, which lie on the
    partitions, the parts are added in float32, in the order of ranks.

Cores
    On a logical core of two physical ones the first does the work.

Limits:
    H up to 8192, in float32 up to 4096.

Cost
    HBM: results three times, received parts twice, residual and y once. Rounding to results' dtype: y.
    Bound: the collective.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.experts.arguments import MAX_ROW_BYTES, Routing
from nki_kernels.experts.weighted_sums import add_chosen_biases
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.tiles import expect_dims, expect_hidden, filled, load, ranges

cores = (1,)


@nki.jit
def experts_combine(
    results, replica_group, ranks, residual=None, weights=None, ids=None, b_down=None, absent=False
):
    """Return y [T, H]: for this rank's tokens the sum of all ranks' results, plus the residual, in results' dtype.

    With `b_down`, also the biases of each token's K experts times their weights. y is in new shared HBM.
    AssertionError if shapes do not fit together, or the hidden size exceeds the limit of the module
    docstring.
    """
    expect_dims(2, results, "results [N * T, H]")
    tokens, hidden = results.shape[0] // ranks, results.shape[1]
    dtype = results.dtype
    expect_hidden("experts_combine", results, hidden, MAX_ROW_BYTES)
    if residual is not None:
        expect_dims(2, residual, "residual [T, H]")
        shape = (ranks * residual.shape[0], residual.shape[1])
        assert results.shape == shape and dtype == residual.dtype, (
            f"results have to be [{shape[0]}, {shape[1]}] {residual.dtype} for residual {residual.shape} and {ranks} "
            f"ranks, not {results.shape} {dtype}"
        )
    if b_down is not None:
        assert ids.shape[0] == tokens, (
            f"ids are of {ids.shape[0]} tokens, results of {tokens}; both have to be equal"
        )
        assert weights.shape == ids.shape, (
            f"weights are {weights.shape}, ids are {ids.shape}; both need one shape"
        )
        assert b_down.shape[1] == hidden, f"b_down has to be [E, {hidden}], not {b_down.shape}"
    y = nl.ndarray((tokens, hidden), dtype=dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y
    # A collective may not touch arguments of a kernel, so the results pass through internal buffers.
    local_results = nl.ndarray(results.shape, dtype=dtype, buffer=nl.private_hbm, name="own_results")
    received = nl.ndarray(results.shape, dtype=dtype, buffer=nl.private_hbm, name="received_results")
    nisa.dma_copy(dst=local_results, src=results)
    ncc.all_to_all(srcs=[local_results], dsts=[received], replica_group=replica_group, collective_dim=0)
    for first, last in ranges(0, tokens):
        total = None if residual is None else load(residual[first:last, :], nl.float32)
        if b_down is not None:
            routing = Routing(weights[first:last, :], ids[first:last, :], absent)
            total = add_chosen_biases(total, routing, b_down)
        if total is None:
            total = filled((last - first, hidden), 0.0)
        for rank in range(ranks):
            addend = load(received[rank * tokens + first : rank * tokens + last, :], dtype)
            # Sums of ranks stay in float32 until the last one, which rounds once.
            before, sum_dtype = total, dtype if rank + 1 == ranks else nl.float32
            total = nl.ndarray(before.shape, dtype=sum_dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=total, data1=before, data2=addend, op=nl.add)
        nisa.dma_copy(dst=y[first:last, :], src=total)
    return y


def experts_combine_reference(
    results: list[np.ndarray],
    replica_group: object,
    ranks: int,
    residual: list[np.ndarray] | list[None] | None = None,
    weights: list[np.ndarray] | None = None,
    ids: list[np.ndarray] | None = None,
    b_down: np.ndarray | None = None,
    absent: bool = False,
) -> list[np.ndarray]:
    """Compute y with NumPy for every rank of one group: a list of arrays [T, H].

    Lists have one array per rank; `b_down` is the same on all. `replica_group` and `absent` are not read.
    """
    outputs = []
    tokens = len(results[0]) // ranks
    for rank in range(len(results)):
        rows = slice(rank * tokens, (rank + 1) * tokens)
        total = np.sum([widened(rank_results[rows]) for rank_results in results], axis=0)
        if residual is not None:
            total = total + widened_or_zero(residual[rank])
        if b_down is not None and weights is not None and ids is not None:
            biases = np.concatenate([widened(b_down), np.zeros((1, b_down.shape[1]), np.float32)])
            total = total + np.einsum("tk,tkh->th", weights[rank], biases[ids[rank]])
        outputs.append(total.astype(results[0].dtype))
    return outputs
