"""Programs that write parts of the repository from other parts, and the campaign that breaks the shipped kernels."""
