"""Rewriting a recorded program: fewer and larger numpy calls that give the same values."""

from simulate.replay.fusion.execute import Fused, FusionReport
from simulate.replay.fusion.graph import NotFused

__all__ = ["Fused", "FusionReport", "NotFused"]
