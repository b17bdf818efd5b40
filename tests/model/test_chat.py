"""Chat templates: equal to transformers, harmless, bounded, and refused in one sentence each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.errors import ModelError
from model.loading.chat import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
    "        {{ raise_exception('roles must alternate\nuser, assistant') }}\n"
    "    {% endif %}\n"
    "    {%- if message.role == 'user' -%} [INST] {{ message.content }} [/INST]\n"
    "    {%- else %} {% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}"
)
TOOLS = (
    "{% set ns = namespace(count=0) %}{% for each in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{{ each | tojson }}{{ {'ü': '<'} | tojson(indent=2) }}{% endfor %}"
    "{{ ns.count }}{% if tools is none %}no tools{% endif %}"
)
TALK = [
    {"role": "user", "content": "  Grüße & <b>\n"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "More"},
]
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def folder_with(folder: Path, template: Any, **fields: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, "chat_template": template, **fields}))
    return folder


def refusal(folder: Path, template: str) -> str:
    with pytest.raises(ModelError) as caught:
        ChatTemplate(folder_with(folder, template)).render(TALK)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder / 'tokenizer_config.json'}: the chat template ")


@pytest.mark.parametrize("template", [CHATML, INST, TOOLS], ids=["chatml", "inst", "tools"])
def test_a_prompt_is_that_of_transformers(tmp_path: Path, template: str) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    compiled = rendering._compile_jinja_template(template)
    expected = compiled.render(
        messages=TALK,
        add_generation_prompt=True,
        tools=None,
        documents=None,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert ChatTemplate(folder_with(tmp_path, template)).render(TALK) == expected


def test_the_file_goes_before_the_field_and_default_before_other_names(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain {{ bos_token }}"},
    ]
    assert ChatTemplate(folder_with(tmp_path, named)).render(TALK) == "plain <s>"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert ChatTemplate(tmp_path).render(TALK) == "file </s>"


def test_a_folder_without_a_template_says_where_one_is_looked_for(tmp_path: Path) -> None:
    for fields in ({}, {"chat_template": None}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        with pytest.raises(
            ModelError, match=r"neither chat_template\.jinja nor chat_template in tokenizer_config\.json"
        ):
            ChatTemplate(tmp_path)
    for wrong, message in (
        (7, "7 is not a template"),
        ([{"name": "x"}], "none of the templates is called default"),
        ([{"name": [], "template": "x"}], "chat_template: .* is not a template with a name"),
        ([{"template": "x"}], "is not a template with a name"),
        (["x"], "'x' is not a template with a name"),
    ):
        with pytest.raises(ModelError, match=message):
            ChatTemplate(folder_with(tmp_path, wrong))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for x in %}", "is no Jinja2 template: Expected an expression, got 'end of statement block'"),
        ("{{ ''.__class__.__mro__ }}", "asks for what the sandbox forbids: access to attribute '__class__'"),
        (
            "{{ cycler.__init__.__globals__ }}",
            "asks for what the sandbox forbids: access to attribute '__init__'",
        ),
        ("{{ messages.append(1) }}", "asks for what the sandbox forbids: "),
        ("{{ messages[0].name.first }}", "reads what the messages have not: "),
        ("{{ raise_exception('no system role\nplease') }}", "refuses the messages: no system role"),
        ("{{ 1 // 0 }}", "fails: ZeroDivisionError: "),
        ("{% include 'x' %}", "fails: TypeError: no loader for this environment specified"),
        ("{{ range(10 ** 9) | list | length }}", "fails: OverflowError: "),
        ("{{ 'x' * 5000000 }}", "makes a prompt of 5,000,000 characters; at most 4,194,304"),
        ("{{ 'x' * 10 ** 10 }}", "fails: MemoryError"),
        ("{{ 'x' | center(10 ** 10) }}", "fails: MemoryError"),
    ],
)
def test_a_hostile_template_is_refused_in_one_sentence(tmp_path: Path, template: str, message: str) -> None:
    assert refusal(tmp_path, template).startswith(message)


@pytest.mark.slow
def test_a_template_that_never_ends_is_stopped(tmp_path: Path) -> None:
    endless = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    assert refusal(tmp_path, endless).startswith("does not end within 5 seconds and 512 MiB; use")
