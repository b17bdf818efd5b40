"""Report of `nkw bench serve`: the table of `vllm bench serve` and the keys of its results, of vLLM 0.33.0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isinf
from typing import Any

import numpy as np

from model.commands.bench.load import Record

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
"""Short name and heading of a section by metric."""
METRICS = tuple(_TITLES)
"""Metrics whose percentiles can be printed."""
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Keys with a value for each request, which are saved with --save-detailed alone."""


@dataclass(frozen=True)
class Selection:
    """Numbers of a report that options choose.

    Attributes:
        metrics: Metrics with a section, of METRICS.
        percentiles: Percentiles of each metric.
        goodput: Most milliseconds of a good request by metric, of GOODPUT_METRICS.
        rate: Configured requests a second.
        max_concurrency: Most requests at once, or None.
    """

    metrics: Sequence[str]
    percentiles: Sequence[float]
    goodput: Mapping[str, float]
    rate: float
    max_concurrency: int | None


@dataclass(frozen=True)
class Measurement:
    """Records of all requests, the seconds of the whole load, and the selected metrics."""

    records: Sequence[Record]
    seconds: float
    selection: Selection

    @property
    def answered(self) -> list[Record]:
        """Records of the requests that were answered."""
        return [record for record in self.records if not record.error]

    def summarise(self) -> dict[str, Any]:
        """Return the results as a dict under the keys of vLLM's results.

        Throughput is per second. Times in lists are seconds, and statistics are milliseconds.
        """
        answered, seconds = self.answered, self.seconds
        total_input = sum(record.prompt_len for record in answered)
        total_output = sum(record.output_len for record in answered)
        goodput = self.selection.goodput
        good = sum(_is_good(record, goodput) for record in answered)
        tokens_per_second, concurrent = _find_peaks(answered)
        return {
            "duration": seconds,
            "completed": len(answered),
            "failed": len(self.records) - len(answered),
            "total_input_tokens": total_input,
            "total_output_tokens": total_output,
            "request_throughput": len(answered) / seconds,
            "request_goodput": good / seconds if goodput else None,
            "output_throughput": total_output / seconds,
            "total_token_throughput": (total_input + total_output) / seconds,
            "input_lens": [record.prompt_len for record in self.records],
            "output_lens": [0 if record.error else record.output_len for record in self.records],
            "ttfts": [record.ttft for record in self.records],
            "itls": [record.itls for record in self.records],
            "latencies": [record.latency for record in self.records],
            "start_times": [record.start for record in self.records],
            "queue_times": [record.queue_time for record in self.records],
            "generated_texts": [record.text for record in self.records],
            "errors": [record.error for record in self.records],
            "max_output_tokens_per_s": tokens_per_second,
            "max_concurrent_requests": concurrent,
            "rtfx": 0.0,
            **{key: number for metric in self._metrics() for _, key, number in self._describe(metric)},
        }

    def format_table(self) -> str:
        """Return the printed table, with the titles and rows of `vllm bench serve`."""
        return "\n".join(self._lines(self.summarise()))

    def _lines(self, results: Mapping[str, Any]) -> Iterator[str]:
        selection = self.selection
        yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
        yield _row("Successful requests:", results["completed"])
        yield _row("Failed requests:", results["failed"])
        if selection.max_concurrency is not None:
            yield _row("Maximum request concurrency:", selection.max_concurrency)
        if not isinf(selection.rate):
            yield _row("Request rate configured (RPS):", float(selection.rate))
        yield _row("Benchmark duration (s):", results["duration"])
        yield _row("Total input tokens:", results["total_input_tokens"])
        yield _row("Total generated tokens:", results["total_output_tokens"])
        yield _row("Request throughput (req/s):", results["request_throughput"])
        if selection.goodput:
            yield _row("Request goodput (req/s):", results["request_goodput"])
        yield _row("Output token throughput (tok/s):", results["output_throughput"])
        yield _row("Peak output token throughput (tok/s):", results["max_output_tokens_per_s"])
        yield _row("Peak concurrent requests:", float(results["max_concurrent_requests"]))
        yield _row("Total token throughput (tok/s):", results["total_token_throughput"])
        for metric in self._metrics():
            yield f"{_TITLES[metric][1]:-^{_WIDTH}}"
            for label, _, number in self._describe(metric):
                if label:
                    yield _row(label, number)
        yield "=" * _WIDTH

    def _metrics(self) -> list[str]:
        """Return the metrics that get a section: the selected ones that this load has.

        Client queue times need a limit of concurrency, and end-to-end latencies with them also a finite rate.
        """
        lacking = set()
        if self.selection.max_concurrency is None:
            lacking |= {"client_queue_time", "e2el_including_client_queue"}
        if isinf(self.selection.rate):
            lacking.add("e2el_including_client_queue")
        return [metric for metric in METRICS if metric in self.selection.metrics and metric not in lacking]

    def _describe(self, metric: str) -> Iterator[tuple[str, str, float]]:
        """Yield the statistics of a metric as (label of the row, key of the results, milliseconds).

        The label of the standard deviation is empty, because it has no row. Without observations all are 0.
        """
        times = 1e3 * np.array(_list_seconds(metric, self.answered) or [0.0])
        name = _TITLES[metric][0]
        yield f"Mean {name} (ms):", f"mean_{metric}_ms", float(times.mean())
        yield f"Median {name} (ms):", f"median_{metric}_ms", float(np.median(times))
        yield "", f"std_{metric}_ms", float(times.std())
        for percentile in self.selection.percentiles:
            number = float(np.percentile(times, percentile))
            yield f"P{percentile:g} {name} (ms):", f"p{percentile:g}_{metric}_ms", number


