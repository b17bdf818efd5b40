"""/metrics shows the clock of the wall and the predicted one, and Retry-After follows the rate of ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from model.commands.top.command import _is_server_url
from model.families import load_config
from model.llm.prediction import Deployment
from model.loading.shipped import PRETRAINED
from model.plan.predict import Predictor
from model.serve.errors import queue_full_error
from model.serve.prediction import StepTimes
from nkw.commands import main
from tests.serve.conftest import MODEL, Served
from tests.serve.test_ends import metric, wait_until
from tests.step_shapes import decode_shape

pytest.importorskip("openai", reason="openai is an extra of development (dev)")

VLLM = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total request_success_total
request_prompt_tokens_count request_generation_tokens_count request_max_num_generation_tokens_count
request_params_n_count time_to_first_token_seconds_count inter_token_latency_seconds_count
request_time_per_output_token_seconds_count e2e_request_latency_seconds_count request_queue_time_seconds_count
request_inference_time_seconds_count request_prefill_time_seconds_count request_decode_time_seconds_count
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
cache_config_info
""".split()
"""Names of vLLM's page of metrics, whose prefix there is `vllm:`."""
OURS = "step_tokens_total padding_tokens_total steps_total step_seconds_total predicted_step_seconds_total".split()


def ask(server: Served, **changes: Any) -> Any:
    arguments = {"model": MODEL, "prompt": "Tom had", "max_tokens": 3, "temperature": 0} | changes
    return server.client().completions.create(**arguments)


def test_names_are_those_of_vllm(server: Served) -> None:
    ask(server)
    _, body = server.send("GET", "/metrics")
    shown = set(re.findall(r"^nkw_(\w+)\{", body.decode(), re.MULTILINE))
    assert {*VLLM, *OURS} <= shown
    assert set(re.findall(r"^nkw_\w+\{.*?(model_name=\"[^\"]*\")", body.decode(), re.MULTILINE)) == {
        f'model_name="{MODEL}"'
    }


def test_predictions_name_the_chip_and_the_physical_cores_of_a_rank(server: Served) -> None:
    _, body = server.send("GET", "/metrics")
    for name in ("predicted_step_seconds_total", "unpredicted_step_parts"):
        (labels,) = re.findall(rf"^nkw_{name}{{(.*)}}", body.decode(), re.MULTILINE)
        assert {'target="trn2"', 'lnc="1"'} < set(labels.split(","))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "queries"), [((), True), (("--no-prefix-caching",), False)])
def test_prompts_are_looked_up_where_prefixes_are_shared(
    start: Callable[..., Any], options: tuple[str, ...], queries: bool
) -> None:
    with start(*options) as served:
        ask(served)
        assert metric(served, "nkw_prompt_tokens_total") > 0
        looked_up = metric(served, "nkw_prefix_cache_queries_total")
        assert looked_up == (metric(served, "nkw_prompt_tokens_total") if queries else 0)


@pytest.mark.slow
def test_predicted_clock_adds_up_the_parts_of_steps(server: Served) -> None:
    names = ("nkw_steps_total", "nkw_step_seconds_total", "nkw_predicted_step_seconds_total")

    def predicted() -> bool:
        return metric(server, "nkw_unpredicted_step_parts") == 0

    ask(server)  # whose shapes, from here on, are known
    wait_until(predicted)
    shapes = server.engine.use.steps.copy()
    before = [metric(server, name) for name in names]
    ask(server)
    wait_until(predicted)
    steps, wall, seconds = [metric(server, name) - then for name, then in zip(names, before)]
    cache, length = server.engine.scheduler.cache, server.engine.limits.max_model_len
    predictor = Predictor(load_config(PRETRAINED), "trn2", 1, "float32", length)
    launched = server.engine.use.steps - shapes
    step = predictor.make_paged_step({None: cache.pages}, cache.block_size)
    times = {shape: predictor.predict_paged(step.resize(shape.sizes)).time.program_ns for shape in launched}
    assert (steps, launched.total()) == (3, 3)
    assert wall > 0
    assert seconds == pytest.approx(
        1e-9 * sum(times[shape] * count for shape, count in launched.items()), rel=1e-9
    )


@pytest.mark.slow
def test_shapes_that_verify_drafts_are_counted_as_not_predicted() -> None:
    times = StepTimes(Deployment(PRETRAINED, "trn2", 1, 1, 1, "auto", 256, {None: 16}, 16))
    decode = decode_shape(1, 1, 128)
    verify = decode_shape(1, 4, 128)
    try:
        assert times.predict_seconds({decode: 2, verify: 1}) == (0.0, 3)
        wait_until(lambda: times.predict_seconds({decode: 2, verify: 1})[1] == 1)
        once, none = times.predict_seconds({decode: 1})
        assert (times.predict_seconds({decode: 2, verify: 1}), none) == ((2 * once, 1), 0)
        assert once > 0
    finally:
        times.stop()


def test_retry_after_is_whole_seconds_from_1_to_an_hour() -> None:
    answers = map(queue_full_error, (None, 0.0, 1.0, 1.1, 3600.0, 3600.1, 1e9))
    assert [answer.headers["retry-after"] for answer in answers] == "2 1 1 2 3600 3600 3600".split()


@pytest.mark.parametrize(
    ("url", "is_server"),
    [
        ("http://[::1]:1", True),
        ("http://localhost:1/", True),
        ("http://[::1", False),
        ("http://a:65536", False),
    ]
    + [
        ("http://a:b", False),
        ("http://[1.2]", False),
        ("http://a/b", False),
        ("http://:1", False),
        ("a:1", False),
    ]
    + [("http://a\n", False)],
)
def test_url_of_top_is_checked(url: str, is_server: bool) -> None:
    assert _is_server_url(url) is is_server


def test_top_says_in_one_sentence_that_a_url_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://[::1"]) == 2
    assert capsys.readouterr().err == (
        "nkw: error: --url is 'http://[::1'; it must be like http://127.0.0.1:8000\n"
    )
