"""exchange_heads: rows of all heads become all rows of a rank's heads, and back (Ulysses).

    all to all   q, k, v of T / R rows of each sequence, all heads  ->  of T rows of each sequence, heads of the rank
    and back     outputs of T rows of each sequence, heads of the rank  ->  of T / R rows of each sequence, all heads

Ranks divide the rows of each sequence, and between the two exchanges its heads, so that attention sees all rows. Rank r
of the group has rows r * T / R to (r + 1) * T / R - 1, and columns r * W / R to (r + 1) * W / R - 1.

Dimensions:
    B   sequences, one behind the other; T rows of each, over all ranks; R ranks;
    W   width of all heads: heads times head size. k and v may have another one.

Arguments:
    q               [B * T / R, W] @ HBM, any float dtype; on the way back outputs of attention, [B * T, W / R]
    replica_group   nki.collectives.ReplicaGroup
    ranks           compile-time int R: the length of this rank's list
    k, v            [B * T / R, W] @ HBM, q's dtype, or both None; None on the way back
    sequences       compile-time int B
    to_rows         compile-time bool: the way back
    returns q       [B * T, W / R] @ HBM, q's dtype, and k and v alike if there are any; on the way back [B * T / R, W]

Layout and tiling:
    None: HBM to HBM. A collective may not touch the arguments and results of a kernel. So rows are first copied to
    internal buffers, ordered by the rank that receives them, and then copied out of others, ordered by sequence. Each
    array has a collective of its own, during which the next one is copied.

Cores
    Two cores of a logical core exchange half of a rank's rows of each sequence each.

Limits:
    Those of HBM. R divides W, and on the way back T.

Cost
    Two copies of each array in HBM, and one all-to-all, each reading and writing it once. Bound: HBM and the links of
    the ranks for many rows, the collective's latency for few. One collective of q, k and v takes 155 us instead of 107
    for 4096 rows of 3072 elements over 8 ranks of trn2 in bfloat16, as copies wait for it.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.tiles import expect_dims

cores = (1, 2)


@nki.jit
def exchange_heads(q, replica_group, ranks, k=None, v=None, sequences=1, to_rows=False):
    """Return all rows of this rank's heads of q, k and v, or this rank's rows of all heads of q; new shared HBM.

    AssertionError if shapes do not fit together, or the ranks do not divide them.
    """
    expect_dims(2, q, "q [B * T / R, W]")
    assert q.shape[0] % sequences == 0, f"{sequences} sequences do not divide {q.shape[0]} rows of q"
    arrays = [q]
    if k is not None:
        assert not to_rows, "the way back takes the outputs of attention alone; leave k and v out"
        arrays = [q, k, v]
    length = q.shape[0] // sequences
    assert not to_rows or length % ranks == 0, (
        f"{ranks} ranks do not divide {length} rows of a sequence; the number of rows has to be a multiple"
    )
    results = []
    for array in arrays:
        rows, width = array.shape
        assert rows == q.shape[0], f"k and v need {q.shape[0]} rows as q, not {rows}"
        assert to_rows or width % ranks == 0, (
            f"{ranks} ranks do not divide a width of {width}; the width has to be a multiple"
        )
        shape = (rows * ranks, width // ranks)
        if to_rows:
            shape = (rows // ranks, width * ranks)
        results.append(nl.ndarray(shape, dtype=array.dtype, buffer=nl.shared_hbm))
    local_rows = length // ranks if to_rows else length
    core_rows = (0, local_rows)
    if local_rows > 1:
        core_rows = find_core_range(local_rows, 1, nl.program_id(0))
    if local_rows > 1 or nl.program_id(0) == 0:
        _exchange(arrays, results, replica_group, (ranks, sequences), core_rows, to_rows)
    if k is None:
        return results[0]
    return results[0], results[1], results[2]


def _exchange(arrays, results, replica_group, counts, core_rows, to_rows):
    """Exchange rows of arrays among the ranks of a group, and write them to the results.

    Args:
        arrays: arrays in HBM.
        results: arrays in HBM that are written.
        replica_group: the group.
        counts: number of ranks of the group, and of sequences.
        core_rows: (first, end) of the rows of a rank in each sequence that this core exchanges.
        to_rows: whether arrays have all rows of some heads.
    """
    first, end = core_rows
    names = ("q", "k", "v")
    received = []
    for i in range(len(arrays)):
        source = _order_by_rank(arrays[i], counts, to_rows)[:, :, first:end, :]
        shape, dtype = source.shape, arrays[i].dtype
        sent = nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm, name=f"sent_{names[i]}")
        received.append(nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm, name=f"received_{names[i]}"))
        nisa.dma_copy(dst=sent, src=source)
        ncc.all_to_all(srcs=[sent], dsts=[received[i]], replica_group=replica_group, collective_dim=0)
    for i in range(len(arrays)):
        target = _order_by_rank(results[i], counts, not to_rows)[:, :, first:end, :]
        nisa.dma_copy(dst=target, src=received[i])


def _order_by_rank(array, counts, has_all_rows):
    """Return a view of an array in HBM as [rank, sequence, row, column], with the part of each rank.

    Args:
        array: [rows of all sequences, columns].
        counts: number of ranks and of sequences.
        has_all_rows: whether ranks divide rows; else they divide columns.
    """
    ranks, sequences = counts
    rows, columns = array.shape
    length = rows // sequences
    if has_all_rows:
        return array.reshape((sequences, ranks, length // ranks, columns)).permute((1, 0, 2, 3))
    return array.reshape((sequences, length, ranks, columns // ranks)).permute((2, 0, 1, 3))


def exchange_heads_reference(
    q: list[np.ndarray],
    replica_group: object,
    ranks: int,
    k: list[np.ndarray] | None = None,
    v: list[np.ndarray] | None = None,
    sequences: int = 1,
    to_rows: bool = False,
) -> list[np.ndarray] | list[tuple[np.ndarray, ...]]:
    """Return the results of every rank of one group with NumPy: an array each, or with k and v a tuple of three.

    `q`, `k` and `v` have one array per rank; `replica_group` is not read.
    """
    if k is not None and v is not None:
        exchanged = (
            exchange_heads_reference(arrays, None, ranks, None, None, sequences) for arrays in (q, k, v)
        )
        return list(zip(*exchanged))
    axis, divided_axis = (2, 1) if to_rows else (1, 2)
    joined = np.concatenate([array.reshape(sequences, -1, array.shape[1]) for array in q], axis=axis)
    shares = np.split(joined, ranks, axis=divided_axis)
    return [share.reshape(-1, share.shape[2]).copy() for share in shares]