def _row(label: str, number: float) -> str:
    return f"{label:<40} {number:<10.2f}" if isinstance(number, float) else f"{label:<40} {number:<10}"


def _time_per_token(record: Record) -> float:
    """Return the mean time of the tokens after the first one in seconds; 0 without such tokens."""
    return (record.latency - record.ttft) / (record.output_len - 1) if record.output_len > 1 else 0.0


def _is_good(record: Record, goodput: Mapping[str, float]) -> bool:
    """Return whether a request keeps all limits of `goodput`, which are milliseconds by metric."""
    times = {"ttft": record.ttft, "tpot": _time_per_token(record), "e2el": record.latency}
    return all(1e3 * times[metric] <= limit for metric, limit in goodput.items())


def _list_seconds(metric: str, records: Sequence[Record]) -> list[float]:
    """Return all observations of a metric in the records, in seconds; "itl" has several for each request."""
    if metric == "ttft":
        return [record.ttft for record in records]
    if metric == "tpot":
        return [_time_per_token(record) for record in records if record.output_len > 1]
    if metric == "itl":
        return [seconds for record in records for seconds in record.itls]
    if metric == "e2el":
        return [record.latency for record in records]
    if metric == "client_queue_time":
        return [record.queue_time for record in records]
    return [record.latency + record.queue_time for record in records]


def _find_peaks(records: Sequence[Record]) -> tuple[float, int]:
    """Return the most pieces of answers in one second, and the most requests in progress at once.

    Seconds are counted from the start of the first request. Without records both are 0.
    """
    if not records:
        return 0.0, 0
    begin = min(record.start for record in records)
    seconds = ceil(max(record.start + record.latency for record in records) - begin) + 1
    pieces = np.zeros(seconds)
    for record in records:
        times = record.start - begin + record.ttft + np.cumsum([0.0, *record.itls])
        np.add.at(pieces, times.astype(int), 1)
    changes = [(record.start, 1) for record in records]
    changes += [(record.start + record.latency, -1) for record in records]
    return float(pieces.max()), int(np.cumsum([change for _, change in sorted(changes)]).max())
