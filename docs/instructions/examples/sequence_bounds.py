"""Find where the segments of a packed sequence begin and end."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def segment_bounds(ids):
    """Return [2, N]: the first index of each element's segment, and one past its last."""
    columns = ids.shape[1]
    bounds = nl.ndarray((1, 2, columns), dtype=nl.int32, buffer=nl.sbuf)
    nisa.sequence_bounds(dst=bounds, segment_ids=nl.load(ids))
    out = nl.ndarray((1, 2, columns), dtype=nl.int32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=bounds)
    return out


ids = np.array([[1, 1, 1, 2, 2, 3]], dtype=np.int32)
np.testing.assert_array_equal(segment_bounds(ids), [[[0, 0, 0, 3, 3, 5], [3, 3, 3, 5, 5, 6]]])
