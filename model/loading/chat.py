"""Chat templates: the messages of a conversation become the text of a prompt, by Jinja2 in its sandbox.

A folder holds its template as `chat_template.jinja`, or as `chat_template` of tokenizer_config.json: a text, or a list
of named ones, of which `tool_use` is taken for conversations with tools, where it is there, and `default` otherwise.
A template is a program of strangers. It runs in Jinja2's immutable sandbox, and in a copy of this process with limits,
because a loop may never end and a product may take all memory.
"""

from __future__ import annotations

import json
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
from model.errors import ModelError
from nkw.files import read_text
from nkw.process import Limits, answer

Message = Mapping[str, Any]
"""One message: `role` (system, user, assistant, tool) and `content`, and what else the template reads."""

_FILE, _CONFIG, _FIELD = "chat_template.jinja", "tokenizer_config.json", "chat_template"
_LIMITS = Limits(cpu_seconds=5, memory_bytes=2**29)
"""Published templates render a conversation in milliseconds."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_CHARACTERS = 2**22
"""Of a rendered prompt; the longest contexts take fewer."""
_DONE, _FAILED = b"+", b"-"


class ChatTemplate:
    """The chat template of a model folder, or another `source` with the folder's special tokens."""

    def __init__(self, folder: Path | str, source: str | None = None, isolated: bool = True) -> None:
        """Read the template; ModelError where there is none.

        It is rendered in a forked process with limits, where `isolated`. A job process that has limits already renders
        it itself.
        """
        self._isolated = isolated
        folder = Path(folder)
        fields = Fields(folder / _CONFIG, optional=True)
        self._path, self._source, self._of_tools = (
            _sources(folder, fields) if source is None else (folder, source, source)
        )
        self._tokens = {name: text for name in _TOKENS if (text := _token(fields, name)) is not None}

    @property
    def text_with_tools(self) -> str:
        """The template, as text, of a conversation with tools."""
        return self._of_tools

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """The text of a conversation, with the start of the assistant's answer.

        `variables` are further names that the template reads. Raises ModelError for what is no Jinja2, for what the
        template refuses, what the sandbox forbids, and a template that takes more than 5 seconds or 512 MiB.
        """
        given = {"add_generation_prompt": True, "tools": None, "documents": None} | variables
        given |= {"messages": [dict(each) for each in messages], **self._tokens}
        source = self._of_tools if given["tools"] else self._source
        if self._isolated:
            said = answer(lambda: _rendered(source, given), _LIMITS, 4 * _MOST_CHARACTERS + len(_DONE))
        else:
            said = _rendered(source, given)
        if not said:
            raise self._error(
                f"does not end within {_LIMITS.cpu_seconds} seconds and {_LIMITS.memory_bytes >> 20} MiB"
            )
        done, text = said[:1], said[1:].decode(errors="surrogatepass")
        if done != _DONE:
            raise self._error(text)
        return text

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: the chat template {what}", "NKW-MODEL-CHAT")


def _rendered(source: str, given: Mapping[str, Any]) -> bytes:
    """The text after `_DONE`, or after `_FAILED` what is wrong with the template."""
    try:
        text = _environment().from_string(source).render(given)
        wrong = ""
        if len(text) > _MOST_CHARACTERS:
            wrong = f"makes a prompt of {len(text):,} characters; at most {_MOST_CHARACTERS:,}"
    except jinja2.exceptions.SecurityError as error:
        wrong = f"asks for what the sandbox forbids: {_first_line(error)}"
    except jinja2.UndefinedError as error:
        wrong = f"reads what the messages have not: {_first_line(error)}"
    except _Refusal as error:
        wrong = f"refuses the messages: {_first_line(error)}"
    except jinja2.TemplateSyntaxError as error:
        wrong = f"is no Jinja2 template: {_first_line(error)}"
    except Exception as error:  # a template computes, so whatever Python raises may come out of it
        wrong = f"fails: {type(error).__name__}: {_first_line(error)}".rstrip(": ")
    return (
        _FAILED + wrong.encode(errors="surrogatepass")
        if wrong
        else _DONE + text.encode(errors="surrogatepass")
    )


class _Refusal(jinja2.TemplateError):
    """What a template raises by `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: marks what the assistant says, for training; here its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The names that transformers gives its templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _as_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **form: Any) -> str:
    """Without the escapes for HTML that Jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _sources(folder: Path, fields: Fields) -> tuple[Path, str, str]:
    """The file that holds the template, its text, and the text for conversations with tools."""
    path = folder / _FILE
    try:
        text = read_text(path)
        return path, text, text
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", "NKW-MODEL-CHAT") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text: {error}", "NKW-MODEL-CHAT") from None
    found = of_tools = fields.get(_FIELD, None)
    if isinstance(found, list):
        named: dict[str, Any] = {}
        for entry in found:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise fields.error(_FIELD, f"{entry!r:.60} is not a template with a name")
            named[entry["name"]] = entry.get("template")
        found = named.get("default")
        of_tools = named.get("tool_use", found)
        if found is None:
            raise fields.error(_FIELD, "none of the templates is called default")
    if found is None:
        raise ModelError(
            f"{folder} has no chat template: neither {_FILE} nor {_FIELD} in {_CONFIG}", "NKW-MODEL-CHAT"
        )
    for each in (found, of_tools):
        if not isinstance(each, str):
            raise fields.error(_FIELD, f"{each!r:.60} is not a template")
    return folder / _CONFIG, found, of_tools


def _token(fields: Fields, name: str) -> str | None:
    """A special token's text, which stands alone or with its properties."""
    found = fields.get(name, None)
    text = found.get("content") if isinstance(found, dict) else found
    if text is not None and not isinstance(text, str):
        raise fields.error(name, f"{found!r:.60} is not a token")
    return text


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0][:200]
