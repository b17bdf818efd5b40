"""`nkw run-batch`: files of requests, answers as `vllm run-batch` writes them, and runs that are continued."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from model import LLM, SamplingParams
from model.commands.run_batch import command
from model.commands.run_batch.batch_file import AnswerFile, BatchRequest, fingerprint, parse_batch
from model.errors import ModelError
from model.serve import serving
from model.serve.replicas.backend import Answer
from nkw.commands import main
from nkw.files import Outputs
from tests.serve.conftest import MODEL

Capture = pytest.CaptureFixture[str]
FILE = Path("requests.jsonl")
OPTIONS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")
"""Steps of the shapes that other tests of servers have launched."""


def line(custom_id: str = "a", url: str = "/v1/completions", **changes: Any) -> str:
    """Return a request for two tokens, whose body is changed; None leaves a field out."""
    body = {"model": MODEL, "prompt": "Tom had", "max_tokens": 2, "temperature": 0} | changes
    body = {name: field for name, field in body.items() if field is not None}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


REQUESTS = [
    line("text"),
    line("chat", "/v1/chat/completions", prompt=None, messages=[{"role": "user", "content": "Tom"}]),
    line("range", max_tokens=-1),
    line("unknown", surprise=1),
    line("model", model="another"),
    line("route", "/v1/embeddings"),
    line("stream", stream=True),
    line("many", n=2, temperature=1, seed=1),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the answers to REQUESTS by custom_id, in their order."""
    folder = tmp_path_factory.mktemp("batch")
    requests_file, out = folder / "requests.jsonl", folder / "answers.jsonl"
    requests_file.write_text("\n\n".join(REQUESTS))
    assert main(["run-batch", "-i", str(requests_file), "-o", str(out), *OPTIONS]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["answers.jsonl", "requests.jsonl"]
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    return {answer["custom_id"]: answer for answer in lines}


def test_every_request_has_an_answer_in_its_order(answers: dict[str, Any]) -> None:
    assert list(answers) == [json.loads(text)["custom_id"] for text in REQUESTS]
    for answer in answers.values():
        assert list(answer) == ["id", "custom_id", "response", "error"]
        assert list(answer["response"]) == ["status_code", "request_id", "body"]
    ids = {(answer["id"], answer["response"]["request_id"]) for answer in answers.values()}
    assert len(ids) == len(REQUESTS)


def test_an_answer_is_that_of_the_engine(answers: dict[str, Any]) -> None:
    (output,) = LLM().generate(["Tom had"], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert answers["text"]["response"]["body"]["choices"][0]["text"] == output.outputs[0].text
    assert answers["text"]["response"]["body"]["object"] == "text_completion"
    assert answers["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(answers["many"]["response"]["body"]["choices"]) == 2
    assert {answers[name]["error"] for name in ("text", "chat", "many")} == {None}
    assert {answers[name]["response"]["status_code"] for name in ("text", "chat", "many")} == {200}


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("range", 400, "max_tokens is -1"),
        ("unknown", 400, "does not take the argument surprise"),
        ("model", 404, "the model does not exist"),
    ],
)
def test_a_refused_request_has_the_error_of_the_server(
    answers: dict[str, Any], name: str, status: int, message: str
) -> None:
    answer = answers[name]
    assert (answer["response"]["status_code"], answer["response"]["body"]) == (status, None)
    assert message in answer["error"]["error"]["message"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("route", "the url is another one"), ("stream", "an answer of a batch is no stream")],
)
def test_what_no_batch_can_have_is_an_error_of_its_line(
    answers: dict[str, Any], name: str, message: str
) -> None:
    assert answers[name]["response"]["status_code"] == 400
    assert message in answers[name]["error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "has no request"),
        (line() + "\nno", "line 2 of requests.jsonl is no JSON object"),
        ("[1]", "line 1 of requests.jsonl is no JSON object"),
        ('{"custom_id": 1}', "line 1 of requests.jsonl has no custom_id that is a text"),
        (line().replace('"body"', '"text"'), "line 1 of requests.jsonl has no body that is an object"),
        (line().replace("POST", "GET"), "has the method 'GET'; requests of a batch are POST"),
        (line() + "\n\n" + line(), "lines 1 and 3 of requests.jsonl have the same custom_id"),
    ],
)
def test_a_file_of_other_lines_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError) as refused:
        parse_batch(text, FILE)
    assert message in refused.value.message


def test_empty_lines_and_further_fields_are_left_out() -> None:
    first = line().replace('"custom_id"', '"further": 1, "custom_id"')
    requests = parse_batch(f"\n{first}\r\n\n{line('b')}", FILE)
    assert [request.custom_id for request in requests] == ["a", "b"]


