"""What vLLM's examples of offline inference do, with the import changed."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from model import LLM, EngineArgs, RequestOutput, SamplingParams, StructuredOutputsParams
from model.loading.shipped import PRETRAINED
from tests.model.folders import write_folder

PROMPTS = ["Hello, my name is", "Once upon a time", "The park is", "The sun"]
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 32}
CHAT = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What shall it be about?"},
    {"role": "user", "content": "A dog."},
]


@cache
def llm() -> LLM:
    return LLM(model=PRETRAINED, **SMALL)


def texts(outputs: list[RequestOutput]) -> list[str]:
    """Return the text of each request's first continuation."""
    return [output.outputs[0].text for output in outputs]


@pytest.mark.slow
def test_prompts_are_continued() -> None:
    outputs = llm().generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        (completion,) = output.outputs
        assert (
            completion.finish_reason == "length"
            if len(completion.token_ids) == 16
            else completion.finish_reason == "stop"
        )
        assert llm().get_tokenizer().decode(completion.token_ids) == completion.text


@pytest.mark.slow
def test_defaults_are_those_of_the_folder(tmp_path: Path) -> None:
    assert llm().get_default_sampling_params() == SamplingParams()
    folder = write_folder(tmp_path / "model")
    chosen = {"temperature": 0.6, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(
        json.dumps({**chosen, "do_sample": True, "eos_token_id": 2})
    )
    folder_llm = LLM(folder, max_model_len=32, num_pages=8)
    wanted = SamplingParams(temperature=0.6, top_k=3, top_p=0.9, repetition_penalty=1.1, max_tokens=5)
    assert folder_llm.get_default_sampling_params() == wanted
    (output,) = folder_llm.generate("abc", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 5


@pytest.mark.slow
def test_talks_go_through_the_chat_template() -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    (one,) = llm().chat(CHAT, params, use_tqdm=False)
    several = llm().chat([CHAT] * 3, params, use_tqdm=False)
    assert texts(several) == texts([one]) * 3
    template = (
        "{% for message in messages %}{{ message.role }}{{ separator }}{{ message.content }};{% endfor %}"
    )
    (other,) = llm().chat(
        CHAT[1:2], params, use_tqdm=False, chat_template=template, chat_template_kwargs={"separator": ": "}
    )
    assert other.prompt == "user: Hello;"
    (closed,) = llm().chat(
        CHAT[1:2],
        params,
        use_tqdm=False,
        chat_template="Hi{% if add_generation_prompt %}!{% endif %}{{ tools | length }}",
        add_generation_prompt=False,
        tools=[{"type": "function"}],
    )
    assert closed.prompt == "Hi1"


SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "sampling", "wanted"),
    [
        ({"choice": ["Positive", "Negative"]}, {}, "Positive|Negative"),
        ({"regex": r"\w{1,3}@\w{1,3}\.com\n"}, {"stop": ["\n"], "max_tokens": 50}, r"\w{1,3}@\w{1,3}\.com"),
        ({"grammar": SQL}, {"max_tokens": 50}, "SELECT col_[12]  from table_[12]  where col_[12] = [12] "),
    ],
)
def test_texts_have_the_form_that_was_asked_for(form, sampling, wanted: str) -> None:
    pytest.importorskip("llguidance", reason="llguidance is an extra (serve)")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), seed=2, **sampling)
    (text,) = texts(llm().generate("Classify this:", sampling_params=params, use_tqdm=False))
    assert re.fullmatch(wanted, text)


