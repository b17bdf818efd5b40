"""Metrics of a server for `/metrics`: vLLM's names with the prefix `nkw_`, and vLLM's own series for its dashboards.

Times are seconds of the engine's clock. Every sample has the label `model_name`. The series `vllm:…` are those that the
Grafana dashboards of vLLM 0.33.0 query (its examples/observability), with vLLM's labels, types and bucket bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from model.engine import RequestOutput
from model.engine.async_engine import EngineState
from model.engine.outputs import FinishReason
from model.layers.launch import StepShape
from model.llm.prediction import Deployment

PredictSeconds = Callable[[Mapping[StepShape, int]], tuple[float, int]]
"""Function from the number of launches of each shape to their predicted seconds and the number without a prediction."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_TOKENS = tuple(2**power for power in range(18))
_VLLM_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_VLLM_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_VLLM_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_VLLM_STEP_TOKENS = tuple(float(2**power) for power in (0, *range(3, 15)))
_VLLM_BOUNDS: Mapping[str, Sequence[float]] = {
    "time_to_first_token_seconds": _VLLM_FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": _VLLM_TOKEN_SECONDS,
    "request_time_per_output_token_seconds": _VLLM_TOKEN_SECONDS,
    "request_params_n": (1, 2, 5, 10, 20),
}
"""Upper bounds of buckets of vLLM's histograms, by name; other times have `_VLLM_REQUEST_SECONDS`."""
_VLLM_NAMES = frozenset(
    "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens generation_tokens "
    "prefix_cache_queries prefix_cache_hits num_preemptions request_success spec_decode_num_drafts "
    "spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos "
    "cache_config".split()
)
"""Counters, gauges and infos that vLLM has with the same meaning."""
_VLLM_ENGINE = "0"
"""Label `engine` of vLLM's series; a router of replicas writes the replica there."""
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("From a token of a request to the next one.", _SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", _SECONDS),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", _SECONDS),
    "request_inference_time_seconds": ("From a request's first step to its last token.", _SECONDS),
    "request_time_per_output_token_seconds": ("The mean between tokens of a request.", _SECONDS),
    "request_decode_time_seconds": ("From a request's first token to its last.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of all continuations of a prompt.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest continuation of a prompt.", _TOKENS),
    "request_params_n": ("Continuations that a request asked for.", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that got their first token.",
    "generation_tokens": "Tokens of continuations.",
    "prefix_cache_queries": "Tokens of prompts that were looked up among the known pages.",
    "prefix_cache_hits": "Tokens of prompts that known pages held.",
    "num_preemptions": "Requests that gave back their pages and computed again.",
}