def test_wrong_files_are_refused_before_the_model_is_opened(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "make_engine", None)
    requests_file = tmp_path / "requests.jsonl"
    requests_file.write_text(line())
    for words, message in (
        (("-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")), "none is missing"),
        (("-i", str(requests_file), "-o", str(requests_file)), "this command reads that file"),
        (("-i", str(requests_file), "-o", str(tmp_path)), "it is a folder"),
    ):
        assert main(["run-batch", *words]) == 2
        assert message in capsys.readouterr().err
    assert requests_file.read_text() == line()


def claim(path: Path) -> Any:
    return Outputs(list).claim(path, "answers", "NKW-JSON-PATH")


def answer_file(path: Path, names: str, digest: str = "0" * 64) -> AnswerFile:
    return AnswerFile(claim(path), [BatchRequest(name, "/v1/completions", {}) for name in names], digest)


def answered(name: str) -> str:
    return json.dumps({"custom_id": name})


def test_answers_are_written_in_the_order_of_the_requests(tmp_path: Path) -> None:
    out = tmp_path / "out"
    answers = answer_file(out, "abc")
    for index, count in ((2, 0), (0, 1), (1, 3)):
        answers.add(index, answered("abc"[index]))
        assert answers.count == count
        assert not out.exists()
    answers.finish()
    assert out.read_text() == "".join(f"{answered(name)}\n" for name in "abc")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_later_run_keeps_the_whole_answers(tmp_path: Path) -> None:
    first = answer_file(tmp_path / "out", "abcd")
    first.add(0, answered("a"))
    first.add(1, answered("b"))
    with open(first.path, "a", encoding="utf-8") as file:
        file.write('{"custom_id": "c"')  # a write that was broken off
    later = answer_file(tmp_path / "out", "abcd")
    assert later.count == 2
    later.add(2, answered("c"))
    assert later.path.read_text() == "".join(f"{answered(name)}\n" for name in "abc")


@pytest.mark.parametrize(("names", "kept"), [("ab", 2), ("ax", 1), ("xb", 0)])
def test_answers_to_other_requests_are_dropped(tmp_path: Path, names: str, kept: int) -> None:
    first = answer_file(tmp_path / "out", "ab")
    first.add(0, answered("a"))
    first.add(1, answered("b"))
    assert answer_file(tmp_path / "out", names).count == kept


def test_another_input_or_option_begins_anew(tmp_path: Path) -> None:
    digests = [fingerprint("a", {"seed": 0}), fingerprint("b", {"seed": 0}), fingerprint("a", {"seed": 1})]
    assert len(set(digests)) == 3
    first = answer_file(tmp_path / "out", "a", digests[0])
    first.add(0, answered("a"))
    assert [answer_file(tmp_path / "out", "a", digest).count for digest in digests] == [1, 0, 0]


def test_an_interrupted_run_is_continued_by_the_same_command(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests_file, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests_file.write_text("\n".join(map(line, "abc")))
    custom_ids: list[str] = []

    async def answer_or_stop(app: object, request: BatchRequest) -> str:
        custom_ids.append(request.custom_id)
        if custom_ids == ["a", "b", "c"]:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)  # until the interrupt cancels it
        return answered(request.custom_id)

    monkeypatch.setattr(command, "_answer", answer_or_stop)
    monkeypatch.setattr(command, "make_engine", lambda args: None)
    monkeypatch.setattr(serving, "run_application", lambda options, engine: nullcontext((None, None)))
    words = ["run-batch", "-i", str(requests_file), "-o", str(out)]
    assert main(words) == 130
    assert "interrupted: 2 of 3 answers are in " in capsys.readouterr().err
    assert not out.exists()
    assert main(words) == 0
    assert custom_ids == ["a", "b", "c", "c"]
    assert "2 of 3 answers are there already" in capsys.readouterr().err
    assert out.read_text() == "".join(f"{answered(name)}\n" for name in "abc")


def test_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([429, 429, 200])

    async def reply(pieces: object) -> Answer:
        return Answer(next(statuses), b'{"a": 1}')

    monkeypatch.setattr("model.serve.replicas.backend.collect_answer", reply)
    monkeypatch.setattr("model.serve.cluster.engine.answer_pieces", lambda app, call: None)
    (request,) = parse_batch(line(), FILE)
    answer = json.loads(asyncio.run(command._answer(None, request)))  # type: ignore[arg-type]
    assert (answer["response"]["status_code"], answer["response"]["body"]) == (200, {"a": 1})


@pytest.mark.parametrize("code", ["engine_failed", "engine_stopped"])
def test_a_failed_engine_ends_the_run(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    async def reply(pieces: object) -> Answer:
        return Answer(500, json.dumps({"error": {"code": code}}).encode())

    monkeypatch.setattr("model.serve.replicas.backend.collect_answer", reply)
    monkeypatch.setattr("model.serve.cluster.engine.answer_pieces", lambda app, call: None)
    (request,) = parse_batch(line(), FILE)
    with pytest.raises(ModelError, match="the engine has failed at the request 'a'"):
        asyncio.run(command._answer(None, request))  # type: ignore[arg-type]
