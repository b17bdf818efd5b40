"""`/metrics` has the series that vLLM's Grafana dashboards query, with vLLM's labels, types and bucket bounds.

The queries are those of vLLM 0.33.0: `grafana.json` in examples/observability/prometheus_grafana, and
`performance_statistics.json` and `query_statistics.json` in examples/observability/dashboards/grafana.
"""

from __future__ import annotations

import json

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from model.commands.top.command import format_metrics
from model.serve.metrics import Metrics, _find_vllm_bounds
from model.serve.replicas.backend import Answer
from model.serve.replicas.router import _label_metrics
from tests.serve.conftest import MODEL, Served

HISTOGRAMS = """
e2e_request_latency_seconds inter_token_latency_seconds time_to_first_token_seconds request_prompt_tokens
request_generation_tokens request_time_per_output_token_seconds
""".split()
"""Histograms whose buckets are queried, with the label `le`; of three of them sum and count as well."""
SUMS = """
request_decode_time_seconds request_prefill_time_seconds request_queue_time_seconds
request_max_num_generation_tokens
""".split()
"""Histograms of which sums are queried."""
COUNTERS = ["generation_tokens", "prompt_tokens"]
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
LATENCY_BOUNDS = [
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
]


def read_families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def families(server: Served) -> dict[str, Metric]:
    """Return the metric families of a server that has answered a request, by name."""
    body = {"model": MODEL, "prompt": "Tom had", "max_tokens": 3, "ignore_eos": True}
    server.send("POST", "/v1/completions", json.dumps(body).encode())
    return read_families(server.send("GET", "/metrics")[1].decode())


def labels_of(family: Metric) -> set[frozenset[str]]:
    return {frozenset(sample.labels) for sample in family.samples}


def bounds_of(family: Metric) -> list[float]:
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    assert buckets[-1].labels["le"] == "+Inf"
    return [float(bucket.labels["le"]) for bucket in buckets[:-1]]


@pytest.mark.parametrize("name", [*HISTOGRAMS, *SUMS])
def test_a_histogram_of_the_dashboards_has_its_labels(families: dict[str, Metric], name: str) -> None:
    family = families[f"vllm:{name}"]
    assert family.type == "histogram"
    assert {sample.name.rpartition("_")[2] for sample in family.samples} == {"bucket", "sum", "count"}
    assert labels_of(family) == {
        frozenset({"model_name", "engine"}),
        frozenset({"model_name", "engine", "le"}),
    }
    assert {sample.labels["model_name"] for sample in family.samples} == {MODEL}
    count = next(sample.value for sample in family.samples if sample.name.endswith("_count"))
    ours = next(s.value for s in families[f"nkw_{name}"].samples if s.name.endswith("_count"))
    assert count == ours > 0


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_of_the_dashboards_counts_what_ours_counts(families: dict[str, Metric], name: str) -> None:
    family, ours = families[f"vllm:{name}"], families[f"nkw_{name}"]
    assert family.type == "counter"
    (sample,) = [sample for sample in family.samples if sample.name == f"vllm:{name}_total"]
    assert sample.labels == {"model_name": MODEL, "engine": "0"}
    (expected,) = [sample.value for sample in ours.samples if sample.name == f"nkw_{name}_total"]
    assert sample.value == expected > 0


@pytest.mark.parametrize("name", GAUGES)
def test_a_gauge_of_the_dashboards_has_the_label_model_name(families: dict[str, Metric], name: str) -> None:
    family = families[f"vllm:{name}"]
    assert family.type == "gauge"
    (sample,) = family.samples
    assert (sample.name, sample.labels) == (f"vllm:{name}", {"model_name": MODEL, "engine": "0"})


def test_every_reason_of_an_end_has_a_sample_before_the_first_request() -> None:
    family = read_families(Metrics("m", 256).format_samples().decode())["vllm:request_success"]
    samples = [sample for sample in family.samples if sample.name == "vllm:request_success_total"]
    assert {sample.labels["finished_reason"]: sample.value for sample in samples} == {
        "stop": 0,
        "length": 0,
        "abort": 0,
        "error": 0,
    }


def test_tokens_of_steps_are_a_histogram(families: dict[str, Metric]) -> None:
    family = families["vllm:iteration_tokens_total"]
    assert family.type == "histogram"
    assert bounds_of(family) == [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    numbers = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    steps = next(s.value for s in families["nkw_steps"].samples if s.name == "nkw_steps_total")
    tokens = next(s.value for s in families["nkw_step_tokens"].samples if s.name == "nkw_step_tokens_total")
    assert (numbers["count"], numbers["sum"]) == (steps, tokens)
    one_token = next(sample.value for sample in family.samples if sample.labels.get("le") == "1.0")
    assert 0 < one_token < steps


def test_pages_of_the_cache_are_a_gauge_as_in_vllm(families: dict[str, Metric]) -> None:
    (sample,) = families["vllm:cache_config_info"].samples
    assert families["vllm:cache_config_info"].type == "gauge"
    assert (sample.value, sample.labels["block_size"]) == (1, "16")


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("e2e_request_latency_seconds", LATENCY_BOUNDS),
        ("request_queue_time_seconds", LATENCY_BOUNDS),
        (
            "time_to_first_token_seconds",
            [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1]
            + [2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560],
        ),
        (
            "inter_token_latency_seconds",
            [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80],
        ),
        ("request_prompt_tokens", [1, 2, 5, 10, 20, 50, 100, 200]),  # the context is 256
        ("request_params_n", [1, 2, 5, 10, 20]),
    ],
)
def test_buckets_are_those_of_vllm(families: dict[str, Metric], name: str, bounds: list[float]) -> None:
    assert bounds_of(families[f"vllm:{name}"]) == bounds


@pytest.mark.parametrize(
    ("max_model_len", "last"), [(199, 100), (200, 200), (201, 200), (1000, 1000), (4096, 2000)]
)
def test_buckets_of_tokens_end_at_the_longest_sequence(max_model_len: int, last: int) -> None:
    assert _find_vllm_bounds("request_generation_tokens", max_model_len)[-1] == last


def test_a_router_writes_the_replica_as_the_engine() -> None:
    text = Metrics("m", 256).format_samples()
    metrics = [(0, Answer(200, text)), (1, Answer(200, text))]
    families = {family.name: family for family in _label_metrics(metrics)}
    samples = families["vllm:prompt_tokens"].samples
    assert {(s.labels["engine"], s.labels["replica"]) for s in samples} == {("0", "0"), ("1", "1")}
    assert all("engine" not in sample.labels for sample in families["nkw_prompt_tokens"].samples)


def test_top_says_that_steps_are_not_predicted_yet() -> None:
    steps = {("nkw_steps_total", ""): 4.0, ("nkw_unpredicted_step_parts", ""): 5.0}
    unknown = "predicted clock   unknown so far: 5 parts of steps are not predicted yet"
    assert unknown in format_metrics(steps, steps, 0.0).splitlines()
    some = {**steps, ("nkw_predicted_step_seconds_total", ""): 0.002}
    assert "predicted clock   0.50 ms a step, without 5 parts" in format_metrics(some, some, 0.0).splitlines()
