"""Mutation testing of the shipped kernels: each mutant is one small mechanical change, and checks should notice it.

See README.md. `operators` generates the mutants, `cases` has the inputs, `judge` runs a mutant, `campaign` runs many.
"""
