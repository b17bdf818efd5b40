"""An empty replay cache for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulate.replay import ReplayCache
from simulate.world import replaying


@pytest.fixture(autouse=True)
def cache() -> Iterator[ReplayCache]:
    """Yield an empty replay cache, which the test's launches outside a World use."""
    empty = ReplayCache()
    with replaying(empty):
        yield empty
