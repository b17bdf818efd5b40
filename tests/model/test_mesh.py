"""Meshes: who holds what, which groups meet, and the tokens of one rank from every mesh."""

from __future__ import annotations

import json

import numpy as np
import pytest

from model.cli import main
from model.device import DryDevice
from model.kernel_model import KernelModel
from model.layers.launch import Axis
from model.layers.shard import Shard
from model.mesh import Mesh
from model.reference import ReferenceModel
from model.weights import shard_weights
from tests.model.test_cli import refused
from tests.model.test_kernel_model import IDS, load, logits_of, noise

PROMPTS = [
    np.random.default_rng(seed).integers(3, 300, count).tolist() for seed, count in enumerate((9, 1, 13))
]


def test_ranks_of_a_group_hold_the_model_once_and_meet() -> None:
    mesh = Mesh(tensor=2, data=3)
    assert mesh.ranks == 6
    assert [mesh.shard(rank) for rank in range(6)] == [Shard(0, 2), Shard(1, 2)] * 3
    assert [mesh.group_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert mesh.groups(Axis.tensor) == [[0, 1], [2, 3], [4, 5]]
    assert Mesh(tensor=1, data=4).groups(Axis.tensor) is None
    assert [mesh.sequences_of_group(count) for count in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("mesh", [Mesh(1, 2), Mesh(2, 2), Mesh(1, 3), Mesh(4, 2), Mesh(2, 4)], ids=str)
def test_every_mesh_has_the_logits_of_one_rank(write_model, simulated, mesh) -> None:
    config, weights = load(write_model(num_attention_heads=4, num_key_value_heads=2))
    shards = shard_weights(config, weights, mesh.tensor)
    device = simulated("trn2", mesh.ranks)
    model = KernelModel(config, shards, device, 128, sequences=3, mesh=mesh)
    reference = ReferenceModel(config, weights)
    bound = 4 * noise(config, weights, logits_of(reference, IDS))  # as in test_kernel_model
    at = [len(each) for each in PROMPTS]
    steps = [(model.prefill(PROMPTS), reference.prefill(PROMPTS))]
    steps += [(model.decode([5, 6, 7], at), reference.decode([5, 6, 7], at))]
    for own, wanted in steps:
        assert len(own) == 3
        for one, other in zip(own, wanted):
            assert np.abs(one.logits - other.logits).max() <= bound
            assert one.ids[0] == np.argmax(one.logits)


def test_groups_share_the_arrays_of_their_weights(write_model) -> None:
    config, weights = load(write_model())
    shards = shard_weights(config, weights, 2)
    model = KernelModel(config, shards, DryDevice("trn1", 4), 128, sequences=2, mesh=Mesh(2, 2))
    first, _, third, _ = model._held
    name = next(iter(shards[0].arrays))
    assert first[name] is third[name]


def test_prompts_are_divided_over_the_groups_of_a_mesh(write_model, tmp_path, capsys) -> None:
    folder = str(write_model(eos_token_id=None))
    results = []
    for mesh in ([], ["--dp", "2"], ["--tp", "2", "--dp", "2"], ["--dp", "3"]):
        path = tmp_path / "out.json"
        prompts = ["--prompt", "a", "--prompt", "a longer one", "--prompt", "b"]
        arguments = ["--model", folder, *prompts, "--max-new-tokens", "3", *mesh, "--json", str(path)]
        assert main(["generate", *arguments]) == 0
        results.append(json.loads(path.read_text()))
    ids = [[each["generated_ids"] for each in result["generations"]] for result in results]
    assert ids[0] == ids[1] == ids[2] == ids[3]
    assert [(result["tp"], result["dp"]) for result in results] == [(1, 1), (1, 2), (2, 2), (1, 3)]
    assert all(each["checks"]["tokens_equal"] == 3 for result in results for each in result["generations"])
    assert "predicted on 3 cores for 3 prompts, in ms" in capsys.readouterr().out
    steps = [result["predictions"]["trn2"]["per_token"]["program_ns"] for result in results]
    assert steps[1] < steps[0]  # two sequences a group instead of three


@pytest.mark.parametrize(("tp", "dp", "fits"), [(1, 32, True), (4, 8, True), (1, 33, False), (4, 9, False)])
def test_a_mesh_has_at_most_32_ranks(write_model, capsys, tp, dp, fits) -> None:
    arguments = ["--model", str(write_model()), "--backend", "numpy", "--max-new-tokens", "1"]
    mesh = ["--tp", str(tp), "--dp", str(dp)]
    if fits:
        assert main(["generate", *arguments, *mesh]) == 0
        return
    said = f"nkw: error: {dp} groups of {tp} ranks are {tp * dp} ranks; one run takes 32"
    assert refused(capsys, *arguments, *mesh) == said
