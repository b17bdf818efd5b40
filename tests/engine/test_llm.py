"""`LLM` on the shipped model: together equals alone, and arguments and results have vLLM's shape."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from model import LLM, SamplingParams
from model.config import ModelConfig
from model.errors import ModelError
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.shipped import PRETRAINED
from model.runners.reference import ReferenceModel
from tests.model.reordering import reordered

PROMPTS = ["Once upon a time", "The sun was", "Tom had a red ball and", "Lily", "Once upon a time there was"]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128, "num_pages": 20}
PROMPT_LOOKUP = {"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@cache
def llm() -> LLM:
    return LLM(**SIZES)


def speculative_llm() -> LLM:
    """Return an LLM with drafts by prompt lookup."""
    return LLM(**SIZES, speculative_config=PROMPT_LOOKUP)


def alone(prompt: str, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of a prompt's continuations without other requests."""
    (output,) = llm().generate(prompt, params, use_tqdm=False)
    return tuple(tuple(output.token_ids) for output in output.outputs)


SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=11, max_tokens=6, n=2)
PENALISED = SamplingParams(
    temperature=0.7,
    min_p=0.02,
    seed=3,
    max_tokens=6,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    logit_bias={400: 2.0},
)


@pytest.mark.slow
def test_requests_together_get_what_each_gets_alone() -> None:
    params = [GREEDY, SAMPLED, PENALISED, GREEDY, SAMPLED]
    outputs = llm().generate(PROMPTS, params, use_tqdm=False)
    for prompt, request_params, output in zip(PROMPTS, params, outputs):
        assert output.prompt == prompt
        assert tuple(tuple(output.token_ids) for output in output.outputs) == alone(prompt, request_params)
    assert llm().engine.scheduler.cache.free == 20
    assert not llm().engine.busy


def test_continuations_of_a_prompt_differ_and_repeat_by_seed() -> None:
    first, second = alone(PROMPTS[0], SAMPLED)
    assert first != second
    assert alone(PROMPTS[0], SAMPLED) == (first, second)


def test_an_equal_prompt_is_read_from_pages() -> None:
    text = "Once upon a time there was a little girl named Lily who had a big red ball and a small blue car."
    cold, warm = (llm().generate(text, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert warm.metrics.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // 16 * 16 > 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.slow
def test_results_say_how_they_ended() -> None:
    (full,) = llm().generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    text = full.outputs[0].text
    assert full.finished
    assert full.outputs[0].finish_reason == "length"
    stop_start = text.index(" little")
    (stopped,) = llm().generate(
        PROMPTS[:1], SamplingParams(temperature=0, max_tokens=20, stop=" little"), use_tqdm=False
    )
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == (
        text[:stop_start],
        "stop",
        " little",
    )
    (kept,) = llm().generate(
        PROMPTS[0],
        SamplingParams(temperature=0, max_tokens=20, stop=[" little"], include_stop_str_in_output=True),
        use_tqdm=False,
    )
    assert kept.outputs[0].text == text[: stop_start + len(" little")]
    token = full.outputs[0].token_ids[3]
    (by_id,) = llm().generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[token]), use_tqdm=False
    )
    assert by_id.outputs[0].stop_reason == token
    assert by_id.outputs[0].token_ids == full.outputs[0].token_ids[:4]


@pytest.mark.slow
def test_min_tokens_put_off_the_end() -> None:
    (full,) = llm().generate(PROMPTS[0], GREEDY, use_tqdm=False)
    first = full.outputs[0].token_ids[0]
    (late,) = llm().generate(
        PROMPTS[0],
        SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[first], min_tokens=3),
        use_tqdm=False,
    )
    assert len(late.outputs[0].token_ids) >= 3
    assert first not in late.outputs[0].token_ids[:3]


def test_log_probabilities_come_with_their_rank_and_text() -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    (output,) = llm().generate(PROMPTS[0], params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert [len(candidates) for candidates in completion.logprobs] == [2, 2, 2]
    chosen = [candidates[token] for candidates, token in zip(completion.logprobs, completion.token_ids)]
    assert [logprob.rank for logprob in chosen] == [1, 1, 1]
    assert completion.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in chosen))
    assert "".join(logprob.decoded_token for logprob in chosen).strip() == completion.text.strip()


