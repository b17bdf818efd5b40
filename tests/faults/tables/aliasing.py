"""Results that overlap operands of the same tile at other positions."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-ALIAS-SHIFTED", ramp(4, 8), answer=lambda x: np.concatenate([x[:, 0:1], x[:, 0:7]], 1))
def window_moved_by_one(x, sick):
    """A window moves by one column within its tile."""
    tile = nl.load(x)
    moved = tile if sick else nl.load(x)
    nisa.tensor_copy(dst=moved[:, 1:8], src=tile[:, 0:7])  # blamed
    return copied_out(moved)


@fault("NKW-ALIAS-SHIFTED", ramp(4, 8), answer=lambda x: np.cumsum(x, 1, dtype=np.float32))
def prefix_sum_in_place(x, sick):
    """Each step of a prefix sum adds the tile to itself, shifted by a power of two."""
    tile = nl.load(x)
    for step in (1, 2, 4):
        target = tile if sick else nl.ndarray((4, 8), dtype=nl.float32)
        if not sick:
            nisa.tensor_copy(dst=target[:, 0:step], src=tile[:, 0:step])
        nisa.tensor_tensor(  # blamed
            dst=target[:, step:8], data1=tile[:, step:8], data2=tile[:, 0 : 8 - step], op=nl.add
        )
        tile = target
    return copied_out(tile)


@fault("NKW-ALIAS-SHIFTED", ramp(32, 32), answer=lambda x: x.T)
def transposed_in_place(x, sick):
    """The Vector engine transposes a block of 32 x 32 onto itself."""
    tile = nl.load(x)
    turned = tile if sick else nl.ndarray((32, 32), dtype=nl.float32)
    nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.vector)  # blamed
    return copied_out(turned)


@fault("NKW-ALIAS-SHIFTED", ramp(4, 2, 8), answer=lambda x: np.stack([x[:, 1], x[:, 1] * 2], 1))
def second_plane_onto_both(x, sick):
    """One activation reads the second plane twice and writes both planes."""
    tile = nl.load(x)
    out = tile if sick else nl.ndarray((4, 2, 8), dtype=nl.float32)
    if sick:
        nisa.activation(  # blamed
            dst=tile, op=nl.copy, data=tile[:, 1:2].broadcast(1, 2), scale=1.0
        )
    else:
        nisa.activation(dst=out[:, 0], op=nl.copy, data=tile[:, 1], scale=1.0)
        nisa.activation(dst=out[:, 1], op=nl.copy, data=tile[:, 1], scale=2.0)
    return copied_out(out)
