"""Layers of a checkpoint of e4m3fn with a scale for each 128 rows and columns, as Qwen3 and DeepSeek publish them."""

from __future__ import annotations

import warnings
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
from tests.model.tiny_families import COMMON, YARN

pytest.importorskip("torch", reason="torch is an extra of development (dev)")
pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=128)
LATENT = dict(
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=136,
    kv_lora_rank=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
EXPERTS = dict(
    moe_intermediate_size=128,
    n_routed_experts=16,
    n_shared_experts=2,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
)
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": HEADS,
    "DeepseekV3": dict(**LATENT, **EXPERTS, first_k_dense_replace=1, rope_parameters=YARN),
}
MLP = ("mlp.w_gate", "mlp.w_up", "mlp.w_down")
SELF_ATTENTION = ("attention.w_qkv", "attention.w_o")


def write(folder: Path, family: str = "Qwen3", **sizes: Any) -> dict[str, np.ndarray]:
    """Write a folder in blocks of 128 x 128; return the numbers that its tensors stand for."""
    fields = dict(vocab_size=300, num_hidden_layers=2, hidden_size=256, intermediate_size=512)
    random_model(family, {**COMMON, **fields, **MODELS[family], **sizes}, 6).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return quantise(folder, "blocks of 128")[1]


def spread(scales: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Return the scale of each element of a matrix [in, out]."""
    depth, columns = elements.shape
    return np.kron(scales, np.ones((128, 128), FLOAT32))[:depth, :columns]


@pytest.mark.parametrize(
    ("family", "ranks", "sizes", "stored"),
    [
        ("Qwen3", 1, {}, (*MLP, *SELF_ATTENTION)),
        ("Qwen3", 2, {}, (*MLP, *SELF_ATTENTION)),
        # Ranks hold copies of key/value heads.
        ("Qwen3", 4, {}, (*MLP, *SELF_ATTENTION)),
        # A third of the intermediate size of 512 cuts inside a block.
        ("Qwen3", 3, {}, SELF_ATTENTION),
        # Heads of 64: keys of a rank fill half of a block, so that values would begin inside it.
        ("Qwen3", 1, {"head_dim": 64}, (*MLP, *SELF_ATTENTION)),
        ("Qwen3", 2, {"head_dim": 64}, (*MLP, "attention.w_o")),
        # Rotated elements of queries change places with plain ones of other blocks.
        ("DeepseekV3", 1, {}, (*MLP, "attention.w_q_a", "attention.w_kv", "attention.w_o")),
        ("DeepseekV3", 2, {}, (*MLP, "attention.w_q_a", "attention.w_kv", "attention.w_o")),
    ],
)
def test_ranks_hold_blocks_as_they_are_stored(
    tmp_path: Path, family: str, ranks: int, sizes: dict[str, Any], stored: tuple[str, ...]
) -> None:
    """Other weights are widened."""
    plain = write(tmp_path, family, **sizes)
    config = load_config(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    wide = {name: np.asarray(weight) for name, weight in checkpoint.items() if name in plain}
    rank_weights = shard_weights(config, checkpoint, ranks, dtype="bfloat16")
    widened = shard_weights(config, dict(checkpoint) | wide, ranks, dtype="bfloat16")
    for rank, plain_rank in zip(rank_weights, widened, strict=True):
        arrays = {name: array for name, array in rank.arrays.items() if name.startswith("layers.0.")}
        kept = {name for name, array in arrays.items() if array.dtype == E4M3}
        assert kept == {f"layers.0.{name}" for name in stored}
        for name, array in arrays.items():
            if name in kept:
                scales = spread(rank.arrays[f"{name}_block_scales"], array)
                check_halves(array, scales, plain_rank.arrays[name])
            elif not name.endswith("_block_scales"):
                assert np.array_equal(array, plain_rank.arrays[name])


@pytest.mark.parametrize(("family", "is_reordered"), [("Qwen3", False), ("DeepseekV3", True)])
def test_a_warning_names_weights_whose_order_cuts_blocks(
    tmp_path: Path, family: str, is_reordered: bool
) -> None:
    write(tmp_path, family)
    config = load_config(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        shard_weights(config, open_checkpoint(tmp_path, config), 1, dtype="bfloat16")
    sentence = (
        "layers.*.attention.w_q is widened at load, because the order in which kernels read its outputs cuts inside "
        "the blocks of 128 by 128 elements of fp8, with any number of ranks."
    )
    assert [str(warning.message) for warning in warned] == ([sentence] if is_reordered else [])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_plan_counts_the_bytes_that_a_rank_holds(tmp_path: Path, ranks: int) -> None:
    write(tmp_path)
    config = load_config(tmp_path)
    rank = shard_weights(config, open_checkpoint(tmp_path, config), ranks, dtype="bfloat16")[0]
    model = load_model(tmp_path / "config.json")
    sections = [*model.blocks, model.embedding, model.head]
    counted = sum(section.count * section.count_weight_bytes(ranks, 1, "bfloat16") for section in sections)
    assert counted == sum(array.nbytes for array in rank.arrays.values())


@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2), Mesh(2, sequence=True)], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_the_reference(tmp_path: Path, family: str, mesh: Mesh) -> None:
    """The reference widens e4m3fn, of whose codes 16 change by 2^-9 of a scale: 2^-17 of a block's largest weight.

    All weights are widened to float32, as bfloat16 would round those of the reference.
    """
    write(tmp_path, family)
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
@pytest.mark.parametrize("family", MODELS)
def test_text_is_generated_by_kernels_that_read_blocks(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    ranks: str,
) -> None:
    """The tokens are those of the reference, in bfloat16; launches of all three kernels have block scales."""
    write(tmp_path, family)
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
    readers = {
        "mlp": {f"{name.removeprefix('mlp.')}_block_scales" for name in MLP},
        "output_projection": {"w_o_block_scales"},
    }
    for reader, scales in readers.items():
        steps_of_reader = [names for kernel, names in launches if kernel == reader]
        assert len(steps_of_reader) >= 4 and all(names >= scales for names in steps_of_reader)
    assert ("qkv_projection", True) in {(kernel, "w_qkv_block_scales" in names) for kernel, names in launches}
