"""Select by a mask and find the maximum of each row."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def masked_maximum(x, mask):
    rows = x.shape[0]
    tile = nl.load(x)
    largest = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.select_reduce(
        dst=tile,
        predicate=nl.load(mask),
        on_true=tile,
        on_false=-1e30,
        reduce_res=largest,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    out = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, largest)
    return out


x = np.arange(12, dtype=np.float32).reshape(3, 4)
mask = (x % 4 < 2).astype(np.uint8)
np.testing.assert_array_equal(masked_maximum(x, mask), [[1], [5], [9]])
