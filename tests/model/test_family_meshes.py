"""Every dense family on meshes of ranks and stages: the tokens of one rank, the logits of transformers.

Most tiny models have 4 query heads: 3 ranks hold padding, and with 2 key/value heads or 1 some ranks hold the same one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.kernel_model import KernelModel
from model.mesh import Mesh
from model.reference import ReferenceModel
from model.sampling import StepOutput
from model.weights import shard_weights
from tests.model.test_dense_families import CACHE, IDS, load, oracle
from tests.model.tiny_families import TINY, write_tiny

PROMPTS = [IDS[:15], IDS[4:11]]
NEXT = [IDS[15], IDS[11]]
MESHES = {
    "qwen3": [Mesh(1, 2), Mesh(4, 2), Mesh(5), Mesh(6)],
    "gpt2": [Mesh(1, 2), Mesh(2), Mesh(2, 2), Mesh(3)],
    "qwen3-next": [Mesh(1, 2), Mesh(2, 2)],
}
"""Those with another number of heads than 4: 6 in two groups, 3, and 2 key heads of the delta rule."""
OTHERS = [Mesh(1, 2), Mesh(2, 2), Mesh(3), Mesh(4)]
STAGES = Mesh(2, pipeline=2)

QUICK = {*{family: name for name, (family, _) in TINY.items()}.values(), "olmo2"}
"""The last model of every family, and one whose ranks hold keys normalised whole, some of them only padding."""


def steps(model: ReferenceModel | KernelModel) -> list[StepOutput]:
    """A step of prompts of different lengths, and one of a token each."""
    return [*model.prefill(PROMPTS), *model.decode(NEXT, [len(each) for each in PROMPTS])]


@cache
def one_rank(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray], list[StepOutput]]:
    config, weights = load(folder)
    return config, weights, steps(ReferenceModel(config, weights))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("tiny") for name in TINY}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            name,
            mesh,
            marks=[] if name in QUICK and mesh is not STAGES else pytest.mark.deep,
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
    device = SimulatedDevice("trn2", mesh.ranks)
    model = KernelModel(config, shards, device, CACHE, sequences=len(PROMPTS), mesh=mesh)
    bound = 2 * oracle(name).bound()  # both models err
    for own, other in zip(steps(model), wanted, strict=True):
        assert np.abs(own.logits - other.logits).max() <= bound
        assert own.ids[0] == np.argmax(own.logits)
        second, first = np.sort(other.logits)[-2:]
        assert first - second <= 2 * bound or own.ids[0] == np.argmax(other.logits)
