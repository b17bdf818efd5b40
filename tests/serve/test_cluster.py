"""`nkw serve --cluster` without Ray: the router before a stand-in for Ray Serve's handle, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.errors import ModelError
from model.serve.cluster import start
from model.serve.cluster.engine import answer_pieces
from model.serve.cluster.folder import hash_folder
from model.serve.cluster.handle import ServeHandle, list_running_replicas, watch_router
from model.serve.cluster.start import check_nodes, fingerprint, name_application
from model.serve.replicas.backend import Answer, Call, Head, ReplicaLost
from model.serve.replicas.router import Router
from model.serve.replicas.routing import Routing
from nkw.cluster import join_cluster
from nkw.commands import main
from tests.serve.conftest import options_of

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream")]
BODY = json.dumps({"prompt": "x" * 200}).encode()
COMPLETION = Call("/v1/completions", "POST", b"/v1/completions", b"", JSON, "salt", BODY)


class NodeLost(Exception):
    """Stands for what Ray raises."""


class Response:
    """A stand-in for Ray Serve's DeploymentResponseGenerator: pieces, and exceptions to raise between them."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = iter(pieces)
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            if piece == "wait":
                await asyncio.Event().wait()
            return piece
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A stand-in for Ray Serve's DeploymentHandle."""

    def __init__(self, pieces: Mapping[str, Sequence[Any]], replica_replies: Any = ()) -> None:
        self.calls: list[tuple[str, Call]] = []
        self.responses: list[Response] = []
        self.broadcasts: list[tuple[str, ...]] = []
        self._pieces = pieces
        self._replica_replies = replica_replies

    def options(self, method_name: str, stream: bool) -> Handle:
        assert (method_name, stream) == ("answer", True)
        return self

    def remote(self, key: str, call: Call) -> Response:
        self.calls.append((key, call))
        self.responses.append(Response(self._pieces[key]))
        return self.responses[-1]

    def broadcast(self, *words: str) -> Any:
        self.broadcasts.append(words)
        if isinstance(self._replica_replies, Exception):
            raise self._replica_replies

        async def results_async(timeout_s: float, return_exceptions: bool) -> Any:
            assert return_exceptions
            return self._replica_replies

        return SimpleNamespace(results_async=results_async)


def router(handle: Handle, up: Sequence[str] = ("a", "b")) -> Router:
    return Router(ServeHandle(handle, lambda: up, (NodeLost, ReplicaLost)), Routing(16, 80, 16_000))


def sent(app: Any, call: Call = COMPLETION) -> tuple[Head, bytes]:
    """Return head and data of an application's answer."""

    async def ask() -> list[Any]:
        return [piece async for piece in answer_pieces(app, call)]

    head, *data = asyncio.run(ask())
    return head, b"".join(data)


def test_answer_of_a_replica_passes_with_the_salt_of_its_key() -> None:
    handle = Handle({"a": [Head(200, JSON), b'{"a":', b"1}"]})
    assert sent(router(handle)) == (Head(200, JSON), b'{"a":1}')
    ((key, call),) = handle.calls
    assert (key, call.key_salt, call.body, call.headers) == ("a", "salt", BODY, JSON)
    assert handle.responses[0].cancelled, "what a client no longer reads is not computed"


def test_prompts_that_begin_alike_go_to_one_replica_and_load_goes_to_the_other() -> None:
    handle = Handle({key: [Head(200, JSON), b"{}"] for key in "ab"})
    app = router(handle)
    other = Call(
        "/v1/completions", "POST", b"/v1/completions", body=json.dumps({"prompt": "y" * 200}).encode()
    )
    for call in (COMPLETION, other, COMPLETION, other):
        sent(app, call)
    assert [key for key, _ in handle.calls] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("lost", [NodeLost(), ReplicaLost()], ids=["by Ray", "by the router"])
def test_replica_that_is_lost_before_its_answer_is_a_refusal(lost: Exception) -> None:
    head, body = sent(router(Handle({"a": [lost]})))
    assert (head.status, json.loads(body)["error"]["code"]) == (503, "replica_ended")
    head, body = sent(router(Handle({"a": [Head(200, JSON), b"{", lost]})))
    assert (head.status, json.loads(body)["error"]["code"]) == (503, "replica_ended")


