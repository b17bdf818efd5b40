"""OpenAI's client of the Responses API gets texts, calls, forms and events from a server that stores nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import MODEL, Served
from tests.serve.test_refusals import posted
from tests.serve.test_tools import FORM, TOOLS, caller, scripted  # noqa: F401 - fixtures

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")
pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")

FUNCTIONS: list[Any] = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
ASKED: dict[str, Any] = {"model": MODEL, "input": "Tom had", "max_output_tokens": 4, "temperature": 0}


def test_response_is_the_answer_of_the_conversation(client: Any) -> None:
    messages = [{"role": "system", "content": "Once"}, {"role": "user", "content": "Tom had"}]
    expected = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
    for prompt in ("Tom had", [{"role": "user", "content": [{"type": "input_text", "text": "Tom had"}]}]):
        response = client.responses.create(**ASKED | {"input": prompt}, instructions="Once")
        assert response.output_text == expected.choices[0].message.content
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        assert response.usage.output_tokens == 4
        assert response.usage.total_tokens == response.usage.input_tokens + 4
        assert (response.store, response.previous_response_id) == (False, None)
        assert response.id.startswith("resp_")


def test_events_of_a_text_have_their_order_and_numbers(client: Any) -> None:
    full_response = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == full_response.output_text
    assert events[-1].response.output_text == full_response.output_text
    assert events[-1].response.usage == full_response.usage
    assert events[0].response.usage is None
    item = events[-1].response.output[0]
    assert {event.item_id for event in deltas} == {item.id}


def test_stream_has_the_types_of_its_events_and_no_done(server: Served) -> None:
    _, body = server.send("POST", "/v1/responses", json.dumps(ASKED | {"stream": True}).encode())
    frames = [frame.split("\n") for frame in body.decode().removesuffix("\n\n").split("\n\n")]
    for event_line, data in frames:
        assert event_line == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_calls_go_out_and_their_outputs_come_back(caller: Served) -> None:  # noqa: F811
    client = caller.client()
    arguments = {"model": "scripted", "tools": FUNCTIONS, "temperature": 0}
    question = {"role": "user", "content": "CALL"}
    response = client.responses.create(**arguments, input=[question])
    message, call = response.output
    assert (message.content[0].text, message.status) == ("I look.", "completed")
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Oslo", "days": 3},
    )
    assert response.status == "completed"
    returned = {"type": "function_call_output", "call_id": call.call_id, "output": "RETURNED"}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    history = [question, reasoning, *(item.to_dict() for item in response.output), returned]
    answer = client.responses.create(**arguments, input=history)
    assert answer.output_text == "It is 5 degrees."


def test_events_of_calls_add_up_to_the_calls(caller: Served) -> None:  # noqa: F811
    arguments = {"model": "scripted", "tools": FUNCTIONS, "temperature": 0, "input": "TWICE"}
    events = list(caller.client().responses.create(**arguments, stream=True))
    calls = events[-1].response.output
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("now", {}),
        ("weather", {"city": "Paris"}),
    ]
    for index, call in enumerate(calls):
        call_events = [event for event in events if getattr(event, "output_index", None) == index]
        assert [call_events[0].type, call_events[-2].type, call_events[-1].type] == [
            "response.output_item.added",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        deltas = [
            event.delta for event in call_events if event.type == "response.function_call_arguments.delta"
        ]
        assert "".join(deltas) == call_events[-2].arguments == call.arguments
        assert (call_events[0].item.call_id, call_events[-1].item.status) == (call.call_id, "completed")


def test_required_calls_and_forms_hold(client: Any) -> None:
    choice = {"type": "function", "name": "weather"}
    response = client.responses.create(
        **ASKED | {"max_output_tokens": 60}, tools=FUNCTIONS, tool_choice=choice, parallel_tool_calls=False
    )
    assert [(output_item.type, output_item.name) for output_item in response.output] == [
        ("function_call", "weather")
    ]
    form = {
        "type": "json_schema",
        "name": "cat",
        "schema": FORM | {"properties": {"degrees": {"enum": [1, 2]}}},
    }
    response = client.responses.create(**ASKED | {"max_output_tokens": 60}, text={"format": form})
    assert json.loads(response.output_text)["degrees"] in (1, 2)
    assert response.text.format.type == "json_schema"


def test_log_probabilities_are_included_when_asked_for(client: Any) -> None:
    arguments = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    content = client.responses.create(**arguments).output[0].content[0]
    assert [len(logprob.top_logprobs) for logprob in content.logprobs] == [2] * 4
    assert client.responses.create(**ASKED).output[0].content[0].logprobs == []


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"previous_response_id": "resp_1"},
        "previous_response_id",
        "previous_response_id: this server stores no conversation: send its messages, calls and outputs in input",
    ),
    (
        {"background": True},
        "background",
        "background: answers are not computed in the background: set stream to true",
    ),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input.0",
        "this server stores no items: send the item itself",
    ),
    (
        {"input": [{"role": "user", "content": "a"}, {"type": "web_search_call"}]},
        "input.1",
        "an item of input is not a message, a function_call, a function_call_output or reasoning: leave it out",
    ),
    (
        {"tools": [{"type": "web_search"}]},
        "tools",
        "this server runs no tools of its own: give functions in tools",
    ),
    (
        {"tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", "tools": []}},
        "tool_choice",
        "tool_choice is none, auto, required or a function: leave other tools out of tools",
    ),
    ({"input": []}, "input", "input is empty: give a text or at least one item"),
    (
        {"text": {"format": {"type": "json_schema"}}},
        "text.format",
        "text.format of the type json_schema has no schema: give text.format.schema",
    ),
    (
        {"max_output_tokens": 257},
        "max_output_tokens",
        "max_output_tokens is 257; the context has 256 tokens, prompt included: ask for fewer, or leave "
        "max_output_tokens out",
    ),
    ({"input": [{"role": "user"}]}, "messages.0", "messages.0: Value error, content is missing"),
]


@pytest.mark.parametrize(("changes", "param", "message"), REFUSED, ids=range(len(REFUSED)))
def test_response_that_cannot_be_is_refused(
    server: Served, changes: dict[str, Any], param: str, message: str
) -> None:
    status, error = posted(server, "/v1/responses", ASKED | changes)
    assert (status, error["param"], error["message"]) == (400, param, message)


def test_response_that_asks_for_no_state_is_taken(server: Served) -> None:
    for changes in (
        {"store": True, "background": False, "previous_response_id": None, "truncation": "disabled"},
        {"tools": FUNCTIONS, "tool_choice": "none"},
        {"tools": FUNCTIONS, "tool_choice": "auto", "reasoning": {"effort": "low", "summary": "auto"}},
        {
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "max_output_tokens": 256,
            "stop": list("aeiou"),
        },
        {"input": [{"type": "message", "role": "developer", "content": "a"}]},
    ):
        assert posted(server, "/v1/responses", ASKED | changes) == (200, {})


def test_fault_of_a_stream_is_its_last_event(caller: Served, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from model.serve.errors import ApiError
    from model.serve.openai.responses import ResponseHandler

    async def fail(self: Any, stream: Any) -> Any:
        raise ApiError(500, "the model could not compute this request", "request_failed")
        yield

    monkeypatch.setattr(ResponseHandler, "iterate_updates", fail)
    body = {"model": "scripted", "input": "TALK", "stream": True}
    _, answer = caller.send("POST", "/v1/responses", json.dumps(body).encode())
    last = json.loads(answer.decode().strip().split("\n")[-1].removeprefix("data: "))
    assert (last["type"], last["code"], last["sequence_number"]) == ("error", "request_failed", 2)