class Metrics:
    """Counters and histograms of one server, in their own registry.

    Args:
        model: The value of the label `model_name`.
        max_model_len: The length of the longest sequence, which bounds the buckets of vLLM's histograms of tokens.
        prefix_caching: Whether the tokens of prompts count as queries of the prefix cache.
    """

    def __init__(self, model: str, max_model_len: int, prefix_caching: bool = True) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._prefix_caching = prefix_caching
        self._histograms = {
            name: (
                Histogram(f"nkw_{name}", text, ["model_name"], buckets=edges, registry=self._registry).labels(
                    model
                ),
                Histogram(
                    f"vllm:{name}",
                    text,
                    ["model_name", "engine"],
                    buckets=_find_vllm_bounds(name, max_model_len),
                    registry=self._registry,
                ).labels(model, _VLLM_ENGINE),
            )
            for name, (text, edges) in _HISTOGRAMS.items()
        }
        """For each name our histogram and vLLM's, which differ in their buckets."""
        self._counters = {
            name: Counter(f"nkw_{name}", text, ["model_name"], registry=self._registry).labels(model)
            for name, text in _COUNTERS.items()
        }
        self._ended = Counter(
            "nkw_request_success",
            "Continuations that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in get_args(FinishReason):
            self._ended.labels(model, reason)  # a rate needs the sample before the first request
        self._model = model
        self._progress: dict[str, tuple[int, float]] = {}
        """Number of tokens and time of the last one, by the id of a request that has not ended."""

    def add_engine(
        self, state: Callable[[], EngineState], deployment: Deployment, predict: PredictSeconds
    ) -> None:
        """Add series of an engine's requests, pages and steps to `/metrics`, and of the predicted time of its steps.

        They are read when `/metrics` is asked for.

        Args:
            state: Returns the current state of the engine.
            deployment: Chip and ranks for which times are predicted.
            predict: Returns the predicted seconds of launch counts by shape, and the number of launches without a
                prediction.
        """
        self._registry.register(_EngineCollector(self._model, state, deployment, predict))

    def record_output(self, output: RequestOutput) -> None:
        """Record that a request got tokens or ended. The engine's thread calls it after each step.

        Args:
            output: The request's output so far; only tokens since the previous call are counted.
        """
        metrics = output.metrics
        lengths = [len(continuation.token_ids) for continuation in output.outputs]
        tokens = sum(lengths)
        before, last = self._progress.get(output.request_id, (0, metrics.arrival_time))
        first, now = metrics.first_token_time, metrics.last_token_time
        if now is not None and tokens > before:
            self._counters["generation_tokens"].inc(tokens - before)
            if before == 0:
                self._record_first_token(output)
            else:
                self._observe("inter_token_latency_seconds", now - last)
            self._progress[output.request_id] = tokens, now
        if not output.finished:
            return
        self._progress.pop(output.request_id, None)
        for continuation in output.outputs:
            self._ended.labels(self._model, continuation.finish_reason).inc()
        self._counters["num_preemptions"].inc(metrics.num_preemptions)
        longest = max(lengths)
        self._observe("request_generation_tokens", tokens)
        self._observe("request_max_num_generation_tokens", longest)
        self._observe("request_params_n", len(output.outputs))
        if metrics.finished_time is not None:
            self._observe("e2e_request_latency_seconds", metrics.finished_time - metrics.arrival_time)
        if first is not None and now is not None and metrics.first_scheduled_time is not None:
            self._observe("request_decode_time_seconds", now - first)
            self._observe("request_inference_time_seconds", now - metrics.first_scheduled_time)
            if longest > 1:
                self._observe("request_time_per_output_token_seconds", (now - first) / (longest - 1))

    def format_samples(self) -> bytes:
        """Return all samples in Prometheus' text format."""
        families = list(self._registry.collect())
        return generate_latest(Families([*families, *_list_vllm_families(families)]))

    def _observe(self, name: str, amount: float) -> None:
        """Record an observation in the `nkw_` histogram and in the `vllm:` histogram of a name."""
        for histogram in self._histograms[name]:
            histogram.observe(amount)

    def _record_first_token(self, output: RequestOutput) -> None:
        metrics, prompt = output.metrics, len(output.prompt_token_ids)
        assert metrics.first_token_time is not None and metrics.first_scheduled_time is not None
        self._counters["prompt_tokens"].inc(prompt)
        if self._prefix_caching:
            self._counters["prefix_cache_queries"].inc(prompt)
            self._counters["prefix_cache_hits"].inc(metrics.num_cached_tokens)
        self._observe("request_prompt_tokens", prompt)
        self._observe("time_to_first_token_seconds", metrics.first_token_time - metrics.arrival_time)
        self._observe("request_queue_time_seconds", metrics.first_scheduled_time - metrics.arrival_time)
        self._observe("request_prefill_time_seconds", metrics.first_token_time - metrics.first_scheduled_time)


@dataclass
class Families(Collector):
    """Metric families as a prometheus_client collector, so that `generate_latest` can format them."""

    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        """Return the metric families, which prometheus_client then formats."""
        return self.families


def _find_vllm_bounds(name: str, max_model_len: int) -> Sequence[float]:
    """Return the upper bounds of the buckets of vLLM's histogram of a name, without the last bound, which is infinite.

    Histograms of tokens have the bounds 1, 2, 5, 10, 20, 50, … up to `max_model_len`.
    """
    if name in _VLLM_BOUNDS:
        return _VLLM_BOUNDS[name]
    if name.endswith("_seconds"):
        return _VLLM_REQUEST_SECONDS
    series = (mantissa * 10**power for power in range(len(str(max_model_len))) for mantissa in (1, 2, 5))
    return [bound for bound in series if bound <= max_model_len]


def _list_vllm_families(families: Sequence[Metric]) -> Iterator[Metric]:
    """Yield a copy with vLLM's name and the label `engine` for each family that vLLM has too.

    These are counters, gauges and infos; an info becomes a gauge, as vLLM writes it. Other families are skipped.
    """
    for family in families:
        name = family.name.removeprefix("nkw_")
        if name in _VLLM_NAMES:
            is_info = family.type == "info"
            alias = Metric(
                f"vllm:{name}_info" if is_info else f"vllm:{name}",
                family.documentation,
                "gauge" if is_info else family.type,
            )
            for sample in family.samples:
                labels = {**sample.labels, "engine": _VLLM_ENGINE}
                alias.add_sample(sample.name.replace("nkw_", "vllm:", 1), labels, sample.value)
            yield alias


@dataclass(eq=False)
class _EngineCollector(Collector):
    """Collector of the samples that are read from the engine's state when `/metrics` is asked for."""

    model: str
    state: Callable[[], EngineState]
    deployment: Deployment
    predict: PredictSeconds

    def collect(self) -> list[Metric]:
        """Return the gauges, counters and infos of the engine's state at this moment.

        Among them are the predicted seconds of its steps, which may start predictions in the background.
        """
        state = self.state()
        gauge, counter = partial(self._family, GaugeMetricFamily), partial(self._family, CounterMetricFamily)
        used = 1 - state.free_pages / state.pages
        drafts, accepted = sum(state.drafts.values()), sum(state.accepted_drafts.values())
        accepted_by_position: dict[tuple[str, ...], int] = {
            (str(index),): state.accepted_drafts.get(index, 0) for index in sorted(state.drafts)
        }
        families = [
            gauge("num_requests_running", "Requests that hold pages.", {(): state.running}),
            gauge("num_requests_waiting", "Requests that wait for pages.", {(): state.waiting}),
            gauge("kv_cache_usage_perc", "Share of the pages that requests hold; 1 is all.", {(): used}),
            counter("step_tokens", "Tokens that steps computed for requests.", {(): state.tokens}),
            counter("padding_tokens", "Padding tokens computed to fill a bucket.", {(): state.padding}),
            counter("steps", "Steps that were computed.", {(): state.steps}),
            counter("step_seconds", "Seconds in which steps were computed here.", {(): state.step_seconds}),
            counter("spec_decode_num_drafts", "Chunks with drafts.", {(): state.drafts.get(0, 0)}),
            counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.", {(): drafts}),
            counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", {(): accepted}),
            counter(
                "spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens that were accepted, by their position after the last token.",
                accepted_by_position,
                "position",
            ),
        ]
        if state.expert_choices:
            choices = counter(
                "expert_choices",
                "Choices of tokens, padding included, whose experts a group of ranks computed.",
                {(str(group),): count for group, count in enumerate(state.expert_choices)},
                "group",
            )
            families.append(choices)
        seconds, missing = self.predict(state.shapes)
        cores = self.deployment.target, str(self.deployment.lnc)
        pages = {"block_size": str(state.block_size), "num_gpu_blocks": str(state.pages)}
        return [
            *families,
            counter(
                "predicted_step_seconds",
                "Seconds that the predicted parts of steps would take on the target.",
                {cores: seconds},
                "target",
                "lnc",
            ),
            gauge(
                "unpredicted_step_parts",
                "Parts of steps that are not predicted, or not yet.",
                {cores: missing},
                "target",
                "lnc",
            ),
            self._family(InfoMetricFamily, "cache_config", "Pages of the cache.", {(): pages}),
            self._step_sizes(state),
        ]

    def _step_sizes(self, state: EngineState) -> Metric:
        """Return vLLM's histogram of the number of tokens of a step, `vllm:iteration_tokens_total`."""
        bounds = [*_VLLM_STEP_TOKENS, float("inf")]
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step.", labels=["model_name", "engine"]
        )
        counts = [
            (floatToGoString(bound), sum(count for size, count in state.step_sizes.items() if size <= bound))
            for bound in bounds
        ]
        total = sum(size * count for size, count in state.step_sizes.items())
        family.add_metric([self.model, _VLLM_ENGINE], counts, total)
        return family

    def _family(
        self,
        family_class: Callable[..., Any],
        name: str,
        text: str,
        samples: Mapping[tuple[str, ...], Any],
        *labels: str,
    ) -> Metric:
        """Return the metric family `nkw_NAME` with the given samples.

        Args:
            family_class: Class of prometheus_client, such as GaugeMetricFamily.
            name: Name without the prefix `nkw_`.
            text: Help text.
            samples: Samples by the values of `labels`; the label `model_name` is added to each.
            *labels: Names of the labels besides `model_name`.
        """
        family = family_class(f"nkw_{name}", text, labels=["model_name", *labels])
        for label_values, sample in samples.items():
            family.add_metric([self.model, *label_values], sample)
        return family
