"""Prompts are scored and counted as vLLM does it: `max_tokens` 0 with echo, `prompt_logprobs`, usage in each event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import MODEL, Served

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

PROMPT = "Tom had a red ball"
ECHO: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}


def send(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response, answer = server.send("POST", path, json.dumps(body).encode())
    assert response.status == 200, answer
    document: dict[str, Any] = json.loads(answer)
    return document


def events(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response, answer = server.send("POST", path, json.dumps(body | {"stream": True}).encode())
    assert response.status == 200, answer
    lines = [line.removeprefix(b"data: ") for line in answer.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


def test_prompt_is_scored_without_an_answer(client: Any) -> None:
    longer = client.completions.create(**ECHO, max_tokens=2).choices[0].logprobs
    scored = client.completions.create(**ECHO, max_tokens=0, n=2)
    count = scored.usage.prompt_tokens
    assert [choice.text for choice in scored.choices] == [PROMPT] * 2
    for choice in scored.choices:
        assert choice.logprobs.tokens == longer.tokens[:count]
        assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
        scores = choice.logprobs.token_logprobs[1:]
        assert scores == pytest.approx(longer.token_logprobs[1:count], abs=1e-4)
        assert [set(candidates) for candidates in choice.logprobs.top_logprobs[1:]] == [
            set(candidates) for candidates in longer.top_logprobs[1:count]
        ]
        assert choice.finish_reason == "length"
    assert scored.usage.completion_tokens == 2, "vLLM computes and counts a token for each choice"


def test_scores_are_streamed_as_one_event_for_each_choice(client: Any, server: Served) -> None:
    full_choice = client.completions.create(**ECHO, max_tokens=0).choices[0]
    body = ECHO | {"max_tokens": 0, "n": 2, "stream_options": {"include_usage": True}}
    *pieces, last = events(server, "/v1/completions", body)
    assert sorted(piece["choices"][0]["index"] for piece in pieces) == [0, 1]
    for piece in pieces:
        (choice,) = piece["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[1:] == pytest.approx(full_choice.logprobs.token_logprobs[1:], abs=1e-4)
    assert last["usage"]["completion_tokens"] == 2


def test_prompt_is_echoed_alone_without_log_probabilities(server: Served) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "echo": True, "max_tokens": 0}
    (choice,) = send(server, "/v1/completions", body)["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)


def test_prompt_logprobs_have_the_form_of_vllm(client: Any, server: Served) -> None:
    scored = client.completions.create(**ECHO, max_tokens=0).choices[0].logprobs
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 1}
    (choice,) = send(server, "/v1/completions", body)["choices"]
    first, *remaining = choice["prompt_logprobs"]
    ids = client.post("/../tokenize", body={"prompt": PROMPT}, cast_to=object)["tokens"]
    assert first is None and len(remaining) == len(ids) - 1
    for id, by_id, logprob, token in zip(
        ids[1:], remaining, scored.token_logprobs[1:], scored.tokens[1:], strict=True
    ):
        assert by_id[str(id)]["logprob"] == pytest.approx(logprob, abs=1e-6)
        assert by_id[str(id)]["decoded_token"] == token
        assert min(candidate["rank"] for candidate in by_id.values()) == 1
        assert len(by_id) <= 2
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Tom"}], "max_tokens": 1}
    answer = send(server, "/v1/chat/completions", chat | {"prompt_logprobs": 0})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in send(server, "/v1/chat/completions", chat)


def test_echo_shows_as_many_likely_tokens_as_logprobs(server: Served) -> None:
    (choice,) = send(server, "/v1/completions", ECHO | {"max_tokens": 0, "prompt_logprobs": 5})["choices"]
    assert all(len(candidates) <= 2 for candidates in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(candidates) >= 5 for candidates in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_grows_with_each_event_of_a_stream(server: Served, path: str) -> None:
    stream_fields = (
        {"prompt": PROMPT}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": PROMPT}]}
    )
    body = {
        "model": MODEL,
        "max_tokens": 5,
        "n": 2,
        "temperature": 1,
        "seed": 2,
        "ignore_eos": True,
        **stream_fields,
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events(server, path, body | {"stream_options": options})
    counts: dict[int, list[int]] = {}
    for piece in pieces:
        usage = piece["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        counts.setdefault(piece["choices"][0]["index"], []).append(usage["completion_tokens"])
    for count in counts.values():
        assert count == sorted(count)
        assert count[0] == (1 if path == "/v1/completions" else 0)
        assert count[-1] == 5
    assert last["usage"]["completion_tokens"] == 10
    plain = events(server, path, body | {"stream_options": options | {"include_usage": False}})
    assert [piece["usage"] for piece in plain] == [None] * len(plain), "as in vLLM"


def test_answer_continues_the_last_message(client: Any, server: Served) -> None:
    """The default template ends each message with a line break, which a message that goes on does not have."""
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": "Tom had "}]
    chat_fields = {"messages": messages, "add_generation_prompt": False}
    tokens = client.post("/../tokenize", body=chat_fields, cast_to=object)["tokens"]
    goes_on = client.post(
        "/../tokenize", body=chat_fields | {"continue_final_message": True}, cast_to=object
    )["tokens"]
    texts = [
        client.post("/../detokenize", body={"tokens": token_ids}, cast_to=object)["prompt"]
        for token_ids in (tokens, goes_on)
    ]
    assert texts == ["Once\nTom had \n", "Once\nTom had "]
    body = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    answer = send(server, "/v1/chat/completions", chat_fields | body | {"continue_final_message": True})
    continued = send(server, "/v1/completions", {**body, "prompt": goes_on})
    assert answer["choices"][0]["message"]["content"] == continued["choices"][0]["text"]


def test_prompt_may_lack_special_tokens(client: Any) -> None:
    usage = [
        client.completions.create(
            model=MODEL, prompt="Tom", max_tokens=1, extra_body={"add_special_tokens": special}
        ).usage.prompt_tokens
        for special in (True, False)
    ]
    assert usage[0] == usage[1] + 1


def test_tokens_beyond_the_context_are_cut_and_the_answer_says_so(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Tom had " * 120, max_tokens=256, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 256


def test_tokenizer_is_described(server: Served) -> None:
    response, body = server.send("GET", "/tokenizer_info")
    info = json.loads(body)
    assert response.status == 200
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == (*["<|endoftext|>"] * 2, None)
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "messages" in info["chat_template"]
    assert info["max_model_len"] == 256
