"""The official client lets a model call functions: required, chosen by the model, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from model.loading.chat import ChatTemplate
from model.serve.openai.tools import select_tool_parser
from tests.serve.conftest import MODEL, Served, serving
from tests.serve.scripted import write_scripted
from tests.serve.test_refusals import CHAT, posted

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")
pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", "Oslo"]}},
}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    fields = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": f"{name}?", **fields}}


TOOLS = [tool("weather", CITY), tool("now")]
NAMED = {"type": "function", "function": {"name": "weather"}}
SCRIPTS = {
    "CALL": [
        "I ", "look.\n", "<tool_", "call>\n{", '"name": "wea', 'ther", "argum', 'ents": {"ci', 'ty": "Os', 'lo", "da',
        'ys": 3', "}}\n</tool", "_call>",
    ],
    "TWICE": [
        '<tool_call>{"name": "now", "arguments": {}}', "</tool_call>\n", '<tool_call>{"name": "weather", ',
        '"arguments": {"city"', ': "Paris"}', "} </tool_call>",
    ],
    "LLAMA": ['{"name": "weather"', ', "parameters": {"city": ', '"Oslo"', "} }"],
    "TALK": ["Just ", "<tool", "> talk", " now."],
    "RETURNED": ["It is ", "5 degrees."],
    "DEGREES": ['{"degrees"', ":5}"],
}  # fmt: skip


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted(tmp_path_factory.mktemp("models") / "scripted", SCRIPTS, note="<tool_call>")


@pytest.fixture(scope="module")
def caller(scripted: Path) -> Iterator[Served]:
    with serving("--model", str(scripted), "--max-num-seqs", "2") as served:
        yield served


def complete_chat(client: Any, model: str, content: str, **arguments: Any) -> tuple[Any, Any]:
    """Return the message and finish reason of an answer; check that the accumulated stream equals it."""
    fields = {"tools": TOOLS, "temperature": 0} | arguments
    fields |= {"model": model, "messages": [{"role": "user", "content": content}]}
    choice = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]

    def plain(message: Any) -> tuple[Any, ...]:
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return message.role, message.content or None, calls

    assert plain(final.message) == plain(choice.message)
    assert final.finish_reason == choice.finish_reason
    return choice.message, choice.finish_reason


def calls(message: Any) -> list[tuple[str, Any]]:
    assert len({tool_call.id for tool_call in message.tool_calls}) == len(message.tool_calls)
    return [
        (tool_call.function.name, json.loads(tool_call.function.arguments))
        for tool_call in message.tool_calls
    ]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_required_call_keeps_the_schema_of_its_function(client: Any, choice: Any) -> None:
    arguments = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 0.7, "seed": 5}
    message, reason = complete_chat(client, MODEL, "Tom had", **arguments)
    ((name, call_arguments),) = calls(message)
    assert (reason, message.content) == ("tool_calls", None)
    if choice == NAMED:
        assert name == "weather"
    if name == "weather":
        assert list(call_arguments) == ["city", "days"]
        assert call_arguments["city"] in ("Paris", "Oslo") and 0 <= call_arguments["days"] <= 9
    else:
        assert (name, call_arguments) == ("now", {})


@pytest.mark.slow
def test_call_that_the_model_chooses_is_read_from_its_text(caller: Served) -> None:
    client = caller.client()
    message, reason = complete_chat(client, "scripted", "CALL")
    assert (message.content, reason) == ("I look.", "tool_calls")
    assert calls(message) == [("weather", {"city": "Oslo", "days": 3})]
    message, reason = complete_chat(client, "scripted", "TWICE")
    assert (message.content, reason) == (None, "tool_calls")
    assert calls(message) == [("now", {}), ("weather", {"city": "Paris"})]
    message, _ = complete_chat(client, "scripted", "TWICE", parallel_tool_calls=False)
    assert calls(message) == [("now", {})]
    message, reason = complete_chat(client, "scripted", "TALK")
    assert (message.content, message.tool_calls, reason) == ("Just <tool> talk now.", None, "stop")


def test_arguments_are_streamed_before_the_call_has_ended(caller: Served) -> None:
    events = caller.client().chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "CALL"}],
        tools=TOOLS,
        temperature=0,
        stream=True,
    )
    deltas = [event.choices[0].delta for event in events]
    pieces = [delta.tool_calls[0].function for delta in deltas if delta.tool_calls]
    assert [piece.name for piece in pieces] == ["weather"] + [None] * (len(pieces) - 1)
    assert [piece.arguments for piece in pieces] == ['{"ci', 'ty": "Os', 'lo", "da', 'ys": 3', "}"]


FORM = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
ANSWER_FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": FORM}}


@pytest.mark.parametrize(
    ("content", "called"),
    [("TWICE", [("now", {}), ("weather", {"city": "Paris"})]), ("DEGREES", None)],
)
def test_answer_with_tools_is_a_call_or_has_its_form(caller: Served, content: str, called: Any) -> None:
    tools = [tool("now"), tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}})]
    arguments = {"tools": tools, "response_format": ANSWER_FORM, "max_tokens": 40}
    message, _ = complete_chat(caller.client(), "scripted", content, **arguments)
    if called is None:
        assert (json.loads(message.content), message.tool_calls) == ({"degrees": 5}, None)
    else:
        assert (message.content, calls(message)) == (None, called)


def test_answer_with_tools_has_no_other_text(caller: Served) -> None:
    """The model would say "Just <tool> talk now."; only a choice or a call is allowed."""
    chat_body = {"model": "scripted", "messages": [{"role": "user", "content": "TALK"}], "tools": TOOLS}
    body = json.dumps(chat_body | {"structured_outputs": {"choice": ["Just no"]}, "temperature": 0}).encode()
    _, answer = caller.send("POST", "/v1/chat/completions", body)
    assert json.loads(answer)["choices"][0]["message"]["content"] == "Just no"
    status, error = posted(
        caller, "/v1/chat/completions", chat_body | {"structured_outputs": {"regex": "a+"}, "max_tokens": 4}
    )
    assert (status, error["message"]) == (
        400,
        "tools exclude structured_outputs.regex: leave out tools, or give json or choice",
    )


def test_required_calls_replace_the_form_of_the_answer(client: Any) -> None:
    message, reason = complete_chat(
        client, MODEL, "Tom had", tool_choice=NAMED, response_format={"type": "json_object"}
    )
    assert (calls(message)[0][0], reason) == ("weather", "tool_calls")


def test_answer_has_no_fields_of_calls_that_openai_has_not(caller: Served) -> None:
    def answered(content: str) -> dict[str, Any]:
        chat_body = {"messages": [{"role": "user", "content": content}], "tools": TOOLS, "temperature": 0}
        _, body = caller.send(
            "POST", "/v1/chat/completions", json.dumps(chat_body | {"model": "scripted"}).encode()
        )
        message: dict[str, Any] = json.loads(body)["choices"][0]["message"]
        return message

    assert set(answered("TALK")) == {"role", "content"}
    assert set(answered("CALL")["tool_calls"][0]) == {"id", "type", "function"}


@pytest.mark.slow
def test_calls_are_text_without_tools_and_where_none_may_be(caller: Served) -> None:
    call_text = "".join(SCRIPTS["CALL"])
    for arguments in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        message, reason = complete_chat(caller.client(), "scripted", "CALL", **arguments)
        assert (message.content, message.tool_calls, reason) == (call_text, None, "stop")


@pytest.mark.slow
def test_answer_and_what_its_call_returned_go_back_through_the_template(caller: Served) -> None:
    client = caller.client()
    question = {"role": "user", "content": "CALL"}
    message, _ = complete_chat(client, "scripted", "CALL")
    call = message.tool_calls[0]
    returned = {"role": "tool", "tool_call_id": call.id, "content": "RETURNED"}
    answer = client.chat.completions.create(
        model="scripted", messages=[question, message, returned], tools=TOOLS, temperature=0
    )
    assert answer.choices[0].message.content == "It is 5 degrees."
    body = {"messages": [question, message.to_dict(), returned], "tools": TOOLS}
    body["chat_template_kwargs"] = {"mood": "!", "messages": "ours", "tools": "ours"}
    tokens = client.post("/../tokenize", body=body, cast_to=object)["tokens"]
    text = client.post("/../detokenize", body={"tokens": tokens}, cast_to=object)["prompt"]
    made = {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}
    assert text == (
        f"{json.dumps(TOOLS)}\nuser: CALL\nassistant: "
        f"{json.dumps([{'id': call.id, 'type': 'function', 'function': made}])}I look.\ntool{call.id}: RETURNED!"
    )


@pytest.mark.slow
def test_parser_is_that_of_the_option(scripted: Path) -> None:
    with serving(
        "--model", str(scripted), "--tool-call-parser", "llama3_json", "--max-num-seqs", "1"
    ) as served:
        message, reason = complete_chat(served.client(), "scripted", "LLAMA")
        assert (calls(message), reason) == ([("weather", {"city": "Oslo"})], "tool_calls")
        assert complete_chat(served.client(), "scripted", "TWICE")[0].tool_calls is None


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if tools %}within <tool_call></tool_call>{% endif %}", "hermes"),
        ('{% if tools %}{"name": n, "parameters": dictionary of argument name and}{% endif %}', "llama3_json"),
        ("{% if tools %}<tool_call><function=example>{% endif %}", None),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_parser_is_that_of_the_template(tmp_path: Path, template: str, parser: str | None) -> None:
    assert select_tool_parser(tmp_path, None) is None
    (tmp_path / "chat_template.jinja").write_text(template)
    assert select_tool_parser(tmp_path, None) == parser
    assert select_tool_parser(tmp_path, "hermes") == "hermes"


def test_template_for_tools_is_taken_where_the_folder_has_one(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate(tmp_path)
    assert (template.render([]), template.render([], tools=TOOLS)) == ("plain", "2 tools")
    path.write_text(json.dumps({"chat_template": [named[0], {"name": "tool_use", "template": None}]}))
    with pytest.raises(ModelError, match="None is not a template"):
        ChatTemplate(tmp_path)


CUT_CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"city": "Os'}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    ({"tools": [tool("two words")]}, "tools.0.function.name: String should match pattern '^[A-Za-z0-9_-]{1,64}$'"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "two tools have the same name: give each function its own name"),
    (
        {"tool_choice": "required"},
        "tool_choice is required and there are no tools: give tools, or leave tool_choice out",
    ),
    (
        {"tools": [TOOLS[1]], "tool_choice": NAMED},
        "tool_choice names a function that is not in tools: add it to tools, or name one of them",
    ),
    ({"messages": [{"role": "user"}]}, "messages.0: Value error, content is missing"),
    (
        {"messages": [{"role": "tool", "content": "5"}]},
        "messages.0: Value error, a message of the role tool has a tool_call_id, and no other has one",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CUT_CALL]}]},
        "messages.0: Value error, only an assistant has tool_calls",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_tools_that_cannot_be_are_refused(server: Served, changes: dict[str, Any], message: str) -> None:
    status, error = posted(server, "/v1/chat/completions", CHAT | changes)
    assert (status, error["message"]) == (400, message)


def test_schema_that_cannot_be_is_refused(server: Served) -> None:
    fields = {"tools": [tool("now", {"type": "no type"})], "tool_choice": "required"}
    status, error = posted(server, "/v1/chat/completions", CHAT | fields)
    assert (status, error["message"].startswith("structured outputs: ")) == (400, True)


@pytest.mark.slow
def test_tools_that_ask_for_nothing_are_taken(server: Served) -> None:
    for fields in (
        {"tools": [], "parallel_tool_calls": True},
        {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}},
        {"tool_choice": "auto"},
        {"tools": TOOLS},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        {"messages": [{"role": "assistant", "tool_calls": [CUT_CALL]}]},
        {"messages": [{"role": "assistant", "content": "Tom", "refusal": None, "tool_calls": []}]},
    ):
        assert posted(server, "/v1/chat/completions", CHAT | fields) == (200, {})
