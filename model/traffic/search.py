"""The rate at which a service level breaks, by bisection, and latencies at rates around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.traffic.deployment import Deployment
from model.traffic.record import Life
from model.traffic.report import ServiceLevel, Summary, summary
from model.traffic.workload import SECOND_NS, Workload

QUARTER = 250
SEARCHED = 4 * QUARTER
"""Requests for each replica that decodes, at each rate that the search for the breaking rate tries."""
ALONE = 50
"""Requests that show whether requests alone keep to the service level."""
SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
"""Of the breaking rate: the rates of a curve."""

PRECISION = 0.02
"""Of the rate that is found: its distance to one at which the level does not hold."""

_MOST_HALVINGS = 40


def breaking_rate(holds: Callable[[float], bool], most: float) -> float | None:
    """The highest rate tried at which a service level holds, at most 2 % below one at which it does not.

    At the rate `most` it does not hold. None where it holds at no rate down to 2^-40 of that.
    """
    low = high = most
    for _ in range(_MOST_HALVINGS):
        low, high = low / 2, low
        if holds(low):
            break
    else:
        return None
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class RatePoint:
    """What a stream of requests at a rate sees, in requests per second."""

    rate: float
    run: Summary


def rate_that_breaks(deployment: Deployment, offered: Workload, level: ServiceLevel) -> float | None:
    """The rate at which a level breaks on all replicas, found with one unit of them; None where it never holds.

    Requests that come faster than users get answers who never pause wait longer and longer, so the level breaks there
    however short the run is.
    """
    sample, decoding = _sample(offered, deployment), deployment.decoding_of_unit

    def served(workload: Workload) -> list[Life]:
        return [life for record in deployment.serve_unit(workload) for life in record.lives]

    def by_users(users: int, requests: int) -> Workload:
        return Workload(sample.queries[:requests], users=users)

    if not level.holds(served(by_users(1, ALONE))):
        return None
    quarter = QUARTER * decoding
    users = min(deployment.limits.max_num_seqs * decoding, quarter)
    ends = sorted(life.end_ns for life in served(by_users(users, len(sample.queries))))
    # The middle half of the run: neither its first requests, which begin together, nor the last ones.
    most = 2 * quarter * SECOND_NS / (ends[3 * quarter] - ends[quarter])
    found = breaking_rate(lambda rate: level.holds(served(sample.at_rate(rate))), most)
    return None if found is None else found * deployment.units


def latencies(
    deployment: Deployment, offered: Workload, level: ServiceLevel, breaks: float
) -> list[RatePoint]:
    """Latencies at rates around the breaking one, on one unit of the replicas; the rates are those of all."""
    sample, setup, units = _sample(offered, deployment), deployment.setup, deployment.units

    def point(rate: float) -> RatePoint:
        records = deployment.serve_unit(sample.at_rate(rate / units))
        return RatePoint(rate, summary(records, level, deployment.pages, setup.prefill_replicas // units))

    return [point(share * breaks) for share in SHARES]


def _sample(offered: Workload, deployment: Deployment) -> Workload:
    """A unit's share of a workload; of a short one that of its requests over and over."""
    units, wanted = deployment.units, SEARCHED * deployment.decoding_of_unit
    first, last = offered.arrivals_ns[0], offered.arrivals_ns[-1]
    between = (last - first) // (len(offered.queries) - 1)
    rounds = -(-wanted * units // len(offered.queries))
    times = [
        each - first + number * (last - first + between)
        for number in range(rounds)
        for each in offered.arrivals_ns
    ]
    share = Workload(offered.queries * rounds, tuple(times)).of_replica(0, units)
    assert share is not None, "the first unit has the first request"
    return share.first(wanted)
