"""Predictions that name a serving stack, against published runs of whole models: `python -m benchmarks.stacks`."""
