"""Pages of four bits in the engine: the tokens of the definition in numpy, for every division of a text into steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from model import LLM, SamplingParams
from model.commands.compile.command import list_engine_graphs
from model.commands.compile.graphs import PackGraph
from model.engine import Request, Scheduler, SchedulerOptions
from model.errors import ModelError
from model.families.packed_pages import check_packed_pages
from model.layers.arithmetic import Arithmetic, Span
from model.layers.attention import Attention
from model.layers.cache_formats import CACHE_FORMATS, check_cache_dtype
from model.layers.paged import NEWEST
from model.llm.engine_args import EngineArgs, set_up_engine
from model.llm.loaded import LoadedModel
from model.runners.reference import ReferenceModel
from model.state import PagePool
from tests.model.folders import TINY, random_weights, write_folder
from tests.model.test_cache_plans import read_published

PAGE = 4
TEXT = np.random.default_rng(3).integers(3, 259, 23).tolist()
NEW_TOKENS = 7
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama with random weights and return its folder."""
    path = write_folder(tmp_path_factory.mktemp("packed") / "model")
    safetensors.numpy.save_file(random_weights(TINY, 1), path / "model.safetensors")
    return path


def create_reference(folder: Path) -> ReferenceModel:
    return LoadedModel.open(folder).create_reference(kv_cache_dtype="int4", block_size=PAGE)


def generate(model: ReferenceModel, text: list[int] = TEXT) -> tuple[list[int], list[np.ndarray]]:
    """Return the likeliest tokens after a text, and the logits from which they follow."""
    outputs, tokens, logits = model.prefill([text]), list[int](), list[np.ndarray]()
    for position in range(len(text), len(text) + NEW_TOKENS):
        logits.append(outputs[0].logits)
        tokens.append(int(np.argmax(logits[-1])))
        outputs = model.decode([tokens[-1]], [position])
    return tokens, logits


def round_group(group: np.ndarray, dtype: Any) -> np.ndarray:
    """Return one group of numbers as four bits store it, in float64."""
    scale = np.float64((np.abs(group).max() * np.float32(1 / np.float32(7.25))).astype(dtype))
    return np.clip(np.rint(group.astype(np.float64) / scale), -8, 7) * scale


