"""Agents of openai-agents: a text, a stream, a call of a function, and an answer in a form."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Pet(BaseModel):
    """Answer of an agent."""

    species: Literal["cat", "dog"]


@function_tool
def now() -> str:
    """Return the time."""
    return "It is noon."


async def main() -> None:
    """Run the agents with their default model, which uses the Responses API."""
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=sys.argv[1], api_key="none"))
    settings = ModelSettings(temperature=0, extra_body={"stop": ["."]})
    plain = Agent(name="plain", instructions="Once upon a time", model="stories", model_settings=settings)
    text = (await Runner.run(plain, "Tom had")).final_output
    streamed = Runner.run_streamed(plain, "Tom had")
    pieces = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == streamed.final_output == text
    required = ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_body={"stop": ["."]})
    caller = Agent(name="caller", tools=[now], model="stories", model_settings=required)
    called = await Runner.run(caller, "Tom had")
    assert [type(item).__name__ for item in called.new_items] == [
        "ToolCallItem",
        "ToolCallOutputItem",
        "MessageOutputItem",
    ]
    former = Agent(name="former", output_type=Pet, model="stories")
    assert (await Runner.run(former, "Tom had a")).final_output.species in ("cat", "dog")


asyncio.run(main())
