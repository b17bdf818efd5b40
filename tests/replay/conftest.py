"""An empty replay cache for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulate.replay import ReplayCache
from simulate.world import replaying


@pytest.fixture(autouse=True)
def cache() -> Iterator[ReplayCache]:
    """The cache of the launches that a test makes outside a World: an empty one."""
    empty = ReplayCache()
    with replaying(empty):
        yield empty
