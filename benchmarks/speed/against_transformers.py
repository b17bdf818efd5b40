"""The model replayed against Hugging Face transformers on the same cores: a prompt, decode steps, and peak memory.

    python -m benchmarks.speed.against_transformers                     all models of model_shapes.py, in float32
    python -m benchmarks.speed.against_transformers GPT-2 Qwen3-0.6B    models whose names begin with these words
    python -m benchmarks.speed.against_transformers --dtype bfloat16    bfloat16 activations; NKW_SPEED=torch
    multiplies

A side is one of the two implementations. Both read the same folder of random weights, each in its own process with
the same number of threads, and they run alternately. The first prompt and its steps are a warm-up, in which the
simulator checks and records its launches. On a busy machine, ratios of CPU time with one thread per side
(OMP_NUM_THREADS=1) are the most reliable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.measure import SPIN_SECONDS
from benchmarks.speed.model_shapes import MODELS
from benchmarks.speed.model_subject import PROMPT_TOKENS, STEPS

RUNS = 5
ALLOWED_BESIDE = 1 << 30
"""Bytes that a run may take beside weights and state."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SIDES = ("replayed", "transformers")

Taken = dict[tuple[str, str], list[tuple[float, float]]]
"""Seconds by the clock and of CPU time, by side and order."""


def main() -> int:
    """Print the table, each line after its model is measured. Returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("models", nargs="*", help="beginnings of the names of models; all if none is given")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--runs", type=int, default=RUNS, help="prompts of which medians are taken")
    options = parser.parse_args()
    for line in table(options.models, options.dtype, options.runs):
        print(line, flush=True)
    return 0


def table(models: Sequence[str] = (), dtype: str = "float32", runs: int = RUNS) -> Iterator[str]:
    """Yield the lines of the Markdown table; a model is measured when its line is requested.

    Args:
        models: Beginnings of model names; all models if empty.
        dtype: Dtype of activations, "float32" or "bfloat16".
        runs: Number of prompts whose medians are shown.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    yield f"{dtype}, {threads} threads for each side, load {os.getloadavg()[0]:.1f}"
    yield ""
    yield (
        f"| model | prefill of {PROMPT_TOKENS} | time against transformers | CPU time | a step | time against "
        "transformers | CPU time | peak memory | allowed | transformers | logits apart |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name in MODELS:
        if not models or name.startswith(tuple(models)):
            with tempfile.TemporaryDirectory() as folder:
                yield _line(name, dtype, runs, threads, Path(folder))


def _line(name: str, dtype: str, runs: int, threads: str, folder: Path) -> str:
    """Write a model to a folder, measure both sides, and return the model's line of the table."""
    environment = {**os.environ, **dict.fromkeys(_THREADS, threads)}
    subprocess.run(_command("write", name, folder), check=True, stdout=sys.stderr, env=environment)
    sides = {side: _Process(_command(side, dtype, folder), environment) for side in _SIDES}
    try:
        apart = _apart(sides, folder)
        taken = _in_turn(sides, runs)
        peak, state_bytes = sides["replayed"].ask("memory")
        theirs, _ = sides["transformers"].ask("memory")
    finally:
        for process in sides.values():
            process.end()
    prefill, step = (
        _columns(taken, order, tokens) for order, tokens in (("prefill", PROMPT_TOKENS), ("step", 1))
    )
    memory = (f"{size / 2**20:,.0f} MiB" for size in (peak, state_bytes + ALLOWED_BESIDE, theirs))
    return "| " + " | ".join([name, *prefill, *step, *memory, f"{apart:.0e}"]) + " |"


def _apart(sides: dict[str, _Process], folder: Path) -> float:
    """Warm up both sides and return the largest difference of their logits, as a share of the largest logit."""
    apart = []
    for order in ("prefill", *["step"] * STEPS):
        logits = []
        for side, process in sides.items():
            process.ask(order)
            process.ask(f"logits {folder / side}.npy")
            logits.append(np.load(folder / f"{side}.npy"))
        apart.append(float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[1]).max()))
    return max(apart)


def _in_turn(sides: dict[str, _Process], runs: int) -> Taken:
    """Run a prefill and the decode steps on each side in turn, `runs` times, and return their times."""
    taken: Taken = {}
    for _ in range(runs):
        for side, process in sides.items():
            time.sleep(SPIN_SECONDS)
            for order in ("prefill", *["step"] * STEPS):
                taken.setdefault((side, order), []).append(tuple(process.ask(order)))
    return taken


def _columns(taken: Taken, order: str, tokens: int) -> list[str]:
    """Return three cells: tokens per second of the replayed side, and its time and CPU time over those of transformers.

    Times are medians of the order, "prefill" or "step"; `tokens` is the number of tokens that the order computes.
    """
    (wall, cpu), (their_wall, their_cpu) = (
        [statistics.median(seconds) for seconds in zip(*taken[side, order])] for side in _SIDES
    )
    return [f"{tokens / wall:.1f} tokens/s", f"{wall / their_wall:.2f}", f"{cpu / their_cpu:.2f}"]


def _command(*arguments: object) -> list[str]:
    """Return the command that runs model_subject.py with these arguments."""
    return [sys.executable, "-m", "benchmarks.speed.model_subject", *map(str, arguments)]


class _Process:
    """A side in a process of its own, which answers each line on stdin with a line of JSON on stdout."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment
        )

    def ask(self, order: str) -> Any:
        """Send an order to the process and return its answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdin and self._process.stdout
        print(order, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(self._process.args)} ended at {order!r}")
        return json.loads(answer)

    def end(self) -> None:
        """Close the process's stdin, which ends it, and wait for it."""
        self._process.communicate()


if __name__ == "__main__":
    sys.exit(main())
