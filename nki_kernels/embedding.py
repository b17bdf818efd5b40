"""embedding: the rows of a table that token ids name, scaled, plus those of a table of positions or given ones.

Dimensions:
    T   tokens; V rows of the table (the vocabulary); H its width (the hidden size); P rows of the table of positions.

Arguments:
    ids        [T, 1] @ HBM, int32, 0 <= id < V
    table      [V, H] @ HBM, float32 or bfloat16
    dtype      compile-time nl.float32 or nl.bfloat16: the activations'
    scale      compile-time float, of the rows of tokens
    positions  [T, 1] @ HBM, int32, 0 <= position < P, or None
    position_table  [P, H] @ HBM, float32 or bfloat16, or None
    replica_group   nki.collectives.ReplicaGroup over whose ranks the rows of the table are divided, or None. Then table
               is this rank's part, [V, H], ids number its rows, and an id of V or more stands for a row of another rank
    added      [T, H] @ HBM, float32 or bfloat16: a row to add for every token, or None; not beside positions
    returns x  [T, H] @ HBM, dtype, the same on every rank of a group

Layout
    Tokens on the partitions: an indirect DMA fetches one row per partition, by the row number in that partition of
    the id tile. The same DMA casts to dtype.

Tiling
    for 128 tokens: load ids, gather rows, scale, gather or load the rows to add, add them, store.
    Over ranks the rows that a rank does not hold stay zeros, which are not read from its table, and an all-reduce from
    SBUF to SBUF adds up those of all ranks before they are scaled.

Limits:
    H up to 32768 (a row of float32 in one partition), up to 16384 with a scale, rows to add, or over ranks.
    An id or a position outside of its table is refused where addresses are checked; over ranks an id is not, since no
    rank knows the parts of others: a row that no rank holds is zeros.

Cost
    HBM: ids once, T * H elements of each table or of added rows read, T * H of dtype written. Three DMAs for 128
    tokens. Bound: DMA latency for one token. Over ranks one all-reduce of the rows in addition, in dtype, in float32 if
    they are scaled.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS, expect_dims, load

cores = (1,)


@nki.jit
def embedding(
    ids,
    table,
    dtype=nl.float32,
    scale=1.0,
    positions=None,
    position_table=None,
    replica_group=None,
    added=None,
):
    """Return scale * table[ids] in `dtype`, plus position_table[positions] or `added`: [T, H] in new shared HBM.

    Over ranks that divide the table, each rank passes its rows, and gets the sum. AssertionError if shapes do
    not fit together, or if both positions and added rows are given.
    """
    expect_dims(2, ids, "ids [T, 1]")
    expect_dims(2, table, "table [V, H]")
    tokens = ids.shape[0]
    width = table.shape[1]
    assert ids.shape == (tokens, 1), f"ids have to be [T, 1], not {ids.shape}"
    assert (positions is None) == (position_table is None), (
        "one of positions and position_table is None: give both or neither"
    )
    if positions is not None:
        expect_dims(2, position_table, "position_table [P, H]")
        assert positions.shape == (tokens, 1), f"positions have to be [{tokens}, 1], not {positions.shape}"
        assert position_table.shape[1] == width, (
            f"table has rows of {width}, position_table of {position_table.shape[1]}; both need one width"
        )
    if added is not None:
        assert positions is None, "positions and added are both given: pass None for one of them"
        assert added.shape == (tokens, width), f"added has to be [{tokens}, {width}], not {added.shape}"
    x = nl.ndarray((tokens, width), dtype=dtype, buffer=nl.shared_hbm)
    for first in range(0, tokens, PARTITIONS):
        last = min(tokens, first + PARTITIONS)
        changed = scale != 1.0 or positions is not None or added is not None
        tile = gather_table_rows(table, ids[first:last, :], nl.float32 if changed else dtype, replica_group)
        if changed:
            result = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
            other = None
            if positions is not None:
                other = gather_table_rows(position_table, positions[first:last, :], nl.float32)
            elif added is not None:
                other = load(added[first:last, :], added.dtype)
            if other is None:
                nisa.tensor_scalar(dst=result, data=tile, op0=nl.multiply, operand0=scale)
            else:
                nisa.scalar_tensor_tensor(
                    dst=result, data=tile, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=other
                )
            tile = result
        nisa.dma_copy(dst=x[first:last, :], src=tile)
    return x


def gather_table_rows(table, numbers, dtype, replica_group=None):
    """Gather rows of `table` [V, H] @ HBM into SBUF by their indices: [rows, H] in `dtype`.

    With a replica group, whose ranks divide the table, indices beyond this rank's rows count as zeros, and
    the rows of all ranks are added. Without one such an index is an error.

    Args:
        numbers: indices of the rows, [rows, 1] int32 @ HBM.
    """
    rows = numbers.shape[0]
    width = table.shape[1]
    row_numbers = load(numbers, nl.int32)
    tile = nl.ndarray((rows, width), dtype=dtype, buffer=nl.sbuf)
    source = table.ap(pattern=[[width, rows], [1, width]], vector_offset=row_numbers)
    if replica_group is None:
        nisa.dma_copy(dst=tile, src=source)
        return tile
    nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=tile, src=source, oob_mode=nisa.oob_mode.skip)
    total = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
    ncc.all_reduce(srcs=[tile], dsts=[total], replica_group=replica_group, op=nl.add)
    return total


def embedding_reference(
    ids: np.ndarray,
    table: np.ndarray,
    dtype: object = np.float32,
    scale: float = 1.0,
    positions: np.ndarray | None = None,
    position_table: np.ndarray | None = None,
    replica_group: object = None,
    added: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the rows with NumPy: [T, H] in `dtype`.

    For several ranks pass the whole table, and ids that count its rows.
    """
    rows = table[ids[:, 0]]
    if scale != 1.0:
        rows = widened(rows) * widened(rows).dtype.type(scale)
    if positions is not None and position_table is not None:
        rows = widened(rows) + widened(position_table[positions[:, 0]])
    if added is not None:
        rows = widened(rows) + widened(added)
    return rows.astype(np.dtype(dtype))
