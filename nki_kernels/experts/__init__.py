"""Helpers of the kernels of experts: routing, layout and tokens of blocks, chunks of weights, products, sums."""
