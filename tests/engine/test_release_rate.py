"""How fast places become free is measured while places are taken, from the last ends."""

from __future__ import annotations

from model.engine.release_rate import ReleaseRate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rate_is_that_of_the_ends_since_the_first_place_was_taken() -> None:
    clock = Clock()
    pace = ReleaseRate(clock)
    assert pace.estimate_seconds(1) is None
    pace.take(4)
    pace.take(2)
    clock.now = 3.0
    pace.free(2, has_begun=False)
    assert pace.estimate_seconds(1) is None
    pace.free(2)
    assert pace.estimate_seconds(1) == 1.5
    clock.now = 8.0
    pace.free(2)
    assert pace.estimate_seconds(4) == 8.0


def test_idle_time_does_not_count_and_the_last_rate_holds_until_the_next_end() -> None:
    clock = Clock()
    pace = ReleaseRate(clock)
    pace.take(1)
    clock.now = 2.0
    pace.free(1)
    clock.now = 1000.0
    pace.take(1)
    assert pace.estimate_seconds(1) == 2.0
    clock.now = 1001.0
    pace.free(1)
    assert pace.estimate_seconds(1) == 1.0


def test_only_the_last_32_ends_count() -> None:
    clock = Clock()
    pace = ReleaseRate(clock)
    pace.take(65)
    for _ in range(32):
        clock.now += 10
        pace.free(1)
    assert pace.estimate_seconds(1) == 10
    for _ in range(31):
        clock.now += 1
        pace.free(1)
    assert pace.estimate_seconds(32) == 31 + 10
    clock.now += 1
    pace.free(1)
    assert pace.estimate_seconds(32) == 32


def test_places_that_become_free_at_once_tell_no_rate() -> None:
    pace = ReleaseRate(Clock())
    pace.take(1)
    pace.free(1)
    assert pace.estimate_seconds(1) is None
