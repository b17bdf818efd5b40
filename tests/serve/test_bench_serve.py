"""`nkw bench serve`: prompts, arrivals, statistics, the table of `vllm bench serve`, and runs against a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.commands.bench import report
from model.commands.bench.datasets import FolderEncoder, Prompt, draw_prompts
from model.commands.bench.load import Record, draw_arrivals
from model.commands.bench.report import Measurement, Selection
from model.commands.options import client
from model.errors import ModelError
from model.loading.shipped import PRETRAINED
from nkw.commands import build_parser, main
from tests.serve.conftest import MODEL, Served

Capture = pytest.CaptureFixture[str]
ROWS = """
Successful requests: | Failed requests: | Maximum request concurrency: | Request rate configured (RPS): |
Benchmark duration (s): | Total input tokens: | Total generated tokens: | Request throughput (req/s): |
Request goodput (req/s): | Output token throughput (tok/s): | Peak output token throughput (tok/s): |
Peak concurrent requests: | Total token throughput (tok/s): |
Mean TTFT (ms): | Median TTFT (ms): | P99 TTFT (ms): | Mean TPOT (ms): | Median TPOT (ms): | P99 TPOT (ms): |
Mean ITL (ms): | Median ITL (ms): | P99 ITL (ms): | Mean E2EL (ms): | Median E2EL (ms): | P99 E2EL (ms): |
Mean Client Queue Time (ms): | Median Client Queue Time (ms): | P99 Client Queue Time (ms): |
Mean E2EL incl. Client Queue (ms): | Median E2EL incl. Client Queue (ms): | P99 E2EL incl. Client Queue (ms):
"""
"""Rows that vLLM 0.33.0 prints with all metrics, percentile 99, a rate, a limit of concurrency and goodput."""
SECTIONS = [
    "============ Serving Benchmark Result ============",
    "---------------Time to First Token----------------",
    "-----Time per Output Token (excl. 1st token)------",
    "---------------Inter-token Latency----------------",
    "----------------End-to-end Latency----------------",
    "---------------Client-side Queueing---------------",
    "--------Queue-inclusive End-to-end Latency--------",
    "==================================================",
]
KEYS = """
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
output_throughput total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times
generated_texts errors max_output_tokens_per_s max_concurrent_requests rtfx
""".split()
"""Keys of vLLM 0.33.0 beside those of percentiles."""
RUN_KEYS = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
""".split()
RECORDS = [
    Record(10, 0.0, 3, 0.1, [0.2, 0.3], 0.6, 0.0, "abc"),
    Record(20, 0.5, 1, 0.5, [], 0.5, 0.25, "d"),
    Record(30, 0.6, error="400: no"),
]


def measured(records: list[Record] = RECORDS, **changes: Any) -> Measurement:
    fields: dict[str, Any] = dict(
        metrics=report.METRICS, percentiles=(50.0, 90.0, 99.0), goodput={}, rate=4.0, max_concurrency=2
    )
    return Measurement(records, 2.0, Selection(**(fields | changes)))


def options_of(*words: str) -> argparse.Namespace:
    return build_parser(["bench", "serve"]).parse_args(["bench", "serve", *words])


def drawn(*words: str) -> list[Prompt]:
    return asyncio.run(draw_prompts(options_of(*words), FolderEncoder(PRETRAINED)))


def read_table(text: str) -> dict[str, float]:
    return {row[1]: float(row[2]) for row in re.finditer(r"^(\S.*:) +([\d.]+) *$", text, re.MULTILINE)}


def test_the_table_has_the_rows_and_sections_of_vllm() -> None:
    table = measured(percentiles=(99.0,), goodput={"ttft": 200.0}).format_table().splitlines()
    assert [line for line in table if line[0] in "-="] == SECTIONS
    rows = [line for line in table if line[0] not in "-="]
    assert [row[:40].strip() for row in rows] == [row.strip() for row in ROWS.split("|")]
    assert all(re.fullmatch(r"[\d.]+ *", row[41:]) and len(row) >= 51 for row in rows)


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"max_concurrency": None}, ("Maximum request", "Client Queue")),
        ({"rate": float("inf")}, ("Request rate", "E2EL incl.")),
        ({}, ("goodput",)),
        ({"metrics": ("ttft",)}, ("TPOT", "ITL", "E2EL")),
    ],
)
def test_rows_without_a_meaning_are_left_out(changes: dict[str, Any], absent: tuple[str, ...]) -> None:
    table = measured(**changes).format_table()
    assert [word for word in absent if word in table] == []
    assert "Mean TTFT (ms):" in table


