"""One prediction of traffic: a workload on a deployment, the rate at which the service level breaks, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.engine import SchedulerOptions
from model.engine.bucket_sizes import AUTO, AskedSizes, BucketLimits, fitted, read_buckets
from model.engine.buckets import Buckets
from model.errors import ModelError
from model.folder import config_file
from model.plan.parameters import ModelCounts, load_model
from model.plan.plan import DEFAULT_INSTANCE
from model.state import check_block_size
from model.tokenizer import Tokenizer
from model.traffic.deployment import LIMITS, Deployment, Setup
from model.traffic.lengths import Lengths
from model.traffic.report import ServiceLevel, Summary, summary
from model.traffic.search import breaking_rate
from model.traffic.service import Life, Record
from model.traffic.traces import CountTokens, read_trace
from model.traffic.workload import LARGEST, SECOND_NS, Query, SharedPrefix, Workload, drawn, poisson

REQUESTS = 1000
QUARTER = 250
SEARCHED = 4 * QUARTER
"""Requests of one replica at each rate that the search for the breaking rate tries."""
ALONE = 50
"""Requests that show whether requests alone keep to the service level."""

DEFAULT_SHARE = 0.9
"""Of the breaking rate: the rate of a run for which none is given."""

PROMPTS, NEWS = Lengths("constant", 512), Lengths("constant", 128)
LEVEL = ServiceLevel(ttft=500e6, itl=50e6)


@dataclass(frozen=True)
class Request:
    """The options of a prediction; None leaves the choice to it.

    `rate` is in requests per second, or, where it is a `share`, a part of the rate at which the service level breaks.
    """

    config: Path
    instance: str | None = None
    tp: int | None = None
    replicas: int | None = None
    dtype: str | None = None
    rate: float | None = None
    share: float | None = None
    trace: Path | None = None
    users: int | None = None
    think_s: float = 0.0
    requests: int | None = None
    prompts: Lengths = PROMPTS
    news: Lengths = NEWS
    prefix: SharedPrefix | None = None
    level: ServiceLevel = LEVEL
    price: float | None = None
    seed: int = 0
    block_size: int = 16
    options: SchedulerOptions = LIMITS
    max_model_len: int | None = None
    compare: bool = False
    buckets: str | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.users, self.rate, self.share)) > 1:
            raise ModelError("one of --rate, --load and --users decides when requests come, not several")
        if self.prefix is not None and self.trace is not None:
            raise ModelError("a trace has its own prompts; --shared-prefix is for lengths that are drawn")
        if self.requests is not None and self.requests > LARGEST:
            raise ModelError(f"{self.requests} requests; a run takes at most {LARGEST:,}")
        if self.users is not None and self.users > LARGEST:
            raise ModelError(f"{self.users} users; a run takes at most {LARGEST:,}")
        check_block_size(self.block_size)


@dataclass(frozen=True)
class Variant:
    """The same workload on another deployment; `refusal` says why that cannot be."""

    name: str
    summary: Summary | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Traffic:
    """What a prediction says. `breaks` is the rate at which the service level breaks, in requests per second."""

    request: Request
    model: ModelCounts
    deployment: Deployment
    workload: Workload
    summary: Summary
    breaks: float | None
    searched: bool
    variants: tuple[Variant, ...]

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which parts of steps are rooflines."""
        return self.deployment.clock.refusals


def make_traffic(request: Request, told: Callable[[str], None] = lambda doing: None) -> Traffic:
    """Predict traffic; ModelError for what the model, the instance, the trace or the options do not allow.

    `told` is called with what is being done.
    """
    model = load_model(request.config)
    offered, is_timed = _offered(request, model)
    limit = request.max_model_len or model.config.max_position_embeddings
    if limit is not None:
        offered = offered.within(limit)
    setup = Setup(
        instance=request.instance or DEFAULT_INSTANCE,
        dtype=request.dtype or model.config.dtype or "bfloat16",
        max_model_len=request.max_model_len or offered.longest,
        mean_len=offered.mean,
        tp=request.tp,
        replicas=request.replicas,
        block_size=request.block_size,
        options=request.options,
    )
    if not setup.options.chunked_prefill:
        setup = setup.whole_prompts()
    if request.buckets is not None:
        setup = replace(setup, buckets=_buckets(request.buckets, setup.bucket_limits, offered))
    deployment = Deployment(model, setup)
    breaks = None
    searched = not offered.users and (offered.rate is not None)
    if searched:
        told("the rate at which the service level breaks")
        breaks = _breaks(deployment, offered, request.level)
    workload = offered if is_timed else _at_rate(request, offered, breaks)
    told(f"{len(workload.queries):,} requests")
    run = summary(deployment.serve(workload), request.level, deployment.pages)
    variants = tuple(_variants(model, deployment, workload, request.level, told)) if request.compare else ()
    return Traffic(request, model, deployment, workload, run, breaks, searched, variants)


