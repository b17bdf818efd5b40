"""Predicted times of kernels against published measurements: `python -m benchmarks.fidelity --measurements FILE`."""