def test_replica_that_is_lost_in_a_stream_is_its_last_event() -> None:
    head, body = sent(router(Handle({"a": [Head(200, EVENTS), b"data: 1\n\ndata: 2", NodeLost()]})))
    first, error, done = body.decode().strip().split("\n\n")
    assert (head.status, first, done) == (200, "data: 1", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_ended"


def test_without_replicas_requests_are_refused_at_once() -> None:
    head, body = sent(router(Handle({}), up=()))
    assert (head.status, json.loads(body)["error"]["code"]) == (503, "replica_ended")


def test_replica_that_is_gone_is_not_chosen_and_a_new_one_is() -> None:
    handle, up = Handle({key: [Head(200, JSON), b"{}"] for key in "ac"}), ["a"]
    app = router(handle, up)
    sent(app)
    up[:] = ["c"]
    sent(app)
    assert [key for key, _ in handle.calls] == ["a", "c"]


def test_client_that_leaves_cancels_its_request() -> None:
    handle = Handle({"a": [Head(200, EVENTS), b"data: 1\n\n", "wait"]})

    async def leave() -> None:
        pieces = answer_pieces(router(handle), COMPLETION)
        assert [await anext(pieces), await anext(pieces)] == [Head(200, EVENTS), b"data: 1\n\n"]
        assert not handle.responses[0].cancelled
        await pieces.aclose()

    asyncio.run(leave())
    assert handle.responses[0].cancelled


def test_a_server_that_drains_refuses_texts_and_leaves_the_engines_to_other_servers() -> None:
    handle = Handle({"a": [Head(200, JSON), b"{}"]}, [("a", Answer(200, b"{}"))])
    app = router(handle)
    app.drain()
    assert sent(app)[0].status == 503
    assert sent(app, Call("/v1/models", raw_path=b"/v1/models"))[0].status == 200
    assert sent(app, Call("/ready", raw_path=b"/ready"))[0].status == 503
    assert not handle.broadcasts


@pytest.mark.parametrize(
    ("replica_replies", "status"),
    [
        ([("a", Answer(200, b"{}"))], 200),
        ([("a", Answer(503, b"{}")), ("b", Answer(200, b"{}"))], 200),
        ([("a", Answer(503, b"{}"))], 503),
        ([NodeLost()], 503),
        (NodeLost(), 503),
    ],
)
def test_health_is_that_of_any_replica(replica_replies: Any, status: int) -> None:
    handle = Handle({}, replica_replies)
    assert sent(router(handle), Call("/health", raw_path=b"/health"))[0].status == status
    assert handle.broadcasts == [("ask", "/health")]


def test_metrics_of_all_replicas_are_collected() -> None:
    text = b"# HELP nkw_steps_total Steps.\n# TYPE nkw_steps_total counter\nnkw_steps_total 3.0\n"
    replica_replies = [("a", Answer(200, text)), ("b", Answer(200, text)), NodeLost()]
    body = sent(router(Handle({}, replica_replies)), Call("/metrics", raw_path=b"/metrics"))[1].decode()
    assert 'nkw_steps_total{replica="a"} 3.0' in body and 'nkw_steps_total{replica="b"} 3.0' in body
    assert 'nkw_replica_up{replica="b"} 1.0' in body


def test_application_whose_answer_is_no_longer_read_is_cancelled() -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Callable[..., Awaitable[None]]) -> None:
        assert (await receive())["body"] == BODY
        await send({"type": "http.response.start", "status": 200, "headers": JSON})
        try:
            await receive()
        except asyncio.CancelledError:
            ended.append(scope["state"]["key_salt"])
            raise

    async def leave() -> None:
        pieces = answer_pieces(app, COMPLETION)
        assert await anext(pieces) == Head(200, JSON)
        await pieces.aclose()

    asyncio.run(leave())
    assert ended == ["salt"]


def test_error_of_an_application_ends_its_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sent(app)


