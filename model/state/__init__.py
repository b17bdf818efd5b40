"""The state that sequences keep from step to step: pages of keys and values."""

from model.state.pages import Key, PagePool, check_block_size, page_key

__all__ = ["Key", "PagePool", "check_block_size", "page_key"]
