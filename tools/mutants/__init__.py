"""Mutants: the shipped kernels broken mechanically, one small change each, to see what notices. See README.md."""
