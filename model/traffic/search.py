"""The rate of requests at which a service level breaks, found by bisection, and latencies at rates around it.

A deployment is divided into equal units: single replicas or, if some replicas only compute prompts, the smallest groups
with the same share of such replicas. One unit is simulated, and rates are multiplied by the number of units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.plan.service_level import ServiceLevel
from model.traffic.deployment import Deployment
from model.traffic.record import Timeline
from model.traffic.report import Summary, summarize
from model.traffic.workload import SECOND_NS, Workload

QUARTER = 250
SAMPLE = 4 * QUARTER
"""Requests for each decoding replica, at each rate that the search tries."""
LONE_REQUESTS = 50
"""Requests, one at a time, that show whether a request that is alone keeps the service level."""
SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
"""Rates of a curve, as shares of the breaking rate."""

PRECISION = 0.02
"""Relative distance of the breaking rate to a rate at which the level does not hold."""

_MOST_HALVINGS = 40


def bisect_rate(holds: Callable[[float], bool], limit: float) -> float | None:
    """Return a rate at which a level holds that is at most 2 % below a tried rate at which it does not hold.

    Args:
        holds: Returns whether the level holds at a rate.
        limit: A rate at which the level does not hold; only lower rates are tried.

    Returns:
        The rate, or None if the level holds at none of limit/2, limit/4, … down to 2^-40 of the limit.
    """
    low = high = limit
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
    """Summary of the run of one unit, at the `rate` in requests per second that all replicas together would get."""

    rate: float
    run: Summary


def find_breaking_rate(deployment: Deployment, offered: Workload, level: ServiceLevel) -> float | None:
    """Return the highest rate at which the service level holds for all replicas together, within 2 %.

    One unit of the replicas is simulated. If requests arrive faster than users without pauses are answered, they wait
    longer and longer. So that rate is the upper limit of the search, however short the run is.

    Args:
        deployment: The replicas.
        offered: Requests to draw on; a sample of 1,000 for each decoding replica is served at every rate that is tried.
        level: The service level.

    Returns:
        Requests per second, or None if the level does not hold even for requests that are alone.
    """
    sample, decoding = _take_sample(offered, deployment), deployment.decoding_per_unit

    def serve(workload: Workload) -> list[Timeline]:
        return [timeline for record in deployment.serve_unit(workload) for timeline in record.timelines]

    if not level.holds(serve(Workload(sample.queries[:LONE_REQUESTS], users=1))):
        return None
    quarter = QUARTER * decoding
    users = min(deployment.setup.options.max_num_seqs * decoding, quarter)
    ends_ns = sorted(timeline.end_ns for timeline in serve(Workload(sample.queries, users=users)))
    # The middle half of the run: neither its first requests, which begin together, nor the last ones.
    limit = 2 * quarter * SECOND_NS / (ends_ns[3 * quarter] - ends_ns[quarter])
    rate = bisect_rate(lambda rate: level.holds(serve(sample.stretch_to_rate(rate))), limit)
    return None if rate is None else rate * deployment.units


def predict_curve(
    deployment: Deployment, offered: Workload, level: ServiceLevel, breaking_rate: float
) -> list[RatePoint]:
    """Return the summaries of runs at the rates of `SHARES`, which are shares of the breaking rate, in their order.

    One unit of the replicas is simulated, with a sample of `offered` requests.
    """
    sample, units = _take_sample(offered, deployment), deployment.units

    def predict(rate: float) -> RatePoint:
        records = deployment.serve_unit(sample.stretch_to_rate(rate / units))
        prefill_replicas = deployment.setup.prefill_replicas // units
        return RatePoint(rate, summarize(records, level, deployment.pages, prefill_replicas))

    return [predict(share * breaking_rate) for share in SHARES]


def _take_sample(offered: Workload, deployment: Deployment) -> Workload:
    """Return the requests that one unit gets of a workload: `SAMPLE` for each of its decoding replicas.

    Requests go to the units in turn. A workload that is too short is repeated, with later arrival times.
    """
    units, size = deployment.units, SAMPLE * deployment.decoding_per_unit
    first_ns, last_ns = offered.arrivals_ns[0], offered.arrivals_ns[-1]
    gap_ns = (last_ns - first_ns) // (len(offered.queries) - 1)
    rounds = -(-size * units // len(offered.queries))
    arrivals_ns = [
        arrival_ns - first_ns + number * (last_ns - first_ns + gap_ns)
        for number in range(rounds)
        for arrival_ns in offered.arrivals_ns
    ]
    return Workload((offered.queries * rounds)[::units][:size], tuple(arrivals_ns[::units][:size]))
