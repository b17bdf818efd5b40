"""Comparison of a run with an earlier run: `time --against`."""

from simulate.profile.comparison.compare import Cause, Comparison
from simulate.profile.comparison.measured import Measured, read_measured, sum_profiles

__all__ = ["Cause", "Comparison", "Measured", "read_measured", "sum_profiles"]
