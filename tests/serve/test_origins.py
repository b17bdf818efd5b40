"""Requests of other sites' pages are refused; pages of the server and of allowed origins, and other programs, pass."""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from starlette.testclient import TestClient

from model.commands.options.readers import parse_origins
from model.serve.http.admission import Admission, Gate, Keys
from model.serve.http.origins import OriginPolicy, add_cors
from tests.deep import deep_except

KEY = "a-key-of-the-clients"
FRIEND = "https://chat.example"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
CONTENT_TYPES = ("multipart/form-data; boundary=x", "text/plain", "application/json", None)
OTHER_SITES: list[dict[str, str]] = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "origin": "https://evil.example"},
    {"sec-fetch-site": "same-origin, cross-site"},
    {"origin": "https://evil.example"},
    {"origin": "http://localhost:9000"},
    {"origin": "http://localhost:8000.evil.example"},
    {"origin": "http://localhost@evil.example"},
    {"origin": "null"},
    {"origin": ""},
]
THIS_SITE: list[dict[str, str]] = [
    {},
    {"sec-fetch-site": "same-origin", "origin": "http://localhost:8000"},
    {"sec-fetch-site": "same-origin", "origin": "https://proxy.example"},
    {"sec-fetch-site": "none"},
    {"origin": "http://localhost:8000"},
    {"origin": "HTTP://LOCALHOST:8000".lower()},
]
NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with 200."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def client(
    keys: bool = False, origins: tuple[str, ...] = (), hosts: Any = ("localhost", "::1")
) -> TestClient:
    """Return a client of an application behind the gate."""
    admission = Admission(answer, Keys([KEY] if keys else []), 1000, 5)
    gate = Gate(add_cors(admission, origins), OriginPolicy(None if keys else hosts, origins))
    headers = {"authorization": f"Bearer {KEY}"} if keys else {}
    return TestClient(gate, base_url="http://localhost:8000", headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [False, True], ids=["without keys", "with keys"])
@pytest.mark.parametrize(
    ("path", "method"), deep_except(product(["/", "/v1/audio/transcriptions", "/metrics"], METHODS), 4)
)
def test_pages_of_other_sites_are_refused(keys: bool, method: str, path: str) -> None:
    server = client(keys)
    for content_type in CONTENT_TYPES:
        more = {} if content_type is None else {"content-type": content_type}
        for headers in OTHER_SITES:
            refused = server.request(method, path, headers=headers | more)
            assert (refused.status_code, headers) == (403, headers)
            assert method == "HEAD" or refused.json()["error"]["code"] == "cross_site"
            assert "access-control-allow-origin" not in refused.headers
        for headers in THIS_SITE:
            assert (server.request(method, path, headers=headers | more).status_code, headers) == (
                200,
                headers,
            )


@pytest.mark.parametrize("keys", [False, True], ids=["without keys", "with keys"])
def test_links_of_other_sites_open_the_page_and_nothing_else(keys: bool) -> None:
    server = client(keys)
    assert server.get("/", headers=NAVIGATION).status_code == 200
    for method, path, changes in (
        ("POST", "/", {}),
        ("GET", "/metrics", {}),
        ("GET", "/v1/models", {}),
        ("GET", "/", {"sec-fetch-dest": "iframe"}),
        ("GET", "/", {"sec-fetch-mode": "no-cors"}),
    ):
        assert server.request(method, path, headers=NAVIGATION | changes).status_code == 403


@pytest.mark.parametrize("keys", [False, True], ids=["without keys", "with keys"])
def test_allowed_origins_get_the_headers_of_vllm(keys: bool) -> None:
    server = client(keys, (FRIEND,))
    headers = {"origin": FRIEND, "sec-fetch-site": "cross-site"}
    answered = server.post("/v1/completions", headers=headers)
    assert answered.status_code == 200
    assert answered.headers["access-control-allow-origin"] == FRIEND
    preflight_headers = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    server.headers.pop("authorization", None)  # a browser sends no key with a preflight request
    preflight = server.options("/v1/completions", headers=headers | preflight_headers)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == FRIEND
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    for origin in ("https://chat.example.evil.example", "http://chat.example", "https://chat.example:8443"):
        refused = server.options("/v1/completions", headers=headers | preflight_headers | {"origin": origin})
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
    if keys:
        refused = server.post("/v1/completions", headers=headers | {"authorization": "Bearer wrong"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == FRIEND


def test_any_origin_may_be_allowed_and_the_host_name_is_still_checked() -> None:
    server = client(origins=("*",))
    headers = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    assert server.post("/tokenize", headers=headers).headers["access-control-allow-origin"] == "*"
    assert server.post("/tokenize", headers=headers | {"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost:65535", "[::1]", "[::1]:80", "[0:0::1]"]
)
def test_loopback_names_are_answered(host: str) -> None:
    assert client().get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "[::1].evil.example",
        "[::1]evil",
        "[::1",
        "::1",
        "localhost.evil.example",
        "evil@localhost",
        "localhost:65536",
    ]
    + [
        "localhost/",
        "localhost?",
        "localhost#",
        "localhost\\",
        "local\thost",
        "%6cocalhost",
        "localhost evil",
        "",
    ]
    + ["localhost:80:80", "localhost.", "[::2]", "rebound.example"],
)
def test_other_names_are_refused(host: str) -> None:
    refused = client().get("/health", headers={"host": host})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_host")


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_two_authorization_headers_are_refused(path: str) -> None:
    for keys in (False, True):
        server = client(keys)
        headers = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
        refused = server.get(path, headers=headers)  # type: ignore[arg-type]
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "duplicate_header")
        assert server.get(path, headers=headers[:1]).status_code == 200  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "origins",
    [
        [],
        ["*"],
        ["null"],
        ["https://a.example", "http://b:8080"],
        ["http://[::1]:3000", "chrome-extension://abc"],
    ],
)
def test_origins_are_a_json_list(origins: list[str]) -> None:
    assert parse_origins(json.dumps(origins)) == tuple(origins)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text, "is no JSON list of texts")
        for text in (
            "https://a.example",
            '"*"',
            "[1]",
            "{}",
            "[" * 100_000,
            '{"https://a.example": 1}',
            "NaN",
        )
    ]
    + [
        (json.dumps([origin]), "is no origin")
        for origin in (
            "https://a.example/",
            "a.example",
            "https://A.example",
            "https://",
            "https://a b",
            "\ud800",
        )
    ]
    + [
        (json.dumps([origin]), "is no origin")
        for origin in ("http://a:80", "https://a:443", "https://u@a", "")
    ],
    ids=range(17),
)
def test_what_no_browser_sends_is_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse_origins(text)
