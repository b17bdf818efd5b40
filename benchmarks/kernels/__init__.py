"""Predicted times of the shipped kernels against the least time that a chip allows."""
