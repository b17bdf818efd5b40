"""Chat templates: Jinja2 programs that turn the messages of a conversation into the text of a prompt.

A folder has its template in `chat_template.jinja`, or in `chat_template` of tokenizer_config.json: a text, or a list of
named templates. In a list, `tool_use` serves conversations with tools if it exists, and `default` all others.
A template is untrusted code. It runs in Jinja2's immutable sandbox, and in a forked process with limits, because a loop
may never end and a product may take all memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.config.fields import Fields
from model.errors import ModelError, read_text_file
from nkw.process import Limits, run_in_fork

Message = Mapping[str, Any]
"""Message of a conversation: `role` (system, user, assistant, tool), `content`, and more fields for the template."""

_FILE, _CONFIG, _FIELD = "chat_template.jinja", "tokenizer_config.json", "chat_template"
_CODE = "NKW-MODEL-CHAT"
_LIMITS = Limits(cpu_seconds=5, memory_bytes=2**29)
"""Limits of a rendering; published templates render a conversation in milliseconds."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_CHARACTERS = 2**22
"""Most characters of a rendered prompt; the longest contexts have fewer."""
_DONE, _FAILED = b"+", b"-"


class ChatTemplate:
    """Chat template with the special tokens of a model folder."""

    def __init__(self, folder: Path | str, source: str | None = None, isolated: bool = True) -> None:
        """Read a chat template, and the special tokens of the folder's tokenizer_config.json.

        Args:
            folder: the model folder.
            source: the text of the template; None reads the folder's template.
            isolated: render in a forked process with limits. A job process that has limits needs none.

        Raises:
            ModelError: the folder has no template, or it cannot be read.
        """
        self._isolated = isolated
        folder = Path(folder)
        fields = Fields(folder / _CONFIG, optional=True)
        self._path, self._source, self.source_with_tools = (
            _read_sources(folder, fields) if source is None else (folder, source, source)
        )
        tokens = {name: _read_token(fields, name) for name in _TOKENS}
        self._tokens = {name: text for name, text in tokens.items() if text is not None}

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return the text of the prompt for a conversation, by default with the start of the assistant's answer.

        The template for tools is rendered if the variable `tools` is set and not empty.

        Args:
            messages: the messages, in order.
            variables: further variables of the template, such as `tools`; `add_generation_prompt=False` leaves out the
                start of the answer.

        Raises:
            ModelError: the template is not Jinja2, refuses the messages, leaves the sandbox, fails, or takes more than
                5 seconds or 512 MiB.
        """
        context = {"add_generation_prompt": True, "tools": None, "documents": None} | variables
        context |= {"messages": [dict(message) for message in messages], **self._tokens}
        source = self.source_with_tools if context["tools"] else self._source
        if self._isolated:
            reply = run_in_fork(lambda: _render(source, context), _LIMITS, 4 * _MOST_CHARACTERS + len(_DONE))
        else:
            reply = _render(source, context)
        if not reply:
            raise self._error(
                f"does not end within {_LIMITS.cpu_seconds} seconds and {_LIMITS.memory_bytes >> 20} MiB; use a "
                "simpler one, or a shorter conversation"
            )
        text = reply[1:].decode(errors="surrogatepass")
        if not reply.startswith(_DONE):
            raise self._error(text)
        return text

    def _error(self, problem: str) -> ModelError:
        """Return, without raising it, the error "<file>: the chat template <problem>" with the code for templates."""
        return ModelError(f"{self._path}: the chat template {problem}", _CODE)


def describe_tokenizer(folder: Path) -> dict[str, str | None]:
    """Return `tokenizer_class`, four special tokens and the `chat_template` of a folder; None for what it lacks.

    The special tokens are `bos_token`, `eos_token`, `unk_token` and `pad_token`. A chat template that cannot be read is
    None too.

    Raises:
        ModelError: tokenizer_config.json cannot be read, or one of its special tokens is not a text.
    """
    fields = Fields(folder / _CONFIG, optional=True)
    try:
        template: str | None = _read_sources(folder, fields)[1]
    except ModelError:
        template = None
    tokens = {
        name: _read_token(fields, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    tokenizer_class = fields.get("tokenizer_class", None)
    return {
        "tokenizer_class": tokenizer_class if isinstance(tokenizer_class, str) else None,
        **tokens,
        "chat_template": template,
    }


def _render(source: str, context: Mapping[str, Any]) -> bytes:
    """Return `_DONE` and the rendered prompt, or `_FAILED` and the end of a sentence about the template, as UTF-8.

    No exception leaves the function. A prompt of more than `_MOST_CHARACTERS` is a failure.
    """
    status = _FAILED
    try:
        text = _create_environment().from_string(source).render(context)
        if len(text) > _MOST_CHARACTERS:
            text = f"makes a prompt of {len(text):,} characters; at most {_MOST_CHARACTERS:,} are allowed"
        else:
            status = _DONE
    except jinja2.exceptions.SecurityError as error:
        text = f"asks for what the sandbox forbids: {_get_first_line(error)}"
    except jinja2.UndefinedError as error:
        text = f"reads what the messages have not: {_get_first_line(error)}"
    except _Refusal as error:
        text = f"refuses the messages: {_get_first_line(error)}"
    except jinja2.TemplateSyntaxError as error:
        text = f"is no Jinja2 template: {_get_first_line(error)}"
    except Exception as error:  # a template may raise any exception of Python
        text = f"fails: {type(error).__name__}: {_get_first_line(error)}".rstrip(": ")
    return status + text.encode(errors="surrogatepass")


class _Refusal(jinja2.TemplateError):
    """Error that a template raises by `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """Tags `{% generation %}` … `{% endgeneration %}`, which mark the assistant's text for training; no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Read the tags and the template between them from `parser`; return the statements between them unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _create_environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox with the extensions, filters and functions that transformers has for templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _format_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _format_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **form: Any) -> str:
    """Return `value` as JSON, for templates' filter `tojson`: without the HTML escapes that Jinja2's own adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)


def _refuse(message: str) -> NoReturn:
    """Raise _Refusal with `message`: the function `raise_exception` of templates, which refuses the conversation."""
    raise _Refusal(message)


def _read_sources(folder: Path, fields: Fields) -> tuple[Path, str, str]:
    """Return (file with the template, template, template for conversations with tools) of a folder.

    `fields` are those of tokenizer_config.json, read if chat_template.jinja is absent. Both templates are equal unless
    the folder has one named `tool_use`.

    Raises:
        ModelError: the folder has no template or no one named `default`, or a template is not text.
    """
    path = folder / _FILE
    if os.path.lexists(path):
        text = read_text_file(path, _CODE)
        return path, text, text
    template = tool_template = fields.get(_FIELD, None)
    if isinstance(template, list):
        templates: dict[str, Any] = {}
        for entry in template:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise fields.error(
                    _FIELD, f"{entry!r:.60} is not a template with a name; write the texts name and template"
                )
            templates[entry["name"]] = entry.get("template")
        template = templates.get("default")
        tool_template = templates.get("tool_use", template)
        if template is None:
            raise fields.error(_FIELD, "none of the templates is called default; add one with this name")
    if template is None:
        raise ModelError(
            f"{folder} has no chat template: neither {_FILE} nor {_FIELD} in {_CONFIG}; add one of them",
            _CODE,
        )
    for source in (template, tool_template):
        if not isinstance(source, str):
            raise fields.error(_FIELD, f"{source!r:.60} is not a template; write it as a text")
    return folder / _CONFIG, template, tool_template


def _read_token(fields: Fields, name: str) -> str | None:
    """Return the text of the special token in the field `name`; None if the field is absent or null.

    The field is a text, or an object with the text as `content`.

    Raises:
        ModelError: The field is something else.
    """
    token = fields.get(name, None)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise fields.error(
            name, f"{token!r:.60} is not a token: neither a text nor an object with the text as content"
        )
    return text


def _get_first_line(error: BaseException) -> str:
    """Return the first 200 characters of the first line of an error's message; "" for an empty message."""
    return next(iter(str(error).splitlines()), "")[:200]
