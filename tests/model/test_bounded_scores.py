"""Scores of attention that norms of heads bound, for which kernels need no maximum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.layers.denoiser.attention import MOST_BOUNDED_SCORE, bound_scores
from model.layers.denoiser.joint_attention import JointAttention
from model.loading.checkpoint import Checkpoint
from model.loading.component import LoadedComponent
from model.mesh import Mesh
from model.runners.component import KernelComponent, ReferenceComponent, make_step
from nki_kernels.prefill.checks import MAX_BOUNDED_SCORE
from tests.model.denoiser_oracles import CASES
from tests.model.test_denoisers import UNIT, bound_error, open_case

SECOND = "sd3 with second attention and head norms"


def find_joint_attention(model: LoadedComponent) -> JointAttention:
    """Return the first layer of joint attention."""
    return next(layer for layer in model.network.layers if isinstance(layer, JointAttention))


def read_arrays(model: LoadedComponent) -> dict[str, np.ndarray]:
    """Return copies of the weights of one rank by name."""
    (shard,) = model.load_shards(Mesh(1))
    return {name: array.copy() for name, array in shard.arrays.items()}


def list_norms(layer: JointAttention) -> list[tuple[str, str]]:
    """Return the names of the norms of queries and keys of both streams."""
    return [(stream.head_norms[0].name, stream.head_norms[1].name) for stream in (layer.image, layer.text)]


def test_the_limit_is_that_of_the_kernel() -> None:
    assert MOST_BOUNDED_SCORE == MAX_BOUNDED_SCORE


@pytest.mark.parametrize("name", ["flux with guidance", SECOND])
def test_bound_is_reached_and_not_exceeded(name: str, tmp_path: Path) -> None:
    model = open_case(CASES[name], tmp_path)
    layer, arrays = find_joint_attention(model), read_arrays(model)
    rng = np.random.default_rng(3)
    weights = []
    for names in list_norms(layer):
        for norm in names:
            arrays[norm] = rng.normal(0, 2, arrays[norm].shape).astype(np.float32)
        weights.append([arrays[norm][0].astype(np.float64) + 1 for norm in names])
    bound = bound_scores((layer.image, layer.text), arrays)
    heads = layer.image.heads
    size = heads.head_dim
    largest = 0.0
    for q_weight in (weights[0][0], weights[1][0]):
        for k_weight in (weights[0][1], weights[1][1]):
            # All of the length of a head in one element, turned onto another one of its pair by a rotation.
            for first, second in [(i, j) for i in range(size) for j in (i, (i + size // 2) % size)]:
                if first == second or layer.image.rotation is not None:
                    product = size * abs(q_weight[first] * k_weight[second])
                    largest = max(largest, product * heads.score_scale)
            rows = rng.standard_normal((2, 200, size))
            rows /= np.sqrt(np.square(rows).mean(axis=2, keepdims=True))
            scores = (rows[0] * q_weight) @ (rows[1] * k_weight).T * heads.score_scale
            assert np.abs(scores).max() <= bound
    np.testing.assert_allclose(largest * (1 + 2.0**-7), bound, rtol=1e-6)


def scale_norms(arrays: Mapping[str, np.ndarray], layer: JointAttention, bound: float) -> None:
    """Set the weights of norms of queries to 1 but for one, so that scores reach `bound`, and those of keys to 1."""
    heads = layer.image.heads
    for queries, keys in list_norms(layer):
        arrays[queries][:], arrays[keys][:] = 0, 0
    (queries, _), _ = list_norms(layer)
    arrays[queries][0, 3] = bound / (heads.head_dim * heads.score_scale * (1 + 2.0**-7)) - 1


@pytest.mark.parametrize(("bound", "is_bounded"), [(63.999, True), (64.001, False), (np.nan, False)])
def test_layers_are_bounded_up_to_the_limit(bound: float, is_bounded: bool, tmp_path: Path) -> None:
    model = open_case(CASES[SECOND], tmp_path)
    layer, arrays = find_joint_attention(model), read_arrays(model)
    assert layer.second is not None
    names = {layer.name, layer.second.name}
    assert set(layer.list_bounded_layers(arrays)) == names
    scale_norms(arrays, layer, bound)
    assert set(layer.list_bounded_layers(arrays)) == names - (set() if is_bounded else {layer.name})


def test_layers_without_norms_of_heads_are_not_bounded(tmp_path: Path) -> None:
    model = open_case(CASES["sd3"], tmp_path)
    layer = find_joint_attention(model)
    assert layer.list_bounded_layers(read_arrays(model)) == []
    step = make_step(model.config, model.activations, model.choose_dtypes("trn2"))
    assert [launch.arguments.get("bounded") for launch in layer.launches(step)].count(False) == 1


def scale_head_norms(model: LoadedComponent, factor: int) -> LoadedComponent:
    """Return the component with the norms of queries multiplied by a factor."""
    assert model.checkpoint is not None
    weights = {
        name: np.asarray(tensor) * (factor if "norm_q" in name or "norm_added_q" in name else 1)
        for name, tensor in model.checkpoint.items()
    }
    return replace(model, checkpoint=Checkpoint(weights))


@pytest.mark.parametrize(("factor", "is_bounded"), [(1, True), (250, False)])
def test_kernels_equal_numpy_with_and_without_maxima(factor: int, is_bounded: bool, tmp_path: Path) -> None:
    from model.device import SimulatedDevice

    case = CASES[SECOND]
    model = scale_head_norms(open_case(case, tmp_path), factor)
    assert bool(find_joint_attention(model).list_bounded_layers(read_arrays(model))) == is_bounded
    images = KernelComponent(model, SimulatedDevice("trn2", 1), 2).run(case.draw_inputs())["x"]
    expected = ReferenceComponent(model).run(case.draw_inputs())["x"]
    np.testing.assert_allclose(images, expected, rtol=0, atol=factor * bound_error(expected, UNIT, case))


def test_dry_runs_take_the_norms_of_the_checkpoint(tmp_path: Path) -> None:
    """A plan, which has no weights, takes weights of 1."""
    from model.device import DryDevice
    from model.runners.image_times import DryBackend, TimedComponent

    model = open_case(CASES[SECOND], tmp_path)
    times = []
    for timed in (scale_head_norms(model, 1), replace(model, checkpoint=None), scale_head_norms(model, 250)):
        device = DryDevice("trn2", 1, one_for_all=True)
        component = DryBackend(device, "trn2").create(timed, 2, "denoiser")
        assert isinstance(component, TimedComponent)
        times.append(component.prediction.program_ns)
    assert times[0] == times[1] != times[2]
