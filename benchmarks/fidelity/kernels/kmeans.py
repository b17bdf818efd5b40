"""The assignment step of k-means: the nearest of K centroids for each point, by matmul and arg-max."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, load, load_repeated, psum, sbuf


def assign(points_t, centroids_t, norms):
    """Return the indices of the eight nearest centroids of each point, uint32 [N, 8], the nearest first.

    For each 128 points, scores are the products with the centroids plus `norms`, added by the Vector engine on the
    way out of PSUM. points_t is [D, N] and centroids_t [D, K]; norms [1, K] are minus half of each centroid's squared
    norm.
    """
    depth, count = points_t.shape
    centroids = centroids_t.shape[1]
    out = nl.ndarray((count, 8), dtype=nl.uint32, buffer=nl.shared_hbm)
    offsets = load_repeated(norms, PARTITIONS)
    right = [load(centroids_t[k : k + PARTITIONS, :]) for k in range(0, depth, PARTITIONS)]
    for row in range(0, count, PARTITIONS):
        left = [
            load(points_t[k : k + PARTITIONS, row : row + PARTITIONS]) for k in range(0, depth, PARTITIONS)
        ]
        scores = sbuf((PARTITIONS, centroids), nl.float32)
        for column in range(0, centroids, BANK):
            bank = psum((PARTITIONS, BANK))
            for k in range(len(left)):
                moving = right[k][:, column : column + BANK]
                nisa.nc_matmul(dst=bank, stationary=left[k], moving=moving, accumulate=k > 0)
            bank_columns = slice(column, column + BANK)
            nisa.tensor_tensor(
                dst=scores[:, bank_columns], data1=bank, data2=offsets[:, bank_columns], op=nl.add
            )
        best = sbuf((PARTITIONS, 8), nl.float32)
        nisa.max8(dst=best, src=scores)
        indices = sbuf((PARTITIONS, 8), nl.uint32)
        nisa.nc_find_index8(dst=indices, data=scores, vals=best)
        nisa.dma_copy(dst=out[row : row + PARTITIONS, :], src=indices)
    return out
