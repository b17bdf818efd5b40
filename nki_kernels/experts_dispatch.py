"""experts_dispatch: rows and choices of the tokens of all ranks among which whole experts, or rows, are divided.

    rows[s * T + t]    = n[t] of rank s
    ids[s * T + t, k]  = the number among this rank's experts of choice k of that token, or `experts` of another rank's
    weights[…]         = its weight, 0 of another rank's

Where ranks cut rows and each has a part of every expert (sequence parallelism), choices stay as they are.

Dimensions:
    T   tokens of each rank; N ranks; H hidden size; K experts of a token.

Arguments:
    n              [T, H] @ HBM, float32 or bfloat16: this rank's rows, as `router` returns them
    weights        [T, K] @ HBM, float32
    ids            [T, K] @ HBM, int32: numbers among the experts of all ranks
    experts        compile-time int: experts of each rank; without `first` nothing depends on it
    replica_group  nki.collectives.ReplicaGroup
    ranks          compile-time int N: the length of this rank's list
    first          [1, 1] @ HBM, int32: the number of this rank's first expert; or None: choices stay as they are
    returns rows   [N * T, H] @ HBM, n's dtype
            own_weights, own_ids  [N * T, K] @ HBM, float32 and int32

Layout and tiling:
    Rows go from HBM to HBM. Choices are compared in SBUF, 128 tokens on the partitions.

Cores
    On a logical core of two physical ones the first does the work.

Limits:
    Those of HBM; up to 2^24 experts.

Cost
    HBM: n twice, the rows of all ranks twice. All tokens may choose experts of one rank, so each rank has room for the
    rows of all: none is ever dropped. With that room an all-to-all moves the bytes of an all-gather, out of N copies
    of n. So this is an all-gather; results come back by an all-to-all (`experts_combine`). Bound: the collective.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.tiles import PARTITIONS, cast, expect_dims, filled, load, load_repeated, ranges

cores = (1,)


@nki.jit
def experts_dispatch(n, weights, ids, experts, replica_group, ranks, first=None):
    """Gather the rows of all ranks, and keep the choices of this rank's experts.

    Returns, in shared HBM, rows [N * T, H], weights and ids [N * T, K]. ids count this rank's experts; a
    choice of another rank's expert has the id `experts` and weight 0. With first = None weights and ids are
    gathered unchanged. AssertionError if shapes do not fit together, or `experts` is below 1.
    """
    expect_dims(2, n, "n [T, H]")
    expect_dims(2, ids, "ids [T, K]")
    tokens = n.shape[0]
    assert ids.shape[0] == tokens, f"ids are of {ids.shape[0]} tokens, n of {tokens}; both have to be equal"
    assert weights.shape == ids.shape, (
        f"weights are {weights.shape}, ids are {ids.shape}; both need one shape"
    )
    if first is not None:
        assert first.shape == (1, 1), f"first has to be [1, 1], not {first.shape}"
    assert experts >= 1, f"experts is {experts}; every rank has at least one: give 1 or more"
    outputs = []
    for source in (n, weights, ids):
        outputs.append(
            nl.ndarray((ranks * tokens, source.shape[1]), dtype=source.dtype, buffer=nl.shared_hbm)
        )
    if nl.program_id(0) > 0:
        return outputs[0], outputs[1], outputs[2]
    gathered = gather_arrays([n, weights, ids], replica_group, ranks)
    nisa.dma_copy(dst=outputs[0], src=gathered[0])
    if first is None:
        nisa.dma_copy(dst=outputs[1], src=gathered[1])
        nisa.dma_copy(dst=outputs[2], src=gathered[2])
        return outputs[0], outputs[1], outputs[2]
    first_expert = cast(load_repeated(first, PARTITIONS), nl.float32)
    for start, end in ranges(0, ranks * tokens):
        local_weights, local_ids = select_choices(
            gathered[1][start:end, :], gathered[2][start:end, :], first_expert[0 : end - start, :], experts
        )
        nisa.dma_copy(dst=outputs[1][start:end, :], src=local_weights)
        nisa.dma_copy(dst=outputs[2][start:end, :], src=local_ids)
    return outputs[0], outputs[1], outputs[2]


def gather_arrays(sources, replica_group, ranks):
    """Return the arrays [rows, columns] of all ranks, each as [ranks * rows, columns] in private HBM, in rank order.

    Args:
        sources: this rank's rows, weights and ids in HBM, which name the buffers in this order.
        ranks: number of ranks of the group.
    """
    names = ("rows", "weights", "ids")
    # A collective may not touch arguments and results of a kernel, hence the copies.
    local_arrays, gathered = [], []
    for i in range(len(sources)):
        (rows, columns), dtype = sources[i].shape, sources[i].dtype
        for arrays, count, prefix in ((local_arrays, rows, "own"), (gathered, ranks * rows, "all")):
            arrays.append(
                nl.ndarray((count, columns), dtype=dtype, buffer=nl.private_hbm, name=f"{prefix}_{names[i]}")
            )
        nisa.dma_copy(dst=local_arrays[i], src=sources[i])
    ncc.all_gather(srcs=local_arrays, dsts=gathered, replica_group=replica_group, collective_dim=0)
    return gathered


def select_choices(weights, ids, first, experts):
    """Return (weights, ids) of some choices, float32 and int32 in SBUF, with ids counted from expert `first` on.

    Choices of experts outside of first … first + experts - 1 get the id `experts` and weight 0, even for a
    weight of NaN.

    Args:
        weights: [row, K] @ HBM, as `ids`.
        first: the same expert index on each row, [row, 1] float32 in SBUF.
    """
    numbers = load(ids, nl.float32)
    nisa.tensor_scalar(dst=numbers, data=numbers, op0=nl.subtract, operand0=first)
    in_range = nl.ndarray(ids.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=in_range, data=numbers, op0=nl.greater_equal, operand0=0.0)
    nisa.scalar_tensor_tensor(
        dst=in_range, data=numbers, op0=nl.less, operand0=float(experts), op1=nl.multiply, operand1=in_range
    )
    chosen = nl.ndarray(ids.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=chosen, src=in_range)
    local_weights = filled(ids.shape, 0.0)
    # A copy leaves a 0 for other ranks even if the weight is NaN, which a product with 0 would keep.
    nisa.tensor_copy_predicated(dst=local_weights, src=load(weights, nl.float32), predicate=chosen)
    numbers_or_absent = filled(ids.shape, float(experts))
    nisa.tensor_copy_predicated(dst=numbers_or_absent, src=numbers, predicate=chosen)
    local_ids = nl.ndarray(ids.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=local_ids, src=numbers_or_absent)
    return local_weights, local_ids


def experts_dispatch_reference(
    n: list[np.ndarray],
    weights: list[np.ndarray],
    ids: list[np.ndarray],
    experts: int,
    replica_group: object,
    ranks: int,
    first: list[np.ndarray] | list[None] | None = None,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Compute (rows, weights, ids) with NumPy for every rank of one group: a list of tuples.

    Lists have one array per rank. `replica_group` and `ranks` are not read.
    """
    rows, every_weight, every_id = (np.concatenate(arrays) for arrays in (n, weights, ids))
    results = []
    for number in first or [None] * len(n):
        if number is None:
            results.append((rows, every_weight, every_id))
            continue
        local = every_id - number[0, 0]
        in_range = (local >= 0) & (local < experts)
        chosen = np.where(in_range, local, experts).astype(np.int32)
        results.append((rows, np.where(in_range, every_weight, np.float32(0.0)), chosen))
    return results
