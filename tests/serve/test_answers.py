"""What OpenAI's own client gets, whole and in pieces, equals what the engine gives alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from model import LLM, RequestOutput, SamplingParams
from tests.serve.conftest import MODEL, Served

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 6, "n": 2}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Return an engine without a server."""
    return LLM(max_num_seqs=4, max_num_batched_tokens=64)


def alone(llm: LLM, prompt: str, **params: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return output


def pieces(stream: Any, text: Any) -> tuple[dict[int, str], dict[int, str]]:
    """Return the joined text and the finish reason of each choice of a stream."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in stream:
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (text(choice) or "")
            if choice.finish_reason:
                assert choice.index not in reasons, "two ends"
                reasons[choice.index] = choice.finish_reason
    return texts, reasons


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_completion_is_that_of_the_engine_whole_and_in_pieces(
    client: Any, llm: LLM, params: dict[str, Any]
) -> None:
    expected = alone(llm, "The red key", **params)
    answer = client.completions.create(model=MODEL, prompt="The red key", **params)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected.outputs]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * len(expected.outputs)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in expected.outputs)
    stream = client.completions.create(model=MODEL, prompt="The red key", stream=True, **params)
    texts, reasons = pieces(stream, lambda choice: choice.text)
    assert texts == {output.index: output.text for output in expected.outputs}
    assert reasons == dict.fromkeys(texts, "length")


@pytest.mark.slow
def test_many_clients_at_once_get_what_each_gets_alone(server: Served, llm: LLM) -> None:
    prompts = ["Tom had", "The sun", "One day a dog", "Lily saw"]
    ask = server.client().completions.create
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(model=MODEL, prompt=prompt, **GREEDY), prompts))
    texts = [alone(llm, prompt, **GREEDY).outputs[0].text for prompt in prompts]
    assert [answer.choices[0].text for answer in answers] == texts


@pytest.mark.slow
def test_chat_goes_through_the_template_whole_and_in_pieces(client: Any, llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Once upon a time"},
        {"role": "user", "content": "there was a cat."},
    ]
    multipart_messages = [
        messages[0],
        {"role": "user", "content": [{"type": "text", "text": "there was a cat."}]},
    ]
    (expected,) = llm.chat(messages, SamplingParams(**GREEDY), use_tqdm=False)
    for conversation in (messages, multipart_messages):
        answer = client.chat.completions.create(model=MODEL, messages=conversation, **GREEDY)
        assert answer.choices[0].message.content == expected.outputs[0].text
    stream = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    texts, reasons = pieces(stream, lambda choice: choice.delta.content)
    assert (texts, reasons) == ({0: expected.outputs[0].text}, {0: "length"})
    assert stream[0].choices[0].delta.role == "assistant"
    assert [event.usage is None for event in stream] == [True] * (len(stream) - 1) + [False]
    assert stream[-1].usage == answer.usage


def test_messages_are_data_of_the_template(client: Any) -> None:
    text = "{{ 7 * 7 }}{% for a in b %}{{ ''.__class__ }}"
    chat_body = {"messages": [{"role": "user", "content": text}]}
    tokens = client.post("/../tokenize", body=chat_body, cast_to=object)["tokens"]
    assert client.post("/../detokenize", body={"tokens": tokens}, cast_to=object) == {"prompt": f"{text}\n"}


@pytest.mark.slow
def test_stop_strings_and_biases_count(client: Any, llm: LLM) -> None:
    plain = alone(llm, "Once upon a time", **GREEDY).outputs[0]
    word = plain.text.split()[3]
    stopped = client.completions.create(model=MODEL, prompt="Once upon a time", stop=[word], **GREEDY)
    assert stopped.choices[0].text == plain.text[: plain.text.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    biased = {"logit_bias": {plain.token_ids[0]: -100}, "frequency_penalty": 1.5, "presence_penalty": 0.5}
    answer = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        **GREEDY | biased | {"logit_bias": {str(plain.token_ids[0]): -100}},
    )
    assert answer.choices[0].text == alone(llm, "Once upon a time", **GREEDY | biased).outputs[0].text
    assert answer.choices[0].text != plain.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        {"allowed_token_ids": [300, 301, 302]},
        {"min_p": 0.5},
        {"top_k": 2},
        {"repetition_penalty": 4.0},
        {"min_tokens": 5, "stop": ["a", "e"]},
        {"stop_token_ids": [*range(300, 1000)]},
        {"stop": ["a", "e"], "include_stop_str_in_output": True},
        {"logit_bias": {"300": 100.0}},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_arguments_of_vllm_count(client: Any, llm: LLM, extra: dict[str, Any]) -> None:
    drawn = {"temperature": 1.5, "seed": 11, "max_tokens": 8}
    arguments = {**drawn, **extra}
    if "logit_bias" in extra:
        arguments["logit_bias"] = {300: 100.0}
    expected, plain = alone(llm, "Tom had", **arguments).outputs[0], alone(llm, "Tom had", **drawn).outputs[0]
    answer = client.completions.create(model=MODEL, prompt="Tom had", **drawn, extra_body=extra).choices[0]
    assert (answer.text, answer.finish_reason) == (expected.text, expected.finish_reason)
    assert answer.stop_reason == expected.stop_reason
    assert answer.text != plain.text, "the argument changes nothing here"


@pytest.mark.slow
def test_logprobs_are_those_of_the_engine(client: Any, llm: LLM) -> None:
    output = alone(llm, "Tom had", logprobs=2, **GREEDY).outputs[0]
    assert output.logprobs is not None
    chosen = [candidates[token].logprob for token, candidates in zip(output.token_ids, output.logprobs)]
    best = [
        sorted((one.logprob for one in candidates.values()), reverse=True) for candidates in output.logprobs
    ]
    answer = client.completions.create(model=MODEL, prompt="Tom had", logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert "".join(logprobs.tokens) == output.text
    assert [logprobs.text_offset[0], logprobs.text_offset[1]] == [0, len(logprobs.tokens[0])]
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tom had"}],
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
    )
    rows = chat.choices[0].logprobs.content
    assert [len(row.top_logprobs) for row in rows] == [2] * 6
    assert all(row.top_logprobs[0].logprob >= row.logprob for row in rows)
    assert [len(scores) for scores in best] == [2] * 6


def test_answers_have_the_form_that_is_asked_for(client: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")
    schema = {"type": "object", "properties": {"cat": {"type": "boolean"}}, "required": ["cat"]}
    json_schema = {"name": "animals", "schema": schema | {"additionalProperties": False}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tom had"}],
        response_format={"type": "json_schema", "json_schema": json_schema},
        temperature=0,
    )
    assert list(json.loads(answer.choices[0].message.content)) == ["cat"]
    body = {"structured_outputs": {"choice": ["dog", "cat"]}}
    answer = client.completions.create(model=MODEL, prompt="Tom had", extra_body=body)
    assert answer.choices[0].text in ("dog", "cat")
    assert answer.choices[0].finish_reason == "stop"


def test_prompts_may_be_several_texts_or_token_ids_and_are_echoed(client: Any, server: Served) -> None:
    tokens = client.post("/../tokenize", body={"prompt": "Tom had"}, cast_to=object)["tokens"]
    assert client.post("/../detokenize", body={"tokens": tokens}, cast_to=object) == {"prompt": "Tom had"}
    several = client.completions.create(model=MODEL, prompt=["Tom had", "The sun"], **GREEDY)
    one = client.completions.create(model=MODEL, prompt=tokens, echo=True, **GREEDY)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert one.choices[0].text == "Tom had" + several.choices[0].text
    assert several.choices[0].text != several.choices[1].text


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_log_probabilities(client: Any, stream: bool) -> None:
    """The columns begin with the prompt, whose first token has none; without echo they are the rest of them."""
    arguments = {
        "model": MODEL,
        "prompt": ["Tom had a", "The sun"],
        "logprobs": 2,
        "temperature": 0,
        "max_tokens": 3,
    }
    alone = client.completions.create(**arguments)
    answer = client.completions.create(**arguments, echo=True, stream=stream)
    choice_columns: list[dict[str, list[Any]]] = [{}, {}]
    texts = ["", ""]
    for piece in answer if stream else [answer]:
        for choice in piece.choices:
            texts[choice.index] += choice.text
            for name, column in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                choice_columns[choice.index].setdefault(name, []).extend(column)
    for columns, text, choice in zip(choice_columns, texts, alone.choices):
        tokens = columns["tokens"]
        assert "".join(tokens).strip() == text.strip()
        assert columns["text_offset"] == [len("".join(tokens[:count])) for count in range(len(tokens))]
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
        assert all(-50 < logprob <= 0 for logprob in columns["token_logprobs"][1:])
        assert [len(candidates) >= 2 for candidates in columns["top_logprobs"][1:]] == [True] * (
            len(tokens) - 1
        )
        assert tokens[-3:] == choice.logprobs.tokens
        assert len(tokens) > 5


def test_model_is_listed_and_health_ready_and_version_are_said(client: Any, server: Served) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == server.engine.limits.max_model_len
    for path in ("/health", "/ready", "/version"):
        response, body = server.send("GET", path)
        assert (response.status, list(json.loads(body))) == (
            200,
            ["version" if path == "/version" else "status"],
        )
