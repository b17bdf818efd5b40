"""Predicted times of kernels whose source is public, run unchanged from a clone, against their published device times.

A source is one entry of a file of such times; `python -m benchmarks.fidelity --sources CLONE` runs them.
"""
