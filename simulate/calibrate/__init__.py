"""Calibration: which numbers of a hardware record measured times of kernels contradict, and by how much."""
