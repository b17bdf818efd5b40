"""State that sequences keep from step to step: pages of keys and values, and slots of recurrent states.

The engine allocates pages and slots here; these classes count references and know no arrays.
"""

from model.state.pages import BlockTable, PagePool, blocks_before, check_block_size, window_pages
from model.state.pool import Key, page_key, root_key
from model.state.slots import INTERVAL, SlotPool, WindowPool

__all__ = [
    "INTERVAL",
    "BlockTable",
    "Key",
    "PagePool",
    "SlotPool",
    "WindowPool",
    "blocks_before",
    "check_block_size",
    "page_key",
    "root_key",
    "window_pages",
]
