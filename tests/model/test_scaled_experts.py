"""Routed experts whose weights have eight bits with scales: what ranks hold, and the tokens of the reference."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from model.families import load_config
from model.formats import QuantisedWeight
from model.formats.scaled import E4M3, INT8
from model.layers.shard import Shard
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.sizes import load_model
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.deep import deep_except
from tests.model.folders import byte_tokenizer
from tests.model.oracle import random_model
from tests.model.test_expert_parallel import model_of
from tests.model.test_family_meshes import steps
from tests.model.test_scaled_weights import BFLOAT16, FLOAT32, check_halves, quantise, write
from tests.model.tiny_families import COMMON, TINY

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

MATRICES = ("w_gate", "w_up", "w_down")
FAMILIES = [
    *(
        "mixtral",
        "qwen3 with experts",
        "olmoe",
        "deepseek v3",
        "glm4-moe",
        "afmoe",
        "solar-open",
        "minimax-m2",
    ),
    *("deepseek v2", "qwen3-next", "mixtral with a window"),
]
SCHEMES = ["compressed, channel", "int-quantized", "a scale for each tensor", "blocks of 128"]


@pytest.mark.parametrize(
    ("name", "scheme"), deep_except([(name, scheme) for name in FAMILIES for scheme in SCHEMES], 5)
)
def test_ranks_hold_experts_as_they_are_stored(tmp_path: Path, name: str, scheme: str) -> None:
    """Two ranks divide the intermediate size, and two more the experts where their number is even."""
    _, plain = write(tmp_path, name, scheme)
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    wide = {name: np.asarray(weight) for name, weight in checkpoint.items() if name in plain}
    count = next(block.mlp.count for block in config.blocks if hasattr(block.mlp, "per_token"))
    expert_ranks = 2 - count % 2
    shards = [Shard(number % 2, 2, number // 2, expert_ranks) for number in range(2 * expert_ranks)]
    stored = shard_weights(config, checkpoint, 2, shards, dtype="bfloat16")
    widened = shard_weights(config, dict(checkpoint) | wide, 2, shards, dtype="bfloat16")
    for rank, plain_rank in zip(stored, widened, strict=True):
        names = [
            name
            for name in plain_rank.arrays
            if ".experts.w_" in name and name.rpartition(".")[2] in MATRICES
        ]
        assert names and all(rank.arrays[name].shape[0] == count // expert_ranks for name in names)
        for name in names:
            blocks = rank.arrays.get(f"{name}_block_scales")
            scales = (
                rank.arrays[f"{name}_scales"] if blocks is None else spread_blocks(blocks, rank.arrays[name])
            )
            check_halves(rank.arrays[name], scales, plain_rank.arrays[name])


def spread_blocks(scales: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Return the scale of each element of a stack [experts, in, out]."""
    _, depth, columns = elements.shape
    return np.stack([np.kron(expert, np.ones((128, 128), FLOAT32))[:depth, :columns] for expert in scales])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*SCHEMES[:2], SCHEMES[3]])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("mixtral", Mesh(1)),
        ("mixtral", Mesh(2)),
        ("qwen3 with experts", Mesh(2, sequence=True)),
        ("olmoe", Mesh(1, 2, expert=2)),
        ("deepseek v3", Mesh(2, 2, expert=2)),
        ("afmoe", Mesh(2, 2, sequence=True, expert=2)),
    ],
    ids=str,
)
def test_quantised_experts_give_the_logits_of_the_reference(
    tmp_path: Path, name: str, mesh: Mesh, scheme: str
) -> None:
    """The reference widens e4m3fn, of whose codes 16 change by 2^-9 of a scale: 2^-17 of a column's largest weight.

    All weights are widened to float32, as bfloat16 would round those of the reference.
    """
    write(tmp_path, name, scheme)
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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*SCHEMES[:2], SCHEMES[3]])
@pytest.mark.parametrize("ranks", [("1", "1", "1"), ("2", "1", "1"), ("1", "2", "2")])
def test_text_is_generated_with_quantised_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, ranks: tuple[str, str, str]
) -> None:
    """Tensor-parallel ranks, and ranks that divide the experts, in bfloat16."""
    fields = {**COMMON, **TINY["olmoe"][1], "vocab_size": 300}
    random_model("Olmoe", fields, 6).save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    quantise(tmp_path, scheme)
    prompts = [word for _ in range(int(ranks[1])) for word in ("--prompt", "Tom had")]
    arguments = ["--model", str(tmp_path), *prompts, "--max-new-tokens", "4", "--tp", ranks[0]]
    assert main(["generate", *arguments, "--dp", ranks[1], "--ep", ranks[2], "--dtype", "bfloat16"]) == 0
    count = 4 * int(ranks[1])
    assert f"{count} of {count}" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "is_stored"), [(1, True), (2, True), (4, True), (3, False)])
