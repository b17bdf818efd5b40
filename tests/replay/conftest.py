"""An empty replay cache for every test of this folder."""

from __future__ import annotations

import pytest

from simulate.replay import launch as replayed_launches
from simulate.replay.cache import ReplayCache


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> ReplayCache:
    """The cache that launches use: an empty one."""
    empty = ReplayCache()
    monkeypatch.setattr(replayed_launches, "REPLAYS", empty)
    return empty


@pytest.fixture(params=["plans kept", "planned again"])
def small_or_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are recorded as those of small arguments are, and as those of large ones are."""
    if request.param == "planned again":
        monkeypatch.setattr(replayed_launches, "_LARGE_BYTES", 0)
