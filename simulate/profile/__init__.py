"""Profiles: where the time of a launch goes, as text and as a page."""

from simulate.profile.profile import Profile, profile
from simulate.profile.text import text

__all__ = ["Profile", "profile", "text"]
