"""Parts of the kernels whose state has one size however long a sequence is."""
