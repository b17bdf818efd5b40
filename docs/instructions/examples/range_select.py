"""Keep the scores of a window of keys, and find the maximum of each row."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def select_window(scores, first, last):
    """Keep scores[row, key] where first[row] <= key < last[row]."""
    rows = scores.shape[0]
    tile = nl.load(scores)
    largest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.range_select(
        dst=tile,
        on_true_tile=tile,
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=nl.load(first),
        bound1=nl.load(last),
        reduce_res=largest,
    )
    out = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, largest)
    return out


scores = np.arange(16, dtype=np.float32).reshape(2, 8)
first, last = np.array([[0], [2]], dtype=np.float32), np.array([[3], [6]], dtype=np.float32)
np.testing.assert_array_equal(select_window(scores, first, last), [[2], [13]])
