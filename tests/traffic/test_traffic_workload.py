"""What a workload is made of: lengths, traces as they are published, texts of options; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from model.errors import ModelError
from model.plan.service_level import ServiceLevel
from model.traffic.lengths import Lengths
from model.traffic.traces import read_trace
from model.traffic.workload import Query, SharedPrefix, Workload, draw_poisson_arrivals, draw_queries

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
2023-11-16 18:15:51.1224670,91,16
"""


def words(text: str) -> int:
    return len(text.split())


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def read(folder: Path, text: str, most: int | None = None) -> Workload | list[Query]:
    return read_trace(written(folder, text), most, lambda: words)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_azure_trace_is_read_with_its_times(tmp_path: Path, end: str) -> None:
    trace = read(tmp_path, AZURE.replace("\n", end))
    assert isinstance(trace, Workload)
    assert trace.queries == (Query(374, 44), Query(396, 109), Query(91, 16))
    assert trace.arrivals_ns == (0, 4_314_579_000, 4_441_877_000)
    assert trace.left_out == 1


def test_a_trace_with_offsets_and_other_columns_is_read(tmp_path: Path) -> None:
    text = "GeneratedTokens,who,TIMESTAMP,ContextTokens\n5,,2024-05-10 02:00:00.5+02:00,7\n6,,2024-05-10T00:00:01Z,8\n"
    trace = read(tmp_path, text)
    assert isinstance(trace, Workload)
    assert (trace.queries, trace.arrivals_ns) == ((Query(7, 5), Query(8, 6)), (0, 500_000_000))


def test_the_first_rows_of_a_trace_are_taken(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE, 2)
    assert isinstance(trace, Workload)
    assert len(trace.queries) == 2


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("ContextTokens", "Tokens", "has no column ContextTokens"),
        (",44", "", "line 2 of the trace .* has 2 columns"),
        ("374", "3" * 200_000, "is not CSV: field larger than field limit"),
        ("374", "-3", "line 2 of the trace .* has '-3' tokens"),
        ("374", "1e3", "has '1e3' tokens"),
        ("374", "99999999", "has '99999999' tokens"),
        ("2023-11-16 18:15:46.6805900", "noon", "line 2 of the trace .* has the time 'noon'"),
        ("2023-11-16 18:15:46", "2023-13-16 18:15:46", "has the time '2023-13"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_line(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, AZURE.replace(old, new, 1))


@pytest.mark.parametrize(
    "text", ["", AZURE.split("\n")[0], "TIMESTAMP,ContextTokens,GeneratedTokens\n\n", "[]"]
)
def test_a_trace_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match="has no"):
        read(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="none is missing"):
        read_trace(tmp_path / "none", None, lambda: words)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="binary is not text"):
        read_trace(tmp_path / "binary", None, lambda: words)


def conversation(*values: object) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": value} for value in values]}


def test_conversations_are_a_prompt_and_its_answer(tmp_path: Path) -> None:
    listed = [
        conversation("a b c", "d e", "f"),
        conversation("alone"),
        conversation("", "e"),
        conversation("g", "h"),
    ]
    assert read(tmp_path, json.dumps(listed)) == [Query(3, 2), Query(1, 1)]
    assert read(tmp_path, json.dumps(listed), 1) == [Query(3, 2)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is a JSON object"),
        ("[1]", "conversation 0 of the trace .* is no object with a list"),
        (json.dumps([conversation("a", 3)]), "conversation 0 of the trace .* has a turn without text"),
    ],
)
def test_conversations_of_another_form_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("512", 512, 512, 512.0),
        ("3..5", 3, 5, 4.0),
        ("exp:50", 1, 10**6, 50.0),
        ("lognormal:20,0", 20, 20, 20.0),
    ],
)
def test_lengths_are_drawn_as_they_are_named(text: str, low: int, high: int, mean: float) -> None:
    lengths = Lengths.parse(text).draw(4000, np.random.default_rng(0))
    assert low <= min(lengths) <= max(lengths) <= high
    error = np.std(lengths) / np.sqrt(len(lengths))
    # Rounding to whole numbers of at least 1 moves the mean of an exponential distribution by less than a token.
    assert np.mean(lengths) == pytest.approx(mean, abs=4 * error + 1)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "5..3", "0..3", "2000000", "exp:0", "exp:", "lognormal:5", "x:3"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"lengths .*; write 512"):
        Lengths.parse(text)


def test_a_service_level_is_read() -> None:
    assert ServiceLevel.parse("ttft=500ms, itl=50.5ms,e2e=10s") == ServiceLevel(500e6, 50.5e6, 10e9)
    assert ServiceLevel.parse("itl=20us") == ServiceLevel(None, 20e3, None)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "ttft=0ms", "ttft=-1ms", "itl=1s,itl=2s", "other=1s", "ttft=1s,"]
)
def test_other_service_levels_are_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"service level .*; write one or more"):
        ServiceLevel.parse(text)


def test_a_shared_prefix_is_read() -> None:
    assert SharedPrefix.parse("64") == SharedPrefix(64)
    assert SharedPrefix.parse("64:8") == SharedPrefix(64, 8)


@pytest.mark.parametrize("text", ["", "0", "64:0", "64:", "a", "9999999"])
def test_other_shared_prefixes_are_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"shared prefix .*; write 1024"):
        SharedPrefix.parse(text)


def test_replicas_get_every_request_once() -> None:
    draw = np.random.default_rng(2)
    queries = draw_queries(11, Lengths("uniform", 1, 99), Lengths("uniform", 1, 99), None, draw)
    workload = draw_poisson_arrivals(queries, 5.0, draw)
    shares = [workload.select_share(number, 3) for number in range(3)]
    requests = [request for share in shares if share for request in zip(share.arrivals_ns, share.queries)]
    assert sorted(requests, key=lambda request: request[0]) == list(
        zip(workload.arrivals_ns, workload.queries)
    )
    assert Workload(queries, users=2).select_share(2, 3) is None


def test_a_rate_stretches_the_times() -> None:
    draw = np.random.default_rng(2)
    workload = draw_poisson_arrivals([Query(1, 1)] * 50, 5.0, draw)
    assert workload.stretch_to_rate(20.0).rate == pytest.approx(20.0, rel=1e-6)
    with pytest.raises(ModelError, match="one moment"):
        Workload((Query(1, 1),) * 2, (0, 0)).stretch_to_rate(1.0)


def test_requests_that_are_too_long_are_left_out() -> None:
    workload = Workload((Query(5, 5), Query(2, 2), Query(9, 1)), (0, 1, 2))
    kept = workload.drop_longer_than(9)
    assert (kept.queries, kept.arrivals_ns, kept.left_out) == ((Query(2, 2),), (1,), 2)
    with pytest.raises(ModelError, match="the shortest has 4"):
        workload.drop_longer_than(3)


@pytest.mark.parametrize("users", [3, 4, 5])
def test_replicas_share_all_requests_of_users(users: int) -> None:
    """No request is lost where replicas are as many as users, or one more or one fewer."""
    queries = tuple(Query(number, 1) for number in range(1, 12))
    shares = [Workload(queries, users=users).select_share(replica, 4) for replica in range(4)]
    served = [share for share in shares if share is not None]
    assert sorted(query.prompt_tokens for share in served for query in share.queries) == list(range(1, 12))
    assert sum(share.users for share in served) == users
    assert len(served) == min(users, 4) and all(share.users for share in served)
