"""Latent attention in a model: what ranks hold, which kernels, rotations without pairs, plans, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.device import SimulatedDevice
from model.errors import ModelError
from model.families import compose, load_config
from model.layers.latent_attention import LatentMixer
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import list_states
from model.layers.shard import Shard
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.oracle import Oracle, random_model
from tests.model.test_dense_families import CACHE, IDS, PROMPT, assert_equal, load
from tests.model.tiny_families import COMMON, LATENT, write_tiny

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")


def mixer(folder: Path) -> LatentMixer:
    latent_mixer = compose(load_config(folder)).blocks[1][0]
    assert isinstance(latent_mixer, LatentMixer)
    return latent_mixer


def step(config: Any, tokens: int, sequences: int, phase: Phase, ranks: int = 1, **changes: Any) -> StepShape:
    dtype = np.dtype(np.float32)
    return StepShape(
        phase, tokens, sequences, 64, config.context, ranks, dtype, WeightDtypes(dtype), **changes
    )


def test_every_rank_holds_both_projections_of_its_heads(tmp_path: Path) -> None:
    """Four heads over three ranks: two, two, and padding of zeros; 10 plain elements of a key and 14 of a value."""
    _, weights = load(write_tiny(tmp_path, "deepseek v3"))
    latent_mixer = mixer(tmp_path)
    weight = weights["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, 24, 20)
    for rank, heads in enumerate(([0, 1], [2, 3], [])):
        shard = Shard(rank, 3)
        keys, values = (
            projection.take(weights, shard) for projection in (latent_mixer.w_keys, latent_mixer.w_values)
        )
        assert keys.shape == latent_mixer.w_keys.shape(shard) == (20, 20)
        assert values.shape == latent_mixer.w_values.shape(shard) == (20, 28)
        count = len(heads)
        assert np.array_equal(keys[: 10 * count], weight[heads, :10].reshape(-1, 20))
        assert np.array_equal(values[:, : 14 * count], weight[heads, 10:].reshape(-1, 20).T)
        assert not keys[10 * count :].any() and not values[:, 14 * count :].any()


def test_rotated_elements_come_first_and_pairs_half_of_them_apart(tmp_path: Path) -> None:
    _, weights = load(write_tiny(tmp_path, "deepseek v2"))
    latent_mixer = mixer(tmp_path)
    order = [10, 12, 14, 11, 13, 15, *range(10)]
    query = weights["model.layers.1.self_attn.q_proj.weight"].reshape(4, 16, 36)
    assert np.array_equal(latent_mixer.w_query.take(weights, Shard(0, 1)), query[:, order].reshape(-1, 36).T)
    rows = weights["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    latent = latent_mixer.w_latent.take(weights, Shard(1, 2))
    assert np.array_equal(latent, rows[[*range(20), 20, 22, 24, 21, 23, 25]].T)
    assert latent_mixer.w_latent.is_whole and not latent_mixer.w_query.is_whole


def test_kernels_of_prompts_and_of_steps(tmp_path: Path) -> None:
    config = load_config(write_tiny(tmp_path, "deepseek v3"))
    latent_mixer, project = mixer(tmp_path), ["qkv_projection"] * 3
    prompt = latent_mixer.launches(step(config, 40, 2, Phase.prefill))
    attended = ["latent_keys_values", "attention_prefill"]
    assert [launch.kernel for launch in prompt] == [*project, *attended, "output_projection"]
    for new, sequences, sizes in (
        (1, 300, [(128, 2), (44, 1)]),
        (2, 64, [(128, 1)]),
        (2, 65, [(128, 1), (2, 1)]),
    ):
        launches = latent_mixer.launches(step(config, new * sequences, sequences, Phase.decode))
        attend = [launch for launch in launches if launch.kernel == "latent_attention_decode"]
        assert [(launch.rows, launch.repeat) for launch in attend] == sizes
        assert len(launches) == 4 + len(attend)
    (rows,) = list_states(latent_mixer, step(config, 2, 2, Phase.decode, pages=9, block_size=16))
    assert rows.shape == (9, 16, 26)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [True, False])
def test_queries_without_a_latent_and_rotations_of_halves(tmp_path: Path, interleaved: bool) -> None:
    fields = dict(q_lora_rank=None, rope_interleave=interleaved, n_routed_experts=16, n_group=1, topk_group=1)
    fields |= dict(num_experts_per_tok=3, n_shared_experts=1, norm_topk_prob=False)
    oracle = Oracle(random_model("DeepseekV3", {**COMMON, **LATENT, **fields}, 11), IDS, PROMPT)
    oracle.model.save_pretrained(tmp_path)
    config, weights = load(tmp_path)
    assert_equal(ReferenceModel(config, weights), oracle)
    assert_equal(
        KernelModel(config, shard_weights(config, weights, 1), SimulatedDevice("trn2", 1), CACHE), oracle
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek v2", {"attention_bias": True}, "attention_bias: projections of latent attention"),
        ("deepseek v3", {"mlp_bias": True}, "mlp_bias: projections of latent attention and of experts"),
        (
            "deepseek v2",
            {"norm_topk_prob": True},
            "norm_topk_prob: weights of experts are parts of a softmax",
        ),
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'; known are greedy"),
        ("deepseek v3", {"n_group": 5}, "n_group: 2 of 5 groups of 32 experts"),
        ("deepseek v3", {"topk_group": 5}, "n_group: 5 of 4 groups of 32 experts"),
        ("deepseek v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim: 5 is odd"),
    ],
)
def test_what_no_kernel_computes_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    path = write_tiny(tmp_path, name) / "config.json"
    fields = json.loads(path.read_text())
    load_config(tmp_path)
    path.write_text(json.dumps({**fields, **changes}))
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "traffic"])
def test_plans_and_traffic_time_the_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    folder = str(write_tiny(tmp_path, "deepseek v3"))
    if command == "plan":
        assert main(["plan", folder, "--tp", "2", "--prompt", "40", "--generate", "8"]) == 0
        text = capsys.readouterr().out
        for kernel in ("latent_keys_values", "latent_attention_decode", "router", "experts_decode"):
            assert f"\n{kernel} " in text
        assert "Times are dry runs of this project's kernels" in text
        return
    lengths = [
        "--prompt-lengths",
        "20",
        "--output-lengths",
        "4",
        "--requests",
        "6",
        "--rate",
        "5",
        "--replicas",
        "1",
    ]
    assert main(["traffic", folder, "--tp", "2", *lengths]) == 0
    assert capsys.readouterr().out