class Running(SimpleNamespace):
    """A stand-in for Ray Serve's RunningReplica."""

    def __init__(self, name: str) -> None:
        super().__init__(replica_id=SimpleNamespace(unique_id=name))


@pytest.fixture
def named_router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the router of Ray Serve around a stand-in for its base class."""
    modules = {name: ModuleType(name) for name in ("ray", "ray.serve", "ray.serve.request_router")}
    public = modules["ray.serve.request_router"]
    for name in ("PendingRequest", "RequestRouter", "RunningReplica"):
        setattr(public, name, type(name, (), {}))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "model.serve.cluster.request_router", raising=False)
    from model.serve.cluster.request_router import NamedReplicaRouter

    yield NamedReplicaRouter()
    del sys.modules["model.serve.cluster.request_router"]
    watch_router(SimpleNamespace(curr_replicas={}))


def test_ray_sends_a_call_to_the_replica_that_it_names(named_router: Any) -> None:
    replicas = [Running("a"), Running("b")]

    async def chosen(name: str) -> tuple[Any, BaseException | None]:
        pending = SimpleNamespace(args=[name, COMPLETION], future=asyncio.Future())
        ranks = await named_router.choose_replicas(replicas, pending)
        return ranks, pending.future.exception() if pending.future.done() else None

    assert asyncio.run(chosen("b")) == ([[replicas[1]]], None)
    ranks, error = asyncio.run(chosen("c"))
    assert ranks == [replicas] and isinstance(error, ReplicaLost)


def test_running_replicas_are_those_of_the_router(named_router: Any) -> None:
    named_router.curr_replicas = {SimpleKey(name): None for name in "ab"}
    named_router.initialize_state()
    assert list_running_replicas() == ["a", "b"]


class SimpleKey:
    """A stand-in for Ray Serve's ReplicaID."""

    def __init__(self, name: str) -> None:
        self.unique_id = name


def test_digest_is_of_names_and_bytes(tmp_path: Path) -> None:
    def folder(name: str, **files: str) -> str | None:
        root = tmp_path / name
        for file, text in files.items():
            path = root / file.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        return hash_folder(root)

    first = folder("first", config="1", sub__weights="2")
    assert first == folder("second", sub__weights="2", config="1")
    digests = [
        folder("bytes", config="1", sub__weights="3"),
        folder("name", config="1", sub__weight="2"),
        folder("moved", config="12", sub__weights=""),
        folder("more", config="1", sub__weights="2", other=""),
    ]
    assert len({first, *digests}) == 5
    (tmp_path / "first" / ".mark").write_text("by a tool", encoding="ascii")
    assert hash_folder(tmp_path / "first") == first
    assert hash_folder(tmp_path / "nowhere") is None


def test_servers_may_differ_in_their_own_options_and_not_in_the_engines() -> None:
    marks = {
        words: fingerprint(options_of("--cluster", "local", *words), "digest")
        for words in [(), ("--host", "::1"), ("--max-body", "3"), ("--log-level", "error")]
    }
    assert len(set(marks.values())) == 1
    option_lists = [("--max-num-seqs", "3"), ("--replicas", "2"), ("--max-queue", "1"), ("--seed", "5")]
    assert len({marks[()], *(fingerprint(options_of(*words), "digest") for words in option_lists)}) == 5
    assert fingerprint(options_of(), "another") != fingerprint(options_of(), "digest")


@pytest.mark.parametrize(("name", "expected"), [("a-b_c.1", "a-b_c.1"), ("org/a#b ü", "org-a-b--")])
def test_name_of_the_deployment_has_letters_that_ray_takes(name: str, expected: str) -> None:
    assert name_application(options_of("--served-model-name", name)) == expected


