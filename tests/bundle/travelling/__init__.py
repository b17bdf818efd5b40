"""Kernels that travel in the tests."""