def test_statistics_are_those_of_the_answered_requests() -> None:
    results = measured(percentiles=(50.0, 99.9)).summarise()
    assert set(KEYS) <= set(results)
    expected = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 4,
        "request_throughput": 1.0,
        "output_throughput": 2.0,
        "total_token_throughput": 17.0,
        "request_goodput": None,
        "mean_ttft_ms": 300.0,
        "std_ttft_ms": 200.0,
        "mean_tpot_ms": 250.0,  # of the one answer that has further tokens
        "median_itl_ms": 250.0,
        "p50_e2el_ms": 550.0,
        "p99.9_ttft_ms": float(np.percentile([100.0, 500.0], 99.9)),
        "mean_client_queue_time_ms": 125.0,
        "mean_e2el_including_client_queue_ms": 675.0,
        "max_concurrent_requests": 2,
        "max_output_tokens_per_s": 3.0,
    }
    assert {key: results[key] for key in expected} == pytest.approx(expected)
    assert results["errors"] == ["", "", "400: no"]


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"tpot": 250.1}, 2),  # an answer of one token keeps any limit
        ({"tpot": 249.9}, 1),
        ({"e2el": 550.0}, 1),
        ({"ttft": 200.0, "e2el": 550.0}, 0),
    ],
)
def test_goodput_counts_the_requests_that_keep_all_limits(goodput: dict[str, float], good: int) -> None:
    assert measured(goodput=goodput).summarise()["request_goodput"] == good / 2


def test_requests_that_follow_one_another_are_not_concurrent() -> None:
    one_after_another = [Record(1, 0.0, 1, 1.0, [], 1.0), Record(1, 1.0, 1, 1.5, [], 1.5)]
    results = measured(one_after_another).summarise()
    assert (results["max_concurrent_requests"], results["max_output_tokens_per_s"]) == (1, 1.0)


def test_a_load_without_answers_has_a_table() -> None:
    table = read_table(measured(RECORDS[2:]).format_table())
    assert (table["Successful requests:"], table["Mean TTFT (ms):"]) == (0, 0)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    arrivals = draw_arrivals(2000, 4.0, 1.0, 0)
    intervals = np.diff([0.0, *arrivals])
    assert arrivals[-1] == pytest.approx(500.0)
    assert intervals.std() == pytest.approx(intervals.mean(), rel=0.1)
    assert arrivals == draw_arrivals(2000, 4.0, 1.0, 0) != draw_arrivals(2000, 4.0, 1.0, 1)


def test_larger_burstiness_makes_arrivals_more_even() -> None:
    assert np.diff(draw_arrivals(500, 4.0, 100.0, 0)).std() < 0.05


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert draw_arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