class FakeRay(ModuleType):
    """A stand-in for the module ray: its nodes, what tasks return on each, and what `init` got."""

    def __init__(self, digests: Sequence[str | None] = ()) -> None:
        super().__init__("ray")
        self.seen: dict[str, Any] = {}
        self._digests = iter(digests)
        self._nodes = [
            {"Alive": True, "NodeID": f"{n}", "NodeManagerAddress": f"10.0.0.{n}", "Resources": {"CPU": 1}}
            for n in range(len(digests))
        ]

    def nodes(self) -> list[dict[str, Any]]:
        unused = {"NodeManagerAddress": "10.0.1.1", "NodeID": "x"}
        return [
            {"Alive": False, "Resources": {"CPU": 1}} | unused,
            {"Alive": True, "Resources": {}} | unused,
            *self._nodes,
        ]

    def remote(self, **_: Any) -> Callable[..., Any]:
        task = SimpleNamespace(remote=lambda folder: next(self._digests))
        return lambda function: SimpleNamespace(options=lambda **_: task)

    def get(self, references: Any) -> Any:
        return references

    def init(self, **settings: Any) -> None:
        folder = Path(settings.get("_temp_dir", "/")).parent
        token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "/"))
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, token) if path.exists()]
        self.seen = settings | {"modes": modes, "auth": os.environ.get("RAY_AUTH_MODE"), "token": token}

    def shutdown(self) -> None:
        self.seen["ended"] = True


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    def install(*digests: str | None) -> FakeRay:
        ray = FakeRay(digests)
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = lambda node, soft: node  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        return ray

    return install


@pytest.mark.parametrize(("third", "says"), [("x", None), ("y", "another model at"), (None, "no folder")])
def test_every_node_has_the_same_folder(
    fake_ray: Callable[..., FakeRay], third: str | None, says: str | None
) -> None:
    ray = fake_ray("x", "x", third)
    if says is None:
        check_nodes(ray, Path("/models/m"), "x")
    else:
        with pytest.raises(ModelError) as refused:
            check_nodes(ray, Path("/models/m"), "x")
        assert refused.value.message == (
            f"node 10.0.0.2 has {says} /models/m: copy the folder of this machine to the same path on every node"
        )


def test_local_cluster_listens_at_loopback_and_demands_a_token_that_its_user_reads(
    fake_ray: Callable[..., FakeRay],
) -> None:
    ray = fake_ray()
    with join_cluster("local", 3, "space") as joined:
        assert joined is ray and "ended" not in ray.seen
    assert ray.seen["_node_ip_address"] == "127.0.0.1" and not ray.seen["include_dashboard"]
    assert (ray.seen["num_cpus"], ray.seen["namespace"], ray.seen["auth"]) == (3, "space", "token")
    assert ray.seen["modes"] == [0o700, 0o600] and ray.seen["ended"]
    assert not ray.seen["token"].exists() and "RAY_AUTH_MODE" not in os.environ


def test_token_of_a_lasting_cluster_is_used_where_there_is_one(
    fake_ray: Callable[..., FakeRay], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray, token = fake_ray(), tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    for expected in (None, "token"):
        with join_cluster("auto", 3):
            assert (ray.seen["auth"], "_temp_dir" in ray.seen) == (expected, False)
        token.touch()


@pytest.mark.parametrize(
    ("mode", "variable", "says"),
    [
        (None, None, "Ray has no token here"),
        (None, "secret", None),
        (0o604, None, "every user of this machine may read Ray's token"),
        (0o600, None, None),
    ],
)
def test_token_that_is_missing_or_open_is_warned_of(
    mode: int | None,
    variable: str | None,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    if mode is not None:
        path.touch()
        path.chmod(mode)
    if variable is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", variable)
    start._warn_about_token()
    assert [record.message.partition(":")[0] for record in caplog.records] == ([] if says is None else [says])


def test_cluster_that_does_not_answer_is_one_sentence(
    fake_ray: Callable[..., FakeRay], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ray()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert main(["serve", "--port", "0", "--cluster", "127.0.0.1:1"]) == 2
    stderr = capsys.readouterr().err
    assert (
        stderr.startswith("nkw: error: no Ray cluster answers at 127.0.0.1:1 (") and stderr.count("\n") == 1
    )


def test_without_ray_one_sentence_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--port", "0", "--cluster", "local"]) == 2
    expected = "nkw: error: --cluster needs Ray Serve; pip install 'nki-workbench[cluster]'\n"
    assert capsys.readouterr().err == expected