def test_allowed_tokens_are_the_only_ones() -> None:
    params = SamplingParams(max_tokens=5, allowed_token_ids=[400, 401], seed=1)
    assert set(alone(PROMPTS[0], params)[0]) <= {400, 401}


@pytest.mark.slow
def test_prompts_are_texts_ids_or_mappings() -> None:
    ids = llm().get_tokenizer().encode(PROMPTS[0])
    wanted = alone(PROMPTS[0], GREEDY)[0]
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": PROMPTS[0]}):
        (output,) = llm().generate(prompt, GREEDY, use_tqdm=False)
        assert tuple(output.outputs[0].token_ids) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        {"model": PRETRAINED, "num_speculative_tokens": 3},
    ],
)
def test_drafts_change_no_token(speculation) -> None:
    prompts = ["The sun was shining and the birds were singing and the birds were", PROMPTS[0]]
    params = [SamplingParams(temperature=0, max_tokens=16), SAMPLED]
    speculative = LLM(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=128,
        num_pages=20,
        speculative_config=speculation,
    )
    outputs = speculative.generate(prompts, params, use_tqdm=False)
    for prompt, request_params, output in zip(prompts, params, outputs):
        assert tuple(tuple(output.token_ids) for output in output.outputs) == alone(prompt, request_params)
    acceptance = speculative.engine.acceptance
    assert acceptance.verified[0] > 0
    assert speculative.engine.scheduler.cache.free == 20


