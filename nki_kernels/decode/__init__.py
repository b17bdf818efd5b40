"""Helpers of the kernels of a decode step: tile sizes, tokens, caches, products, softmax."""
