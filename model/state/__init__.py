"""The state that sequences keep from step to step: pages of keys and values."""

from model.state.pages import (
    BlockTable,
    Key,
    PagePool,
    blocks_before,
    check_block_size,
    page_key,
    root_key,
    window_pages,
)

__all__ = [
    "BlockTable",
    "Key",
    "PagePool",
    "blocks_before",
    "check_block_size",
    "page_key",
    "root_key",
    "window_pages",
]
