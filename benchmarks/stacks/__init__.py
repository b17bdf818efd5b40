"""Predictions for whole models on a named serving stack, compared with published runs: `python -m benchmarks.stacks`.

A serving stack (`model.plan.stacks.Stack`) turns device times of this project's kernels into the times that a user of
that stack sees. Its constants are fitted to a half of the published runs; the other half checks them.
"""
