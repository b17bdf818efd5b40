"""Gives every test of this folder an empty replay cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulate.replay import ReplayCache
from simulate.world import replaying


@pytest.fixture(autouse=True)
def cache() -> Iterator[ReplayCache]:
    """Yield an empty replay cache, which launches outside a World use during the test."""
    empty = ReplayCache()
    with replaying(empty):
        yield empty