def _buckets(given: str, limits: BucketLimits, offered: Workload) -> Buckets:
    """The sizes that were asked for, or those that fit the lengths of the requests."""
    if given != AUTO:
        return read_buckets(given, limits)
    lengths = ((query.prompt, query.new) for query in offered.queries)
    return fitted(AskedSizes.of_lengths(lengths, limits.max_num_batched_tokens), limits)


def _offered(request: Request, model: ModelCounts) -> tuple[Workload, bool]:
    """The requests, and whether they come when they shall; else their times are to be stretched to a rate."""
    draw = np.random.default_rng(request.seed)
    queries: tuple[Query, ...]
    if request.trace is None:
        count = request.requests or REQUESTS
        queries = drawn(count, request.prompts, request.news, request.prefix, draw)
    else:
        read = read_trace(request.trace, request.requests, lambda: _counter(request.config, model))
        if isinstance(read, Workload):
            if request.users is None:
                return read, request.rate is None and request.share is None
            read = list(read.queries)
        queries = tuple(read)
    if request.users is not None:
        think_ns = round(request.think_s * SECOND_NS)
        return Workload(queries, users=request.users, think_ns=think_ns), True
    return poisson(queries, 1.0, draw), len(queries) == 1


def _counter(config: Path, model: ModelCounts) -> CountTokens:
    folder = config_file(config).parent
    tokenizer = Tokenizer(folder, model.config.vocab_size)
    return lambda text: len(tokenizer.encode(text))


def _at_rate(request: Request, offered: Workload, breaks: float | None) -> Workload:
    if request.rate is not None:
        return offered.at_rate(request.rate)
    if breaks is None and offered.rate is not None:
        raise ModelError(
            "requests alone do not keep to the service level, so there is no breaking rate to take a share of; give "
            "--rate, or longer times with --sla"
        )
    return offered.at_rate((request.share or DEFAULT_SHARE) * (breaks or 1.0))


def _breaks(deployment: Deployment, offered: Workload, level: ServiceLevel) -> float | None:
    """The rate at which a level breaks on all replicas, found with one of them; None where it never holds.

    Requests that come faster than users get answers who never pause wait longer and longer, so the level breaks there
    however short the run is.
    """
    sample = _sample(offered, deployment.replicas)

    def served(workload: Workload) -> list[Life]:
        return deployment.serve_one(workload).lives

    def by_users(users: int, requests: int) -> Workload:
        return Workload(sample.queries[:requests], users=users)

    if not level.holds(served(by_users(1, ALONE))):
        return None
    ends = sorted(
        life.end_ns for life in served(by_users(min(deployment.limits.max_num_seqs, QUARTER), SEARCHED))
    )
    # The middle half of the run: neither its first requests, which begin together, nor the last ones.
    most = 2 * QUARTER * SECOND_NS / (ends[3 * QUARTER] - ends[QUARTER])
    found = breaking_rate(lambda rate: level.holds(served(sample.at_rate(rate))), most)
    return None if found is None else found * deployment.replicas


def _sample(offered: Workload, replicas: int) -> Workload:
    """A replica's share of a workload; of a short one that of its requests over and over."""
    first, last = offered.arrivals_ns[0], offered.arrivals_ns[-1]
    between = (last - first) // (len(offered.queries) - 1)
    rounds = -(-SEARCHED * replicas // len(offered.queries))
    times = [
        each - first + number * (last - first + between)
        for number in range(rounds)
        for each in offered.arrivals_ns
    ]
    share = Workload(offered.queries * rounds, tuple(times)).of_replica(0, replicas)
    assert share is not None, "the first replica has the first request"
    return share.first(SEARCHED)


def _variants(
    model: ModelCounts,
    base: Deployment,
    workload: Workload,
    level: ServiceLevel,
    told: Callable[[str], None],
) -> Iterator[Variant]:
    """The same workload with one thing changed."""
    own = base.setup
    changes: dict[str, Setup] = {
        "static batching": replace(own, options=replace(own.options, continuous=False)),
        "whole prompts": own.whole_prompts(),
        "no prefix cache": replace(own, options=replace(own.options, prefix_caching=False)),
        "half the buckets": replace(own, few_buckets=True),
    }
    for tp in (base.tp // 2, base.tp * 2):
        replicas = base.replicas * base.tp // max(1, tp)  # on the same cores
        if tp and replicas:
            changes[f"tp {tp}, replicas {replicas}"] = replace(own, tp=tp, replicas=replicas)
    for name, setup in changes.items():
        told(name)
        try:
            changed = Deployment(model, setup, base)
            records: list[Record] = changed.serve(workload)
        except ModelError as error:
            yield Variant(name, refusal=error.message)
            continue
        yield Variant(name, summary(records, level, changed.pages))
