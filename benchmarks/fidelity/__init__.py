"""Comparison of predicted kernel times with published measurements.

`python -m benchmarks.fidelity --measurements FILE` runs it. An entry is one published measurement. A builder
(`builders/`) turns the words of an entry into a case: a kernel of `kernels/` with its arguments, and the quantity to
read from its timeline. With `--sources`, kernels of clones are launched instead (`sources/`).
"""