def test_random_prompts_have_the_length_asked_for() -> None:
    prompts = drawn("--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "7")
    encoder = FolderEncoder(PRETRAINED)
    lengths = [len(asyncio.run(encoder.encode(prompt.text, True))) for prompt in prompts]
    assert [(prompt.length, prompt.output_len) for prompt in prompts] == [(20, 7)] * 4
    assert lengths == [20] * 4
    assert len({prompt.text for prompt in prompts}) == 4


def test_lengths_vary_by_the_ratio_around_a_common_prefix() -> None:
    words = ("--num-prompts", "6", "--input-len", "20", "--output-len", "10", "--random-range-ratio", "0.5")
    prompts = drawn(*words, "--random-prefix-len", "8")
    assert {prompt.text[:16] for prompt in prompts} == {prompts[0].text[:16]}
    assert len({prompt.length for prompt in prompts}) > 1
    assert all(18 <= prompt.length <= 38 and 5 <= prompt.output_len <= 15 for prompt in prompts)


def test_the_seed_decides_the_prompts() -> None:
    words = ("--num-prompts", "2", "--random-input-len", "8")
    assert drawn(*words) == drawn(*words, "--seed", "0") != drawn(*words, "--seed", "1")


def test_stories_are_sent_again_unless_the_options_forbid_it() -> None:
    prompts = drawn("--dataset-name", "stories", "--num-prompts", "40", "--disable-shuffle")
    assert len(prompts) == 40
    assert prompts[16:32] == prompts[:16]
    assert {prompt.output_len for prompt in prompts} == {128}
    assert len(drawn("--dataset-name", "stories", "--num-prompts", "40", "--no-oversample")) == 16


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b"}\n', encoding="utf-8")
    return path


def test_lines_of_a_file_are_prompts(custom: Path) -> None:
    words = ("--dataset-name", "custom", "--dataset-path", str(custom), "--disable-shuffle", "--num-prompts")
    assert drawn(*words, "3") == [Prompt("a", 0, 256), Prompt("b", 0, 256), Prompt("a", 0, 256)]
    assert drawn(*words, "1", "--output-len", "5") == [Prompt("a", 0, 5)]
    assert drawn(*words, "2", "--custom-output-len", "4")[1] == Prompt("b", 0, 4)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("\n", (), "has no prompt"),
        ('{"prompt": 3}', (), 'line 1 of .* is no object with a text as "prompt"'),
        ('{"prompt": "a"}\nno', (), "line 2 of .* is no object"),
        ('{"prompt": "a"}', ("--custom-output-len", "-1"), 'line 1 of .* has no positive "output_tokens"'),
    ],
)
def test_a_file_of_other_lines_is_refused(
    custom: Path, text: str, words: tuple[str, ...], message: str
) -> None:
    custom.write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        drawn("--dataset-name", "custom", "--dataset-path", str(custom), *words)


def test_lengths_of_a_file_are_taken_where_they_are_asked_for(custom: Path) -> None:
    custom.write_text('{"prompt": "a", "output_tokens": 3}', encoding="utf-8")
    words = ("--dataset-name", "custom", "--dataset-path", str(custom), "--num-prompts", "1")
    assert drawn(*words, "--custom-output-len=-1") == [Prompt("a", 0, 3)]


def test_a_prompt_needs_room_for_a_word() -> None:
    with pytest.raises(ModelError, match="leaves no token for a word"):
        drawn("--random-input-len", "1", "--num-prompts", "1")
    assert drawn("--random-input-len", "2", "--num-prompts", "1")[0].length == 2


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--request-rate inf", "request_rate", float("inf")),
        ("--request-rate 2.5", "request_rate", 2.5),
        ("--goodput ttft:500 tpot:50", "goodput", [("ttft", 500.0), ("tpot", 50.0)]),
        ("--percentile-metrics ttft,e2el", "percentile_metrics", ("ttft", "e2el")),
        ("--metric-percentiles 25,99.9", "metric_percentiles", (25.0, 99.9)),
        ("", "metric_percentiles", (50.0, 90.0, 99.0)),
        ("", "percentile_metrics", ("ttft", "tpot", "itl", "e2el")),
        ("--metadata a=b c=d=e", "metadata", [("a", "b"), ("c", "d=e")]),
        ("--random-range-ratio 0.99", "random_range_ratio", 0.99),
        ("--no-ignore-eos", "ignore_eos", False),
    ],
)
def test_an_option_is_read(words: str, field: str, value: object) -> None:
    assert getattr(options_of(*words.split()), field) == value


