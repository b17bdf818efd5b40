"""The listing."""

from __future__ import annotations

from simulate.isa.enums import Engine
from simulate.timing import listing, schedule
from tests.timing.streams import EXACT, Builder, dma_cost


def test_a_listing_shows_every_slice_in_order_of_start() -> None:
    build = Builder()
    build.dma((), (), dma_cost(busy=40.0, transfer=200.0), Engine.sync)
    timeline = schedule(build.stream, EXACT)
    assert listing(build.stream, timeline) == (
        "    start us       end us     ready us  track                  event\n"
        "      0.0000       0.0080       0.3720  Sync                   dma_copy #0\n"
        "      0.1080       0.3080       0.3720  DMA q Sync             dma_copy #0\n"
    )
