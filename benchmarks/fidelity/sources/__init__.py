"""Kernels whose source is public, run from a clone as it stands and held against their published device times."""