@pytest.mark.parametrize(
    "words",
    [
        "--request-rate 0",
        "--request-rate nan",
        "--goodput itl:5",
        "--goodput ttft",
        "--goodput ttft:-1",
        "--percentile-metrics ttft,other",
        "--metric-percentiles 101",
        "--metadata a",
        "--random-range-ratio 1",
        "--custom-output-len 0",
        "--burstiness 0",
        "--dataset-name sharegpt",
    ],
)
def test_an_option_out_of_its_range_is_refused(words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        options_of(*words.split())
    assert ended.value.code == 2
    assert words.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench serve", "chat", "run-batch -i a -o b"])
def test_a_key_on_the_command_line_is_refused_and_not_repeated(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--api-key", "a-secret"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "a-secret" not in captured.err + captured.out
    assert "--api-key" in captured.err


def test_metrics_of_options_are_those_of_the_report() -> None:
    assert client.BENCH_METRICS == report.METRICS
    assert client.GOODPUT_METRICS == report.GOODPUT_METRICS


def test_bench_alone_lists_what_can_be_measured(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 0
    assert "\n    serve  " in capsys.readouterr().out


def bench(server: Served, *words: str) -> int:
    return main(
        ["bench", "serve", "--port", str(server.port), "--disable-tqdm", "--max-concurrency", "1", *words]
    )


def test_a_server_is_measured_and_the_results_are_saved(
    server: Served, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "results" / "a.json"
    words = "--num-prompts 2 --random-input-len 12 --random-output-len 3 --request-rate 50 --save-result"
    saving = ("--result-dir", str(path.parent), "--result-filename", "a.json", "--save-detailed")
    assert bench(server, *words.split(), *saving, "--metadata", "chip=trn2") == 0
    table = read_table(capsys.readouterr().out)
    results = json.loads(path.read_text())
    assert table["Successful requests:"] == results["completed"] == 2
    assert table["Total input tokens:"] == results["total_input_tokens"] == 24
    assert table["Total generated tokens:"] == results["total_output_tokens"] == 6
    assert table["P90 TTFT (ms):"] == pytest.approx(results["p90_ttft_ms"], abs=0.01)
    assert set(RUN_KEYS + KEYS) <= set(results)
    assert (results["model_id"], results["chip"], results["max_concurrency"]) == (MODEL, "trn2", 1)
    assert [len(itls) for itls in results["itls"]] == [2, 2]
    assert all(0 < ttft < latency for ttft, latency in zip(results["ttfts"], results["latencies"]))
    assert results["mean_e2el_ms"] > results["mean_ttft_ms"] > 0


def test_chats_are_measured_and_results_are_appended(server: Served, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"earlier": 1}')
    words = "--backend openai-chat --dataset-name stories --num-prompts 1 --output-len 2 --ignore-eos"
    assert bench(server, *words.split(), "--append-result", "--result-filename", str(path)) == 0
    assert read_table(capsys.readouterr().out)["Total generated tokens:"] == 2
    earlier, results = map(json.loads, path.read_text().splitlines())
    assert (earlier, results["backend"]) == ({"earlier": 1}, "openai-chat")
    assert "ttfts" not in results


def test_requests_that_are_refused_are_counted_and_told(server: Served, capsys: Capture) -> None:
    words = ("--dataset-name", "stories", "--num-prompts", "2", "--extra-body", '{"surprise": 3}')
    assert bench(server, *words) == 1
    captured = capsys.readouterr()
    assert read_table(captured.out)["Failed requests:"] == 2
    assert captured.err.count("400: nkw serve does not take the argument surprise") == 2


def test_a_tokenizer_of_a_folder_takes_the_place_of_the_servers(
    server: Served, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, *words: object) -> None:
        raise AssertionError("the server's tokenizer is asked")

    monkeypatch.setattr("model.commands.bench.datasets.ServerEncoder.encode", refuse)
    words = "--model stories --served-model-name stories --num-prompts 1 --random-input-len 4 --output-len 1"
    assert bench(server, *words.split()) == 0
    assert read_table(capsys.readouterr().out)["Total input tokens:"] == 4


def test_a_server_that_does_not_answer_is_named(capsys: Capture) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("nkw: error: http://127.0.0.1:1 does not answer: ")


def test_a_server_without_a_tokenizer_needs_a_folder(server: Served, capsys: Capture) -> None:
    words = ("--base-url", f"http://127.0.0.1:{server.port}/other", "--served-model-name", MODEL)
    assert main(["bench", "serve", *words]) == 2
    assert "needs the tokenizer of the model; give --tokenizer DIR" in capsys.readouterr().err


def test_a_path_is_for_the_custom_dataset(capsys: Capture) -> None:
    assert main(["bench", "serve", "--dataset-path", "a.jsonl"]) == 2
    assert "--dataset-path is for --dataset-name custom; it is random" in capsys.readouterr().err
