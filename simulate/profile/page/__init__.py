"""Profiles as a single HTML page that needs no other files."""

from simulate.profile.page.page import PageLaunch, PageStep, make_page, read_style, write_page

__all__ = ["PageLaunch", "PageStep", "make_page", "read_style", "write_page"]
