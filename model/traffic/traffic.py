"""One prediction of traffic: a workload on a deployment, the rate at which the service level breaks, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.config.folder import find_config_file
from model.engine import SchedulerOptions
from model.engine.bucket_sizes import AUTO, AskedSizes, BucketLimits, fitted, read_buckets
from model.engine.buckets import MOST_ROWS, Buckets
from model.errors import ModelError
from model.loading.tokenizer import Tokenizer
from model.plan.plan import DEFAULT_INSTANCE
from model.plan.sizes import ModelSizes, load_model
from model.speech.recording import SECONDS_OF_COLUMN
from model.speech.rules import BEGINNING_TOKENS
from model.state import check_block_size
from model.traffic.deployment import LIMITS, Deployment, Setup
from model.traffic.drafts import AcceptanceRates, MeasuredOutcomes, Speculation
from model.traffic.lengths import Lengths
from model.traffic.report import ServiceLevel, Summary, summary
from model.traffic.search import RatePoint, latencies, rate_that_breaks
from model.traffic.traces import CountTokens, read_trace
from model.traffic.variants import Variant, variants
from model.traffic.workload import LARGEST, SECOND_NS, Query, SharedPrefix, Workload, drawn, poisson
from nkw.files import read_text

REQUESTS = 1000

DEFAULT_SHARE = 0.9
"""Of the breaking rate: the rate of a run for which none is given."""

PROMPTS, NEWS = Lengths("constant", 512), Lengths("constant", 128)
BEGINNINGS = Lengths("constant", BEGINNING_TOKENS)
LEVEL = ServiceLevel(ttft=500e6, itl=50e6)


@dataclass(frozen=True)
class Request:
    """The options of a prediction; None leaves the choice to it.

    `rate` is in requests per second, or, where it is a `share`, a part of the rate at which the service level breaks.
    `acceptance` is that of the drafts that `options` allow, or is measured on a text. With a `curve` latencies are
    predicted at rates around the breaking one.
    """

    config: Path
    instance: str | None = None
    tp: int | None = None
    ep: int = 1
    replicas: int | None = None
    dtype: str | None = None
    rate: float | None = None
    share: float | None = None
    trace: Path | None = None
    users: int | None = None
    think_s: float = 0.0
    requests: int | None = None
    prompts: Lengths | None = None
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
    prefill_replicas: int = 0
    acceptance: str | None = None
    acceptance_text: Path | None = None
    draft_model: Path | None = None
    curve: bool = False

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
        self._check_drafts()

    def _check_drafts(self) -> None:
        tokens = self.options.speculative_tokens
        given = [each for each in (self.acceptance, self.acceptance_text) if each is not None]
        if not tokens and (given or self.draft_model is not None):
            raise ModelError(
                "--speculative-tokens says how many drafts a step verifies; without it there are none"
            )
        if tokens and (tokens >= MOST_ROWS or len(given) != 1):
            raise ModelError(
                f"{tokens} drafts of a step; up to {MOST_ROWS - 1} are verified"
                if tokens >= MOST_ROWS
                else "one of --acceptance and --acceptance-text says how many of the drafts are right"
            )
        if self.acceptance_text is not None and self.draft_model is not None:
            raise ModelError("a text shows what prompt lookup finds; for a draft model give --acceptance")


@dataclass(frozen=True)
class Traffic:
    """What a prediction says. `breaks` is the rate at which the service level breaks, in requests per second.

    `searched` says whether it was looked for; `curve` has the latencies at rates around it.
    """

    request: Request
    model: ModelSizes
    deployment: Deployment
    workload: Workload
    summary: Summary
    breaks: float | None
    searched: bool
    variants: tuple[Variant, ...]
    curve: tuple[RatePoint, ...] = ()

    @property
    def refusals(self) -> tuple[str, ...]:
        """The different reasons for which parts of steps are rooflines."""
        return self.deployment.refusals

    @property
    def window_s(self) -> float | None:
        """Seconds of speech of each request; None where requests are texts."""
        shape = self.model.config.spectrum
        return None if shape is None else shape[1] * SECONDS_OF_COLUMN


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
        ep=request.ep,
        replicas=request.replicas,
        block_size=request.block_size,
        options=request.options,
        prefill_replicas=request.prefill_replicas,
        speculation=_speculation(request, model),
    )
    if not setup.options.chunked_prefill:
        setup = setup.whole_prompts()
    if request.buckets is not None:
        setup = replace(setup, sizes=_buckets(request.buckets, setup.bucket_limits, offered))
    deployment = Deployment(model, setup)
    breaks, curve = None, list[RatePoint]()
    searched = not offered.users and (offered.rate is not None)
    if searched:
        told("the rate at which the service level breaks")
        breaks = rate_that_breaks(deployment, offered, request.level)
    workload = offered if is_timed else _at_rate(request, offered, breaks)
    told(f"{len(workload.queries):,} requests")
    records = deployment.serve(workload)
    run = summary(records, request.level, deployment.pages, setup.prefill_replicas)
    if request.curve and breaks is not None:
        told("latencies at rates around the breaking one")
        curve = latencies(deployment, offered, request.level, breaks)
    changed = (
        variants(model, deployment, workload, request.level, run.prompts, told) if request.compare else ()
    )
    return Traffic(request, model, deployment, workload, run, breaks, searched, tuple(changed), tuple(curve))


def _speculation(request: Request, model: ModelSizes) -> Speculation | None:
    """What becomes of drafts, and the model that proposes them."""
    tokens, path = request.options.speculative_tokens, request.acceptance_text
    if not tokens:
        return None
    draft = None if request.draft_model is None else load_model(request.draft_model)
    if path is None:
        assert request.acceptance is not None, "checked by the request"
        return Speculation(AcceptanceRates.parsed(request.acceptance, tokens), draft)
    try:
        text = read_text(path)
    except OSError as error:
        raise ModelError(f"the text {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelError(f"the text {path} is not UTF-8") from None
    return Speculation(MeasuredOutcomes.of_text(_tokenizer(request.config, model).encode(text), tokens))


def _buckets(given: str, limits: BucketLimits, offered: Workload) -> Buckets:
    """The bucket sizes that were given, or with `auto` those with the least padding for the requests' lengths."""
    if given != AUTO:
        return read_buckets(given, limits)
    lengths = ((query.prompt, query.new) for query in offered.queries)
    return fitted(AskedSizes.of_lengths(lengths, limits.max_num_batched_tokens), limits)


def _offered(request: Request, model: ModelSizes) -> tuple[Workload, bool]:
    """The requests, and whether they come when they shall; else their times are to be stretched to a rate."""
    draw = np.random.default_rng(request.seed)
    queries: tuple[Query, ...]
    if request.trace is None:
        count = request.requests or REQUESTS
        prompts = request.prompts or (BEGINNINGS if model.config.spectrum else PROMPTS)
        queries = drawn(count, prompts, request.news, request.prefix, draw)
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


def _counter(config: Path, model: ModelSizes) -> CountTokens:
    tokenizer = _tokenizer(config, model)
    return lambda text: len(tokenizer.encode(text))


def _tokenizer(config: Path, model: ModelSizes) -> Tokenizer:
    return Tokenizer(find_config_file(config).parent, model.config.vocab_size)


def _at_rate(request: Request, offered: Workload, breaks: float | None) -> Workload:
    if request.rate is not None:
        return offered.at_rate(request.rate)
    if breaks is None and offered.rate is not None:
        raise ModelError(
            "requests alone do not keep to the service level, so there is no breaking rate to take a share of; give "
            "--rate, or longer times with --sla"
        )
    return offered.at_rate((request.share or DEFAULT_SHARE) * (breaks or 1.0))
