"""Mask the future of causal attention scores."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def mask_future(scores):
    """Keep scores[query, key] where query - key >= 0."""
    keys = scores.shape[1]
    tile = nl.load(scores)
    nisa.affine_select(
        dst=tile,
        pattern=[[-1, keys]],
        channel_multiplier=1,
        on_true_tile=tile,
        on_false_value=-1e30,
        cmp_op=nl.greater_equal,
    )
    out = nl.ndarray(scores.shape, dtype=scores.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


scores = np.arange(16, dtype=np.float32).reshape(4, 4)
visible = np.tril(np.ones((4, 4), dtype=bool))
np.testing.assert_array_equal(mask_future(scores), np.where(visible, scores, np.float32(-1e30)))
