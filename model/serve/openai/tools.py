"""Functions that an answer may call: the parser of calls, and the grammar of required ones."""

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


def select_tool_parser(folder: Path, name: str | None) -> str | None:
    """Return the name of the parser for the tool calls of a folder's model.

    Args:
        name: The option --tool-call-parser; None selects the parser by the chat template.

    Returns:
        A name of TOOL_CALL_PARSERS, or None if the chat template is missing or teaches no known format.
    """
    if name is not None:
        return name
    try:
        text = ChatTemplate(folder).source_with_tools
    except ModelError:  # each request for a chat gets this error
        return None
    if "<tool_call>" in text and "<function=" not in text:
        return "hermes"
    return "llama3_json" if '"parameters": dictionary of argument name' in text else None


@dataclass(frozen=True)
class ToolUse:
    """Functions that an answer may call, or has to if `is_required`; several calls are allowed if `is_parallel`."""

    functions: Sequence[FunctionDefinition]
    is_required: bool
    is_parallel: bool

    def build_structured_outputs(self) -> StructuredOutputsParams | None:
        """Return the grammar of required calls, `[{"name": …, "arguments": …}, …]`, which any model can write.

        Every function has its own schema in the grammar, so that references resolve within the schema. Calls that are
        not required have no grammar.
        """
        if not self.is_required:
            return None
        lines = [
            'start: "[" call ("," call)* "]"' if self.is_parallel else 'start: "[" call "]"',
            f"call: {' | '.join(f'call_{number}' for number in range(len(self.functions)))}",
        ]
        for number, function in enumerate(self.functions):
            head = json.dumps(f'{{"name":"{function.name}","arguments":')
            parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
            schema = json.dumps({"x-guidance": {"whitespace_flexible": False}} | parameters)
            lines.append(f'call_{number}: {head} args_{number} "}}"\nargs_{number}: %json {schema}')
        return StructuredOutputsParams(grammar="\n".join(lines))

    def make_reader(self, parser: str | None) -> CallReader:
        """Return a reader of the calls of one answer; required calls are a list, whatever the parser."""
        call_format = CALL_LIST if self.is_required or parser is None else TOOL_CALL_PARSERS[parser]
        return CallReader(call_format, {function.name for function in self.functions}, self.is_parallel)