def attend_by_position(
    self: Attention, query: np.ndarray, keys: np.ndarray, values: np.ndarray, span: Span, numpy: Arithmetic
) -> np.ndarray:
    """Return outputs of attention, one position after another in float64, from groups that are rounded one by one."""
    outputs = np.zeros(query.shape, np.float64)
    group = len(query) // len(keys)
    for token in range(query.shape[1]):
        position = keys.shape[1] - query.shape[1] + token
        first = position // PAGE * PAGE
        for head in range(len(query)):
            seen_keys = keys[head // group, : position + 1].astype(np.float64)
            seen_values = values[head // group, : position + 1].astype(np.float64)
            for start in range(0, first, PAGE):
                page = keys[head // group, start : start + PAGE].T
                columns = [round_group(column, ml_dtypes.bfloat16) for column in page]
                seen_keys[start : start + PAGE] = np.stack(columns, axis=1)
            for row in range(first):
                seen_values[row] = round_group(values[head // group, row], np.float32)
            scores = seen_keys @ query[head, token].astype(np.float64) * self.heads.score_scale
            weights = np.exp(scores - scores.max())
            outputs[head, token] = weights @ seen_values / weights.sum()
    return outputs.astype(np.float32).swapaxes(0, 1).reshape(query.shape[1], -1)


def test_the_definition_is_attention_to_rounded_pages_position_by_position(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, logits = generate(create_reference(folder))
    plain = generate(LoadedModel.open(folder).create_reference())[1]
    monkeypatch.setattr(Attention, "_attend", attend_by_position)
    expected_tokens, expected = generate(create_reference(folder))
    assert tokens == expected_tokens
    # Two layers of some sixteen roundings each.
    bound = 32 * np.spacing(np.abs(expected).max())
    assert max(np.abs(row - exact).max() for row, exact in zip(logits, expected)) <= bound
    assert np.abs(plain[0] - expected[0]).max() > 1000 * bound


def test_the_definition_does_not_depend_on_the_division_of_a_text(folder: Path) -> None:
    model = create_reference(folder)
    complete = model.extend(model.start(), TEXT).logits
    for sizes in ((1,) * 23, (5, 3, 15), (16, 7)):
        sequence, first = model.start(), 0
        for size in sizes:
            output = model.extend(sequence, TEXT[first : first + size])
            first += size
        assert np.abs(output.logits - complete).max() <= 32 * np.spacing(np.abs(complete).max())


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_of_the_engine_give_the_tokens_of_the_definition(folder: Path, ranks: int) -> None:
    """Two samples share the page that the prompt does not fill, so that one of them gets a copy."""
    expected, _ = generate(create_reference(folder))
    params = SamplingParams(n=2, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for budget in (5, 16, 64) if ranks == 1 else (16,):
        options: dict[str, Any] = dict(block_size=PAGE, max_num_batched_tokens=budget, max_num_seqs=2)
        llm = LLM(folder, kv_cache_dtype="int4", tensor_parallel_size=ranks, **options)
        for cached in (0, 20):
            output = llm.generate({"prompt_token_ids": TEXT}, params, use_tqdm=False)[0]
            assert [list(sample.token_ids) for sample in output.outputs] == [expected, expected]
            assert output.metrics.num_cached_tokens == cached


def test_a_bfloat16_model_with_pages_of_sixteen_generates_like_its_definition(folder: Path) -> None:
    """Logits of bfloat16 differ by roundings, so the first token is compared where its lead is larger."""
    reference = LoadedModel.open(folder, "bfloat16").create_reference(kv_cache_dtype="int4", block_size=16)
    lead = np.diff(np.sort(reference.prefill([TEXT])[0].logits)[-2:])[0]
    assert lead > 0.1
    llm = LLM(folder, kv_cache_dtype="int4", dtype="bfloat16", max_model_len=64)
    tokens = llm.generate({"prompt_token_ids": TEXT}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert tokens[0] == np.argmax(reference.prefill([TEXT])[0].logits)


def test_packs_are_graphs_of_their_own_that_change_no_page_of_a_request(folder: Path) -> None:
    limits: dict[str, Any] = dict(
        block_size=PAGE, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64
    )
    setup = set_up_engine(EngineArgs(folder, kv_cache_dtype="int4", **limits))
    packs = [graph for graph in list_engine_graphs(setup) if isinstance(graph, PackGraph)]
    assert [graph.count for graph in packs] == [1, 2, 4, 8]
    assert [[launch.kernel for launch in graph.launches] for graph in packs] == [["pack_pages"] * 2] * 4
    plain = list_engine_graphs(set_up_engine(EngineArgs(folder, kv_cache_dtype="int8", **limits)))
    assert not any(isinstance(graph, PackGraph) for graph in plain)
    llm = LLM(folder, kv_cache_dtype="int4", **limits)
    first = llm.generate({"prompt_token_ids": TEXT}, GREEDY, use_tqdm=False)[0]
    llm.engine._model.launch_packs(2)
    again = llm.generate({"prompt_token_ids": TEXT}, GREEDY, use_tqdm=False)[0]
    assert again.metrics.num_cached_tokens == 20
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_chunks_end_with_pages_and_pages_that_are_full_leave_the_newest_ones() -> None:
    options = SchedulerOptions(2, 7, prefix_caching=False, whole_pages=True)
    scheduler = Scheduler([PagePool(16, PAGE), PagePool(6, PAGE, NEWEST)], options)
    for name in ("a", "b"):
        scheduler.submit(Request(name, [*TEXT[:9]], 3))
    chunks, newest = [], []
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        chunks.append({request.id: chunk.num_scheduled_tokens for request, chunk in batch.chunks.items()})
        sampled = {request: [5] for request, chunk in batch.chunks.items() if chunk.samples}
        scheduler.complete_step(batch, sampled)
        newest.append([len(request.tables[1].pages) for request in scheduler.running])
        for request in sampled:
            if len(request.tokens) == 12:
                scheduler.end(request)
    assert chunks[:4] == [{"a": 4}, {"a": 5}, {"a": 1, "b": 4}, {"a": 1, "b": 5}]
    assert newest[:4] == [[0], [1], [1, 0], [1, 1]]
    assert scheduler.cache.free == 22


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (
            "mistral-7b-v0.1",
            "attention with a cache of its own and without a window; layers.0.attention is not",
        ),
        ("deepseek-v2-lite", "without a window; layers.0.attention is not"),
        ("qwen3-next-80b-a3b", "without a window"),
        ("whisper-tiny", "use int8 or fp8"),
        ("gemma-2-2b", "without a window"),
    ],
)
def test_models_without_plain_attention_are_refused(name: str, layer: str) -> None:
    config = read_published(name)
    with pytest.raises(
        ModelError, match="^" + re.escape("kv_cache_dtype is 'int4', which is for ")
    ) as refused:
        check_packed_pages(config, "int4")
    assert layer in str(refused.value)
    check_packed_pages(config, "int8")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b"])
def test_models_of_plain_attention_are_taken(name: str) -> None:
    check_packed_pages(read_published(name), "int4")


@pytest.mark.parametrize(("head_dim", "accepted"), [(8, True), (12, False), (128, True), (136, False)])
def test_heads_of_other_sizes_are_refused(tmp_path: Path, head_dim: int, accepted: bool) -> None:
    args = EngineArgs(write_folder(tmp_path / "m", head_dim=head_dim), kv_cache_dtype="int4")
    if accepted:
        assert set_up_engine(args).options.whole_pages
        return
    with pytest.raises(ModelError, match=f"heads of 8, 16, 24 … 128 elements; .* has {head_dim}: use int8"):
        set_up_engine(args)


def test_drafts_and_budgets_below_a_page_are_refused(folder: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with pytest.raises(ModelError, match="pages of four bits take one new token of a sequence in a step"):
        set_up_engine(EngineArgs(folder, kv_cache_dtype="int4", speculative_config=drafts))
    set_up_engine(EngineArgs(folder, kv_cache_dtype="int8", speculative_config=drafts))
    for budget, accepted in ((18, False), (19, True), (20, True)):
        args = EngineArgs(folder, kv_cache_dtype="int4", max_num_seqs=4, max_num_batched_tokens=budget)
        if accepted:
            pools = {pool.window: pool.count for pool in set_up_engine(args).pools}
            assert pools[NEWEST] == 4 * 2 + budget // 16
        else:
            with pytest.raises(ModelError, match="max_num_batched_tokens is 18; give 19 or more"):
                set_up_engine(args)


def test_contiguous_caches_are_refused() -> None:
    assert CACHE_FORMATS["int4"].packs_pages
    check_cache_dtype("int4")
    check_cache_dtype("int8", has_pages=False)
    with pytest.raises(
        ModelError, match="'int4', which is for pages, and this cache is contiguous: use int8"
    ):
        check_cache_dtype("int4", has_pages=False)
