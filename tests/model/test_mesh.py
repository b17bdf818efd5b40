"""Meshes: who holds what, which groups meet, and the tokens of one rank from every mesh."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from model.device import DryDevice, SimulatedDevice
from model.layers.launch import Axis
from model.layers.shard import Shard
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.deep import deep_except
from tests.model.conftest import WAYS
from tests.model.test_cli import refused
from tests.model.test_kernel_model import IDS, PROMPT, load, logits_of, noise

PROMPTS = [
    np.random.default_rng(seed).integers(3, 300, count).tolist() for seed, count in enumerate((9, 1, 13))
]


def test_ranks_of_a_group_hold_the_model_once_and_meet() -> None:
    mesh = Mesh(tensor=2, data=3)
    assert mesh.ranks == 6
    assert [mesh.shard(rank) for rank in range(6)] == [Shard(0, 2), Shard(1, 2)] * 3
    assert [mesh.find_group(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert mesh.list_groups(Axis.tensor) == [[0, 1], [2, 3], [4, 5]]
    assert Mesh(tensor=1, data=4).list_groups(Axis.tensor) is None
    assert [mesh.slice_local_rows(rank, 8) for rank in range(6)] == [slice(0, 8)] * 6
    assert mesh.pad_length(7, 1) == 7
    assert [mesh.count_group_sequences(count) for count in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]


def test_ranks_that_cut_the_sequence_hold_as_many_rows_each() -> None:
    mesh = Mesh(tensor=4, data=2, sequence=True)
    assert mesh.list_groups(Axis.tensor) == Mesh(tensor=4, data=2).list_groups(Axis.tensor)
    assert [mesh.slice_local_rows(rank, 8) for rank in (0, 1, 3, 4, 7)] == [
        slice(0, 2),
        slice(2, 4),
        slice(6, 8),
        slice(0, 2),
        slice(6, 8),
    ]
    assert [mesh.pad_length(7, sequences) for sequences in (1, 2, 3, 4, 6)] == [8, 8, 8, 7, 8]
    assert [Mesh(3, sequence=True).pad_length(tokens, 1) for tokens in (3, 4)] == [3, 6]


MESHES = [
    *(Mesh(1, 2), Mesh(2, 2), Mesh(1, 3), Mesh(4, 2), Mesh(2, 4)),
    *(Mesh(4, 1, sequence=True), Mesh(2, 2, sequence=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated", "mesh"), deep_except(product(WAYS, MESHES), 5), indirect=["simulated"], ids=str
)
def test_every_mesh_has_the_logits_of_one_rank(write_model, simulated, mesh) -> None:
    config, weights = load(write_model(num_attention_heads=4, num_key_value_heads=2))
    shards = shard_weights(config, weights, mesh.tensor)
    model = KernelModel(config, shards, simulated("trn2", mesh.ranks), 128, sequences=3, mesh=mesh)
    reference = ReferenceModel(config, weights)
    bound = 4 * noise(config, weights, logits_of(reference, IDS))  # as in test_kernel_model
    positions = [len(prompt) for prompt in PROMPTS]
    steps = [(model.prefill(PROMPTS), reference.prefill(PROMPTS))]
    steps += [(model.decode([5, 6, 7], positions), reference.decode([5, 6, 7], positions))]
    for outputs, wanted in steps:
        assert len(outputs) == 3
        for one, other in zip(outputs, wanted):
            assert np.abs(one.logits - other.logits).max() <= bound
            assert one.ids[0] == np.argmax(one.logits)


def test_groups_share_the_arrays_of_their_weights(write_model) -> None:
    config, weights = load(write_model())
    shards = shard_weights(config, weights, 2)
    model = KernelModel(config, shards, DryDevice("trn1", 4), 128, sequences=2, mesh=Mesh(2, 2))
    first, _, third, _ = model._runner.network._rank_arrays
    name = next(iter(shards[0].arrays))
    assert first[name] is third[name]


@pytest.mark.slow
def test_prompts_are_divided_over_the_groups_of_a_mesh(write_model, tmp_path, capsys) -> None:
    folder = str(write_model(eos_token_id=None))
    results = []
    for mesh in ([], ["--dp", "2"], ["--tp", "2", "--dp", "2"], ["--dp", "3"], ["--tp", "2", "--sp"]):
        path = tmp_path / "out.json"
        prompts = ["--prompt", "a", "--prompt", "a longer one", "--prompt", "b"]
        arguments = ["--model", folder, *prompts, "--max-new-tokens", "3", *mesh, "--json", str(path)]
        assert main(["generate", *arguments]) == 0
        results.append(json.loads(path.read_text()))
    ids = [[generation["generated_ids"] for generation in result["generations"]] for result in results]
    assert all(group_ids == ids[0] for group_ids in ids)
    assert [(result["tp"], result["dp"], result["sp"]) for result in results] == [
        (1, 1, False),
        (1, 2, False),
        (2, 2, False),
        (1, 3, False),
        (2, 1, True),
    ]
    assert all(
        generation["checks"]["tokens_equal"] == 3
        for result in results
        for generation in result["generations"]
    )
    assert "predicted on 3 cores for 3 prompts, in ms" in capsys.readouterr().out
    steps = [result["predictions"]["trn2"]["per_token"]["program_ns"] for result in results]
    assert steps[1] < steps[0]  # two sequences a group instead of three


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "dp", "works"),
    [
        (1, 32, ""),
        (4, 8, ""),
        (1, 33, "--tp 1 with --dp 1 to 32"),
        (4, 9, "--tp 4 with --dp 1 to 8"),
        (33, 1, "--tp 1 to 32"),
    ],
)
def test_a_mesh_has_at_most_32_ranks(write_model, capsys, tp, dp, works) -> None:
    prompts = [word for number in range(33) for word in ("--prompt", str(number))]
    arguments = ["--model", str(write_model()), "--backend", "numpy", "--max-new-tokens", "1", *prompts]
    mesh = ["--tp", str(tp), "--dp", str(dp)]
    if not works:
        assert main(["generate", *arguments, *mesh]) == 0
        return
    message = f"nkw: error: --tp {tp} times --dp {dp} are {tp * dp} ranks; one run takes 32: {works}"
    assert refused(capsys, *arguments, *mesh) == message


@pytest.mark.parametrize(
    ("prompts", "works"),
    [(1, "1 prompt; this run takes --dp 1"), (2, "2 prompts; this run takes --dp 1 to 2")],
)
def test_every_group_has_a_prompt(write_model, capsys, prompts, works) -> None:
    prompt_options = [word for number in range(prompts) for word in ("--prompt", str(number))]
    arguments = [
        "--model",
        str(write_model()),
        "--backend",
        "numpy",
        "--max-new-tokens",
        "1",
        *prompt_options,
        "--dp",
    ]
    message = f"nkw: error: --dp {prompts + 1} makes {prompts + 1} groups for {works}"
    assert refused(capsys, *arguments, str(prompts + 1)) == message
    assert main(["generate", *arguments, str(prompts)]) == 0


@pytest.mark.slow
def test_a_group_of_32_ranks_has_the_logits_of_one(write_model) -> None:
    """2 ranks hold each of 12 groups of 3 query heads, 8 ranks hold padding; 20 of all have ten tokens, others nine."""
    sizes = {"num_attention_heads": 36, "num_key_value_heads": 12, "head_dim": 4, "vocab_size": 308}
    config, weights = load(write_model(num_hidden_layers=1, **sizes))
    wanted = logits_of(ReferenceModel(config, weights), IDS)
    model = KernelModel(config, shard_weights(config, weights, 32), SimulatedDevice("trn2", 32), 128)
    logits = logits_of(model, IDS[: PROMPT + 1])
    assert np.abs(logits - wanted[: len(logits)]).max() <= 4 * noise(
        config, weights, wanted
    )  # as in test_kernel_model


UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 54}
SAID = [
    "9 query heads in 3 groups: 3 a rank, 3 of 12 are padding, 1 rank holds padding only",
    "an MLP of width 54: 14 a rank, 2 of 56 are padding",
]


@pytest.mark.slow
def test_the_report_says_what_ranks_hold_padded(write_model, tmp_path, capsys) -> None:
    folder, path = str(write_model(**UNEVEN)), tmp_path / "out.json"
    arguments = ["--model", folder, "--max-new-tokens", "2", "--json", str(path), "--tp"]
    for ranks, uneven in ((1, []), (3, []), (4, SAID)):
        assert main(["generate", *arguments, str(ranks)]) == 0
        assert json.loads(path.read_text())["uneven"] == uneven
        text = " ".join(capsys.readouterr().out.split())
        assert (f"on 4 ranks {'; '.join(SAID)}" in text) == bool(uneven)


@pytest.mark.parametrize(("tp", "fits"), [("1", False), ("2", True)])
def test_one_rank_has_nobody_to_cut_a_sequence_with(write_model, capsys, tp, fits) -> None:
    arguments = ["--model", str(write_model()), "--backend", "numpy", "--max-new-tokens", "1", "--tp", tp]
    if fits:
        assert main(["generate", *arguments, "--sp"]) == 0
        return
    message = (
        "nkw: error: --sp cuts prompts over tensor-parallel ranks and there is 1; ask for more with --tp"
    )
    assert refused(capsys, *arguments, "--sp") == message


def test_ranks_beyond_the_heads_give_the_tokens_of_one(write_model, tmp_path, capsys) -> None:
    folder, path = str(write_model(eos_token_id=None)), tmp_path / "out.json"
    generations, uneven = [], []
    for ranks in ("1", "7"):
        arguments = ["--model", folder, "--prompt", "a", "--max-new-tokens", "3", "--tp", ranks]
        assert main(["generate", *arguments, "--json", str(path)]) == 0
        result = json.loads(path.read_text())
        generations += result["generations"]
        uneven.append(result["uneven"])
    assert generations[0]["generated_ids"] == generations[1]["generated_ids"]
    assert [generation["checks"]["tokens_equal"] for generation in generations] == [3, 3]
    heads = "4 query heads in 2 groups: 1 a rank, 3 of 7 are padding, 3 ranks hold padding only"
    assert not uneven[0]
    assert uneven[1][0].startswith(heads)
