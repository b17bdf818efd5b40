"""Predicted times of the shipped kernels against the least time that a chip allows: `python -m benchmarks.kernels`.

A work is a part of a model's step, such as an attention block, with the launches that do it. Its floor is the least
time that its operations and bytes take at the peaks of the chip.
"""
