"""The parts of the kernels of experts: choice, blocks, weights at run-time addresses, products, places, lists, sums."""
