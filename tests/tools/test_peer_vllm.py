"""tools/peer_vllm.py with a stand-in for vLLM's Python: it gets the same files and writes what a test wants."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from model.loading.shipped import PRETRAINED
from tools import peer_vllm
from tools.peer_vllm import (
    WORKER,
    Answer,
    Case,
    Job,
    Load,
    PeerError,
    difference,
    jobs,
    main,
    run_here,
    run_vllm,
)

CASE = Case("two prompts", [[[5, 6, 7]], [[5, 6, 8]]], max_tokens=2)
JOB = Job("small", {"num_pages": 4}, [CASE], Load([[1, 2]], 1))
TIMES = {"steps": 3, "tokens": 1234, "submit_us": 1.0, "schedule_us": 2.25, "finish_us": 3.0}
VERSIONS = {"vllm": "0.0.1", "Python": "3.11.7"}
RIGHT = {"tokens": [[1, 2], [3, 4]], "cached": [0, 32]}


def stand_in(folder: Path, body: str) -> str:
    """Write a program that gets `-I`, the worker, the job's file and the answer's, and runs `body`."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\nasked, answered = sys.argv[3:]\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answering(folder: Path, answer: Answer) -> str:
    """Write a stand-in that gives an answer."""
    return stand_in(folder, f"open(answered, 'w').write({json.dumps(asdict(answer))!r})")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small job, and an engine here that has done it."""
    monkeypatch.setattr(peer_vllm, "jobs", lambda model: [JOB])
    monkeypatch.setattr(peer_vllm, "run_here", lambda job: Answer([RIGHT], TIMES))


def test_equal_answers_exit_0_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = answering(tmp_path, Answer([RIGHT], {**TIMES, "schedule_us": 9.0}, VERSIONS))
    assert main(["--python", python]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Greedy, float32, pages of 32 positions; vllm 0.0.1, Python 3.11.7",
        "case         requests  tokens  cached here  cached there  same",
        "two prompts         2       4           32            32   yes",
        "scheduler alone, 1 requests   here  there",
        "steps                            3      3",
        "tokens computed              1,234  1,234",
        "submit a request, us           1.0    1.0",
        "schedule a step, us, median    2.2    9.0",
        "finish a step, us, median      3.0    3.0",
    ]


@pytest.mark.parametrize(
    ("answer", "difference"),
    [
        ({**RIGHT, "tokens": [[1, 2], [3, 5]]}, "two prompts: request 1, token 1: 4 here, 5 there"),
        (
            {**RIGHT, "tokens": [[1], [3, 4]]},
            "two prompts: request 0, token 1: 2 here, no token there",
        ),
        ({**RIGHT, "cached": [0, 0]}, "two prompts: request 1 found 32 tokens in pages here, 0 there"),
    ],
)
def test_a_difference_exits_1_and_is_named(tmp_path: Path, capsys, answer, difference: str) -> None:
    assert main(["--python", answering(tmp_path, Answer([answer], TIMES, VERSIONS))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("no")
    assert lines[-1] == difference
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('no vllm', file=sys.stderr); sys.exit(3)", ""),
        ("raise MemoryError('2 GiB')", "ended with code 1 in the job 'small': MemoryError: 2 GiB"),
        ("sys.exit(9)", "ended with code 9 in the job 'small': it printed nothing"),
        ("open(answered, 'w').write('{')", "answer to the job 'small' cannot be read"),
        ("open(answered, 'w').write('[]')", "answer to the job 'small' cannot be read"),
        ("pass", "answer to the job 'small' cannot be read"),
        ("open(answered, 'w').write(json.dumps({'cases': []}))", "is not the one to that job"),
    ],
)
def test_no_answer_exits_2_and_says_why(tmp_path: Path, capsys, body: str, message: str) -> None:
    python = stand_in(tmp_path, body)
    assert main(["--python", python]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert (message or f"{python} has no vllm: no vllm") in error
    assert error.count("\n") == 1


def test_a_job_that_takes_too_long_is_ended(tmp_path: Path, capsys) -> None:
    python = stand_in(tmp_path, "time.sleep(600)")
    assert main(["--python", python, "--timeout", "0.2"]) == 2
    assert "vLLM took more than 0.2 s for the job 'small'" in capsys.readouterr().err


def test_a_python_that_is_not_there_is_named(tmp_path: Path, capsys) -> None:
    assert main(["--python", str(tmp_path / "nothing")]) == 2
    assert "nothing cannot be run: No such file or directory" in capsys.readouterr().err


def test_the_worker_gets_the_job_and_says_where_vllm_is_missing(tmp_path: Path) -> None:
    body = "job = json.load(open(asked)); open(answered, 'w').write(json.dumps({'cases': job['cases'], 'load': {}}))"
    assert run_vllm(JOB, stand_in(tmp_path, body), 60).cases == [asdict(CASE)]
    without = "import runpy; sys.modules['vllm'] = sys.modules['torch'] = None; sys.argv = sys.argv[2:]; "
    body = without + f"runpy.run_path({str(WORKER)!r}, run_name='__main__')"
    with pytest.raises(PeerError, match="has no vllm: ModuleNotFoundError"):
        run_vllm(JOB, stand_in(tmp_path, body), 60)


@pytest.mark.slow
def test_the_engine_here_does_a_job() -> None:
    arguments = {
        "block_size": 4,
        "num_pages": 8,
        "max_model_len": 16,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
    }
    case = Case("again", [[[5, 6, 7, 8, 9]], [[5, 6, 7, 8, 9]]], max_tokens=2)
    load = Load([[*range(6)], [*range(20, 26)]], 3)
    answer = run_here(Job("here", {**arguments, "model": str(PRETRAINED)}, [case], load))
    assert answer.cases[0]["cached"] == [0, 4]
    assert answer.cases[0]["tokens"][0] == answer.cases[0]["tokens"][1]
    assert answer.load is not None
    assert answer.load["tokens"] == 2 * (6 + 2)
    assert difference(answer.cases[0], answer.cases[0]) is None


@pytest.mark.slow
def test_the_jobs_fit_into_their_pages() -> None:
    for job in jobs(PRETRAINED):
        for case in job.cases:
            longest = max(len(ids) for wave in case.waves for ids in wave) + case.max_tokens
            assert longest <= job.arguments["max_model_len"]
            assert -(-longest // job.arguments["block_size"]) <= job.arguments["num_pages"]
