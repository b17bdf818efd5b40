"""Change of a model's loss by caches of 8, 4 and 2 bits: `python -m benchmarks.caches`."""
