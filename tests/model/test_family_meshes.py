"""Every dense family on meshes of ranks and stages: the tokens of one rank, the logits of transformers.

Most tiny models have 4 query heads: 3 ranks hold padding, and with 2 key/value heads or 1 some ranks hold the same one.
`make test` computes each feature of a family on one mesh, `make deep` every family on every mesh.
Programs are replayed as recorded; those of test_dense_families are rewritten.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from model.sampling import StepOutput
from tests.model.test_dense_families import CACHE, IDS, load, oracle
from tests.model.tiny_families import FEATURES, TINY, write_tiny

PROMPTS = [IDS[:15], IDS[4:11]]
NEXT = [IDS[15], IDS[11]]
MESHES = {
    "qwen3": [Mesh(1, 2), Mesh(4, 2), Mesh(5), Mesh(8)],
    "gpt2": [Mesh(1, 2), Mesh(2), Mesh(2, 2), Mesh(3)],
    "qwen3-next": [Mesh(1, 2), Mesh(2, 2), Mesh(5)],
    "deepseek v2": [Mesh(1, 2), Mesh(2, 2), Mesh(3), Mesh(7)],
    "mamba2": [Mesh(1, 2), Mesh(2, 2), Mesh(4), Mesh(9)],
    "gpt2 untied": [Mesh(1, 2), Mesh(8, sequence=True)],
}
"""Those with another number of heads than 4: 6 in two groups, 3, and 2 key heads of the delta rule; and those with a
mesh of more ranks than heads, of which some hold padding only."""
OTHERS = [Mesh(1, 2), Mesh(2, 2), Mesh(3), Mesh(4)]
STAGES = Mesh(2, pipeline=2)


def pairs() -> set[tuple[str, Mesh]]:
    """Return the models and meshes that `make test` runs: each feature on one mesh of OTHERS, and all of MESHES."""
    covered = {(name, mesh) for name, meshes in MESHES.items() for mesh in meshes}
    return covered | {(models[0], OTHERS[n % len(OTHERS)]) for n, models in enumerate(FEATURES.values())}


def steps(model: ReferenceModel | KernelModel) -> list[StepOutput]:
    """Run a step of prompts of different lengths and a step of one token for each sequence."""
    return [*model.prefill(PROMPTS), *model.decode(NEXT, [len(prompt) for prompt in PROMPTS])]


@cache
def one_rank(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray], list[StepOutput]]:
    config, weights = load(folder)
    return config, weights, steps(ReferenceModel(config, weights))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("tiny") for name in TINY}


def test_every_family_has_a_feature_and_every_mesh_several_features() -> None:
    featured = {name for models in FEATURES.values() for name in models}
    assert {TINY[name][0] for name in (*featured, *MESHES)} == {family for family, _ in TINY.values()}
    for mesh in OTHERS:
        assert len({name for name, paired_mesh in pairs() if paired_mesh == mesh}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name,
            mesh,
            marks=[] if (name, mesh) in pairs() else pytest.mark.deep,
            id=f"{name}-{mesh}",
        )
        for name in TINY
        for mesh in (*MESHES.get(name, OTHERS), STAGES)
    ],
)
def test_every_mesh_gives_the_tokens_of_one_rank(folders: dict[str, Path], name: str, mesh: Mesh) -> None:
    folder = folders[name]
    if not any(folder.iterdir()):
        write_tiny(folder, name)
    config, weights, wanted = one_rank(folder)
    shards = shard_weights(config, weights, mesh.tensor)
    device = SimulatedDevice("trn2", mesh.ranks, exact=True)
    model = KernelModel(config, shards, device, CACHE, sequences=len(PROMPTS), mesh=mesh)
    bound = 2 * oracle(name).bound()  # both models err
    for output, other in zip(steps(model), wanted, strict=True):
        assert np.abs(output.logits - other.logits).max() <= bound
        assert output.ids[0] == np.argmax(output.logits)
        second, first = np.sort(other.logits)[-2:]
        assert first - second <= 2 * bound or output.ids[0] == np.argmax(other.logits)
