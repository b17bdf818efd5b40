"""Routed experts in a model: prompts that are sorted by expert, what ranks hold, which kernels, what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import compose, load_config
from model.layers.launch import Growth, Phase, StepShape, WeightDtypes
from model.layers.shard import Shard
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.oracle import Oracle, random_model
from tests.model.test_dense_families import assert_equal, load
from tests.model.tiny_families import COMMON, write_tiny

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

LONG = 129 + 11
"""Tokens of a prompt whose experts are sorted, one row tile and a ragged one."""


@cache
def long_oracle() -> Oracle:
    fields: dict[str, Any] = dict(head_dim=14, num_local_experts=6, num_experts_per_tok=2)
    fields |= dict(max_position_embeddings=256, num_hidden_layers=2)
    ids = np.random.default_rng(5).integers(3, 151, LONG + 1).tolist()
    return Oracle(random_model("Mixtral", {**COMMON, **fields}, 7), ids, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_long_prompt_equals_transformers(tmp_path: Path, ranks: int) -> None:
    """Without ranks the reference."""
    long_oracle().model.save_pretrained(tmp_path)
    config, weights = load(tmp_path)
    if ranks == 0:
        assert_equal(ReferenceModel(config, weights), long_oracle())
        return
    shards = shard_weights(config, weights, ranks)
    assert_equal(KernelModel(config, shards, SimulatedDevice("trn2", ranks), 256), long_oracle())


def _step(config: Any, tokens: int, ranks: int = 1, **changes: Any) -> StepShape:
    phase = Phase.prefill if tokens > 1 else Phase.decode
    weight_dtype = np.dtype(np.float32)
    return StepShape(
        phase, tokens, 1, 256, config.context, ranks, weight_dtype, WeightDtypes(weight_dtype), **changes
    )


def test_kernels_and_work_follow_the_tokens_of_a_step(tmp_path: Path) -> None:
    """20 experts of 50 elements, three for a token; hidden states of 36."""
    config, _ = load(write_tiny(tmp_path, "mixtral with a window"))
    experts = compose(config).blocks[0][1]
    expert_bytes = 3 * 36 * 50 * 4
    for tokens, reached in ((1, 3), (6, 18), (7, 20), (128, 20), (129, 20)):
        router, routed = experts.launches(_step(config, tokens))
        assert router.kernel == "router"
        assert routed.kernel == ("experts_decode" if tokens <= 128 else "experts_prefill")
        assert routed.growth is Growth.experts
        assert routed.work.bytes == reached * expert_bytes
        assert routed.work.operations == 2 * tokens * 3 * 3 * 36 * 50


def test_every_rank_holds_a_part_of_every_expert(tmp_path: Path) -> None:
    config, weights = load(write_tiny(tmp_path, "mixtral"))
    gate, up, down = (
        weight
        for weight in compose(config).blocks[1][1].weights
        if weight.name.rpartition(".")[2] in MATRICES
    )
    prefix = "model.layers.1.block_sparse_moe.experts"
    for rank, span in enumerate((slice(0, 17), slice(17, 34), slice(34, 50))):
        shard = Shard(rank, 3)
        for weight, name in ((gate, "w1"), (up, "w3")):
            rank_array = weight.take(weights, shard)
            assert rank_array.shape == weight.shape(shard) == (5, 36, 17)
            for expert in range(5):
                matrix = weights[f"{prefix}.{expert}.{name}.weight"]
                assert np.array_equal(rank_array[expert][:, : span.stop - span.start], matrix[span].T)
                assert not rank_array[expert][:, span.stop - span.start :].any()
        rank_array = down.take(weights, shard)
        assert rank_array.shape == down.shape(shard) == (5, 17, 36)
        for expert in range(5):
            matrix = weights[f"{prefix}.{expert}.w2.weight"]
            assert np.array_equal(rank_array[expert][: span.stop - span.start], matrix[:, span].T)


MATRICES = ("w_gate", "w_up", "w_down")


def test_clipped_queries_and_more_choices_than_experts_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "olmoe") / "config.json"
    fields = json.loads(path.read_text())
    assert fields["clip_qkv"] is None and load_config(tmp_path).model_type == "olmoe"
    path.write_text(json.dumps({**fields, "clip_qkv": 8.0}))
    with pytest.raises(ModelError, match="clip_qkv: queries, keys and values are not clipped"):
        load_config(tmp_path)
    path.write_text(json.dumps({**fields, "num_experts_per_tok": 16}))
    load_config(tmp_path)
    path.write_text(json.dumps({**fields, "num_experts_per_tok": 17}))
    with pytest.raises(ModelError, match="num_experts_per_tok: 17 of 16 experts"):
        load_config(tmp_path)


@pytest.mark.slow
def test_plans_time_the_kernels_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path, "olmoe")
    assert main(["plan", str(folder), "--tp", "2", "--prompt", "40", "--generate", "8"]) == 0
    text = capsys.readouterr().out
    assert "\nrouter " in text and "\nexperts_decode " in text
    assert "Times are dry runs of this project's kernels" in text
