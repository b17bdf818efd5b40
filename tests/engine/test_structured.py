"""Texts of a form that was asked for: every text keeps it, whatever the model would have said."""

from __future__ import annotations

import json
import re
import sys

import pytest

from model import LLM, SamplingParams
from model.engine import StructuredOutputsParams
from model.errors import ModelError
from tests.engine.test_llm import PROMPTS, SIZES, llm, speculative_llm

pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def texts(**form) -> list[str]:
    params = SamplingParams(
        temperature=1.0, seed=3, n=2, max_tokens=60, structured_outputs=StructuredOutputsParams(**form)
    )
    (output,) = llm().generate(PROMPTS[0], params, use_tqdm=False)
    assert [output.finish_reason for output in output.outputs] == ["stop", "stop"]
    return [output.text for output in output.outputs]


def test_a_choice_is_one_of_the_texts() -> None:
    assert set(texts(choice=["yes", "no"])) <= {"yes", "no"}


def test_a_regular_expression_is_matched_whole() -> None:
    for text in texts(regex="[0-9]{3}-[a-f]{2,5}!"):
        assert re.fullmatch("[0-9]{3}-[a-f]{2,5}!", text)


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_json_schema_is_kept(schema) -> None:
    for text in texts(json=schema):
        document = json.loads(text)
        assert list(document) == ["name", "age"]
        assert len(document["name"]) <= 8
        assert 0 <= document["age"] <= 99


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" ("b" | "c"){2,4} "."', 'root ::= "a" letter{2,4} "."\nletter ::= "b" | "c"'],
    ids=["Lark", "GBNF"],
)
def test_a_grammar_is_kept(grammar: str) -> None:
    for text in texts(grammar=grammar):
        assert re.fullmatch("a[bc]{2,4}[.]", text)


@pytest.mark.slow
def test_a_form_holds_beside_drafts() -> None:
    speculative = LLM(
        max_num_seqs=4,
        max_model_len=128,
        num_pages=20,
        speculative_config={"num_speculative_tokens": 3, "prompt_lookup_min": 1},
    )
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    (output,) = speculative.generate(PROMPTS[0], params, use_tqdm=False)
    assert output.outputs[0].text == texts(json=SCHEMA)[0]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "given are none"),
        ({"regex": "a", "grammar": "start: /a/"}, r"given are \['regex', 'grammar'\]"),
        ({"choice": [""]}, "texts that are not empty"),
        ({"choice": []}, "choice is empty"),
    ],
)
def test_forms_that_cannot_be_are_refused(form, message) -> None:
    with pytest.raises(ModelError, match=message):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "["},
        {"json": "{"},
        {"json": {"type": "nothing"}},
        {"grammar": "start: x"},
        {"grammar": "root ::= ("},
    ],
)
def test_forms_that_cannot_be_read_are_refused_before_anything_is_computed(form) -> None:
    with pytest.raises(ModelError, match="structured outputs"):
        llm().generate(PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputsParams(**form)))
    assert not llm().engine.busy


def test_a_missing_library_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModelError, match=r"pip install 'nki-workbench\[serve\]'"):
        llm().generate(PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])))


@pytest.mark.slow
def test_drafts_keep_the_form_and_change_no_token() -> None:
    """What is masked behind a draft follows from the draft, and is forgotten where the draft is wrong."""
    speculative = speculative_llm()
    form = StructuredOutputsParams(regex="(the cat and ){6}[0-9]{4}[.]")
    for params in (
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=form),
        SamplingParams(seed=5, max_tokens=60, structured_outputs=form, repetition_penalty=1.1),
    ):
        (wanted,) = llm().generate("the cat and the dog", params, use_tqdm=False)
        (speculated,) = speculative.generate("the cat and the dog", params, use_tqdm=False)
        assert speculated.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert speculated.outputs[0].finish_reason == "stop"
    assert min(speculative.engine.acceptance.rates) > 0.2
    assert speculative.engine.acceptance.rates[0] < 1


@pytest.mark.slow
def test_a_form_at_which_llguidance_gives_up_is_refused() -> None:
    patient = LLM(**SIZES, grammar_cpu_seconds=600)
    for form in ({"grammar": "start: start start"}, {"regex": "(a{1000}){1000}"}):
        params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(**form))
        with pytest.raises(ModelError, match=r"^structured outputs: the form cannot be kept: "):
            patient.generate(PROMPTS[0], params, use_tqdm=False)
    assert texts(regex="a{3}") == ["aaa", "aaa"]
