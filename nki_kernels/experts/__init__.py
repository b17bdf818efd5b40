"""The parts of the kernels of experts: weights at run-time addresses, products, places of rows, lists, sums."""
