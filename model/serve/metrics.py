"""Metrics of a server for `/metrics`: vLLM's names with the prefix `nkw_`.

Times are seconds of the engine's clock. Every sample has the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from model.engine import RequestOutput
from model.engine.async_engine import EngineState
from model.layers.launch import StepShape

PredictSeconds = Callable[[Mapping[StepShape, int]], tuple[float, int]]
"""Function from the number of launches of each shape to their predicted seconds and the number without a prediction."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_TOKENS = tuple(2**power for power in range(18))
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
        prefix_caching: Whether the tokens of prompts count as queries of the prefix cache.
    """

    def __init__(self, model: str, prefix_caching: bool = True) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._prefix_caching = prefix_caching
        self._histograms = {
            name: Histogram(
                f"nkw_{name}", text, ["model_name"], buckets=edges, registry=self._registry
            ).labels(model)
            for name, (text, edges) in _HISTOGRAMS.items()
        }
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
        self._model = model
        self._progress: dict[str, tuple[int, float]] = {}
        """Number of tokens and time of the last one, by the id of a request that has not ended."""

    def show(self, state: Callable[[], EngineState], target: str, predict: PredictSeconds) -> None:
        """Add the requests, pages and steps of an engine, and the predicted time of its steps on a target."""
        self._registry.register(_EngineCollector(self._model, state, target, predict))

    def watch(self, output: RequestOutput) -> None:
        """Record that a request got tokens or ended; the engine's thread calls it."""
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
                self._histograms["inter_token_latency_seconds"].observe(now - last)
            self._progress[output.request_id] = tokens, now
        if not output.finished:
            return
        self._progress.pop(output.request_id, None)
        for continuation in output.outputs:
            self._ended.labels(self._model, continuation.finish_reason).inc()
        self._counters["num_preemptions"].inc(metrics.num_preemptions)
        longest = max(lengths)
        self._histograms["request_generation_tokens"].observe(tokens)
        self._histograms["request_max_num_generation_tokens"].observe(longest)
        self._histograms["request_params_n"].observe(len(output.outputs))
        if metrics.finished_time is not None:
            self._histograms["e2e_request_latency_seconds"].observe(
                metrics.finished_time - metrics.arrival_time
            )
        if first is not None and now is not None and metrics.first_scheduled_time is not None:
            self._histograms["request_decode_time_seconds"].observe(now - first)
            self._histograms["request_inference_time_seconds"].observe(now - metrics.first_scheduled_time)
            if longest > 1:
                self._histograms["request_time_per_output_token_seconds"].observe(
                    (now - first) / (longest - 1)
                )

    def text(self) -> bytes:
        """Return all samples in Prometheus' text format."""
        return generate_latest(self._registry)

    def _record_first_token(self, output: RequestOutput) -> None:
        metrics, prompt = output.metrics, len(output.prompt_token_ids)
        assert metrics.first_token_time is not None and metrics.first_scheduled_time is not None
        self._counters["prompt_tokens"].inc(prompt)
        if self._prefix_caching:
            self._counters["prefix_cache_queries"].inc(prompt)
            self._counters["prefix_cache_hits"].inc(metrics.num_cached_tokens)
        self._histograms["request_prompt_tokens"].observe(prompt)
        self._histograms["time_to_first_token_seconds"].observe(
            metrics.first_token_time - metrics.arrival_time
        )
        self._histograms["request_queue_time_seconds"].observe(
            metrics.first_scheduled_time - metrics.arrival_time
        )
        self._histograms["request_prefill_time_seconds"].observe(
            metrics.first_token_time - metrics.first_scheduled_time
        )


@dataclass(eq=False)
class _EngineCollector(Collector):
    """Samples that are read from the engine's state when `/metrics` is asked for."""

    model: str
    state: Callable[[], EngineState]
    target: str
    predict: PredictSeconds

    def collect(self) -> list[Metric]:
        """Return the gauges and counters of the engine's current state."""
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
        pages = {"block_size": str(state.block_size), "num_gpu_blocks": str(state.pages)}
        return [
            *families,
            counter(
                "predicted_step_seconds",
                "Seconds that the predicted parts of steps would take on the target.",
                {(self.target,): seconds},
                "target",
            ),
            gauge(
                "unpredicted_step_parts",
                "Parts of steps that are not predicted, or not yet.",
                {(self.target,): missing},
                "target",
            ),
            self._family(InfoMetricFamily, "cache_config", "Pages of the cache.", {(): pages}),
        ]

    def _family(
        self,
        family_class: Callable[..., Any],
        name: str,
        text: str,
        samples: Mapping[tuple[str, ...], Any],
        *labels: str,
    ) -> Metric:
        """Return a metric family with one sample for each tuple of values of the labels besides `model_name`."""
        family = family_class(f"nkw_{name}", text, labels=["model_name", *labels])
        for label_values, sample in samples.items():
            family.add_metric([self.model, *label_values], sample)
        return family
