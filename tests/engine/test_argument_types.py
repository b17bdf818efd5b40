"""`SamplingParams` and `LLM` refuse a value of a wrong type in one sentence; several threads may call `LLM`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from model import LLM, SamplingParams
from model.engine.structured import StructuredOutputsParams
from model.errors import ModelError

HUGE = 10**5000
"""More digits than Python prints."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0; it must be a whole number"),
        ({"max_tokens": "2"}, "max_tokens is '2'; it must be a whole number"),
        ({"n": "2"}, "n is '2'; it must be a whole number"),
        ({"n": None}, "n is None; it must be a whole number"),
        ({"n": HUGE}, "n is an integer of 16610 bits; it must be between 1 and 128"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"seed": -2}, "seed is -2; it must be between 0 and 9.22337e+18"),
        ({"seed": HUGE}, "seed is an integer of 16610 bits; it must be between 0 and 9.22337e+18"),
        ({"top_k": 3.0}, "top_k is 3.0; it must be a whole number"),
        ({"min_tokens": None}, "min_tokens is None; it must be a whole number"),
        ({"logprobs": "all"}, "logprobs is 'all'; it must be a whole number"),
        ({"temperature": None}, "temperature is None; it must be a number"),
        ({"temperature": "0.5"}, "temperature is '0.5'; it must be a number"),
        ({"temperature": 1j}, "temperature is 1j; it must be a number"),
        ({"temperature": HUGE}, "temperature is an integer of 16610 bits; it must be between 0 and 1e+06"),
        ({"top_p": [0.9]}, "top_p is [0.9]; it must be a number"),
        ({"presence_penalty": {}}, "presence_penalty is {}; it must be a number"),
        ({"stop": 5}, "stop is 5; it must be a text or a list of texts"),
        ({"stop": b"end"}, "stop is b'end'; it must be a text or a list of texts"),
        ({"stop": ["a", 5]}, "stop is ['a', 5]; it must be a text or a list of texts"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}; it must be a text or a list of texts"),
        ({"stop": iter(["a", ""])}, "a stop string is empty; every text begins with it: leave it out"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids is b'ab'; it must be a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'; it must be a list of token ids"),
        ({"stop_token_ids": [1, 2.0]}, "an element of stop_token_ids is 2.0; it must be a whole number"),
        ({"allowed_token_ids": {5: 1}}, "allowed_token_ids is {5: 1}; it must be a list of token ids"),
        (
            {"allowed_token_ids": iter(())},
            "allowed_token_ids is empty; no token could be chosen: leave it out to allow all tokens",
        ),
        ({"logit_bias": [1]}, "logit_bias is [1]; it must map token ids to numbers"),
        ({"logit_bias": {"a": 1}}, "a token id of logit_bias is 'a'; it must be a whole number"),
        ({"logit_bias": {1: "2"}}, "logit_bias of token 1 is '2'; it must be a number"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes'; it must be True or False"),
        ({"ignore_eos": 2}, "ignore_eos is 2; it must be True or False"),
        (
            {"include_stop_str_in_output": None},
            "include_stop_str_in_output is None; it must be True or False",
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs is {'regex': 'a'}; it must be StructuredOutputsParams",
        ),
    ],
)
def test_a_parameter_of_a_wrong_type_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        SamplingParams(**values)
    assert refused.value.message == message


def test_what_vllm_accepts_is_accepted() -> None:
    """Accept, as vLLM does, booleans for numbers, -1 for no seed, NumPy's scalars, and repeated token ids as one."""
    params = SamplingParams(
        n=np.int64(2),
        seed=-1,
        logprobs=True,
        temperature=np.float32(0.5),
        top_p=1,
        max_tokens=None,
        stop=(text for text in ("a", "b")),
        stop_token_ids=np.array([7, 7, 8]),
        allowed_token_ids=(token for token in (3, 4)),
        logit_bias={np.int32(3): np.float64(0.5)},
        ignore_eos=np.True_,
        structured_outputs=StructuredOutputsParams(regex="a"),
    )
    assert (params.n, params.seed, params.logprobs, params.temperature) == (2, None, 1, 0.5)
    assert (params.stops, params.stop_token_ids, params.allowed_token_ids) == (("a", "b"), (7, 8), (3, 4))
    assert (params.logit_bias, params.ignore_eos) == ({3: 0.5}, True)
    assert type(params.n) is int and type(params.temperature) is float
    assert SamplingParams(stop="a").stops == ("a",)
    assert SamplingParams(stop=[]).stops == SamplingParams(stop=None).stops == ()


