"""What the server does not do as asked, in OpenAI's shape; each refusal has a twin that is answered."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from model.serve.http.keys import others_may_read, read_keys
from nkw.commands import main
from tests.serve.conftest import MODEL, Served

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "Tom had", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Tom had"}], "max_tokens": 1}


def posted(server: Served, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the `error` of a request, which is empty for an answer that is no error."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response, answer = server.send("POST", path, data, **headers)
    assert response.headers["x-request-id"].startswith("req_")
    error = json.loads(answer).get("error") or {}
    assert set(error) in (set(), {"message", "type", "param", "code"})
    return response.status, error


COMPLETIONS_REFUSED = [
    ({"model": "other"}, 404, "the model does not exist; this server has stories"),
    ({"temperature": -1}, 400, "temperature is -1.0; it must be between 0 and 1e+06"),
    ({"temperature": "0"}, 400, "temperature: Input should be a valid number"),
    (
        {"n": 7},
        400,
        "7 continuations are asked for; 6 at most are computed at once: ask for fewer prompts or a smaller n",
    ),
    ({"prompt": []}, 400, "prompt is an empty list: give at least one text"),
    (
        {"prompt": "word " * 400},
        400,
        "the prompt has 403 tokens; sequences of at most 256 leave no room for a new one: shorten the prompt",
    ),
    ({"prompt": [4096]}, 400, "the prompt has token id 4096; the vocabulary has 4096 tokens"),
    (
        {"best_of": 2},
        400,
        "best_of: answers are not ranked: ask for n answers with logprobs and take the best",
    ),
    (
        {"max_tokens": 257},
        400,
        "max_tokens is 257; the context has 256 tokens, prompt included: ask for fewer, or leave max_tokens out",
    ),
    ({"max_tokens": 0}, 400, "max_tokens is 0; it must be between 1 and inf"),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs is 21; it must be between 0 and 20"),
    (
        {"prompt_logprobs": 1, "stream": True},
        400,
        "prompt_logprobs are not streamed: set stream to false, or ask for echo with logprobs",
    ),
    ({"echo": True, "logprobs": 21}, 400, "logprobs is 21; it must be between 0 and 20"),
    (
        {"logit_bias": {"x": 1}},
        400,
        "logit_bias has a name that is not a token id: write token ids in decimal digits, as in /tokenize",
    ),
    ({"logit_bias": {"4096": 1}}, 400, "logit_bias has token id 4096; the vocabulary has 4096 tokens"),
    (
        {"allowed_token_ids": []},
        400,
        "allowed_token_ids is empty; no token could be chosen: leave it out to allow all tokens",
    ),
    (
        {"allowed_token_ids": [4096]},
        400,
        "allowed_token_ids has token id 4096; the vocabulary has 4096 tokens",
    ),
    (
        {"skip_special_tokens": False},
        400,
        "skip_special_tokens is False; texts are decoded without special tokens only: leave it out",
    ),
    ({"stream_options": {}}, 400, "stream_options needs stream to be true"),
    ({"stop": [str(n) for n in range(17)]}, 400, "stop has 17 texts; it takes at most 16: give fewer"),
]


@pytest.mark.parametrize(("changes", "status", "message"), COMPLETIONS_REFUSED)
def test_completion_that_cannot_be_is_refused(
    server: Served, changes: dict[str, Any], status: int, message: str
) -> None:
    status_code, error = posted(server, "/v1/completions", PLAIN | changes)
    assert (status_code, error["message"], error["type"]) == (status, message, "invalid_request_error")


CHATS_REFUSED = [
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "the form of the text is given twice: give response_format or structured_outputs",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format needs json_schema if its type is json_schema, and only then",
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured outputs take one of json, regex, choice, grammar, json_object; given are ['regex', 'choice']",
    ),
    ({"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
    ({"top_logprobs": 1}, "top_logprobs needs logprobs to be true"),
    (
        {"max_completion_tokens": 257},
        "max_completion_tokens is 257; the context has 256 tokens, prompt included: ask for fewer, or leave "
        "max_completion_tokens out",
    ),
    ({"continue_final_message": True}, "continue_final_message needs add_generation_prompt to be false"),
    (
        {
            "continue_final_message": True,
            "add_generation_prompt": False,
            "messages": [{"role": "user", "content": " "}],
        },
        "the prompt does not have the last message, so it cannot be continued: leave out continue_final_message",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CHATS_REFUSED)
def test_chat_that_cannot_be_is_refused(server: Served, changes: dict[str, Any], message: str) -> None:
    assert posted(server, "/v1/chat/completions", CHAT | changes)[1]["message"] == message


def test_arguments_that_ask_for_nothing_are_taken(server: Served) -> None:
    empty = {
        "response_format": {"type": "text"},
        "user": "me",
        "top_logprobs": None,
        "stop": None,
    }
    assert posted(server, "/v1/chat/completions", CHAT | empty) == (200, {})
    assert posted(server, "/v1/completions", PLAIN | {"best_of": 1, "n": 6, "logit_bias": {"4095": 1}}) == (
        200,
        {},
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is no JSON"),
        (b"[" * 100_000, "the request cannot be read"),
        (b'{"model": "\xff"}', "the request cannot be read"),
        (b"null", "the body: Input should be a valid dictionary or object to extract fields from"),
    ],
    ids=["cut", "deep", "no text", "null"],
)
def test_body_that_is_no_request_is_refused(server: Served, body: bytes, message: str) -> None:
    status_code, error = posted(server, "/v1/completions", body)
    assert (status_code, error["message"].startswith(message)) == (400, True), error


DEEP = b'{"a": ' * 900 + b"1" + b"}" * 900
HOSTILE = [
    (b'"prompt": "\\ud800"', 400, "the prompt is not Unicode text: surrogates not allowed at character 0"),
    (b'"\\ud800": 1', 400, "the body: Input should be a valid string"),
    (b'"max_tokens": ' + b"9" * 5000, 400, "the request cannot be read"),
    (b'"seed": ' + b"9" * 300, 400, "seed is 999"),
    (b'"temperature": NaN', 400, "temperature is nan; it must be between 0 and 1e+06"),
    (b'"temperature": 1e999', 400, "temperature is inf; it must be between 0 and 1e+06"),
    (b'"logit_bias": {"1": NaN}', 400, "logit_bias of token 1 is nan; it must be between -100 and 100"),
    (b'"structured_outputs": {"json": ' + DEEP + b"}", 400, "structured outputs: recursion limit exceeded"),
    (
        b'"structured_outputs": {"grammar": "start: start start"}',
        400,
        "structured outputs: the form cannot be kept: ",
    ),
    (b'"prompt": "\\u0000\\u001b[31m{{ 7 * 7 }}"', 200, ""),
    (b'"stop": "\\ud800"', 200, ""),
]


@pytest.mark.parametrize(("argument", "status", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_argument_is_answered(server: Served, argument: bytes, status: int, message: str) -> None:
    body = b'{"model": "stories", "prompt": "Tom", "max_tokens": 2, ' + argument + b"}"
    status_code, error = posted(server, "/v1/completions", body)
    assert (status_code, error.get("message", "").startswith(message)) == (status, True), error


def test_hostile_conversation_is_answered(server: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": DEEP.decode() * 3}}
    for changes, status in (
        ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, 200),
        ({"chat_template_kwargs": json.loads(DEEP)}, 200),
        ({"chat_template_kwargs": {"self": 1, "messages": 2, "bos_token": "x", "raise_exception": 3}}, 200),
    ):
        assert posted(server, "/v1/chat/completions", CHAT | changes)[0] == status


def test_unknown_paths_and_methods_are_refused_and_nothing_raw_is_logged(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nkw.serve")
    response, body = server.send("GET", "/v1/secret-path?secret-query")
    assert (response.status, json.loads(body)["error"]["message"]) == (404, "there is no such path")
    response, _ = server.send("DELETE", "/v1/completions", x_secret="header")
    assert response.status == 405
    posted(server, "/v1/completions", PLAIN | {"model": "secret-model\n"})
    posted(server, "/v1/completions", PLAIN | {"secret-argument": 1})
    lines: list[str] = []
    while len(lines) < 4:  # a line is written once its answer was sent
        records = [record.getMessage() for record in caplog.records if record.name == "nkw.serve"]
        # An earlier test's client may have left before the line of its answer was written.
        lines = [line for line in records if " /v1/chat/" not in line]
    assert [re.split(r" \d+\.\d+ s ", line)[0] for line in lines] == [
        "GET unknown path 404",
        "DELETE /v1/completions 405",
        "POST /v1/completions 404",
        "POST /v1/completions 400",
    ]


def test_full_context_has_the_code_of_openai(server: Served) -> None:
    for text in ("word " * 400, "word " * 4000):
        assert (
            posted(server, "/v1/completions", PLAIN | {"prompt": text})[1]["code"]
            == "context_length_exceeded"
        )
    assert posted(server, "/v1/completions", PLAIN | {"prompt": "word " * 200}) == (200, {})


def test_client_gets_the_errors_of_openai(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not computed"):
        client.embeddings.create(model=MODEL, input="a")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="a", max_tokens=0)


@pytest.mark.slow
def test_key_is_needed_where_there_are_keys(start: Callable[..., Any], key_file: Path) -> None:
    with start("--api-key-file", str(key_file), "--max-body", "300", "--max-num-seqs", "1") as served:
        for key in ("first-key-of-clients", "second-key-of-clients"):
            assert [model.id for model in served.client(api_key=key).models.list()] == [MODEL]
        for key in ("first-key-of-client", "first-key-of-clients2", "", "ключ"):
            response, body = served.send(
                "GET", "/v1/models", authorization=f"Bearer {key}".encode().decode("latin-1")
            )
            assert (response.status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            served.client(api_key="wrong").models.list()
        assert served.send("GET", "/metrics")[0].status == 401
        assert served.send("GET", "/health")[0].status == 200
        assert served.send("GET", "/health", host="any.example")[0].status == 200
        authorization = f"Bearer {served.keys[0]}"
        padding = 300 - len(json.dumps({"prompt": ""}))
        for more, status in ((0, 200), (1, 413)):
            body = json.dumps({"prompt": "a" * (padding + more)}).encode()
            assert posted(served, "/tokenize", body, authorization=authorization)[0] == status
        chunked = {"authorization": authorization, "transfer_encoding": "chunked"}
        body = b"12d\r\n" + b" " * 301 + b"\r\n0\r\n\r\n"
        assert posted(served, "/tokenize", body, **chunked)[0] == 413


def test_without_keys_only_loopback_names_are_answered(server: Served) -> None:
    for host, status in (("localhost:80", 200), ("[::1]", 200), ("[::1]:80", 200), ("rebound.example", 403)):
        assert server.send("GET", "/health", host=host)[0].status == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_without_keys_only_a_loopback_address_is_listened_at(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--host", host]) == 2
    assert capsys.readouterr().err == (
        f"nkw: error: --host {host} is no loopback address, and without keys anybody could use the server: give "
        "--api-key-file FILE\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "has no key; each line that is not empty is one"),
        ("long-enough-for-a-key\nshort\n", "line 2 of {} has 5 characters; a key has 16 to 1,024"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_key_file_without_good_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["serve", "--api-key-file", str(path)]) == 2
    expected = message.format(path) if "{}" in message else f"{path} {message}"
    assert capsys.readouterr().err == f"nkw: error: {expected}\n"


def test_port_in_use_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("model.serve.log.log_to_stderr", lambda level: None)  # it would stay for other tests
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--max-num-seqs", "1"]) == 2
    assert capfd.readouterr().err == (
        f"nkw: error: 127.0.0.1 port {port} cannot be listened at: Address already in use; give another "
        "--host or --port\n"
    )


GOOD_KEY = "sk-0123456789._~+/="
WRONG_CHARACTER = "has a character that a key cannot have"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (f"{GOOD_KEY}\r\n\n  \n{'b' * 16}", [GOOD_KEY, "b" * 16]),
        ("c" * 1024, ["c" * 1024]),
    ],
    ids=["several", "longest"],
)
def test_key_file_has_a_key_on_each_line(tmp_path: Path, text: str, keys: list[str]) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text.encode())
    assert read_keys(path) == keys


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("d" * 15, "has 15 characters; a key has 16 to 1,024"),
        ("d" * 1025, "has 1,025 characters; a key has 16 to 1,024"),
        ("\0" * 1000, WRONG_CHARACTER),
        ("two words in the key", WRONG_CHARACTER),
        (f" {GOOD_KEY}", WRONG_CHARACTER),
        (f"{GOOD_KEY}\t", WRONG_CHARACTER),
        (f"{GOOD_KEY}\x0b{GOOD_KEY}", WRONG_CHARACTER),
        (f"{GOOD_KEY}\u2028{GOOD_KEY}", WRONG_CHARACTER),
        (f"{GOOD_KEY}\x7f", WRONG_CHARACTER),
        (f"\ufeff{GOOD_KEY}", WRONG_CHARACTER),
        (f"{GOOD_KEY}\r\r", WRONG_CHARACTER),
        ("e" * 16, "lines 1 and 2 of .* have the same key"),
    ],
    ids=range(12),
)
def test_key_that_no_header_can_carry_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(f"{'e' * 16}\n{line}\n".encode())
    with pytest.raises(ModelError, match=message) as refused:
        read_keys(path)
    assert line.strip() not in str(refused.value)


@pytest.mark.parametrize(("mode", "readable"), [(0o600, False), (0o640, False), (0o604, True)])
def test_keys_that_everybody_may_read_are_warned_of(key_file: Path, mode: int, readable: bool) -> None:
    key_file.chmod(mode)
    assert others_may_read(key_file) == readable
    assert not others_may_read(None)


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "model.commands.serve.command.find_spec", lambda name: None if name == "uvicorn" else object()
    )
    assert main(["serve"]) == 2
    assert (
        capsys.readouterr().err == "nkw: error: nkw serve needs uvicorn; pip install 'nki-workbench[serve]'\n"
    )


@pytest.mark.slow
def test_slow_and_too_many_connections_end(start: Callable[..., Any]) -> None:
    words = ("--header-timeout", "1", "--body-timeout", "1", "--max-connections", "2", "--max-num-seqs", "1")
    with start(*words) as served:
        address = ("127.0.0.1", served.port)
        with socket.create_connection(address) as slow, socket.create_connection(address) as silent:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
            silent.sendall(b"GET /health HTTP/1.1\r\n")
            with socket.create_connection(address) as third:
                assert b" 503 " in third.makefile("rb").readline()
            assert b" 408 " in slow.makefile("rb").readline()
            assert b" 408 " in silent.makefile("rb").readline()
        assert served.send("GET", "/health")[0].status == 200
        with socket.create_connection(address) as wrong:
            wrong.sendall(b"\x16\x03\x01\r\n\r\n")
            assert b" 400 " in wrong.makefile("rb").readline()
