"""Profiles of launches, which attribute time to lines, engines and causes; as text and as an HTML page."""

from simulate.profile.profile import Profile, profile
from simulate.profile.text import text

__all__ = ["Profile", "profile", "text"]
