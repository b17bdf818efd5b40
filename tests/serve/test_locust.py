"""Locust loads a server for minutes: no request and no page is lost, memory is flat, each gets what it gets alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import pytest

from tests.interruptible import ROOT, started
from tests.serve.conftest import MODEL
from tests.serve.test_load import check_alone

SECONDS = 120
USERS = 24
MOST_BYTES = 2048
"""That a request may add to the server's memory. The list of a prompt's tokens, an output, a queue of updates and the
like take more, so requests that are not forgotten would be seen."""
FEW_PAGES = "--max-num-seqs 8 --num-pages 18 --max-queue 12".split()
"""So that requests are preempted, and some refused."""


@contextmanager
def server() -> Iterator[tuple[int, str]]:
    """Yield the number of a server's process, and its address."""
    running = started("-m", "nkw", "serve", "--port", "0", *FEW_PAGES, "--log-level", "error")
    try:
        assert running.stdout is not None
        yield running.pid, running.stdout.readline().strip().removesuffix("/v1")
        running.terminate()
        assert running.communicate() == ("", "")
        assert running.returncode == 0
    finally:
        running.kill()
        running.communicate()


def metrics(url: str) -> dict[str, float]:
    """Return the samples of /metrics, with their labels but the model's."""
    with urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    matches = (re.match(r"nkw_(\w+)\{(.*)\} (\S+)$", line) for line in lines)
    return {
        match[1] + match[2].replace(f'model_name="{MODEL}"', ""): float(match[3])
        for match in matches
        if match
    }


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.deep
@pytest.mark.skipif(find_spec("locust") is None, reason="locust is an extra of its own (load)")
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the memory of a process is read from Linux' /proc"
)
def test_minutes_of_load_lose_nothing_and_take_no_more_memory(tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes"
    with server() as (pid, url):
        command = [
            *(sys.executable, "-m", "locust", "--headless", "--only-summary", "--stop-timeout", "120"),
            *("--locustfile", str(ROOT / "tests/serve/load/locustfile.py"), "--host", url),
            *("--users", str(USERS), "--spawn-rate", str(USERS), "--run-time", f"{SECONDS}s"),
        ]
        environment = os.environ | {"OUTCOMES": str(outcomes), "MODEL": MODEL}
        loading = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        memory: list[tuple[int, int]] = []
        while loading.poll() is None:
            time.sleep(1)
            memory.append(
                (outcomes.read_bytes().count(b"\n") if outcomes.exists() else 0, resident_bytes(pid))
            )
        output, _ = loading.communicate()
        records = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
        ended = metrics(url)
        while ended["num_requests_running"] or ended["num_requests_waiting"]:
            ended = metrics(url)
    assert "Traceback" not in output, output
    counts = Counter(outcome for _, outcome, _ in records)
    assert set(counts) == {"whole", "left", "full"}, output
    assert sorted(number for number, _, _ in records) == list(range(len(records)))
    assert ended["kv_cache_usage_perc"] == 0
    assert ended["num_preemptions_total"] > 0
    # A step of a new shape adds its program, at times that chance decides; a request that is kept adds to each span.
    half = memory[len(memory) // 2 :: 4]
    spans = pairwise(half)
    assert (
        median((resident - was) / max(now - then, 1) for (then, was), (now, resident) in spans) <= MOST_BYTES
    ), memory
    sample = records[:: max(1, len(records) // 50)]
    assert check_alone((number, text) for number, outcome, text in sample if outcome == "whole") > 0
