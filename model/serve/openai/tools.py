"""Functions that an answer may call: the parser of calls, and the grammars that force or allow calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.engine.structured import StructuredOutputsParams
from model.errors import ModelError
from model.loading.chat import ChatTemplate
from model.serve.errors import ApiError
from model.serve.openai.calls import CALL_LIST, TOOL_CALL_PARSERS, CallReader
from model.serve.openai.messages import FunctionDefinition
from model.workers.grammar import close_objects

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_BLANKS = r"BLANKS: /[ \t\n]{0,4}/"
"""Terminal of Lark for the blanks that models write between the parts of a call."""


def select_tool_parser(folder: Path, name: str | None) -> str | None:
    """Return the name of the parser for the tool calls of a folder's model.

    Args:
        folder: The model's folder.
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
    """Functions that an answer may call, or must call if `is_required`.

    If `is_parallel` is False, an answer makes at most one call.
    """

    functions: Sequence[FunctionDefinition]
    is_required: bool
    is_parallel: bool

    def build_structured_outputs(
        self, answer: StructuredOutputsParams | None, parser: str | None
    ) -> StructuredOutputsParams | None:
        """Return the form of an answer that may or must call functions; None for any text.

        Required calls have the grammar `[{"name": …, "arguments": …}, …]`, which any model can write; they replace the
        form of an answer, as in vLLM. If calls are not required, the answer is either in its form or consists of calls.

        Args:
            answer: The form of an answer without calls, or None for any text.
            parser: The parser of calls that are not required; None if none are read, which leaves `answer` as it is.

        Raises:
            ApiError: Calls are not required, and the form of the answer is neither a JSON schema nor a list of choices.
        """
        if self.is_required:
            calls = '"[" call ("," call)* "]"' if self.is_parallel else '"[" call "]"'
            return StructuredOutputsParams(
                grammar="\n".join([f"start: {calls}", *self._format_required_calls()])
            )
        if answer is None or parser is None:
            return answer
        lines = [
            f"start: answer | calls\nanswer: {_format_answer(answer)}",
            *self._format_calls(parser),
            _BLANKS,
        ]
        return StructuredOutputsParams(grammar="\n".join(lines))

    def _format_required_calls(self) -> list[str]:
        """Return the lines of a Lark grammar for the rule `call`, a JSON object without blanks.

        Every function has its own schema in the grammar, so that references resolve within the schema.
        """
        lines = [f"call: {' | '.join(f'call_{number}' for number in range(len(self.functions)))}"]
        for number, function in enumerate(self.functions):
            head = json.dumps(f'{{"name":"{function.name}","arguments":')
            schema = _format_parameters(function, {"whitespace_flexible": False})
            lines.append(f'call_{number}: {head} args_{number} "}}"\nargs_{number}: %json {schema}')
        return lines

    def _format_calls(self, parser: str) -> list[str]:
        """Return the lines of a Lark grammar for the rule `calls`, with the blanks that models write.

        Args:
            parser: A name of TOOL_CALL_PARSERS; the calls are in the format that this parser reads.
        """
        call_format = TOOL_CALL_PARSERS[parser]
        if call_format.opens:
            call = f'"{call_format.opens}" BLANKS object BLANKS "{call_format.closes}"'
            lines = [f"calls: {call}{f' (BLANKS {call})*' if self.is_parallel else ''}"]
        else:
            lines = [f"calls: object{' (BLANKS /[,;]/ BLANKS object)*' if self.is_parallel else ''}"]
        lines.append(f"object: {' | '.join(f'call_{number}' for number in range(len(self.functions)))}")
        for number, function in enumerate(self.functions):
            tokens = ("{", '"name"', ":", f'"{function.name}"', ",")
            head = " BLANKS ".join(map(json.dumps, tokens))
            schema = _format_parameters(function, {"whitespace_flexible": True})
            lines.append(
                f"call_{number}: {head} BLANKS ({json.dumps(json.dumps('arguments'))} | "
                f'{json.dumps(json.dumps("parameters"))}) BLANKS ":" BLANKS args_{number} BLANKS "}}"\n'
                f"args_{number}: %json {schema}"
            )
        return lines

    def make_reader(self, parser: str | None) -> CallReader:
        """Return a new reader of the calls in one answer; required calls are read as a list, whatever the parser."""
        call_format = CALL_LIST if self.is_required or parser is None else TOOL_CALL_PARSERS[parser]
        return CallReader(call_format, {function.name for function in self.functions}, self.is_parallel)


def _format_parameters(function: FunctionDefinition, options: dict[str, bool]) -> str:
    """Return the JSON schema of a function's arguments as JSON; without `parameters` it takes no arguments.

    Args:
        function: The function.
        options: Options of llguidance for blanks.
    """
    parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
    return json.dumps({"x-guidance": options} | close_objects(json.loads(json.dumps(parameters))))


def _format_answer(answer: StructuredOutputsParams) -> str:
    """Return the form of an answer as the right side of a Lark rule.

    Raises:
        ApiError: The form is a regular expression or a grammar, or its schema is not a JSON object.
    """
    ((name, form),) = answer.form.items()
    if name == "choice":
        return " | ".join(map(json.dumps, form))
    if name not in ("json", "json_object"):
        raise ApiError(
            400,
            f"tools exclude structured_outputs.{name}: leave out tools, or give json or choice",
            param="structured_outputs",
        )
    schema = {"type": "object"} if name == "json_object" else form
    try:
        schema = close_objects(
            json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema))
        )
    except ValueError as error:
        raise ApiError(
            400,
            f"structured_outputs.json is no JSON: {error}; give a JSON schema",
            param="structured_outputs",
        ) from None
    if not isinstance(schema, dict):
        raise ApiError(
            400,
            "structured_outputs.json is no JSON object: give a JSON schema as an object",
            param="structured_outputs",
        )
    options = {"x-guidance": {"whitespace_flexible": False}}
    return f"%json {json.dumps(options | schema)}"
