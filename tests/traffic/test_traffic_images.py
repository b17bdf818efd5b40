"""`nkw traffic` for diffusion models: batches of equal settings, queueing theory, reports and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

from model.plan.images import open_planned_pipeline, plan_images
from model.runners.denoise import MOST_IMAGES, Sampling
from model.traffic.image_service import serve_images
from model.traffic.images import ImageTrafficRequest, predict_image_traffic, summarize_images
from model.traffic.workload import SECOND_NS, RequestStream, draw_poisson_times
from nkw.commands import main
from tests.model.test_denoise import folders  # noqa: F401

FEW, MANY = Sampling(steps=2), Sampling(steps=5)


def predict(sampling: Sampling, images: int) -> dict[str, int]:
    """Return the times of a model with 10 ns for the text, 100 ns + 20 ns an image for a pass, and 7 ns an image."""
    return {
        "text_encoder": 10,
        "denoiser": sampling.steps * (100 + 20 * images),
        "autoencoder": 7 * images,
    }


def list_streams() -> Iterator[RequestStream[Sampling]]:
    """Yield few and many requests at a time, and requests of users."""
    generator = np.random.default_rng(3)
    queries = tuple((FEW, MANY)[index] for index in generator.integers(2, size=300))
    yield RequestStream(queries, draw_poisson_times(300, 1e6, generator))
    yield RequestStream(queries, draw_poisson_times(300, 1e7, generator))
    yield RequestStream(queries, users=7, think_ns=450)


@pytest.mark.parametrize("most_images", [1, 2, 4])
def test_every_request_is_drawn_once(most_images: int) -> None:
    for stream in list_streams():
        batches = serve_images(stream, predict, most_images)
        indices = [arrival.index for batch in batches for arrival in batch.requests]
        assert sorted(indices) == list(range(len(stream.queries)))
        for batch in batches:
            assert 1 <= len(batch.requests) <= most_images
            assert len({arrival.query for arrival in batch.requests}) == 1
            assert batch.end_ns - batch.begin_ns == sum(batch.stages_ns.values())
        for batch, following in pairwise(batches):
            first = min(arrival.arrival_ns for arrival in following.requests)
            assert following.begin_ns == max(batch.end_ns, first)


def test_waiting_requests_of_equal_settings_are_in_the_batch() -> None:
    """A batch leaves a request of its settings out only if it is full or the request has not arrived."""
    for stream in list_streams():
        batches = serve_images(stream, predict, 3)
        for number, batch in enumerate(batches):
            later = [arrival for following in batches[number + 1 :] for arrival in following.requests]
            if len(batch.requests) < 3:
                equal = [arrival for arrival in later if arrival.query == batch.requests[0].query]
                assert all(arrival.arrival_ns > batch.begin_ns for arrival in equal)
            head = (batch.requests[0].arrival_ns, batch.requests[0].index)
            assert all((arrival.arrival_ns, arrival.index) > head for arrival in later)


def test_a_case_by_hand() -> None:
    """FEW takes 10 + 2 x (100 + 20 n) + 7 n ns: 257 for one image and 304 for two; MANY takes 617 for one.

    Request 0 comes at 0 and ends at 257. Requests 1 (FEW), 2 (MANY) and 3 (FEW) wait: 1 and 3 go together, until 561,
    then 2, until 1,178. Request 4 comes at 1,300 to an idle replica and ends at 1,557.
    """
    stream = RequestStream((FEW, FEW, MANY, FEW, FEW), (0, 100, 150, 200, 1_300))
    batches = serve_images(stream, predict, 2)
    drawn_indices = [[arrival.index for arrival in batch.requests] for batch in batches]
    assert drawn_indices == [[0], [1, 3], [2], [4]]
    assert [(batch.begin_ns, batch.end_ns) for batch in batches] == [
        (0, 257),
        (257, 561),
        (561, 1_178),
        (1_300, 1_557),
    ]
    summary = summarize_images([batches])
    assert (summary.images, summary.batches, summary.elapsed_ns) == (5, 4, 1_557)
    assert summary.utilisation == (257 + 304 + 617 + 257) / 1_557
    assert summary.mean_queue_ns == (0 + 157 + 411 + 57 + 0) / 5
    assert (summary.queue[50], summary.queue[99]) == (57, 411)
    assert (summary.e2e[50], summary.e2e[99]) == (361, 1_028)
    assert (summary.drawing[50], summary.drawing[99]) == (304, 617)
    assert summary.stages_ns == {"text_encoder": 40, "denoiser": 240 + 280 + 600 + 240, "autoencoder": 35}
    assert summary.images_per_s == 5 * SECOND_NS / 1_557
    assert summary.dollars_per_thousand(7.2) == pytest.approx(7.2 / 3600 * 1000 * 1_557e-9 / 5)
    assert summarize_images([batches, []]).utilisation == summary.utilisation / 2


def test_the_limit_of_a_batch() -> None:
    """Of three requests that wait together, a limit of 2 leaves one, a limit of 3 or 4 none."""
    stream = RequestStream((FEW,) * 4, (0, 1, 2, 3))
    sizes = {
        limit: [len(batch.requests) for batch in serve_images(stream, predict, limit)] for limit in (2, 3, 4)
    }
    assert sizes == {2: [1, 2, 1], 3: [1, 3], 4: [1, 3]}


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_image_at_a_time_waits_as_queueing_theory_says(load: float) -> None:
    """M/D/1: the mean wait is load / (1 - load) / 2 times of service.

    The bound is four standard errors, estimated from the cycles of an idle server, which are independent.
    """
    service_ns = 100_000
    times_ns = draw_poisson_times(30_000, load * SECOND_NS / service_ns, np.random.default_rng(11))
    batches = serve_images(
        RequestStream((FEW,) * len(times_ns), times_ns), lambda sampling, images: {"denoiser": service_ns}, 1
    )
    waits_ns = np.array([batch.begin_ns - batch.requests[0].arrival_ns for batch in batches])
    mean = summarize_images([batches]).mean_queue_ns
    assert mean == pytest.approx(waits_ns.mean())
    idle = np.flatnonzero(waits_ns == 0)
    sums, counts = np.add.reduceat(waits_ns, idle), np.diff([*idle, len(waits_ns)])
    error = sqrt(np.sum((sums - mean * counts) ** 2.0)) / len(waits_ns)
    assert mean == pytest.approx(service_ns * load / (1 - load) / 2, abs=4 * error)
    assert error < 0.05 * mean


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:  # noqa: F811
    """Return the folder of a tiny pipeline."""
    return folders["flow"]


def test_full_batches_are_those_of_a_plan(folder: Path) -> None:
    pipeline = open_planned_pipeline(folder, "auto", None)
    request = ImageTrafficRequest((3,), instance="trn1.2xlarge", tp=2, most_images=3, users=3, requests=30)
    traffic = predict_image_traffic(pipeline, request, lambda phase: None)
    plan = plan_images(pipeline, "trn1", 2, Sampling(3), images=3, ranks=2)
    assert traffic.replicas == 1
    assert traffic.full_rate == pytest.approx(plan.images_per_second, rel=1e-4)
    # Three users without pauses keep every batch full.
    assert traffic.summary.batches == 10 and traffic.summary.utilisation == 1
    assert traffic.summary.images_per_s == pytest.approx(traffic.full_rate)


def test_groups_share_a_batch(folder: Path) -> None:
    pipeline = open_planned_pipeline(folder, "auto", None)
    single, double = (
        predict_image_traffic(
            pipeline,
            ImageTrafficRequest((2,), instance="trn1.32xlarge", dp=dp, most_images=2, users=2, requests=2),
            lambda phase: None,
        )
        for dp in (1, 2)
    )
    assert (single.replicas, double.replicas) == (32, 16)
    assert double.batch_times[Sampling(2), 2] == single.batch_times[Sampling(2), 1]


def read_document(folder: Path, path: Path, *words: str) -> dict[str, object]:
    """Return the document of a command, without the lines that it prints."""
    assert main(["traffic", str(folder), "--instance", "trn1.2xlarge", *words, "--json", str(path)]) == 0
    document: dict[str, object] = json.loads(path.read_text())
    return document


def test_the_seed_decides_a_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "40", "--steps", "2,3"]
    first, again, other_seed = (
        read_document(folder, tmp_path / f"{index}.json", *words, "--seed", seed)
        for index, seed in enumerate(("5", "5", "6"))
    )
    assert first == again
    assert first["run"] != other_seed["run"]
    text = capsys.readouterr().out
    assert "2 or 3 steps with guidance 4" in text and "per 1,000 images" in text
    assert max(map(len, text.splitlines())) <= 80


def test_requests_arrive_at_the_rate(folder: Path, tmp_path: Path) -> None:
    words = ["--requests", "30", "--steps", "2", "--max-num-seqs", "2"]
    document = read_document(folder, tmp_path / "rate.json", *words, "--rate", "50")
    assert document["rate"] == pytest.approx(50, rel=1e-6) and document["max_num_seqs"] == 2
    half = read_document(folder, tmp_path / "load.json", *words, "--load", "50%")
    assert half["rate"] == pytest.approx(half["full_rate"] / 2, rel=1e-4)  # type: ignore[operator]
    assert read_document(folder, tmp_path / "one.json", "--requests", "1", "--steps", "2")["rate"] is None


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line that refuses a command."""
    try:
        status = main(["traffic", *words])
    except SystemExit as exit_of_parser:
        status = exit_of_parser.code  # type: ignore[assignment]
    assert status == 2
    *_, line = capsys.readouterr().err.strip().split("\n")
    return line


