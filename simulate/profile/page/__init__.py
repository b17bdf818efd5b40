"""Profiles as one HTML page that needs nothing but itself."""

from simulate.profile.page.page import PageLaunch, PageStep, page, style, write_page

__all__ = ["PageLaunch", "PageStep", "page", "style", "write_page"]
