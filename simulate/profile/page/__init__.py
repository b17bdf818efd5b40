"""Profiles as one HTML page that needs nothing but itself."""

from simulate.profile.page.page import Part, Step, page, write_page

__all__ = ["Part", "Step", "page", "write_page"]