@pytest.mark.slow
def test_a_model_drafts_for_itself_what_each_of_several_requests_chooses() -> None:
    speculative = LLM(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=128,
        num_pages=32,
        speculative_config={"model": PRETRAINED, "num_speculative_tokens": 3},
    )
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    speculative.generate(PROMPTS[:3], greedy, use_tqdm=False)
    acceptance = speculative.engine.acceptance
    assert acceptance.verified[2] >= 6
    assert acceptance.rates == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": 2, "method": "eagle"}, "'eagle'; known are ngram and draft_model"),
        ({"num_speculative_tokens": 2, "method": "draft_model"}, "has method .draft_model. without a model"),
        ({"num_speculative_tokens": 2, "depth": 3}, "takes no depth"),
        (
            {"num_speculative_tokens": 2, "prompt_lookup_max": 1, "prompt_lookup_min": 2},
            "n-grams of 2 to 1 tokens",
        ),
    ],
)
def test_a_speculation_that_cannot_be_is_refused(speculation, message) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(speculative_config=speculation)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt has no tokens"),
        ([4096], GREEDY, "token id 4096; the vocabulary has 4096"),
        ([1] * 128, GREEDY, "128 tokens; sequences of at most 128"),
        ([1], SamplingParams(stop_token_ids=[4096]), "stop_token_ids has token id 4096"),
        ({"text": "a"}, GREEDY, "takes no text; it takes prompt, prompt_token_ids, cache_salt"),
        ({"cache_salt": "a"}, GREEDY, "needs prompt or prompt_token_ids"),
        ({"prompt": "a", "cache_salt": ""}, GREEDY, "cache_salt is empty"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_and_leaves_nothing(prompt, params, message) -> None:
    with pytest.raises(ModelError, match=message):
        llm().generate([PROMPTS[0], prompt], params)
    assert not llm().engine.busy
    assert llm().engine.scheduler.cache.free == 20


@pytest.mark.slow
def test_a_prompt_of_the_longest_length_gets_one_token() -> None:
    (output,) = llm().generate([1] * 127, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_model_len": 100_000}, "2 to"),
        ({"block_size": 24}, "block_size is 24"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"enable_lora": True}, "LLM takes no enable_lora: LoRA adapters are not computed"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        (
            {"quantization": "awq"},
            "quantization is 'awq', and the weights are not quantised; weights are quantised on loading by one of fp8",
        ),
        ({"quantization": 8}, "quantization is 8; it must be a text"),
        ({"backend": "cuda"}, "backend is 'cuda'; it must be simulate or neuron"),
        ({"backend": "neuron"}, "the neuron backend needs nki, torch_neuronx, torch_xla"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(**arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "between 0 and 16"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"stop": ""}, "stop string is empty"),
        ({"skip_special_tokens": False}, "skip_special_tokens is False"),
        ({"logit_bias": {1: 101}}, "logit_bias of token 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ],
)
def test_parameters_out_of_range_are_refused(values, message) -> None:
    with pytest.raises(ModelError, match=message):
        SamplingParams(**values)


def test_parameters_at_their_limits_are_taken() -> None:
    limits = {
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "min_p": 1,
        "max_tokens": None,
        "presence_penalty": 2,
    }
    params = SamplingParams(**limits, repetition_penalty=16, logprobs=20, prompt_logprobs=20)
    assert {name: getattr(params, name) for name in limits} == limits


def reference_logits(config: ModelConfig, weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Return the logits of the numpy reference after each token but the last."""
    model = ReferenceModel(config, weights)
    rows = [model.prefill([ids[:1]])[0].logits]
    rows += [model.decode([token], [position])[0].logits for position, token in enumerate(ids[1:-1], 1)]
    return np.stack(rows).astype(np.float64)  # type: ignore[arg-type]


LONG = "Once upon a time there was a little girl named Lily who had a big red ball and a small blue car."


@pytest.mark.slow
def test_log_probabilities_of_the_prompt() -> None:
    """Those of each token are those it would have got if it had been chosen; in chunks, beside others, and again."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, n=2)
    other = SamplingParams(temperature=0, max_tokens=5)
    outputs = llm().generate(
        [PROMPTS[1], LONG, LONG, PROMPTS[2]], [other, params, params, other], use_tqdm=False
    )
    assert outputs[0].prompt_logprobs is None
    assert outputs[0].outputs[0].token_ids == list(alone(PROMPTS[1], other)[0])
    prompt_logprobs, again = (output.prompt_logprobs for output in outputs[1:3])
    ids = outputs[1].prompt_token_ids
    assert prompt_logprobs is not None and len(prompt_logprobs) == len(ids) > 16  # more than one chunk
    assert prompt_logprobs[0] is None
    assert outputs[2].metrics.num_cached_tokens == 0
    config = load_config(PRETRAINED)
    weights = dict(open_checkpoint(PRETRAINED, config))
    exact = reference_logits(config, weights, ids)
    # Four times what the order of float32 sums alone does to a logit; of a logarithm to two, that of the sum as well.
    reordered_logits = (reference_logits(config, reordered(config, weights, seed), ids) for seed in range(8))
    bound = 8 * max(np.abs(logits - exact).max() for logits in reordered_logits)
    assert bound < 1e-3
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for scores in (prompt_logprobs, again):
        assert scores is not None
        for token, candidates, shares in zip(ids[1:], scores[1:], exact, strict=True):
            assert candidates is not None
            assert set(candidates) == {token, *np.argsort(-shares, kind="stable")[:3].tolist()}
            for candidate, known in candidates.items():
                assert known.rank == (shares > shares[candidate]).sum() + 1
                assert known.logprob == pytest.approx(shares[candidate], abs=bound)


def test_a_prompt_of_one_token_has_no_log_probabilities() -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm().generate([7], params, use_tqdm=False)
    assert output.prompt_logprobs == [None]


@pytest.mark.slow
def test_drafts_change_no_log_probability_of_the_prompt() -> None:
    speculative = speculative_llm()
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1)
    text = "the cat and the dog and the cat and the dog and the cat"
    (speculated,), (wanted,) = (
        model.generate(text, params, use_tqdm=False) for model in (speculative, llm())
    )
    assert speculated.outputs[0].token_ids == wanted.outputs[0].token_ids
    ranks, expected_ranks = (
        [
            {token: logprob.rank for token, logprob in (candidates or {}).items()}
            for candidates in output.prompt_logprobs or ()
        ]
        for output in (speculated, wanted)
    )
    assert ranks == expected_ranks and len(ranks) == len(speculated.prompt_token_ids)
