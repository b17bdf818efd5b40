"""One run against another: `time --against`."""

from simulate.profile.comparison.compare import Cause, Comparison
from simulate.profile.comparison.measured import Measured, measured, read_measured

__all__ = ["Cause", "Comparison", "Measured", "measured", "read_measured"]
