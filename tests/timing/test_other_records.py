"""Launches timed by another record of their chip, against launches of that record."""

from __future__ import annotations

import math
import random

import pytest

from simulate.calibrate.numbers import change_record, list_parameters
from simulate.hardware import TARGETS, hardware
from simulate.hardware.overlay import use_stand_in
from simulate.run import Launch
from simulate.timing import Reading, dependences, list_deciding_numbers, schedule
from tests.timing import kernels


def launches(target: str) -> list[Launch]:
    """Launch products with a table function, one core with DMAs of two queues and tables of several, and two ranks."""
    return [
        kernels.dry(kernels.matmul_exp, kernels.zeros(256, 256), kernels.zeros(256, 512), target=target),
        kernels.dry(
            kernels.rmsnorm_swiglu,
            kernels.zeros(128, 512),
            kernels.zeros(1, 512),
            *(kernels.zeros(512, 512, kernels.BF16) for _ in range(2)),
            target=target,
        ),
        kernels.dry(kernels.summed, kernels.zeros(128, 64), ranks=2, target=target),
    ]


def lengths(done: Launch) -> list[float]:
    return [schedule(done.streams, done.hardware, reading).length_ns for reading in Reading]


@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_by_another_record_is_that_of_launching_by_it(target: str) -> None:
    chip, generator = hardware(target), random.Random(7)
    other = change_record(
        chip, {parameter: math.log(generator.uniform(0.5, 2.0)) for parameter in list_parameters(chip)}
    )
    with use_stand_in(other):
        wanted = launches(target)
    for done, new in zip(launches(target), wanted, strict=True):
        again = done.on(other)
        assert again.hardware is new.hardware
        for stream, expected in zip(again.streams, new.streams, strict=True):
            assert [event.cost for event in stream] == [event.cost for event in expected]
        assert lengths(again) == lengths(new) != lengths(done)
        assert lengths(done.on(chip)) == lengths(done)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_records_that_decide_alike_give_equal_schedules(target: str) -> None:
    chip = hardware(target)
    for done in launches(target):
        before, decided, alike = lengths(done), list_deciding_numbers(done.streams, done.hardware), 0
        for number in list_parameters(chip):
            other = done.on(change_record(chip, {number: 0.25 * number.slower}))
            if list_deciding_numbers(other.streams, other.hardware) == decided:
                assert lengths(other) == before, number
                alike += 1
        assert 0 < alike < len(list_parameters(chip))


def test_waits_for_room_are_worked_out_once_and_are_part_of_no_other_reading() -> None:
    done = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 1024), kernels.zeros(256, 1024))
    waits = dependences(done.streams, every_read=True)
    first = [schedule(done.streams, done.hardware, reading, waits).length_ns for reading in Reading]
    assert len(waits.with_room) == 1
    assert [
        schedule(done.streams, done.hardware, reading, waits).length_ns for reading in reversed(Reading)
    ] == first[::-1]
    assert len(waits.with_room) == 1
