"""Experts divided over ranks (--ep): what ranks hold, the tokens of one rank, the load, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.errors import ModelError
from model.execution.expert_load import ExpertLoad
from model.layers.launch import Axis
from model.layers.shard import Shard
from model.loading.weights import shard_weights
from model.mesh import Mesh, check_experts
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.deep import deep_except
from tests.model.oracle import random_model
from tests.model.test_dense_families import CACHE, load, oracle
from tests.model.test_family_meshes import steps
from tests.model.test_routed_experts import LONG, long_oracle
from tests.model.tiny_families import COMMON, write_tiny

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")


def model_of(
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    mesh: Mesh,
    load_of: ExpertLoad | None = None,
    sequences: int = 2,
    cache: int = CACHE,
) -> KernelModel:
    shards = shard_weights(
        config, weights, mesh.tensor, list({mesh.shard(rank) for rank in range(mesh.ranks)})
    )
    return KernelModel(
        config,
        shards,
        SimulatedDevice("trn2", mesh.ranks),
        cache,
        sequences=sequences,
        mesh=mesh,
        expert_load=load_of,
    )


def test_neighbouring_groups_divide_the_experts() -> None:
    mesh = Mesh(tensor=2, data=4, expert=2)
    assert [mesh.shard(rank).expert_rank for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {mesh.shard(rank).expert_ranks for rank in range(8)} == {2}
    assert mesh.list_groups(Axis.expert) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.list_groups(Axis.tensor) == Mesh(tensor=2, data=4).list_groups(Axis.tensor)
    assert Mesh(tensor=2, data=4).list_groups(Axis.expert) is None


def test_a_rank_holds_whole_experts_and_the_others_weights_once(tmp_path: Path) -> None:
    config, weights = load(write_tiny(tmp_path, "gpt-oss"))
    shards = [Shard(rank, 2, expert, 3) for expert in range(3) for rank in range(2)]
    arrays_by_shard = {
        rank_weights.shard: rank_weights.arrays for rank_weights in shard_weights(config, weights, 2, shards)
    }
    alone = {
        rank_weights.shard.rank: rank_weights.arrays for rank_weights in shard_weights(config, weights, 2)
    }
    for shard, arrays in arrays_by_shard.items():
        local_experts = slice(2 * shard.expert_rank, 2 * shard.expert_rank + 2)
        for name, array in arrays.items():
            full_array = alone[shard.rank][name]
            if name.rpartition(".")[2] in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"):
                assert np.array_equal(array, full_array[local_experts])
            else:
                assert np.array_equal(array, full_array)
                assert array is arrays_by_shard[Shard(shard.rank, 2, 0, 3)][name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    deep_except(
        [
            ("olmoe", Mesh(1, 2, expert=2)),
            ("afmoe", Mesh(1, 2, expert=2)),
            ("afmoe", Mesh(2, 2, sequence=True, expert=2)),
            ("gpt-oss", Mesh(2, 2, expert=2)),
            ("gpt-oss with yarn", Mesh(1, 3, expert=3)),
            ("qwen3-next", Mesh(2, 3, expert=3)),
            ("qwen3-next", Mesh(2, 3, sequence=True, expert=3)),
            ("mixtral with a window", Mesh(1, 4, expert=2)),
            ("mixtral with a window", Mesh(1, 4, expert=4)),
            ("gpt-oss", Mesh(2, 2, sequence=True, expert=2)),
            ("deepseek v3", Mesh(2, 2, sequence=True, expert=2)),
            ("olmoe", Mesh(2, 2, sequence=True, expert=2)),
        ],
        6,
    ),
    ids=str,
)
def test_ranks_that_divide_experts_give_the_tokens_of_one_rank(tmp_path: Path, name: str, mesh: Mesh) -> None:
    """With two sequences the last groups have none but padding."""
    config, weights = load(write_tiny(tmp_path, name))
    load_of = ExpertLoad.for_model(config, mesh)
    model, alone = model_of(config, weights, mesh, load_of), ReferenceModel(config, weights)
    bound = 2 * oracle(name).bound()
    for output, wanted in zip(steps(model), steps(alone), strict=True):
        assert np.abs(output.logits - wanted.logits).max() <= bound
    assert load_of is not None and len(load_of.choices) == mesh.data
    rows = mesh.data * (mesh.pad_length(15, 1) + 1)  # the longest of both prompts, and a token
    experts = [block for block in config.blocks if hasattr(block.mlp, "per_token")]
    assert sum(load_of.choices) == sum(rows * expert.mlp.per_token for expert in experts)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(1, 2, expert=2), Mesh(2, sequence=True)], ids=str)
def test_a_long_prompt_is_sorted_by_expert(tmp_path: Path, mesh: Mesh) -> None:
    long_oracle().model.save_pretrained(tmp_path)
    config, weights = load(tmp_path)
    model = model_of(config, weights, mesh, cache=256)
    ids = long_oracle().ids[:LONG]
    for output in model.prefill([ids, ids[:-3]])[:1]:
        wanted = long_oracle().logits[0]
        assert np.abs(output.logits - wanted).max() <= long_oracle().bound()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_scores_lead_all_tokens_to_the_first_rank(tmp_path: Path, ranks: int) -> None:
    """A router of zeros: the first three of 20 experts are chosen, and nobody chooses one of the last rank."""
    config, weights = load(write_tiny(tmp_path, "mixtral with a window"))
    equal = {
        name: np.zeros_like(array) if name.endswith("block_sparse_moe.gate.weight") else array
        for name, array in weights.items()
    }
    mesh = Mesh(1, ranks, expert=ranks)
    load_of = ExpertLoad.for_model(config, mesh)
    model = model_of(config, equal, mesh, load_of)
    bound = 2 * oracle("mixtral with a window").bound()
    for output, wanted in zip(steps(model), steps(ReferenceModel(config, equal)), strict=True):
        assert np.abs(output.logits - wanted.logits).max() <= bound
    assert load_of is not None
    assert load_of.choices[1:] == [0] * (ranks - 1)
    assert load_of.largest_to_mean == load_of.uneven == ranks


def test_the_load_is_counted_by_group() -> None:
    load_of = ExpertLoad(data=4, expert=2, count=6)
    load_of.add([np.array([[0, 5]]), np.array([[1, 2]]), np.array([[3, 4]]), np.array([[5, 0]])])
    assert load_of.choices == [3, 1, 1, 3]
    assert load_of.largest_to_mean == load_of.uneven == 1.5
    load_of.add([np.array([[3, 4]])] * 4)
    assert load_of.choices == [3, 5, 1, 7]
    assert (load_of.largest_to_mean, load_of.uneven) == (1.75, 2.0)


PIPELINE = ["--pp", "2", "--dp", "2", "--ep", "2"]


@pytest.mark.slow
def test_generated_text_reports_the_load(
    tmp_path: Path, byte_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = dict(
        vocab_size=300, head_dim=12, num_local_experts=6, num_experts_per_tok=2, num_hidden_layers=2
    )
    random_model("Mixtral", {**COMMON, **fields}, 3).save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    out, results = tmp_path / "out.json", []
    prompts = ["--prompt", "abc", "--prompt", "longer", "--max-new-tokens", "3", "--json", str(out)]
    for options in (
        [],
        ["--dp", "2"],
        ["--dp", "2", "--ep", "2"],
        ["--tp", "2", "--dp", "2", "--ep", "2"],
        PIPELINE,
    ):
        assert main(["generate", "--model", str(tmp_path), *prompts, *options]) == 0
        results.append((json.loads(out.read_text()), " ".join(capsys.readouterr().out.split())))
    ids = [[generation["generated_ids"] for generation in document["generations"]] for document, _ in results]
    assert all(group_ids == ids[0] for group_ids in ids)
    for document, text in results[:2]:
        assert (document["ep"], document["expert_load"]) == (1, None) and "computed" not in text
    for document, text in results[2:]:
        load = document["expert_load"]
        # Two prompts as long as the longer one, and two more steps; two choices of each token in each layer.
        steps_of_group = max(len(generation["prompt_ids"]) for generation in document["generations"]) + 2
        assert document["ep"] == 2 and sum(load["choices"]) == 2 * 2 * 2 * steps_of_group
        assert load["largest_to_mean"] == max(load["choices"]) / (4 * steps_of_group)
        assert f"experts on 2 groups computed {load['choices'][0]}, {load['choices'][1]} choices" in text


def test_options_that_divide_nothing_are_refused(tmp_path: Path) -> None:
    config, _ = load(write_tiny(tmp_path, "gpt-oss"))
    for expert, data in ((1, 1), (2, 2), (3, 3), (2, 4), (6, 6)):
        check_experts(config, expert, data)
    with pytest.raises(ModelError, match="--ep 4 does not divide the 6 experts of this model"):
        check_experts(config, 4, 4)
    with pytest.raises(ModelError, match="over as many groups of --dp, and 3 is no multiple of it"):
        check_experts(config, 2, 3)
    dense, _ = load(write_tiny(tmp_path / "dense", "qwen3"))
    check_experts(dense, 1, 3)
    with pytest.raises(ModelError, match="--ep 2 divides routed experts, and this model has none"):
        check_experts(dense, 2, 2)
