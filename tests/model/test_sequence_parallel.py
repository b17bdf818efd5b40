"""Sequence parallelism: every family with the rows of its prompts cut over the ranks, and prompts that need padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.plan import Request, make_plan
from model.plan.sizes import load_model
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.model.reordering import reordered
from tests.model.test_dense_families import CACHE, IDS, load, oracle
from tests.model.test_kernel_model import load as load_llama
from tests.model.test_plan_parameters import CONFIGS
from tests.model.tiny_families import TINY, write_tiny

FIRST, SECOND = IDS[:16], IDS[4:11]
"""Prompts of a batch. The first token behind the first one gives longrope other frequencies."""


def model_of(
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    ranks: int,
    sequences: int = 1,
    dtype: str = "float32",
    cache: int = CACHE,
    exact: bool = False,
) -> KernelModel:
    mesh = Mesh(ranks, sequence=True)
    shards = shard_weights(config, weights, ranks, dtype=dtype)
    device = SimulatedDevice("trn2", ranks, exact=exact)
    return KernelModel(config, shards, device, cache, sequences=sequences, mesh=mesh)


def allowed(config: ModelConfig, weights: dict[str, np.ndarray], ids: list[int]) -> float:
    """Return four times what the order of float32 sums does to the logits, as in test_kernel_model."""
    wanted = ReferenceModel(config, weights).prefill([ids])[0].logits
    reordered_models = (ReferenceModel(config, reordered(config, weights, seed)) for seed in range(8))
    return 4 * max(float(np.abs(other.prefill([ids])[0].logits - wanted).max()) for other in reordered_models)


PADDED = ("gemma2", "gpt2 untied", "deepseek v3", "gpt-oss", "qwen3-next with an mlp and biases")
"""Models on four ranks, where that pads the prompts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", deep_except(TINY, (*PADDED, "mamba2", "gemma4")))
def test_every_family_has_the_tokens_of_one_rank(tmp_path, name) -> None:
    """Two prompts of different lengths and a step behind them, replayed as recorded."""
    config, weights = load(write_tiny(tmp_path, name))
    ranks = 4 if name in PADDED else 2
    model = model_of(config, weights, ranks, sequences=2, exact=True)
    alone = ReferenceModel(config, weights)
    first, second = (FIRST[1:], SECOND) if ranks == 4 else (FIRST, SECOND)
    step = [IDS[16], IDS[11]], [len(first), len(second)]
    for output, wanted in (
        *zip(model.prefill([first, second]), alone.prefill([first, second])),
        *zip(model.decode(*step), alone.decode(*step)),
    ):
        # Kernels and reference are each as far from exact logits as float32 takes transformers.
        assert np.abs(output.logits - wanted.logits).max() <= 2 * oracle(name).bound()
        next_best, best = np.sort(wanted.logits)[-2:]
        if best - next_best > 2 * oracle(name).bound():
            assert output.ids[0] == np.argmax(wanted.logits)


def test_bfloat16_costs_what_it_costs_transformers(tmp_path) -> None:
    """A family whose rows are normalised by the ranks in launches of their own as well."""
    config, weights = load(write_tiny(tmp_path, "gemma2"))
    (output,) = model_of(config, weights, 2, dtype="bfloat16").prefill([IDS])
    assert np.abs(output.logits - oracle("gemma2").logits[-1]).max() <= oracle("gemma2").bound("bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_prompts_around_a_row_tile(write_model, ranks) -> None:
    config, weights = load_llama(write_model(max_position_embeddings=140, num_attention_heads=4))
    ids = np.random.default_rng(7).integers(3, 250, 129).tolist()
    reference, model = ReferenceModel(config, weights), model_of(config, weights, ranks, cache=256)
    most = allowed(config, weights, ids)
    for count in (127, 128, 129):
        (output,), (wanted,) = model.prefill([ids[:count]]), reference.prefill([ids[:count]])
        assert np.abs(output.logits - wanted.logits).max() <= most
        (output,), (wanted,) = model.decode([5], [count]), reference.decode([5], [count])
        assert np.abs(output.logits - wanted.logits).max() <= most


def test_a_prompt_may_fill_the_context_beside_its_padding(write_model) -> None:
    """Three ranks pad 64 tokens to 66: rows that no table of positions has, and no prompt."""
    config, weights = load_llama(
        write_model(max_position_embeddings=64, num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    )
    ids = np.random.default_rng(7).integers(3, 250, 64).tolist()
    reference, model = ReferenceModel(config, weights), model_of(config, weights, 3, cache=128)
    (output,), (wanted,) = model.prefill([ids]), reference.prefill([ids])
    assert np.abs(output.logits - wanted.logits).max() <= allowed(config, weights, ids)


@pytest.mark.deep
def test_a_plan_predicts_cut_rows_of_experts_and_latents() -> None:
    """A rank normalises and routes its rows only; the experts and attention are those of all rows.

    Of 2048 tokens: a router of few row tiles takes as long to begin and to end as for the rest.
    """
    counts = load_model(CONFIGS / "deepseek-v2-lite.json")
    request = Request(instance="trn2.48xlarge", tp=4, batch=1, prompt=2048, generate=8)
    uncut, cut = (make_plan(counts, replace(request, sp=sp)).first_token.predicted for sp in (False, True))
    assert uncut is not None and cut is not None and not cut.refusals
    cut_kernels, uncut_kernels = (
        {kernel.name: kernel for kernel in predicted.kernels} for predicted in (cut, uncut)
    )
    assert cut_kernels["router"].time.program_ns < uncut_kernels["router"].time.program_ns / 2
    exchanged = {f"experts_{exchange}, rows of a group" for exchange in ("dispatch", "combine")}
    assert cut_kernels.keys() - uncut_kernels.keys() == {*exchanged, "embedding, last rows"}
    assert {cut_kernels[exchange].launches for exchange in exchanged} == {cut_kernels["router"].launches}
    step = make_plan(counts, replace(request, sp=True)).step.predicted
    assert step == make_plan(counts, request).step.predicted
