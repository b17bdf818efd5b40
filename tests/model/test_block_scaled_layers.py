"""Layers of a checkpoint of e4m3fn with a scale for each 128 rows and columns, as Qwen3 and DeepSeek publish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.device import SimulatedDevice
from model.families import load_config
from model.formats import QuantisedWeight
from model.formats.scaled import E4M3
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.sizes import load_model
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.folders import byte_tokenizer
from tests.model.oracle import random_model
from tests.model.test_expert_parallel import model_of
from tests.model.test_family_meshes import steps
from tests.model.test_scaled_weights import FLOAT32, check_halves, quantise
from tests.model.tiny_families import COMMON

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128
)
MATRICES = ("mlp.w_gate", "mlp.w_up", "mlp.w_down")


def write(folder: Path, **sizes: Any) -> dict[str, np.ndarray]:
    """Write a folder of Qwen3 in blocks of 128 x 128; return the numbers that its tensors stand for."""
    fields = {**COMMON, "vocab_size": 300, "num_hidden_layers": 2, **SIZES, **sizes}
    random_model("Qwen3", fields, 6).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return quantise(folder, "blocks of 128")[1]


def spread(scales: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Return the scale of each element of a matrix [in, out]."""
    depth, columns = elements.shape
    return np.kron(scales, np.ones((128, 128), FLOAT32))[:depth, :columns]


@pytest.mark.parametrize(("ranks", "is_stored"), [(1, True), (2, True), (4, True), (3, False)])
def test_ranks_hold_blocks_as_they_are_stored(tmp_path: Path, ranks: int, is_stored: bool) -> None:
    """A third of the intermediate size of 512 cuts inside a block, so that the matrices of the MLP are widened."""
    plain = write(tmp_path)
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    wide = {name: np.asarray(weight) for name, weight in checkpoint.items() if name in plain}
    stored = shard_weights(config, checkpoint, ranks, dtype="bfloat16")
    widened = shard_weights(config, dict(checkpoint) | wide, ranks, dtype="bfloat16")
    for rank, plain_rank in zip(stored, widened, strict=True):
        for matrix in MATRICES:
            name = f"layers.0.{matrix}"
            array, scales = rank.arrays[name], rank.arrays.get(f"{name}_block_scales")
            assert (scales is not None) == (array.dtype == E4M3) == is_stored
            if scales is None:
                assert np.array_equal(array, plain_rank.arrays[name])
            else:
                check_halves(array, spread(scales, array), plain_rank.arrays[name])
    nbytes = sum(array.nbytes for array in stored[0].arrays.values())
    model = load_model(tmp_path / "config.json")
    sections = [*model.blocks, model.embedding, model.head]
    counted = sum(section.count * section.count_weight_bytes(ranks, 1, "bfloat16") for section in sections)
    assert counted == nbytes


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2), Mesh(2, sequence=True)], ids=str)
def test_logits_are_those_of_the_reference(tmp_path: Path, mesh: Mesh) -> None:
    """The reference widens e4m3fn, of whose codes 16 change by 2^-9 of a scale: 2^-17 of a block's largest weight.

    All weights are widened to float32, as bfloat16 would round those of the reference.
    """
    write(tmp_path)
    config = load_config(tmp_path)
    weights = {
        name: weight.astype(FLOAT32) if isinstance(weight, QuantisedWeight) else weight
        for name, weight in open_checkpoint(tmp_path, config).items()
    }
    for output, reference in zip(
        steps(model_of(config, weights, mesh)), steps(ReferenceModel(config, weights)), strict=True
    ):
        tolerance = 1e-4 * np.abs(reference.logits).max()
        np.testing.assert_allclose(output.logits, reference.logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_text_is_generated_by_kernels_that_read_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    """The tokens are those of the reference, in bfloat16; each launch of `mlp` has all block scales."""
    write(tmp_path)
    launches: list[tuple[str, set[str]]] = []
    run = SimulatedDevice.run

    def record(
        self: SimulatedDevice, kernel: str, arguments: Sequence[Mapping[str, Any]], *options: Any
    ) -> list[Any]:
        launches.append((kernel, {name for name, argument in arguments[0].items() if argument is not None}))
        return run(self, kernel, arguments, *options)

    monkeypatch.setattr(SimulatedDevice, "run", record)
    flags = ["--tp", ranks, "--dtype", "bfloat16"]
    arguments = ["--model", str(tmp_path), "--prompt", "Tom had", "--max-new-tokens", "4", *flags]
    assert main(["generate", *arguments]) == 0
    assert "4 of 4" in capsys.readouterr().out
    blocks = {f"{name.removeprefix('mlp.')}_block_scales" for name in MATRICES}
    layers = [names for kernel, names in launches if kernel == "mlp"]
    assert len(layers) >= 4 and all(names >= blocks for names in layers)
