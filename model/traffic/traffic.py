"""Prediction of `nkw traffic`: a workload on a deployment, the breaking rate of a service level, and variants.

A workload is the requests of a run with their arrival times. A deployment is the replicas of the model on an instance.
The breaking rate is the highest rate at which 99 % of the requests keep the service level. A variant is the same
deployment with one change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.config.folder import find_config_file
from model.device import choose_lnc, find_instance
from model.engine import SchedulerOptions
from model.engine.bucket_sizes import AUTO, BucketLimits, SizeCounts, fit_buckets, read_buckets
from model.engine.buckets import MOST_ROWS, Buckets
from model.errors import ModelError, read_text_file
from model.layers import find_unsupported
from model.layers.cache_formats import CACHE_FORMATS
from model.loading.tokenizer import Tokenizer
from model.plan.meshes import check_mesh
from model.plan.plan import DEFAULT_INSTANCE, LEVEL
from model.plan.policy import Choice, Judged, Question
from model.plan.prices import Price, find_price
from model.plan.service_level import ServiceLevel
from model.plan.sizes import ModelSizes, load_model
from model.plan.stack_records import STACKS, THIS
from model.plan.stacks import METRICS, Ratios, Stack
from model.speech.recording import SECONDS_OF_COLUMN
from model.speech.rules import BEGINNING_TOKENS
from model.state import check_block_size
from model.traffic.deployment import LIMITS, Deployment, Setup
from model.traffic.drafts import AcceptanceRates, MeasuredOutcomes, Speculation
from model.traffic.lengths import Lengths
from model.traffic.report import Summary, summarize
from model.traffic.search import RatePoint, find_breaking_rate, predict_curve
from model.traffic.traces import CountTokens, read_trace
from model.traffic.variants import Variant, predict_variants
from model.traffic.workload import (
    MOST_REQUESTS,
    SECOND_NS,
    SharedPrefix,
    Workload,
    draw_poisson_arrivals,
    draw_queries,
)

REQUESTS = 1000

DEFAULT_SHARE = 0.9
"""Share of the breaking rate that is the rate of a run without `rate` and `share`."""

PROMPTS, OUTPUTS = Lengths("constant", 512), Lengths("constant", 128)
SPEECH_PROMPTS = Lengths("constant", BEGINNING_TOKENS)


@dataclass(frozen=True)
class Request:
    """Options of a prediction; the prediction chooses those that are None.

    | field | meaning |
    |---|---|
    | `quantization` | scheme by which plain weights are quantised; None: as the config says |
    | `rate`, `share` | requests per second; or the rate as a share of the breaking rate |
    | `users`, `think_s` | users who send requests instead, and their pause after an answer in seconds |
    | `kv_cache_dtype` | name of the cache format |
    | `requests` | number of requests; of a trace, the most that are read |
    | `price`, `prices` | dollars an hour of the instance; a file that replaces the shipped prices |
    | `acceptance`, `acceptance_text` | acceptance rates of drafts; or a text on which acceptance is measured |
    | `lnc` | physical cores of a rank; None: those in NEURON_LOGICAL_NC_CONFIG, else the most that the chip has |
    | `compare`, `curve` | whether variants, and runs at rates around the breaking rate, are predicted |

    Raises:
        ModelError: If options exclude one another, or a number is above its limit.
    """

    config: Path
    family: str | None = None
    quantization: str | None = None
    instance: str | None = None
    tp: int | None = None
    ep: int | None = None
    replicas: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    rate: float | None = None
    share: float | None = None
    trace: Path | None = None
    users: int | None = None
    think_s: float = 0.0
    requests: int | None = None
    prompts: Lengths | None = None
    outputs: Lengths = OUTPUTS
    prefix: SharedPrefix | None = None
    level: ServiceLevel = LEVEL
    price: float | None = None
    prices: Path | None = None
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
    lnc: int | None = None
    stack: str = THIS.name

    def __post_init__(self) -> None:
        check_arrivals(self.users, self.rate, self.share, self.requests)
        if self.prefix is not None and self.trace is not None:
            raise ModelError(
                "a trace has its own prompts, and --shared-prefix is for lengths that are drawn; leave one of the "
                "two out"
            )
        if self.buckets is not None and self.stack != THIS.name:
            raise ModelError(
                f"--stack {self.stack} pads to its own sizes, and --buckets are for --stack {THIS.name}: leave one "
                "of the two out"
            )
        check_block_size(self.block_size)
        self._check_drafts()

    def _check_drafts(self) -> None:
        """Raise ModelError if the options of draft tokens exclude one another, or one that is needed is missing."""
        tokens = self.options.speculative_tokens
        sources = 2 - [self.acceptance, self.acceptance_text].count(None)
        if not tokens and (sources or self.draft_model is not None):
            raise ModelError(
                "--speculative-tokens says how many drafts a step verifies, and without it there are none; give it, or "
                "leave --acceptance, --acceptance-text and --draft-model out"
            )
        if tokens >= MOST_ROWS:
            raise ModelError(
                f"{tokens} drafts of a step; up to {MOST_ROWS - 1} are verified: give fewer --speculative-tokens"
            )
        if tokens and sources != 1:
            raise ModelError(
                "one of --acceptance and --acceptance-text says how many of the drafts are right; give one of them, "
                "not both"
            )
        if self.acceptance_text is not None and self.draft_model is not None:
            raise ModelError("a text shows what prompt lookup finds; for a draft model give --acceptance")


def check_arrivals(users: int | None, rate: float | None, share: float | None, requests: int | None) -> None:
    """Check the options that decide when requests come.

    Raises:
        ModelError: Two of them decide it, or there are more than `MOST_REQUESTS` requests or users.
    """
    if [users, rate, share].count(None) < 2:
        raise ModelError(
            "one of --rate, --load and --users decides when requests come; give only one of them"
        )
    for count, noun in ((requests, "requests"), (users, "users")):
        if count is not None and count > MOST_REQUESTS:
            raise ModelError(f"{count} {noun}; a run takes at most {MOST_REQUESTS:,}: give fewer")


@dataclass(frozen=True)
class Traffic:
    """Result of a prediction: its inputs, the summary of the run, and the optional comparisons.

    `breaking_rate` is in requests per second. `searched` is False if users decide the rate or all requests arrive at
    one moment; `breaking_rate` is then None. If `searched` is True and `breaking_rate` is None, the service level holds
    at no rate. `price` is None if no price is known. `judged` has the meshes that the planner compared, the best first;
    it is empty if the request has a tp. `variants` and `curve` are empty unless the request asks for them.
    """

    request: Request
    model: ModelSizes
    deployment: Deployment
    workload: Workload
    summary: Summary
    breaking_rate: float | None
    searched: bool
    judged: tuple[Judged, ...]
    price: Price | None
    variants: tuple[Variant, ...]
    curve: tuple[RatePoint, ...] = ()

    @property
    def stack(self) -> Stack:
        """Serving stack whose host times and padding the prediction uses."""
        return STACKS[self.request.stack]

    @property
    def ratios(self) -> dict[str, Ratios | None]:
        """Published values divided by predicted ones, by metric; None for a metric without a published run.

        Published runs count as near if they resemble this one in its model size, mean prompt, and most requests that a
        replica runs at once.
        """
        run, deployment = self.summary, self.deployment
        running = max(slice.running for slice in run.slices) / deployment.replicas
        sizes = self.model.total / 1e9, max(1, round(running)), max(1, run.prompt_tokens // run.requests)
        return {
            metric: self.stack.find_ratios(metric, deployment.instance.target, *sizes) for metric in METRICS
        }

    @property
    def window_s(self) -> float | None:
        """Seconds of speech of each request, or None if the model reads texts."""
        shape = self.model.config.spectrum
        return None if shape is None else shape[1] * SECONDS_OF_COLUMN


def predict_traffic(request: Request, report_progress: Callable[[str], None]) -> Traffic:
    """Predict what the users of a model would see on an instance: latencies, throughput, goodput and price.

    Args:
        request: The options.
        report_progress: Called with the name of each phase when it begins.

    Raises:
        ModelError: If the model, the instance, the trace or the options do not allow the prediction.
    """
    if request.kv_cache_dtype in CACHE_FORMATS and CACHE_FORMATS[request.kv_cache_dtype].packs_pages:
        raise ModelError(
            f"kv_cache_dtype is '{request.kv_cache_dtype}', and traffic is predicted for caches that store all "
            "positions alike: use int8 or fp8",
            "NKW-MODEL-OPTION",
        )
    model = load_model(request.config, None, request.family, request.quantization, request.kv_cache_dtype)
    offered, has_final_times = _make_workload(request, model)
    max_positions = request.max_model_len or model.config.max_position_embeddings
    if max_positions is not None:
        offered = offered.drop_longer_than(max_positions)
    instance = find_instance(request.instance or DEFAULT_INSTANCE)
    model = model.on_chip(instance.target)
    setup = Setup(
        instance=instance.name,
        lnc=choose_lnc(instance.target, request.lnc, largest=True),
        dtype=request.dtype or model.config.dtype or "bfloat16",
        max_model_len=request.max_model_len or offered.longest,
        mean_len=offered.mean,
        tp=request.tp or 1,
        ep=request.ep or 1,
        replicas=request.replicas,
        block_size=request.block_size,
        options=request.options,
        prefill_replicas=request.prefill_replicas,
        speculation=_make_speculation(request, model),
        stack=request.stack,
    )
    if not setup.options.chunked_prefill or request.stack != THIS.name:  # other stacks pad whole prompts
        setup = setup.with_whole_prompts()
    if request.buckets is not None:
        setup = replace(setup, sizes=_choose_buckets(request.buckets, setup.bucket_limits, offered))
    judged = () if request.tp is not None else _judge_meshes(request, model, setup, offered)
    deployment = _deploy(model, setup, judged)
    price = find_price(deployment.instance, request.price, request.prices)
    breaking_rate, curve, variants = None, list[RatePoint](), list[Variant]()
    searched = offered.rate is not None
    if searched:
        report_progress("the rate at which the service level breaks")
        breaking_rate = find_breaking_rate(deployment, offered, request.level)
    workload = offered if has_final_times else _set_rate(request, offered, breaking_rate)
    report_progress(f"{len(workload.queries):,} requests")
    run = summarize(deployment.serve(workload), request.level, deployment.pages, setup.prefill_replicas)
    if request.curve and breaking_rate is not None:
        report_progress("latencies at rates around the breaking one")
        curve = predict_curve(deployment, offered, request.level, breaking_rate)
    if request.compare:
        variants += predict_variants(model, deployment, workload, request.level, run.prompts, report_progress)
    return Traffic(
        *(request, model, deployment, workload, run, breaking_rate, searched, judged, price),
        variants=tuple(variants),
        curve=tuple(curve),
    )


def _judge_meshes(request: Request, model: ModelSizes, setup: Setup, offered: Workload) -> tuple[Judged, ...]:
    """Return the meshes of a replica that `nkw plan` would compare for the mean request, the best first.

    Empty for a model with a layer that no kernel computes; `Deployment` refuses it later.

    Raises:
        ModelError: If the model or the instance does not allow the requested expert parallelism.
    """
    instance = find_instance(setup.instance)
    if find_unsupported(model.config):
        return ()  # the deployment refuses the model
    check_mesh(model, None, None, request.ep, instance, setup.lnc)
    count = len(offered.queries)
    prompt = -(-sum(query.prompt_tokens for query in offered.queries) // count)
    generate = -(-sum(query.new_tokens for query in offered.queries) // count)
    question = Question(
        *(model, instance, setup.dtype, prompt, generate, setup.options.max_num_seqs, request.level),
        longest=max(prompt + generate, setup.max_model_len),
        fewer=True,
        pp=1,
        ep=request.ep,
        lnc=setup.lnc,
    )
    return Choice(question).judged


def _deploy(model: ModelSizes, setup: Setup, judged: Sequence[Judged]) -> Deployment:
    """Return the deployment on the first of the `judged` meshes that takes it; without meshes, on the setup's mesh.

    Raises:
        ModelError: If no mesh takes the deployment; the message is that of the best mesh.
    """
    shapes = [candidate.mesh.shape for candidate in judged]
    for shape in shapes:
        with suppress(ModelError):
            return Deployment(model, replace(setup, tp=shape.tp, ep=shape.ep))
    # The refusal is that of the best mesh; of a model that does not fit, that of the most ranks.
    if shapes:
        return Deployment(model, replace(setup, tp=shapes[0].tp, ep=shapes[0].ep))
    return Deployment(model, setup)


def _make_speculation(request: Request, model: ModelSizes) -> Speculation | None:
    """Return the distribution of accepted drafts and the draft model, if any; None if a step verifies no drafts.

    Raises:
        ModelError: If the acceptance rates or the text cannot be read, or the draft model cannot be loaded.
    """
    tokens, path = request.options.speculative_tokens, request.acceptance_text
    if not tokens:
        return None
    if path is not None:
        text = read_text_file(path, "NKW-MODEL-OPTION")
        return Speculation(
            MeasuredOutcomes.measure(_load_tokenizer(request.config, model).encode(text), tokens)
        )
    assert request.acceptance is not None, "checked by the request"
    draft_model = (
        None
        if request.draft_model is None
        else load_model(request.draft_model, cache_dtype=request.kv_cache_dtype)
    )
    return Speculation(AcceptanceRates.parse(request.acceptance, tokens), draft_model)


def _choose_buckets(text: str, limits: BucketLimits, offered: Workload) -> Buckets:
    """Return the sizes to which steps are rounded up, from the text of the option --buckets.

    The text "auto" gives the sizes with the least padding for the lengths of the offered requests.

    Raises:
        ModelError: If the text has another form, or its sizes are outside of the limits.
    """
    if text != AUTO:
        return read_buckets(text, limits)
    lengths = ((query.prompt_tokens, query.new_tokens) for query in offered.queries)
    return fit_buckets(SizeCounts.from_lengths(lengths, limits.max_num_batched_tokens), limits)


def _make_workload(request: Request, model: ModelSizes) -> tuple[Workload, bool]:
    """Return the requests, and whether their arrival times are final.

    Times are not final if requests arrive at a rate that is chosen later: drawn ones, conversations, and the rows of a
    trace if the request has a rate or a share.

    Raises:
        ModelError: If the trace cannot be read.
    """
    generator = np.random.default_rng(request.seed)
    if request.trace is None:
        prompts = request.prompts or (SPEECH_PROMPTS if model.config.spectrum else PROMPTS)
        queries = draw_queries(
            request.requests or REQUESTS, prompts, request.outputs, request.prefix, generator
        )
    else:
        trace = read_trace(request.trace, request.requests, lambda: _load_counter(request.config, model))
        if isinstance(trace, Workload) and request.users is None:
            return trace, request.rate is None and request.share is None
        queries = trace.queries if isinstance(trace, Workload) else tuple(trace)
    if request.users is not None:
        think_ns = round(request.think_s * SECOND_NS)
        return Workload(queries, users=request.users, think_ns=think_ns), True
    return draw_poisson_arrivals(queries, 1.0, generator), len(queries) == 1


def _load_counter(config: Path, model: ModelSizes) -> CountTokens:
    """Return a function from a text to its number of tokens, by the tokenizer in the config's folder.

    Raises:
        ModelError: If the tokenizer is missing or damaged, or does not fit the model.
    """
    tokenizer = _load_tokenizer(config, model)
    return lambda text: len(tokenizer.encode(text))


def _load_tokenizer(config: Path, model: ModelSizes) -> Tokenizer:
    """Return the tokenizer in the folder of a model's config.

    Raises:
        ModelError: If the tokenizer is missing or damaged, or does not fit the model.
    """
    return Tokenizer(find_config_file(config).parent, model.config.vocab_size)


def _set_rate(request: Request, offered: Workload, breaking_rate: float | None) -> Workload:
    """Return the workload stretched to the request's rate, or else to its share of the breaking rate.

    Without a rate and a share it is `DEFAULT_SHARE`. A workload of one request has no breaking rate; 1 is used.

    Raises:
        ModelError: If a share is needed and the service level holds at no rate, or if all requests arrive at one
            moment.
    """
    if request.rate is not None:
        return offered.stretch_to_rate(request.rate)
    if breaking_rate is None and offered.rate is not None:
        raise ModelError(
            "requests alone do not keep to the service level, so there is no breaking rate to take a share of; give "
            "--rate, or longer times with --sla"
        )
    return offered.stretch_to_rate((request.share or DEFAULT_SHARE) * (breaking_rate or 1.0))
