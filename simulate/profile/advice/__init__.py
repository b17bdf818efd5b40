"""Advice on a launch, each piece timed by scheduling a changed stream, and the vendor's bounds on its length."""

from simulate.profile.advice.advise import Advice, AdviceKind, make_advice
from simulate.profile.advice.bounds import Bound, bound_launch

__all__ = ["Advice", "AdviceKind", "Bound", "bound_launch", "make_advice"]
