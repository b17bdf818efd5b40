"""`nkw traffic`: predictions against the passes they are made of, policies against each other, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.engine import SchedulerOptions
from model.plan.memory import compute_footprint
from model.plan.service_level import ServiceLevel
from model.plan.sizes import ModelSizes, load_model
from model.plan.stack_records import THIS
from model.traffic.clock import serve_pass
from model.traffic.deployment import Deployment, Setup
from model.traffic.lengths import Lengths
from model.traffic.report import Summary, summarize
from model.traffic.search import bisect_rate
from model.traffic.workload import Query, Workload, draw_poisson_arrivals, draw_queries
from nkw.commands import main
from tests.commands import run_command
from tests.model.folders import TINY, write_folder
from tests.model.test_plan_command import refused
from tests.model.test_plan_parameters import CONFIGS, GEMMA3N, NOT_COMPUTED, written
from tests.step_shapes import decode_shape, prompt_shape

SETUP = Setup("trn2.48xlarge", "bfloat16", 1024, tp=8, replicas=1, options=SchedulerOptions(max_num_seqs=32))


@pytest.fixture(scope="module")
def model() -> ModelSizes:
    return load_model(CONFIGS / "llama-3.2-1b.json")


@pytest.fixture(scope="module")
def deployment(model: ModelSizes) -> Deployment:
    return Deployment(model, SETUP)


def run(deployment: Deployment, workload: Workload) -> Summary:
    return summarize(deployment.serve_unit(workload), ServiceLevel(ttft=500e6), deployment.pages)


@pytest.mark.slow
def test_a_request_alone_takes_the_sum_of_its_passes(deployment: Deployment) -> None:
    """A prompt of 510 tokens is padded to 512; a decode step from position 512 on reads 1,024 positions."""
    ((timeline,),) = (
        unit_run.timelines for unit_run in deployment.serve_unit(Workload((Query(510, 6),), (0,)))
    )
    predictor = deployment.predictors[0]
    step = predictor.make_paged_step({None: deployment.pages}, 16)
    shapes = [
        prompt_shape(1, 512, 512, model_step=step),
        *[decode_shape(1, 1, 512, step)] * 2,
        *[decode_shape(1, 1, 1024, step)] * 3,
    ]
    sequences = [(0, 1), *[(1, 0)] * 5]
    passes = [
        serve_pass(THIS, predictor.predict_paged(shape), *counts).time.program_ns
        for shape, counts in zip(shapes, sequences)
    ]
    assert timeline.ttft_ns == round(passes[0])
    assert timeline.e2e_ns == sum(map(round, passes))


def test_the_pages_fill_what_the_weights_leave(model: ModelSizes, deployment: Deployment) -> None:
    weights = compute_footprint(model, "bfloat16", 8, 0).weight_bytes
    # 16 positions of keys and values of 64 elements, one head of each on a rank, in 16 layers
    (page_kind,) = deployment.page_kinds
    assert (page_kind.window, page_kind.page_bytes) == (None, 16 * 2 * 64 * 16 * 2)
    assert deployment.pages == page_kind.pages == (12 * 2**30 - weights) // page_kind.page_bytes


@pytest.mark.slow
def test_continuous_batches_give_more_tokens_than_static_ones(
    model: ModelSizes, deployment: Deployment
) -> None:
    """512 requests at one moment, 64 tokens each and exponentially many more, 128 on average.

    A static batch of 32 lasts as long as its longest request: on average L = 1 + 1/2 + … + 1/32 = 4.1 times the mean.
    A step of n requests takes a + b n. A continuous batch is full, so it is (L a + 32 b) / (a + 32 b) times as fast.
    Steps are rounded up to sizes at most twice as large, which adds at most the time of 32 requests to b.
    """
    draw = np.random.default_rng(0)
    queries = draw_queries(512, Lengths.parse("64"), Lengths.parse("exp:128"), None, draw)
    workload = Workload(
        tuple(replace(query, new_tokens=min(query.new_tokens, 960)) for query in queries), (0,) * 512
    )
    static = Deployment(model, replace(SETUP, options=replace(SETUP.options, continuous=False)), deployment)
    ratio = run(deployment, workload).tokens_per_s / run(static, workload).tokens_per_s
    predictor = deployment.predictors[0]
    step = predictor.make_paged_step({None: deployment.pages}, 16)
    one, full = (
        serve_pass(
            THIS, predictor.predict_paged(decode_shape(requests, 1, 256, step)), requests, 0
        ).time.program_ns
        for requests in (1, 32)
    )
    slope = (full - one) / 31
    expected = (4.1 * (one - slope) + 32 * slope) / full
    assert expected / 1.25 <= ratio <= expected * 1.25


@pytest.mark.slow
def test_chunks_of_prompts_keep_gaps_short_and_let_first_tokens_wait(
    model: ModelSizes, deployment: Deployment
) -> None:
    queries = (Query(512, 64),) * 300
    workload = draw_poisson_arrivals(
        queries, 0.3 * 1e9 / run(deployment, Workload(queries[:1], (0,))).e2e[50] * 32, _draw()
    )
    small = Deployment(
        model, replace(SETUP, options=replace(SETUP.options, max_num_batched_tokens=256)), deployment
    )
    whole_prompts = Deployment(model, SETUP.with_whole_prompts(), deployment)
    chunked, unchunked = run(small, workload), run(whole_prompts, workload)
    assert chunked.itl[99] < 0.8 * unchunked.itl[99]
    assert chunked.ttft[50] > unchunked.ttft[50]


def _draw() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("limit", [0.37, 5.0, 9.99])
def test_the_breaking_rate_is_found_by_bisection(limit: float) -> None:
    breaking_rate = bisect_rate(lambda rate: rate <= limit, 10.0)
    assert breaking_rate is not None
    assert breaking_rate <= limit < 1.02 * breaking_rate


def test_a_level_that_never_holds_has_no_breaking_rate() -> None:
    assert bisect_rate(lambda rate: False, 10.0) is None


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 128}))
    monkeypatch.chdir(tmp_path)
    return "config.json"


SHORT = (
    "--prompt-lengths",
    "8..24",
    "--output-lengths",
    "8",
    "--requests",
    "20",
    "--tp",
    "2",
    "--replicas",
    "2",
)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    out = run_command(main, ["traffic", *words], capsys).out
    assert max(map(len, out.splitlines())) <= 80
    return out


@pytest.mark.slow
def test_the_text_says_times_rates_and_comparisons(small: str, capsys: Any) -> None:
    text = printed(
        capsys, small, *SHORT, "--compare", "--price", "20", "--sla", "ttft=5ms", "--shared-prefix", "32:2"
    )
    for words in (
        "llama on trn2.48xlarge: tp 2 (LNC 2), 2 replicas, float32",
        "20 requests, ",
        "\ntime to first token (TTFT) ",
        "\nthe service level breaks at ",
        "were cached",
        "\nno prefix cache ",
        "\nstatic batching ",
        "\nwhole prompts ",
        "\nhalf the buckets ",
        "\n1 of 2 prefill ",
        "\ntp 1, replicas 4 ",
        "\ntp 4, replicas 1 ",
        " per million tokens of prompts and $",
        "\ntrn2.48xlarge at $20.00/h\n",
        "Times of steps are dry runs of this project's kernels",
    ):
        assert words in text


@pytest.mark.slow
def test_the_document_holds_what_the_text_says(small: str, capsys: Any, tmp_path: Path) -> None:
    words = (*SHORT, "--users", "6", "--think", "0.001", "--json", "out.json", "--compare")
    printed(capsys, small, *words)
    document = json.loads((tmp_path / "out.json").read_text())
    keys = (
        "schema command config model_type stand_in instance lnc tp ep replicas dtype max_model_len stack pages "
        "block_size kinds "
        "prefill_replicas link draft_model options "
        "requests left_out rate users window_s think_s seed sla_ns compared breaking_rate price price_basis run "
        "variants curve shapes basis versions"
    )
    assert list(document) == keys.split()
    assert (document["users"], document["think_s"], document["rate"], document["breaking_rate"]) == (
        6,
        1e-3,
        None,
        None,
    )
    run_keys = (
        "ttft_ns itl_ns e2e_ns queue_ns handover_ns requests_per_s tokens_per_s goodput_per_s met prompt_tokens "
        "new_tokens cached_tokens elapsed_ns utilisation utilisations prompts acceptance steps computed_tokens padding "
        "preemptions dollars_per_million dollars_per_million_input dollars_per_million_output slices"
    )
    for entry in (document, *document["variants"]):
        assert list(entry["run"]) == run_keys.split()
    run = document["run"]
    assert run["new_tokens"] == 20 * 8
    dollars = (
        run["dollars_per_million_input"] * run["prompt_tokens"] + run["dollars_per_million_output"] * 160
    )
    assert dollars == pytest.approx(run["dollars_per_million"] * 160)
    assert dollars == pytest.approx(document["price"] * run["elapsed_ns"] / 3600e9 * 1e6)
    assert list(document["run"]["ttft_ns"]) == ["p50", "p90", "p99"]


@pytest.mark.slow
def test_a_trace_is_served_at_its_times_and_at_a_rate(small: str, capsys: Any, tmp_path: Path) -> None:
    rows = [f"2024-05-10 00:00:{number:02}.5,{9 + number % 7},{3 + number % 5}" for number in range(40)]
    rows.append("2024-05-10 00:00:59.5,500,5")
    (tmp_path / "azure.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    words = (small, "--trace", "azure.csv", "--tp", "1", "--replicas", "1")
    assert "40 requests, 1.00 per second; 1 left out, without tokens or too long" in printed(capsys, *words)
    assert "40 requests, 50.00 per second" in printed(capsys, *words, "--rate", "50")
    assert "40 requests, 3 users, 0 s between" in printed(capsys, *words, "--users", "3")


@pytest.mark.deep
def test_conversations_come_at_random_and_a_request_alone_comes_at_once(
    small: str, capsys: Any, tmp_path: Path
) -> None:
    turns = [[{"value": "a b c"}, {"value": "d e"}]] * 30
    (tmp_path / "chat.json").write_text(json.dumps([{"conversations": turn} for turn in turns]))
    folder = str(write_folder(tmp_path / "model"))
    words = ("--trace", "chat.json", "--tp", "1", "--replicas", "1")
    assert "30 requests, 20.00 per second" in printed(capsys, folder, *words, "--rate", "20")
    assert "the service level breaks at" in printed(capsys, folder, *words)
    assert "1 request, " in printed(capsys, folder, *words, "--requests", "1")


@pytest.mark.slow
def test_chosen_sizes_pad_less_than_powers_of_two(small: str, capsys: Any) -> None:
    words = ("--prompt-lengths", "40..48", *SHORT[2:], "--rate", "50", "--max-num-seqs", "4")

    def padding(*sizes: str) -> float:
        text = printed(capsys, small, *words, *sizes)
        assert ("steps round up to" in text) == bool(sizes)
        return float(re.findall(r"([\d.]+)%\s+of\s+the\s+computed\s+tokens\s+are\s+padding", text)[0])

    powers, fitted = padding(), padding("--buckets", "auto")
    assert fitted < powers < padding("--buckets", "tokens=64 sequences=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--acceptance", "0.7,0.5"), "a step verifies up to 2 drafts looked up in the prompt"),
        (("--acceptance", "1", "--draft-model", "config.json"), "verifies up to 2 drafts of a llama model"),
    ],
)
def test_drafts_are_predicted_and_compared_with_none(
    small: str, capsys: Any, words: tuple[str, ...], sentence: str
) -> None:
    text = printed(capsys, small, *SHORT, "--speculative-tokens", "2", *words, "--rate", "50", "--compare")
    assert sentence in text
    assert "\nno drafts " in text
    assert "\ndrafts that were right, place by place: " in text


@pytest.mark.slow
def test_drafts_are_measured_on_a_text(tmp_path: Path, capsys: Any) -> None:
    folder = write_folder(tmp_path / "model")
    (tmp_path / "text").write_text("a b c d " * 40)
    words = (
        "--speculative-tokens",
        "3",
        "--acceptance-text",
        str(tmp_path / "text"),
        "--tp",
        "1",
        "--replicas",
        "1",
    )
    text = printed(capsys, str(folder), *SHORT[:6], *words, "--rate", "20")
    assert "\ndrafts that were right, place by place: 100%, 100%, 100%" in text


@pytest.mark.slow
def test_prompts_are_computed_on_replicas_of_their_own(small: str, capsys: Any, tmp_path: Path) -> None:
    words = ("--prefill-replicas", "1", "--compare", "--json", "out.json")
    text = printed(capsys, small, *SHORT, *words)
    for sentence in (
        "1 replica for prompts, 1 for decoding; pages move over NeuronLink",
        "until the pages have moved ",
        "where prompts are computed",
        " prompts anywhere ",
        "static batching: static batches take no requests whose prompts were computed elsewhere",
    ):
        assert sentence in " ".join(text.split())
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["link"]["gb_per_s"], document["prefill_replicas"]) == (256, 1)
    assert list(document["run"]["handover_ns"]) == ["p50", "p90", "p99"]
    assert sum(time_slice["completed"] for time_slice in document["run"]["slices"]) == 20


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--buckets", "tokens=8"), "tokens of the buckets end at 8; up to"),
        (("--rate", "0"), "'0' is not a number from 1e-06"),
        (("--load", "0%"), "'0%' is not a share from 1%"),
        (("--think", "-1"), "'-1' is not a number from 0"),
        (("--rate", "1", "--users", "2"), "one of --rate, --load and --users decides when requests come"),
        (("--trace", "none.csv"), "none.csv is missing"),
        (("--trace", "config.json"), "is a JSON object; a trace is a list"),
        (("--trace", "chat.json"), "tokenizer.json is missing"),
        (("--prompt-lengths", "x"), "lengths 'x'; write 512"),
        (("--sla", "ttft"), "service level 'ttft'"),
        (("--shared-prefix", "0"), "shared prefix '0'"),
        (("--shared-prefix", "8", "--trace", "x"), "a trace has its own prompts"),
        (("--block-size", "12"), "block_size is 12"),
        (
            ("--prompt-lengths", "200"),
            "no request fits into the 128 tokens that the model takes; the shortest has 208",
        ),
        (("--max-model-len", "12"), "no request fits into the 12 tokens that the model takes"),
        (("--max-model-len", "129"), "requests of up to 129 tokens exceed the model's context, 128"),
        (("--sla", "ttft=1us"), "requests alone do not keep to the service level"),
        (("--tp", "65"), "65 ranks on trn2.48xlarge, which has 64 logical cores (LNC 2)"),
        (("--tp", "4", "--replicas", "64"), "64 replicas of 4 ranks take 256 cores; trn2.48xlarge has 64"),
        (("--max-num-seqs", "9999"), "max_num_batched_tokens is 2048, less than"),
        (("--instance", "x"), "'x'"),
        (("--json", "config.json"), "config.json"),
        (("--html", "config.json"), "the page cannot be written to config.json"),
        (("--html", "no/page.html"), "the page cannot be written to no/page.html"),
        (
            ("--prefill-replicas", "2", "--replicas", "2"),
            "2 of 2 replicas compute prompts, which leaves none to",
        ),
        (("--prefill-replicas", "0"), "'0' is not a positive whole number"),
        (("--acceptance", "0.7"), "--speculative-tokens says how many drafts a step verifies"),
        (("--draft-model", "config.json"), "--speculative-tokens says how many drafts a step verifies"),
        (("--speculative-tokens", "2"), "one of --acceptance and --acceptance-text says"),
        (
            ("--speculative-tokens", "128", "--acceptance", "1"),
            "128 drafts of a step; up to 127 are verified",
        ),
        (("--speculative-tokens", "2", "--acceptance", "1.1"), "acceptance '1.1'; write 0.7"),
        (("--speculative-tokens", "2", "--acceptance-text", "none"), "none is missing"),
        (("--speculative-tokens", "2", "--acceptance-text", "chat.json"), "tokenizer.json is missing"),
        (
            ("--speculative-tokens", "2", "--acceptance-text", "chat.json", "--draft-model", "config.json"),
            "a text shows what prompt lookup finds",
        ),
        (
            ("--speculative-tokens", "2", "--acceptance", "1", "--draft-model", "other.json"),
            "the draft model has a vocabulary of 7 tokens, the model one of 300",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(
    small: str, capsys: Any, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "chat.json").write_text('[{"conversations": [{"value": "a"}, {"value": "b"}]}]')
    (tmp_path / "other.json").write_text(json.dumps({**TINY, "vocab_size": 7}))
    arguments = (*SHORT[:6], *words) if "--prompt-lengths" not in words else (*SHORT[2:6], *words)
    assert sentence in refused(capsys, small, *arguments, command="traffic")


def test_a_model_without_kernels_is_refused_with_what_it_has(tmp_path: Path, capsys: Any) -> None:
    told = refused(capsys, str(written(tmp_path, GEMMA3N)), command="traffic")
    assert [
        words
        for words in (f"no kernel of this project computes {NOT_COMPUTED}", "nkw plan gives the rooflines")
        if words not in told
    ] == []


def test_a_model_that_does_not_fit_is_refused_with_its_pages(capsys: Any) -> None:
    told = refused(capsys, str(CONFIGS / "llama-3.1-70b.json"), "--tp", "2", command="traffic")
    assert (
        "tp 2 (LNC 2) on trn2.48xlarge leaves 0 pages of 16 positions beside the weights; a request of 640 tokens"
        in told
    )


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 64])
def test_longrope_is_served_at_any_length_like_factors_that_never_change(tmp_path: Path, length: int) -> None:
    setup = Setup("trn2.48xlarge", "float32", length, tp=1, replicas=1)
    workload = Workload((Query(length // 2, length // 2),) * 2, (0, 0))
    ends = []
    for name, short in (("changing", [1.0, 1.1, 1.25, 1.5]), ("constant", [1.5, 2.0, 3.0, 4.0])):
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": [1.5, 2.0, 3.0, 4.0]}
        scaling |= {"factor": 4.0, "original_max_position_embeddings": 16}
        counts = load_model(write_folder(tmp_path / name, rope_scaling=scaling))
        ends.append([timeline.e2e_ns for timeline in Deployment(counts, setup).serve(workload)[0].timelines])
    assert ends[0] == ends[1]
    assert min(ends[0]) > 0
