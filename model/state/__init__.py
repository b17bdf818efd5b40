"""State that sequences keep from step to step: pages of keys and values, and slots of recurrent states.

The engine allocates pages and slots here; these classes count references and know no arrays.
"""

from model.state.pages import BlockTable, PagePool, check_block_size, count_blocks_before, count_window_pages
from model.state.pool import Key, compute_page_key, compute_root_key
from model.state.slots import INTERVAL, SlotPool, WindowPool

__all__ = [
    "INTERVAL",
    "BlockTable",
    "Key",
    "PagePool",
    "SlotPool",
    "WindowPool",
    "check_block_size",
    "compute_page_key",
    "compute_root_key",
    "count_blocks_before",
    "count_window_pages",
]
