"""The functions that an answer may call: the form in which a model writes calls, and that of required ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.engine.structured import StructuredOutputsParams
from model.errors import ModelError
from model.loading.chat import ChatTemplate
from model.serve.openai.calls import CALL_LIST, TOOL_CALL_PARSERS, CallReader
from model.serve.openai.messages import FunctionDefinition

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_parser(folder: Path, given: str | None) -> str | None:
    """The name of the form in which a folder's model writes calls: what is given, or what its template shows."""
    if given is not None:
        return given
    try:
        text = ChatTemplate(folder).source_with_tools
    except ModelError:  # said to whoever asks for a chat
        return None
    if "<tool_call>" in text and "<function=" not in text:
        return "hermes"
    return "llama3_json" if '"parameters": dictionary of argument name' in text else None


@dataclass(frozen=True)
class ToolUse:
    """The functions that an answer may call, or must (`held`): exactly one of them where not `several`."""

    functions: Sequence[FunctionDefinition]
    held: bool
    several: bool

    def form(self) -> StructuredOutputsParams | None:
        """The grammar of required calls, which any model can write: `[{"name": …, "arguments": …}, …]`.

        Each function has a schema of its own there, so that references within it stay its own.
        """
        if not self.held:
            return None
        lines = [
            'start: "[" call ("," call)* "]"' if self.several else 'start: "[" call "]"',
            f"call: {' | '.join(f'call_{number}' for number in range(len(self.functions)))}",
        ]
        for number, each in enumerate(self.functions):
            head = json.dumps(f'{{"name":"{each.name}","arguments":')
            schema = _NO_PARAMETERS if each.parameters is None else each.parameters
            whole = {"x-guidance": {"whitespace_flexible": False}} | schema
            lines.append(
                f'call_{number}: {head} args_{number} "}}"\nargs_{number}: %json {json.dumps(whole)}'
            )
        return StructuredOutputsParams(grammar="\n".join(lines))

    def reader(self, parser: str | None) -> CallReader:
        """What reads the calls of one answer; required ones are a list whatever the parser."""
        form = CALL_LIST if self.held or parser is None else TOOL_CALL_PARSERS[parser]
        return CallReader(form, {each.name for each in self.functions}, self.several)
