"""Hostile and normal clients together for ten minutes: no token is lost, and the memory stays level."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from benchmarks.speed.hostile import soak

SECONDS, WARM_SECONDS = 600, 60
GROWTH_MIB = 64
"""More than the memory of one grammar or one text on its way, and less than ten minutes of any leak would show."""


@pytest.mark.deep
def test_ten_minutes_of_hostile_clients_lose_nothing_and_memory_stays_level() -> None:
    rounds = list(soak(SECONDS))
    assert sum(done.streams.lost for done in rounds) == 0
    assert set(rounds[-1].refused) == {400}
    memory = [done.memory_mib for done in rounds if done.seconds > WARM_SECONDS]
    quarter = len(memory) // 4
    assert quarter > 0
    assert min(memory[-quarter:]) <= min(memory[:quarter]) + GROWTH_MIB
