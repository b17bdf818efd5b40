"""Fields that are known and not computed are ignored or refused with a sentence; others are refused by their name."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model.serve.openai import fields
from model.serve.openai.fields import KNOWN_FIELDS
from model.serve.openai.messages import ChatMessage
from model.serve.openai.requests import ChatRequest, CompletionRequest, TokenizeRequest
from model.serve.openai.response_requests import ResponseRequest
from tests.serve.conftest import MODEL, Served
from tests.serve.test_refusals import CHAT, PLAIN, posted

ASKED = {"model": MODEL, "input": "Tom had", "max_output_tokens": 1}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", PLAIN),
    "chat completions": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", ASKED),
    "tokenize": ("/tokenize", {"prompt": "Tom had"}),
}


@pytest.mark.parametrize("name", ROUTES)
def test_fields_without_an_effect_are_ignored(server: Served, name: str) -> None:
    path, body = ROUTES[name]
    ignored = [field for field, known in KNOWN_FIELDS[name].items() if known.refusal is None]
    assert posted(server, path, body | dict.fromkeys(ignored, "any")) == (200, {})
    neutral = {field: known.neutral[0] for field, known in KNOWN_FIELDS[name].items() if known.neutral}
    assert posted(server, path, body | neutral) == (200, {})


@pytest.mark.parametrize("name", ROUTES)
def test_fields_that_would_change_the_answer_are_refused_with_a_sentence(server: Served, name: str) -> None:
    path, body = ROUTES[name]
    refused = {field: known for field, known in KNOWN_FIELDS[name].items() if known.refusal is not None}
    assert refused
    for field, known in refused.items():
        status, error = posted(server, path, body | {field: "x"})
        assert (status, error["message"]) == (400, f"{field}: {known.refusal}")
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")
        assert posted(server, path, body | {field: None}) == (200, {})


@pytest.mark.parametrize("name", ROUTES)
def test_unknown_fields_are_refused_by_their_name(server: Served, name: str) -> None:
    path, body = ROUTES[name]
    status, error = posted(server, path, body | {"max_tokenz": 3})
    assert (status, error["message"]) == (
        400,
        "nkw serve does not take the argument max_tokenz: leave it out",
    )


def test_no_computed_field_is_in_the_table() -> None:
    bodies = (CompletionRequest, ChatRequest, ResponseRequest, TokenizeRequest, ChatMessage)
    for body in bodies:
        assert body.known_as is not None
        assert not set(KNOWN_FIELDS[body.known_as]) & set(body.model_fields)


def test_each_ignored_field_is_logged_once(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    fields._log_ignored.cache_clear()
    caplog.set_level("INFO", "nkw.serve")
    for _ in range(2):
        posted(server, "/v1/completions", PLAIN | {"user": "me", "service_tier": "auto"})
    messages = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert messages == [
        "the field user of completions has no effect here and is ignored",
        "the field service_tier of completions has no effect here and is ignored",
    ]


def test_messages_of_other_servers_are_taken_back(server: Served) -> None:
    answer = {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "A cat", "annotations": []},
            {"type": "refusal", "refusal": "No"},
        ],
        "reasoning_content": "Think",
        "annotations": [],
        "function_call": None,
        "tool_calls": None,
        "audio": None,
    }
    assert posted(server, "/v1/chat/completions", CHAT | {"messages": [answer]}) == (200, {})
    message = ChatMessage.model_validate(answer).for_template()
    assert message["content"] == "A catNo"
    assert message["reasoning"] == message["reasoning_content"] == "Think"


@pytest.mark.parametrize("part_type", ["image_url", "input_audio", "input_image"])
def test_images_and_recordings_are_refused_with_one_sentence(server: Served, part_type: str) -> None:
    content = [{"type": "text", "text": "Look"}, {"type": part_type, part_type: {"url": "data:,"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    for path, request_fields in (
        ("/v1/chat/completions", CHAT | body),
        ("/v1/responses", ASKED | {"input": body["messages"]}),
    ):
        status, error = posted(server, path, request_fields)
        assert (status, error["code"]) == (400, "unsupported")
        assert error["message"].startswith("a message has a part that is not a text: ")


def test_reasoning_effort_and_documents_reach_the_template() -> None:
    body = CHAT | {"reasoning_effort": "none", "documents": [{"text": "a"}]}
    variables = ChatRequest.model_validate(body).build_template_variables()
    assert variables == {"reasoning_effort": "none", "enable_thinking": False, "documents": [{"text": "a"}]}
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    assert ChatRequest.model_validate(body | kwargs).build_template_variables()["enable_thinking"]


def test_forms_under_the_older_names_of_vllm_hold(server: Served) -> None:
    pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")
    for form, texts in (
        ({"guided_choice": ["dog", "cat"]}, ("dog", "cat")),
        ({"guided_regex": "cat"}, ("cat",)),
        ({"guided_grammar": 'start: "cat"'}, ("cat",)),
        ({"guided_json": {"const": "cat"}, "guided_decoding_backend": "auto"}, ('"cat"',)),
    ):
        body = json.dumps(PLAIN | {"max_tokens": 8} | form).encode()
        _, answer = server.send("POST", "/v1/completions", body)
        assert json.loads(answer)["choices"][0]["text"] in texts
    both = {"guided_regex": "a", "structured_outputs": {"regex": "a"}}
    assert posted(server, "/v1/completions", PLAIN | both)[1]["message"] == (
        "the form of the text is given twice: give structured_outputs or guided_json, guided_regex, "
        "guided_choice or guided_grammar"
    )


def test_other_apis_are_refused_with_one_sentence(server: Served) -> None:
    status, error = posted(server, "/v1/messages", {"model": MODEL, "messages": []})
    assert (status, error["message"]) == (
        400,
        "Anthropic's API is not served: send the conversation to /v1/chat/completions or /v1/responses",
    )
    response, body = server.send("GET", "/v1/responses/resp_1")
    assert (response.status, json.loads(body)["error"]["message"]) == (
        404,
        "responses are not stored: keep the response of POST /v1/responses",
    )
