"""Pipelines: the layers of each stage, what passes between stages, and the tokens of one rank from all of them."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest

from model.commands.generate.micro_batches import size_micro_batches, split_into_micro_batches
from model.device import DryDevice, SimulatedDevice, schedule_stages
from model.errors import ModelError
from model.execution.stages import (
    divide_evenly,
    divide_stages,
    find_sent_values,
    find_stage_ends,
    list_stage_layers,
)
from model.families import compose
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import list_states
from model.loading.weights import describe_all_ranks, shard_weights
from model.mesh import Mesh
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.deep import deep_except
from tests.model.test_cli import refused
from tests.model.test_dense_families import CACHE, oracle
from tests.model.test_dense_families import load as load_tiny
from tests.model.test_family_meshes import PROMPTS, steps
from tests.model.test_kernel_model import load
from tests.model.tiny_families import write_tiny

FLOAT32 = np.dtype(np.float32)
STEP = StepShape(Phase.decode, 2, 2, 128, 128, 1, FLOAT32, WeightDtypes(FLOAT32))


def test_ranks_of_a_stage_follow_each_other() -> None:
    mesh = Mesh(tensor=2, data=2, pipeline=3)
    assert (mesh.ranks, mesh.stage_ranks) == (12, 4)
    assert [mesh.find_stage(rank) for rank in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert [mesh.find_group(rank) for rank in range(12)] == [0, 0, 1, 1] * 3
    assert [mesh.shard(rank).rank for rank in range(12)] == [0, 1] * 6


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_has_a_smaller_largest_part(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = random.integers(1, 9, 7).tolist()
    cuts = sorted(random.permutation(range(1, 7))[:5].tolist())
    num_stages = int(random.integers(1, 5))
    stages = divide_evenly(costs, num_stages, cuts)
    assert [number for stage in stages for number in stage] == list(range(7))
    assert {stage.stop for stage in stages[:-1]} <= set(cuts)
    alternatives = [
        max(sum(costs[a:b]) for a, b in zip((0, *ends), (*ends, 7)))
        for ends in combinations(cuts, num_stages - 1)
    ]
    assert max(sum(costs[stage.start : stage.stop]) for stage in stages) == min(alternatives)


def test_equal_layers_are_divided_evenly() -> None:
    assert [len(stage) for stage in divide_evenly([1] * 10, 4, range(1, 10))] == [2, 2, 3, 3]
    assert [len(stage) for stage in divide_evenly([1] * 5 + [2], 2, range(1, 6))] == [3, 3]


def test_there_are_no_more_stages_than_layers() -> None:
    assert len(divide_evenly([1] * 3, 3, [1, 2])) == 3
    with pytest.raises(ModelError, match=r"^4 pipeline stages for 3 layers; this model takes --pp 1 to 3$"):
        divide_evenly([1] * 3, 4, [1, 2])
    with pytest.raises(ModelError, match=r"3 layers, some of which share a cache; .* --pp 1 to 2$"):
        divide_evenly([1] * 3, 3, [1])


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 1), (2, 3), (4, 8), (7, 2)])
def test_equal_stages_wait_as_the_closed_form_says(stages: int, batches: int) -> None:
    done = schedule_stages([[3.0] * stages] * batches, [[0.0] * (stages - 1)] * batches)
    assert done.length_ns == 3.0 * (batches + stages - 1)
    assert done.bubble_share == pytest.approx((stages - 1) / (batches + stages - 1), rel=1e-12, abs=1e-12)


def test_the_slowest_stage_sets_the_pace_and_sends_take_both_stages() -> None:
    done = schedule_stages([[1.0, 5.0]] * 3, [[2.0]] * 3)
    # The first stage sends when the second is free: at 1, at 8 and at 15; the last micro-batch ends 2 + 5 later.
    assert (done.length_ns, done.bubble_share) == (22.0, pytest.approx(1 - (3 * 6 + 3 * 4) / (2 * 22)))


def test_micro_batches_differ_by_one_sequence_at_most() -> None:
    assert size_micro_batches(7, 3) == [3, 2, 2]
    assert [list(micro_batch) for micro_batch in split_into_micro_batches("abcdefg", [3, 2, 2])] == [
        ["a", "b", "c"],
        ["d", "e"],
        ["f", "g"],
    ]


def test_a_stage_holds_its_own_layers_only(write_model) -> None:
    config, weights = load(write_model(num_hidden_layers=3))
    mesh = Mesh(2, pipeline=2)
    model = KernelModel(config, shard_weights(config, weights, 2), DryDevice("trn2", 4), 128, mesh=mesh)
    rank_arrays = model._runner.network._rank_arrays
    decoder = compose(config)
    stages = divide_stages(decoder, 2, STEP)
    assert sum(map(len, stages)) == len(decoder.sections) == 5
    for rank, arrays in enumerate(rank_arrays):
        layers = [layer for section in stages[rank // 2] for layer in section]
        stage_names = {weight.name for layer in layers for weight in layer.weights}
        everything = {weight.name for weight in decoder.weights}
        assert stage_names < everything and set(arrays) & everything == stage_names
        states = {state.name for layer in decoder.layers for state in list_states(layer, STEP)}
        assert set(arrays) & states == {state.name for layer in layers for state in list_states(layer, STEP)}


def test_a_rank_of_its_own_reads_the_weights_of_its_stage_only(write_model) -> None:
    """As torchrun starts them: together the ranks hold every weight, and what stages hold is what a run needs."""
    config, weights = load(write_model(num_hidden_layers=3))
    decoder, mesh = compose(config), Mesh(2, pipeline=2)
    all_arrays = {
        rank_weights.shard: rank_weights.arrays for rank_weights in shard_weights(config, weights, 2)
    }
    read: dict[int, set[str]] = {}

    class Reads(dict[str, np.ndarray]):
        def __getitem__(self, name: str) -> np.ndarray:
            read[stage].add(name)
            return super().__getitem__(name)

    for rank in range(4):
        stage = mesh.find_stage(rank)
        read[stage] = set()
        layers = list_stage_layers(decoder, mesh, rank)
        assert layers == [layer for section in divide_stages(decoder, 2, STEP)[stage] for layer in section]
        (stage_weights,) = shard_weights(config, Reads(weights), 2, [mesh.shard(rank)], layers=layers)
        assert set(stage_weights.arrays) == {weight.name for layer in layers for weight in layer.weights}
        for name, array in stage_weights.arrays.items():
            assert np.array_equal(array, all_arrays[stage_weights.shard][name])
        dry = {
            rank_weights.shard: rank_weights.arrays
            for rank_weights in describe_all_ranks(
                config, stage_weights.dtypes, stage_weights.dtype, Mesh(stage_weights.shard.ranks).shards
            )
        }
        for shard, arrays in all_arrays.items():
            assert {name: (array.shape, array.dtype) for name, array in dry[shard].items()} == {
                name: (array.shape, array.dtype) for name, array in arrays.items()
            }
    assert read[0] | read[1] == set(weights)
    assert not any(".layers.2." in name for name in read[0])
    assert not any(".layers.0." in name for name in read[1])
    assert list_stage_layers(decoder, Mesh(2), 0) == list(decoder.all_layers)


def test_layers_that_share_a_cache_lie_on_one_stage(tmp_path) -> None:
    write_tiny(tmp_path, "gemma4")
    config, _ = load_tiny(tmp_path)
    decoder = compose(config)
    cuts = find_stage_ends(decoder, STEP)
    assert 0 < len(cuts) < len(decoder.blocks) - 1
    for count in range(1, len(decoder.blocks)):
        names = {
            sent_value.name
            for sent_value in find_sent_values(decoder.blocks[:count], decoder.blocks[count:], STEP)
        }
        assert names == {"x"} if count in cuts else len(names) > 1
    passed = {
        sent_value.name
        for sent_value in find_sent_values((decoder.sections[0], decoder.blocks[0]), decoder.blocks[1:], STEP)
    }
    assert "x" in passed and len(passed) > 1  # the inputs of every layer besides


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    deep_except(
        [
            ("llama with biases", Mesh(2, 2, pipeline=2)),
            ("llama with biases", Mesh(2, sequence=True, pipeline=3)),
            ("gemma4", Mesh(pipeline=2)),
            ("gpt2", Mesh(2, pipeline=3)),
            ("mixtral", Mesh(pipeline=2)),
        ],
        2,
    ),
    ids=str,
)
def test_every_pipeline_has_the_logits_of_one_rank(tmp_path, name: str, mesh: Mesh) -> None:
    write_tiny(tmp_path, name)
    config, weights = load_tiny(tmp_path)
    shards = shard_weights(config, weights, mesh.tensor)
    device = SimulatedDevice("trn2", mesh.ranks)
    model = KernelModel(config, shards, device, CACHE, sequences=len(PROMPTS), mesh=mesh)
    bound = 2 * oracle(name).bound()  # both models err
    for output, wanted in zip(steps(model), steps(ReferenceModel(config, weights)), strict=True):
        assert np.abs(output.logits - wanted.logits).max() <= bound
        assert output.ids[0] == np.argmax(output.logits)


GIVEN = ["--prompt", "a", "--prompt", "a longer one", "--prompt", "b", "--max-new-tokens", "3"]


@pytest.mark.slow
def test_micro_batches_give_the_tokens_of_one_rank_and_the_report_has_their_bubble(
    write_model, tmp_path, capsys
) -> None:
    folder = str(write_model(eos_token_id=None, num_hidden_layers=2))
    results = []
    for mesh in ([], ["--pp", "2"], ["--pp", "2", "--micro-batches", "3"], ["--pp", "2", "--dp", "3"]):
        path = tmp_path / "out.json"
        assert main(["generate", "--model", folder, *GIVEN, *mesh, "--json", str(path)]) == 0
        results.append(json.loads(path.read_text()))
    ids = [[generation["generated_ids"] for generation in result["generations"]] for result in results]
    assert all(group_ids == ids[0] for group_ids in ids)
    assert all(
        generation["checks"]["tokens_equal"] == 3
        for result in results
        for generation in result["generations"]
    )
    assert [(document["pp"], document["micro_batches"]) for document in results] == [
        (1, 1),
        (2, 2),
        (2, 3),
        (2, 1),
    ]
    bubbles = [document["predictions"]["trn2"]["per_token"]["bubble_share"] for document in results]
    assert bubbles[0] == 0 < bubbles[2] < bubbles[1] < bubbles[3]
    report = " ".join(capsys.readouterr().out.split())
    assert [
        words
        for words in (
            "trn2: 3 micro-batches through 2 stages; the bubble is",
            "25% if stages were equal and sent nothing",
        )
        if words not in report
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "works", "message"),
    [
        (["--pp", "3"], ["--pp", "2"], "3 pipeline stages for 2 layers; this model takes --pp 1 to 2"),
        (
            ["--micro-batches", "4"],
            ["--micro-batches", "3"],
            "4 micro-batches of 3 prompts; this run takes --micro-batches 1 to 3",
        ),
        (
            ["--dp", "2", "--micro-batches", "2"],
            ["--dp", "2", "--micro-batches", "1"],
            "2 micro-batches of 3 prompts in 2 groups; this run takes --micro-batches 1",
        ),
        (
            ["--pp", "2", "--tp", "17"],
            ["--pp", "2", "--tp", "4"],
            "--pp 2 times --tp 17 times --dp 1 are 34 ranks; one run takes 32: --tp 1 to 16",
        ),
    ],
)
def test_refuses_what_a_pipeline_cannot_have(write_model, capsys, options, works, message) -> None:
    arguments = ["--model", str(write_model(num_hidden_layers=2)), "--backend", "numpy", *GIVEN]
    assert refused(capsys, *arguments, *options) == f"nkw: error: {message}"
    assert main(["generate", *arguments, *works]) == 0