def test_several_continuations_come_with_log_probabilities() -> None:
    params = SamplingParams(
        n=3, temperature=0.8, top_p=0.95, max_tokens=4, logprobs=2, seed=1, ignore_eos=True
    )
    (output,) = llm().generate(PROMPTS[:1], params, use_tqdm=False)
    assert [output.index for output in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        assert [
            token in candidates for token, candidates in zip(completion.token_ids, completion.logprobs)
        ] == [True] * 4
        chosen = [
            candidates[token].logprob for token, candidates in zip(completion.token_ids, completion.logprobs)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.slow
def test_a_common_beginning_is_read_from_pages_and_changes_no_text() -> None:
    prefix = (
        "Lily and Tom went to the park. They had a big red ball, and the sun was up, and all of their friends were "
        "there to play with them. One day, "
    )
    prompts, params = [prefix + prompt for prompt in PROMPTS], SamplingParams(temperature=0.0)
    regular = LLM(model=PRETRAINED, enable_prefix_caching=False, **SMALL)
    cached = LLM(model=PRETRAINED, enable_prefix_caching=True, **SMALL)
    plain = regular.generate(prompts, params, use_tqdm=False)
    cached.generate(prompts[0], params, use_tqdm=False)
    outputs = cached.generate(prompts, params, use_tqdm=False)
    assert texts(outputs) == texts(plain)
    full = len(llm().get_tokenizer().encode(prefix)) // 16 * 16
    assert [output.num_cached_tokens for output in plain] == [0] * 4
    assert all(output.num_cached_tokens >= full > 0 for output in outputs)
    assert cached.reset_prefix_cache()
    assert cached.generate(prompts[0], params, use_tqdm=False)[0].num_cached_tokens == 0


def test_sixteen_of_seventeen_equal_tokens_are_cached() -> None:
    prompt = {"prompt_token_ids": [101] * 17}
    llm().generate([prompt], use_tqdm=False)
    assert llm().generate([prompt], use_tqdm=False)[0].num_cached_tokens == 16


def test_drafts_of_n_grams_change_no_text() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    drafting = LLM(model=PRETRAINED, tensor_parallel_size=1, speculative_config=config, **SMALL)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=4)
    prompts = ["The dog ran and ran and ran and the dog ran and", *PROMPTS[:2]]
    assert texts(drafting.generate(prompts, params, use_tqdm=False)) == texts(
        llm().generate(prompts, params, use_tqdm=False)
    )
    assert drafting.engine.acceptance.verified[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_change_no_token(ranks: int) -> None:
    """Of five ranks one has none of the four heads."""
    params = [SamplingParams(temperature=0, max_tokens=8), SamplingParams(seed=7, max_tokens=8, n=2)] * 2
    cut = LLM(model=PRETRAINED, tensor_parallel_size=ranks, **SMALL)
    cut_outputs, local_outputs = (model.generate(PROMPTS, params, use_tqdm=False) for model in (cut, llm()))
    for one, other in zip(cut_outputs, local_outputs):
        assert [output.token_ids for output in one.outputs] == [output.token_ids for output in other.outputs]


SHORT, LONG = [1.0, 1.1, 1.25, 1.5], [1.5, 2.0, 3.0, 4.0]


def longrope(folder: Path, short: list[float], long: list[float]) -> Path:
    """Return a model whose sequences of up to 16 tokens take the short factors."""
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": 4.0}
    return write_folder(folder, rope_scaling={**scaling, "original_max_position_embeddings": 16})


@pytest.mark.slow
@pytest.mark.parametrize(("length", "factors"), [(15, SHORT), (16, SHORT), (17, LONG), (64, LONG)])
def test_max_model_len_chooses_the_factors_of_longrope(tmp_path: Path, length: int, factors) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    folders = (
        longrope(tmp_path / "both", SHORT, LONG),
        longrope(tmp_path / "same", factors, factors),
        longrope(tmp_path / "swapped", LONG, SHORT),
    )
    both, same, swapped = (
        LLM(**vars(EngineArgs(folder, max_model_len=length, num_pages=8)))
        .generate("abcdef", params, use_tqdm=False)[0]
        .outputs[0]
        for folder in folders
    )
    assert (both.token_ids, both.logprobs) == (same.token_ids, same.logprobs)
    assert both.logprobs != swapped.logprobs
