"""The state that sequences keep from step to step: pages of keys and values."""

from model.state.pages import Key, PagePool, page_key

__all__ = ["Key", "PagePool", "page_key"]