def test_ranks_that_cut_inside_a_block_widen_it(tmp_path: Path, ranks: int, is_stored: bool) -> None:
    """A rank's part of the intermediate size of 256 is whole blocks of 128, or inside one; a third of it is neither."""
    fields = dict(hidden_size=136, intermediate_size=256, num_local_experts=3, num_experts_per_tok=2)
    fields |= dict(num_hidden_layers=1, num_attention_heads=12, num_key_value_heads=12, head_dim=128)
    random_model("Mixtral", {**COMMON, **fields}, 6).save_pretrained(tmp_path)
    _, plain = quantise(tmp_path, "blocks of 128")
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    wide = {name: np.asarray(weight) for name, weight in checkpoint.items() if name in plain}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        stored = shard_weights(config, checkpoint, ranks, dtype="bfloat16")
    sentence = (
        "layers.*.experts.w_gate, layers.*.experts.w_up and layers.*.experts.w_down are widened at load, because 3 "
        "tensor-parallel ranks cut inside the blocks of 128 by 128 elements of fp8; kernels read them as stored with "
        "1, 2 or 4 ranks."
    )
    assert [str(warning.message) for warning in warned] == ([] if is_stored else [sentence])
    widened = shard_weights(config, dict(checkpoint) | wide, ranks, dtype="bfloat16")
    for rank, plain_rank in zip(stored, widened, strict=True):
        for matrix in MATRICES:
            name = f"layers.0.experts.{matrix}"
            array = rank.arrays[name]
            assert (f"{name}_block_scales" in rank.arrays) == (array.dtype == E4M3) == is_stored
            if is_stored:
                scales = spread_blocks(rank.arrays[f"{name}_block_scales"], array)
                check_halves(array, scales, plain_rank.arrays[name])
            else:
                assert np.array_equal(array, plain_rank.arrays[name])
    nbytes = sum(array.nbytes for array in stored[0].arrays.values())
    model = load_model(tmp_path / "config.json")
    assert model.describe_cuts(ranks, [1, 2, 3, 4]) == ([] if is_stored else [sentence])
    sections = [*model.blocks, model.embedding, model.head]
    counted = sum(section.count * section.count_weight_bytes(ranks, 1, "bfloat16") for section in sections)
    assert counted == nbytes


def test_experts_of_which_one_is_not_quantised_are_widened(tmp_path: Path) -> None:
    """As the ignore list of a checkpoint may have it; the other matrices stay as they are stored."""
    write(tmp_path, "mixtral", "int-quantized")
    config = load_config(tmp_path)
    checkpoint = dict(open_checkpoint(tmp_path, config))
    for changed in (False, True):
        if changed:
            name = next(name for name in checkpoint if name.endswith("experts.3.w1.weight"))
            checkpoint[name] = np.asarray(checkpoint[name])
        (rank,) = shard_weights(config, checkpoint, 1, dtype="bfloat16")
        layer = f"layers.{name.split('.')[2] if changed else 0}.experts"
        dtypes = [rank.arrays[f"{layer}.{matrix}"].dtype for matrix in MATRICES]
        assert dtypes == [BFLOAT16 if changed else INT8, INT8, INT8]
        assert rank.arrays[f"{layer}.w_up_scales"].dtype == FLOAT32
