"""Entry of `nkw top`: shows the metrics of a server in a terminal. It needs nothing of the extra `serve`."""

from __future__ import annotations

import argparse
import http.client
import re
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from urllib.parse import urlsplit

from model.errors import ModelError
from model.serve.http.keys import read_keys
from nkw.errors import shown
from nkw.terminal import show_lines

_SAMPLE = re.compile(r"^(nkw_\w+?)(?:\{(.*)\})? ([-+.\dinfaNe]+)$")
_LABEL = re.compile(r'(le|target|lnc)="([^"]*)"')
_MOST_BYTES = 2**22
_SECONDS = 10  # for an answer

Samples = Mapping[tuple[str, str], float]
"""Sums over labels by metric and label: the edge of a bucket, the target of a prediction, empty for other samples."""


def top_command(options: argparse.Namespace) -> int:
    """Show the metrics of a server every --every seconds until an interrupt, or once; return the exit status 0.

    They are shown once with --once, and if stdout is no terminal.

    Raises:
        ModelError: --url is no URL of a host, or no server of `nkw serve` answers there.
    """
    if not _is_server_url(options.url):
        raise ModelError(f"--url is {options.url!r}; it must be like http://127.0.0.1:8000")
    keys = read_keys(options.api_key_file)
    before, then = read(options.url, keys), time.monotonic()
    if options.once or not sys.stdout.isatty():
        show_lines(format_metrics(before, before, 0.0))
        return 0
    from rich.live import Live

    with Live(format_metrics(before, before, 0.0), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(options.every)
            samples, now = read(options.url, keys), time.monotonic()
            live.update(format_metrics(samples, before, now - then), refresh=True)
            before, then = samples, now


def _is_server_url(url: str) -> bool:
    """Return whether a text is the HTTP URL of a host, with or without a port, and without a path."""
    try:
        split = urlsplit(url)
        has_host = bool(split.hostname) and split.port != 0
    except ValueError:  # an unfinished [ of IPv6, or a port beyond 65535
        return False
    return has_host and re.fullmatch(r"https?://[a-zA-Z0-9._:\[\]-]+/?", url) is not None


def read(url: str, keys: list[str]) -> Samples:
    """Ask a server for its metrics, and return their current samples.

    Samples that differ only in labels other than `le`, `target` and `lnc` are added up.

    Args:
        url: URL of the server.
        keys: API keys, of which the first is sent.

    Raises:
        ModelError: The server does not answer, or is no server of `nkw serve`.
    """
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            text = answer.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ModelError(f"{url} does not answer: {shown(str(reason))}") from None
    samples: dict[tuple[str, str], float] = defaultdict(float)
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            labels = dict(_LABEL.findall(match[2] or ""))
            label = labels.get("le", "")
            if "target" in labels:
                label = f"{labels['target']} (LNC {labels.get('lnc', 1)})"
            try:
                value = float(match[3])
            except ValueError:
                raise ModelError(f"{url} is no server of nkw serve: {match[1]} has no number") from None
            samples[match[1], label] += value
    if not samples:
        raise ModelError(f"{url} is no server of nkw serve: its /metrics has no nkw_ numbers")
    return samples


def format_metrics(now: Samples, before: Samples, seconds: float) -> str:
    """Return the metrics as text, a line for each.

    Args:
        now: The current samples.
        before: The samples `seconds` ago, for rates.
        seconds: Seconds between both; if 0, the text has no rates.
    """

    def get_sample(name: str) -> float:
        """Return the current sum of a metric over its labels; 0 if it is absent."""
        return _add_up(now, name)

    def format_rate(name: str) -> str:
        """Return the increase of a metric per second as text after a number; empty without an earlier sample."""
        if not seconds:
            return ""
        grown = get_sample(name) - _add_up(before, name)
        return f", {grown / seconds:,.1f} a second"

    def format_share(name: str, total: float) -> str:
        """Return a metric as a share of `total` in percent; "none" if the total is 0."""
        return f"{get_sample(name) / total:.1%}" if total else "none"

    replicas = get_sample("replica_up")
    drafts, steps = get_sample("spec_decode_num_draft_tokens_total"), get_sample("steps_total")

    def format_time_per_step(name: str, missing: float = 0.0) -> str:
        """Return a metric of seconds divided by the number of steps, in ms, as text.

        Args:
            name: Name of the metric.
            missing: Number of parts of steps that have no predicted time.
        """
        seconds = get_sample(name)
        if missing and not seconds:
            return f"unknown so far: {missing:,.0f} parts of steps are not predicted yet"
        targets = "".join(f" on {label}" for sample, label in now if sample == f"nkw_{name}" and label)
        without = f", without {missing:,.0f} parts" if missing else ""
        return f"{seconds / steps * 1e3:,.2f} ms a step{targets}{without}" if steps else "none"

    rows = [
        (
            "requests",
            f"{get_sample('num_requests_running'):,.0f} running, {get_sample('num_requests_waiting'):,.0f} waiting",
        ),
        *([("replicas", f"{replicas:.0f} answer")] if replicas else []),
        ("pages held", f"{get_sample('kv_cache_usage_perc') / max(1, replicas):.1%}"),
        ("prompt tokens", f"{get_sample('prompt_tokens_total'):,.0f}{format_rate('prompt_tokens_total')}"),
        (
            "new tokens",
            f"{get_sample('generation_tokens_total'):,.0f}{format_rate('generation_tokens_total')}",
        ),
        (
            "from known pages",
            format_share("prefix_cache_hits_total", get_sample("prefix_cache_queries_total")),
        ),
        (
            "padding",
            format_share(
                "padding_tokens_total", get_sample("step_tokens_total") + get_sample("padding_tokens_total")
            ),
        ),
        ("steps", f"{steps:,.0f}{format_rate('steps_total')}"),
        ("clock here", format_time_per_step("step_seconds_total")),
        (
            "predicted clock",
            format_time_per_step("predicted_step_seconds_total", get_sample("unpredicted_step_parts")),
        ),
        ("drafts accepted", format_share("spec_decode_num_accepted_tokens_total", drafts)),
        ("preemptions", f"{get_sample('num_preemptions_total'):,.0f}"),
        *(
            (label, f"p50 {_find_quantile(now, name, 0.5)}, p99 {_find_quantile(now, name, 0.99)}")
            for label, name in (
                ("first token", "time_to_first_token_seconds"),
                ("between tokens", "inter_token_latency_seconds"),
                ("whole request", "e2e_request_latency_seconds"),
                ("in the queue", "request_queue_time_seconds"),
            )
        ),
    ]
    return "\n".join(f"{label:<18}{text}" for label, text in rows)


def _add_up(samples: Samples, name: str) -> float:
    """Return the sum of a metric over its labels; 0 if it is absent.

    Args:
        samples: The samples.
        name: Name of the metric without the prefix `nkw_`.
    """
    return sum(value for (sample, _), value in samples.items() if sample == f"nkw_{name}")


def _find_quantile(samples: Samples, name: str, share: float) -> str:
    """Return a bound of a histogram's quantile as text: the edge of the first bucket that reaches it.

    Args:
        samples: The samples.
        name: Name of the histogram without the prefix `nkw_`.
        share: The quantile, from 0 to 1.

    Returns:
        Text such as "up to 0.5 s", or "unknown" without observations.
    """
    bucket = f"nkw_{name}_bucket"
    buckets = sorted((float(edge), count) for (sample, edge), count in samples.items() if sample == bucket)
    if not buckets or not buckets[-1][1]:
        return "unknown"
    edge = next(edge for edge, below in buckets if below >= share * buckets[-1][1])
    return f"up to {edge:g} s" if edge < float("inf") else f"above {buckets[-2][0]:g} s"
