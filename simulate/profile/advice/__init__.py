"""Advice on a launch, each piece checked by what-if, and the vendor's bounds on its length."""

from simulate.profile.advice.advise import Advice, Kind, advice
from simulate.profile.advice.bounds import Bound, bounds

__all__ = ["Advice", "Bound", "Kind", "advice", "bounds"]
