"""litellm: chats, a stream, a call of a function and its output, a completion, and a response."""

import sys
from typing import Any

import litellm

SERVER: dict[str, Any] = {"model": "openai/stories", "api_base": sys.argv[1], "api_key": "none"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Return the time.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
QUESTION = {"role": "user", "content": "Tom had"}


def main() -> None:
    """Ask in each way, and check what comes back."""
    chat = litellm.completion(messages=[QUESTION], max_tokens=4, temperature=0, user="me", **SERVER)
    options = {"include_usage": True}
    stream = litellm.completion(
        messages=[QUESTION], max_tokens=4, temperature=0, stream=True, stream_options=options, **SERVER
    )
    *pieces, last = stream
    text = "".join(choice.delta.content or "" for piece in [*pieces, last] for choice in piece.choices)
    assert text == chat.choices[0].message.content
    assert last.usage.completion_tokens == 4
    called = litellm.completion(
        messages=[QUESTION],
        max_tokens=40,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="low",
        allowed_openai_params=["reasoning_effort", "tool_choice", "parallel_tool_calls"],
        **SERVER,
    )
    message = called.choices[0].message
    assert message.tool_calls[0].function.name == "now"
    returned = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is noon."}
    history = [QUESTION, message.model_dump(), returned]
    answer = litellm.completion(messages=history, max_tokens=4, tools=TOOLS, **SERVER)
    assert answer.choices[0].message.content
    completion = litellm.text_completion(
        prompt="Tom had", max_tokens=3, logprobs=1, **SERVER | {"model": "text-completion-openai/stories"}
    )
    assert len(completion.choices[0].logprobs.tokens) == 3
    response = litellm.responses(input="Tom had", max_output_tokens=16, **SERVER)
    assert 0 < response.usage.output_tokens <= 16


main()
