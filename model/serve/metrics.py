"""What /metrics shows: vLLM's names under the prefix `nkw_`, from what the engine's thread sees.

Times are seconds of the engine's clock. Each number has the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from model.engine import RequestOutput
from model.engine.async_engine import EngineState
from model.layers.launch import StepShape

Predicted = Callable[[Mapping[StepShape, int]], tuple[float, int]]
"""The seconds that parts of these shapes take, each so often, and how many of them are not predicted."""
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
    """Numbers of one server, in a registry of their own."""

    def __init__(self, model: str, prefix_caching: bool = True) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._prefix_caching = prefix_caching
        self._histograms = {
            name: Histogram(f"nkw_{name}", text, ["model_name"], buckets=edges, registry=self._registry)
            for name, (text, edges) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"nkw_{name}", text, ["model_name"], registry=self._registry)
            for name, text in _COUNTERS.items()
        }
        self._ended = Counter(
            "nkw_request_success",
            "Continuations that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._model = model
        self._seen: dict[str, tuple[int, float]] = {}
        for labelled in (*self._histograms.values(), *self._counters.values()):
            labelled.labels(model)  # shown from the start, as 0

    def show(self, state: Callable[[], EngineState], target: str, predicted: Predicted) -> None:
        """Show an engine's requests, pages and steps as well, and how long the steps are `predicted` to take."""
        self._registry.register(_State(self._model, state, target, predicted))

    def watch(self, output: RequestOutput) -> None:
        """A request got a token or ended; the engine's thread says so."""
        metrics, tokens = output.metrics, sum(len(each.token_ids) for each in output.outputs)
        before, last = self._seen.get(output.request_id, (0, metrics.arrival_time))
        first, now = metrics.first_token_time, metrics.last_token_time
        if now is not None and tokens > before:
            self._add("generation_tokens", tokens - before)
            if before == 0:
                self._first_token(output)
            else:
                self._observe("inter_token_latency_seconds", now - last)
            self._seen[output.request_id] = tokens, now
        if not output.finished:
            return
        self._seen.pop(output.request_id, None)
        for each in output.outputs:
            self._ended.labels(self._model, each.finish_reason).inc()
        self._add("num_preemptions", metrics.num_preemptions)
        longest = max(len(each.token_ids) for each in output.outputs)
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

    def text(self) -> bytes:
        """All numbers in Prometheus' text format."""
        return generate_latest(self._registry)

    def _first_token(self, output: RequestOutput) -> None:
        metrics, prompt = output.metrics, len(output.prompt_token_ids)
        assert metrics.first_token_time is not None and metrics.first_scheduled_time is not None
        self._add("prompt_tokens", prompt)
        if self._prefix_caching:
            self._add("prefix_cache_queries", prompt)
            self._add("prefix_cache_hits", metrics.num_cached_tokens)
        self._observe("request_prompt_tokens", prompt)
        self._observe("time_to_first_token_seconds", metrics.first_token_time - metrics.arrival_time)
        self._observe("request_queue_time_seconds", metrics.first_scheduled_time - metrics.arrival_time)
        self._observe("request_prefill_time_seconds", metrics.first_token_time - metrics.first_scheduled_time)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(self._model).observe(value)

    def _add(self, name: str, value: int) -> None:
        self._counters[name].labels(self._model).inc(value)


class _State(Collector):
    """The engine's state at the moment it is asked for."""

    def __init__(
        self, model: str, state: Callable[[], EngineState], target: str, predicted: Predicted
    ) -> None:
        self._model = model
        self._state = state
        self._target = target
        self._predicted = predicted

    def collect(self) -> Iterator[Metric]:
        """The gauges, and what the engine counts itself."""
        state = self._state()
        used = 1 - state.free_pages / state.pages
        for name, text, value in (
            ("num_requests_running", "Requests that hold pages.", state.running),
            ("num_requests_waiting", "Requests that wait for pages.", state.waiting),
            ("kv_cache_usage_perc", "Share of the pages that requests hold; 1 is all.", used),
        ):
            gauge = GaugeMetricFamily(f"nkw_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("step_tokens", "Tokens that steps computed for requests.", state.tokens),
            ("padding_tokens", "Tokens that steps computed for nobody, to fill a bucket.", state.padding),
            ("steps", "Steps that were computed.", state.steps),
            ("step_seconds", "Seconds in which steps were computed here.", state.step_seconds),
            ("spec_decode_num_drafts", "Chunks with drafts.", state.drafts.get(0, 0)),
            ("spec_decode_num_draft_tokens", "Drafts that were verified.", sum(state.drafts.values())),
            (
                "spec_decode_num_accepted_tokens",
                "Drafts that were right.",
                sum(state.accepted_drafts.values()),
            ),
        ):
            counter = CounterMetricFamily(f"nkw_{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield from self._with_labels(state)

    def _with_labels(self, state: EngineState) -> Iterator[Metric]:
        places = CounterMetricFamily(
            "nkw_spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place behind the last token.",
            labels=["model_name", "position"],
        )
        for place in sorted(state.drafts):
            places.add_metric([self._model, str(place)], state.accepted_drafts.get(place, 0))
        yield places
        if state.expert_choices:
            choices = CounterMetricFamily(
                "nkw_expert_choices",
                "Choices of tokens, padding included, whose experts a group of ranks computed.",
                labels=["model_name", "group"],
            )
            for group, count in enumerate(state.expert_choices):
                choices.add_metric([self._model, str(group)], count)
            yield choices
        seconds, missing = self._predicted(state.shapes)
        for name, text, value in (
            (
                "predicted_step_seconds",
                "Seconds that the predicted parts of steps would take on the target.",
                seconds,
            ),
            ("unpredicted_step_parts", "Parts of steps that are not predicted, or not yet.", missing),
        ):
            family = CounterMetricFamily if name.endswith("seconds") else GaugeMetricFamily
            clock = family(f"nkw_{name}", text, labels=["model_name", "target"])
            clock.add_metric([self._model, self._target], value)
            yield clock
        config = InfoMetricFamily("nkw_cache_config", "The pages of the cache.", labels=["model_name"])
        pages = {"block_size": str(state.block_size), "num_gpu_blocks": str(state.pages)}
        config.add_metric([self._model], pages)
        yield config
