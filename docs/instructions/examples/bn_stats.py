"""Compute the mean and variance of rows that are longer than 512 elements."""

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np


@nki.jit
def mean_and_variance(x):
    rows, columns = x.shape
    tile = nl.load(x)
    chunks = columns // 512
    statistics = nl.ndarray((rows, chunks * 6), dtype=nl.float32, buffer=nl.sbuf)
    for chunk in range(chunks):
        nisa.bn_stats(
            dst=statistics[:, 6 * chunk : 6 * chunk + 6],
            data=tile[:, 512 * chunk : 512 * chunk + 512],
        )
    moments = nl.ndarray((rows, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_aggr(dst=moments, data=statistics)
    out = nl.ndarray((rows, 2), dtype=nl.float32, buffer=nl.shared_hbm)
    nl.store(out, moments)
    return out


x = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
expected = np.stack([x.mean(axis=1), x.var(axis=1)], axis=1)
np.testing.assert_allclose(mean_and_variance(x), expected, rtol=1e-4, atol=1e-5)
