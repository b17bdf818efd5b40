"""The assignment step of k-means: for each point [D] the nearest of K centroids, by matmul and arg-max."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, load, psum, sbuf


def assign(points_t, centroids_t, resident_rows=128):
    """points_t [D, N], centroids_t [D, K]: per 128 points all scores, then the Vector engine's max and its index."""
    depth, count = points_t.shape
    centroids = centroids_t.shape[1]
    out = nl.ndarray((count, 8), dtype=nl.uint32, buffer=nl.shared_hbm)
    right = [load(centroids_t[k : k + PARTITIONS, :]) for k in range(0, depth, PARTITIONS)]
    for row in range(0, count, PARTITIONS):
        left = [load(points_t[k : k + PARTITIONS, row : row + PARTITIONS]) for k in range(0, depth, PARTITIONS)]
        scores = sbuf((PARTITIONS, centroids), nl.float32)
        for column in range(0, centroids, BANK):
            bank = psum((PARTITIONS, BANK))
            for k in range(len(left)):
                moving = right[k][:, column : column + BANK]
                nisa.nc_matmul(dst=bank, stationary=left[k], moving=moving, accumulate=k > 0)
            nisa.activation(dst=scores[:, column : column + BANK], op=nl.copy, data=bank)
        best = sbuf((PARTITIONS, 8), nl.float32)
        nisa.max8(dst=best, src=scores)
        places = sbuf((PARTITIONS, 8), nl.uint32)
        nisa.nc_find_index8(dst=places, data=scores, vals=best)
        nisa.dma_copy(dst=out[row : row + PARTITIONS, :], src=places)
    return out