@pytest.mark.parametrize(
    "words",
    [
        ["--stack", "vllm-neuron"],
        ["--ep", "2"],
        ["--trace", "requests.csv"],
        ["--prompt-lengths", "64"],
        ["--output-lengths", "64"],
        ["--shared-prefix", "64"],
        ["--sla", "e2e=1s"],
        ["--compare"],
        ["--prefill-replicas", "1"],
        ["--speculative-tokens", "1"],
        ["--acceptance", "0.5"],
        ["--max-num-batched-tokens", "64"],
        ["--max-model-len", "64"],
        ["--block-size", "32"],
        ["--buckets", "auto"],
        ["--no-chunked-prefill"],
        ["--no-prefix-caching"],
        ["--as", "llama"],
        ["--quantization", "fp8"],
        ["--kv-cache-dtype", "fp8"],
        ["--html", "page.html"],
    ],
)
def test_refuses_options_of_texts(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refuse(capsys, str(folder), *words)
    assert f"{words[0]}: traffic of images has no" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "1", "--users", "2"], "give only one of them"),
        (["--requests", "1000001"], "at most 1,000,000"),
        (["--steps", "1001"], "steps 1001"),
        (["--steps", "4,0"], "'0' is not a positive whole number"),
        (["--steps", ",".join(["2"] * 17)], "17 numbers; give at most 16"),
        (["--guidance", "-1"], "guidance -1 must be between 0 and 1000"),
        (["--size", "32x32"], "its sizes are 16x16"),
        (["--tp", "3"], "3 ranks"),
        (["--max-num-seqs", str(MOST_IMAGES + 1)], "1025 images in one batch; at most 1,024"),
        (["--instance", "trn1.2xlarge", "--dp", "3"], "3 ranks of 1 cores; the instance has 2 cores"),
        (["--instance", "trn1.2xlarge", "--replicas", "3"], "3 replicas of 1 ranks; trn1.2xlarge holds 2"),
    ],
)
def test_refuses_numbers(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refuse(capsys, str(folder), *words)


@pytest.mark.parametrize(
    "words", [["--replicas", "2"], ["--dp", "2"], ["--steps", ",".join(["2"] * 16)], ["--size", "16x16"]]
)
def test_takes_the_numbers_at_the_limits(words: list[str], folder: Path, tmp_path: Path) -> None:
    steps = [] if "--steps" in words else ["--steps", "2"]
    document = read_document(folder, tmp_path / "x.json", *words, *steps, "--users", "2", "--requests", "4")
    assert document["requests"] == 4 and document["rate"] is None


@pytest.mark.parametrize("words", [["--steps", "7"], ["--guidance", "1"], ["--size", "16x16"], ["--dp", "2"]])
def test_traffic_of_texts_has_no_options_of_images(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{words[0]}: only images of a diffusion model have it" in refuse(capsys, "stories", *words)


def test_no_output_replaces_a_file_of_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = folder / "model_index.json"
    assert "this command reads that file" in refuse(capsys, str(folder), "--json", str(index))


def test_a_replica_without_requests_is_idle(folder: Path) -> None:
    pipeline = open_planned_pipeline(folder, "auto", None)
    request = ImageTrafficRequest((2,), instance="trn1.2xlarge", most_images=1, users=1, requests=3)
    traffic = predict_image_traffic(pipeline, request, lambda phase: None)
    assert traffic.replicas == 2 and traffic.summary.images == 3
    assert traffic.summary.utilisation == pytest.approx(0.5)
