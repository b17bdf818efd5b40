"""Requests of a batch with caches of fewer bits get what they get alone, on shared pages and when preempted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from model import LLM, SamplingParams
from model.device import SimulatedDevice
from model.engine import Request, Scheduler, SchedulerOptions
from model.engine.buckets import Buckets
from model.families import load_config
from model.layers.cache_formats import CACHE_FORMATS
from model.layers.paged import NEWEST
from model.llm.loaded import LoadedModel
from model.loading.weights import shard_weights
from model.runners.paged import PagedModel
from model.state import PagePool
from tests.model.folders import TINY, random_weights, write_folder
from tests.model.reordering import reordered

FORMATS = ("fp8", "int8", "int4")
FIRST = np.random.default_rng(3).integers(3, 259, 40).tolist()
TEXTS = (FIRST[:30], [*FIRST[:17], 9, 11, 10], FIRST[20:29])
"""The second text shares four pages of four tokens with the first."""
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model with scales of its caches and return its folder."""
    return write_model(tmp_path / "model", random_weights(TINY))


def write_model(path: Path, weights: dict[str, np.ndarray]) -> Path:
    """Write a model with scales of its caches to a folder, and return the folder."""
    write_folder(path)
    scales = {
        f"model.layers.{layer}.self_attn.{letter}_scale": np.float32([0.008])
        for layer in range(2)
        for letter in "kv"
    }
    safetensors.numpy.save_file(weights | scales, path / "model.safetensors")
    return path


def sums_rows_alike() -> bool:
    """Return whether this machine's BLAS gives a row of a product the same bits at every index of the row."""
    rng = np.random.default_rng(0)
    for depth in (16, 32, 64, 128):
        row, columns = rng.standard_normal(depth, np.float32), rng.standard_normal((depth, 96), np.float32)
        rows = np.broadcast_to(row, (128, depth)).T.copy().T @ columns
        if not (rows == rows[0]).all():
            return False
    return True


def create_llm(folder: Path, name: str, **changes: object) -> LLM:
    options = dict(block_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64)
    return LLM(folder, kv_cache_dtype=name, **{**options, **changes})


@pytest.mark.parametrize("name", FORMATS)
def test_batched_shared_and_preempted_requests_get_the_tokens_of_requests_alone(
    folder: Path, name: str
) -> None:
    alone = create_llm(folder, name, max_num_seqs=1, enable_prefix_caching=False)
    expected = [
        list(alone.generate({"prompt_token_ids": text}, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
        for text in TEXTS
    ]
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    llm = create_llm(folder, name)
    for cached in (0, 28):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert outputs[0].metrics.num_cached_tokens == cached
    few = create_llm(folder, name, num_pages=15).generate(prompts, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in few] == expected
    assert sum(output.metrics.num_preemptions for output in few) > 0


def compute_logits(folder: Path, name: str, texts: tuple[list[int], ...]) -> dict[str, list[np.ndarray]]:
    """Return the logits of requests of two tokens each, in equal buckets of a device that is exact."""
    config = load_config(folder)
    loaded = LoadedModel.open(folder, config=config)
    packs_pages = CACHE_FORMATS[name].packs_pages
    options = SchedulerOptions(3, 64, chunked_prefill=True, prefix_caching=False, whole_pages=packs_pages)
    scheduler = Scheduler([PagePool(64, 4, window) for window in (None, NEWEST)[: 1 + packs_pages]], options)
    model = PagedModel(
        config,
        shard_weights(config, loaded.checkpoint, 1),
        SimulatedDevice("trn2", 1, exact=True),
        scheduler.cache.pools,
        Buckets((3,), (64,), (128,)),
        kv_cache_dtype=name,
        cache_scales=loaded.choose_cache_scales(name, None),
    )
    logits: dict[str, list[np.ndarray]] = {str(text): [] for text in texts}
    for text in texts:
        scheduler.submit(Request(str(text), [*text], 2))
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        outputs = model.step(batch)
        tokens = {}
        for request, (output,) in outputs.items():
            logits[request.id].append(output.logits)
            tokens[request] = [int(np.argmax(output.logits))]
        scheduler.complete_step(batch, tokens)
        for request in outputs:
            if len(logits[request.id]) == 2:
                scheduler.end(request)
    return logits


@pytest.mark.parametrize("name", FORMATS)
def test_logits_in_equal_buckets_are_those_of_requests_alone(folder: Path, tmp_path: Path, name: str) -> None:
    """Compare bits where the host's BLAS sums all rows alike, else logits within the bound of reordered sums."""
    together = compute_logits(folder, name, TEXTS)
    bound = 0.0
    if not sums_rows_alike():
        weights = [reordered(load_config(folder), random_weights(TINY), seed) for seed in range(8)]
        folders = [write_model(tmp_path / str(seed), weights[seed]) for seed in range(8)]
        in_other_orders = [compute_logits(path, name, TEXTS) for path in folders]
        bound = 2 * max(
            float(np.abs(np.subtract(logits[text], together[text])).max())
            for logits in in_other_orders
            for text in together
        )
    for text in TEXTS:
        (logits,) = compute_logits(folder, name, (text,)).values()
        assert np.abs(np.subtract(logits, together[str(text)])).max() <= bound