def test_changes_of_a_list_after_construction_change_no_parameter() -> None:
    allowed, bias = [3], {3: 1.0}
    params = SamplingParams(allowed_token_ids=allowed, logit_bias=bias)
    allowed.append(4)
    bias[4] = 2.0
    assert (params.allowed_token_ids, params.logit_bias) == ((3,), {3: 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 5}, "model is 5; it must be a text or a Path"),
        ({"max_model_len": 64.0}, "max_model_len is 64.0; it must be a whole number"),
        ({"max_num_seqs": "4"}, "max_num_seqs is '4'; it must be a whole number"),
        ({"tensor_parallel_size": None}, "tensor_parallel_size is None; it must be a whole number"),
        ({"num_pages": [1]}, "num_pages is [1]; it must be a whole number"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no'; it must be True or False"),
        ({"seed": -1}, "seed is -1; it must be between 0 and 9.22337e+18"),
        ({"dtype": np.float32}, "dtype is <class 'numpy.float32'>; it must be a text"),
        ({"speculative_config": "ngram"}, "speculative_config is 'ngram'; it must be a mapping of names"),
        (
            {"speculative_config": {"num_speculative_tokens": 2.0}},
            "num_speculative_tokens is 2.0; it must be a whole number",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 2, "prompt_lookup_max": "3"}},
            "prompt_lookup_max is '3'; it must be a whole number",
        ),
        ({"buckets": 16}, "buckets is 16; it must be a text or Buckets"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as refused:
        LLM(**arguments)
    assert refused.value.message == message


@cache
def llm() -> LLM:
    return LLM(max_num_seqs=np.int64(4), max_num_batched_tokens=64, max_model_len=64)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "the prompt is None; it must be a list of token ids, or of prompts"),
        (5, "the prompt is 5; it must be a list of token ids, or of prompts"),
        (b"abc", "the prompt is b'abc'; it must be a list of token ids, or of prompts"),
        ([b"abc"], "the prompt is b'abc'; it must be a list of token ids"),
        ([bytearray(b"abc")], "the prompt is bytearray(b'abc'); it must be a list of token ids"),
        ([5, 6.5], "an element of the prompt is 6.5; it must be a whole number"),
        ([[5, "a"]], "an element of the prompt is 'a'; it must be a whole number"),
        (np.array([1.5, 2]), "the prompt is 1.5; it must be a list of token ids"),
        ([5, HUGE], "the prompt has token id an integer of 16610 bits; the vocabulary has 4096 tokens"),
        ({"prompt": b"abc"}, "the prompt is b'abc'; it must be a text"),
        ({"prompt_token_ids": b"abc"}, "prompt_token_ids is b'abc'; it must be a list of token ids"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt is 5; it must be a text"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(ModelError) as refused:
        llm().generate(prompts, use_tqdm=False)
    assert refused.value.message == message
    assert not llm().engine.busy


@pytest.mark.parametrize(
    ("params", "priority", "message"),
    [
        ({"n": 1}, None, "sampling_params is {'n': 1}; it must be a list of SamplingParams"),
        ([{"n": 1}], None, "sampling_params has {'n': 1}; it must have SamplingParams"),
        (5, None, "sampling_params is 5; it must be a list of SamplingParams"),
        (None, 3, "priority is 3; it must be a list of numbers"),
        (None, ["1"], "a priority is '1'; it must be a whole number"),
        (None, [1, 2], "2 priorities for 1 prompts; give one for each prompt"),
    ],
)
def test_parameters_and_priorities_of_a_wrong_type_are_refused(
    params: Any, priority: Any, message: str
) -> None:
    with pytest.raises(ModelError) as refused:
        llm().generate("Lily", params, priority=priority, use_tqdm=False)
    assert refused.value.message == message


def test_messages_of_a_wrong_type_are_refused() -> None:
    for messages in ("hello", [5], ["hello"], [[5]], b"hello", None):
        with pytest.raises(ModelError, match="must be a"):
            llm().chat(messages, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.slow
def test_prompts_are_arrays_and_generators_too() -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    ids = llm().get_tokenizer().encode("Lily")
    wanted = llm().generate("Lily", params, use_tqdm=False)[0].outputs[0].token_ids
    prompts: list[Any] = [np.array(ids), [np.int64(token) for token in ids], {"prompt_token_ids": tuple(ids)}]
    prompts += [np.array([ids]), (text for text in ["Lily"])]
    for prompt in prompts:
        assert llm().generate(prompt, [params], use_tqdm=False)[0].outputs[0].token_ids == wanted


@pytest.mark.slow
def test_threads_that_call_at_once_get_what_calls_one_after_the_other_get() -> None:
    prompts = [f"{name} was" for name in ("Lily", "Tom", "Anna", "Ben", "The cat", "The dog")]
    params = [SamplingParams(temperature=0.9, seed=number, max_tokens=4) for number in range(len(prompts))]

    def answer(number: int) -> list[int]:
        (output,) = llm().generate(prompts[number], params[number], use_tqdm=False)
        return output.outputs[0].token_ids

    wanted, together = [answer(number) for number in range(len(prompts))], Barrier(len(prompts))

    def answer_together(number: int) -> list[int]:
        together.wait()
        return answer(number)

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(answer_together, range(len(prompts)))) == wanted
    assert llm().engine.scheduler.cache.free == llm().engine.scheduler.cache.count
