"""Clocks and workloads with which the parts of `nkw traffic` are tested."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from model.engine import Batch, SchedulerOptions
from model.engine.buckets import Buckets
from model.layers.launch import StepShape
from model.plan.dry import Time
from model.plan.predict import PassTime
from model.traffic.clock import PredictedClock, StepTime
from model.traffic.lengths import Lengths
from model.traffic.workload import SharedPrefix, Workload, draw_poisson_arrivals, draw_queries

MEAN_NS = 1_000_000

OPTIONS = SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=16)


class Constant:
    """Steps of one time."""

    def step(self, batch: Batch) -> StepTime:
        """Return the same time for every step."""
        return StepTime(MEAN_NS)


class Shapes:
    """A predictor whose times follow the sizes of a step."""

    def predict_paged(self, step: StepShape) -> PassTime:
        """Return a longer time for more tokens and for a longer context."""
        time_ns = 1_000.0 + 37 * step.tokens + step.sequences * step.cache_length + 11 * step.prefix
        if step.decoding is not None:
            time_ns += step.decoding.sequences * step.decoding.cache_length
        return PassTime(Time.exact(time_ns), ())


def shaped(options: SchedulerOptions) -> PredictedClock:
    """Return a clock whose times follow the shapes of steps; requests change their small buckets."""
    buckets = Buckets.powers(
        options.max_num_seqs, options.max_num_batched_tokens, 64, options.speculative_tokens
    )
    return PredictedClock(Shapes(), replace(buckets, context=(8, 16, 32, 64)), (None,))  # type: ignore[arg-type]


def workloads(seed: int) -> Iterable[Workload]:
    """Yield requests of few and of many at a time, and of users."""
    draw = np.random.default_rng(seed)
    lengths = Lengths("uniform", 1, 24), Lengths("uniform", 1, 30)
    queries = draw_queries(150, *lengths, SharedPrefix(9, 3), draw)
    yield draw_poisson_arrivals(queries, 4_000.0, draw)
    yield draw_poisson_arrivals(queries, 40_000.0, draw)
    yield Workload(queries, users=9, think_ns=70_001)
