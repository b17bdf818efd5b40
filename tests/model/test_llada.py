"""LLaDA against transformers' Llama without causal mask: whole passes, and passes that reuse keys and values."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest

from model.config.masked_text import MaskedTextConfig
from model.device import SimulatedDevice
from model.engine.buckets import SIZES_ONLY
from model.errors import ModelError
from model.families import compose, load_config, read_record
from model.families.llada import compose_with_cache
from model.families.tasks import MASKED_TEXT
from model.layers.launch import Phase, StepShape
from model.loading.checkpoint import Checkpoint, open_checkpoint
from model.loading.weights import shard_weights
from model.runners.masked_text import (
    KernelMaskPredictor,
    ReferenceMaskPredictor,
    list_head_pieces,
    shape_pass,
)
from model.runners.unmasking import MaskPredictor
from tests.model import llada_oracle
from tests.model.llada_folders import FIELDS, write_llada, write_tensors
from tests.model.llada_oracle import IDS, LATER, START, STORED

ORACLE = dict(np.load(STORED))
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model of the oracle and return its folder."""
    folder: Path = tmp_path_factory.mktemp("llada")
    (folder / "config.json").write_text(json.dumps(llada_oracle.CONFIG))
    write_tensors(folder, llada_oracle.draw_weights())
    return folder


def load(folder: Path) -> tuple[MaskedTextConfig, Checkpoint]:
    config = load_config(folder, MASKED_TEXT)
    return config, open_checkpoint(folder, config)


def create_kernels(
    folder: Path, target: str, ranks: int, dtype: str, sequences: int = 1, caches: bool = True
) -> KernelMaskPredictor:
    config, weights = load(folder)
    shards = shard_weights(config, weights, ranks, dtype=dtype)
    return KernelMaskPredictor(
        config, shards, SimulatedDevice(target, ranks), sequences, len(IDS), caches, max_bound_steps=3
    )


def assert_equal(predictor: MaskPredictor, dtype: str, caches: bool) -> None:
    """Check that the logits of a whole pass, and with `caches` those of a reusing pass, are within the bound."""
    full, reused = ORACLE[dtype]
    rows = range(2, len(IDS))
    logits = predictor.predict(np.array([IDS]), rows, False)
    assert np.abs(logits[0] - ORACLE["whole"][2:]).max() <= full
    if caches:
        logits = predictor.predict(np.array([LATER]), range(START, len(IDS)), True)
        assert np.abs(logits[0] - ORACLE["reused"]).max() <= reused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("caches", [False, True])
def test_the_reference_gives_the_logits_of_transformers(folder: Path, dtype: str, caches: bool) -> None:
    assert_equal(ReferenceMaskPredictor(*load(folder), dtype, caches=caches), dtype, caches)


@pytest.mark.parametrize(
    ("target", "ranks", "dtype", "caches"),
    [
        ("trn2", 1, "float32", False),
        ("trn2", 2, "float32", True),
        ("trn1", 1, "float32", True),
        ("trn3", 3, "float32", True),
        ("trn2", 2, "bfloat16", True),
        ("trn2", 1, "bfloat16", False),
    ],
)
def test_the_kernels_give_the_logits_of_transformers(
    folder: Path, target: str, ranks: int, dtype: str, caches: bool
) -> None:
    """Two groups of three query heads on three ranks: one rank has padding."""
    assert_equal(create_kernels(folder, target, ranks, dtype, caches=caches), dtype, caches)


def test_a_token_changes_the_logits_before_it(folder: Path) -> None:
    """With a causal mask it would not, and the stored logits would be equal there."""
    predictor = ReferenceMaskPredictor(*load(folder))
    before = range(START)
    first, later = (predictor.predict(np.array([ids]), before, False) for ids in (IDS, LATER))
    assert np.abs(first - later).max() > 0.1


@pytest.mark.deep
def test_the_stored_logits_are_those_of_transformers() -> None:
    pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    live = llada_oracle.record()
    assert live.keys() == ORACLE.keys()
    for name in ("whole", "reused"):
        assert np.abs(live[name] - ORACLE[name]).max() <= 1e-9


def list_rows(folder: Path, start: int) -> dict[str, list[int]]:
    """Return the rows of the launches of a pass over two texts that computes the positions from `start` on."""
    config, weights = load(folder)
    (shard,) = shard_weights(config, weights, 1)
    sizes = StepShape(Phase.prefill, 1, 1, 1, 1, 1, shard.dtype, shard.dtypes)
    step = shape_pass(2, len(IDS), sizes, start)
    rows: dict[str, list[int]] = {}
    for layer in compose_with_cache(config).layers:
        for launch in layer.launches(step):
            rows.setdefault(launch.kernel, []).append(launch.rows)
    return rows


def test_a_reusing_pass_computes_the_rows_from_the_block_on(folder: Path) -> None:
    full, reusing = list_rows(folder, 0), list_rows(folder, START)
    for kernel in ("qkv_projection", "attention_prefill", "output_projection", "mlp"):
        assert full[kernel] == [2 * len(IDS)] * 3
        assert reusing[kernel] == [2 * (len(IDS) - START)] * 3


def test_the_head_computes_the_rows_of_the_block() -> None:
    """Rows of two texts of 200 tokens in launches of 128; the last launch repeats the last row."""
    step = SIZES_ONLY.with_sizes(Phase.prefill, 2, 200, 200)
    pieces = [piece["logits_indices"].reshape(-1) for piece in list_head_pieces(step, range(100, 180))]
    assert [len(piece) for piece in pieces] == [128, 128]
    expected = [*range(100, 180), *range(300, 380), *[379] * 96]
    assert np.concatenate(pieces).tolist() == expected


def test_a_llada_is_loaded_by_its_architecture_for_masked_text(tmp_path: Path) -> None:
    config = load_config(write_llada(tmp_path / "llada"), MASKED_TEXT)
    assert (config.mask_token_id, config.context, config.decoder.eos_token_ids) == (299, 64, (2,))
    assert config.refusal(300) is None
    assert config.refusal(301) is not None
    with pytest.raises(ModelError, match="a llada fills masks in texts; nkw generate and nkw plan do that"):
        load_config(tmp_path / "llada")


def test_the_sizes_of_llada_8b_are_those_of_its_index(tmp_path: Path) -> None:
    """`total_size` in the index of GSAI-ML/LLaDA-8B-Instruct is 16,031,162,368 bytes of bfloat16."""
    sizes: dict[str, object] = dict(
        d_model=4096, mlp_hidden_size=12288, n_heads=32, n_kv_heads=32, n_layers=32
    )
    sizes |= dict(vocab_size=126464, embedding_size=126464, mask_token_id=126336)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | sizes))
    shapes = compose(read_record(tmp_path)).list_tensor_shapes()
    assert 2 * sum(map(prod, shapes.values())) == 16_031_162_368


def test_absent_fields_have_the_values_of_llada(tmp_path: Path) -> None:
    """`mlp_ratio` counts without `mlp_hidden_size`, and as many key/value heads as heads without `n_kv_heads`."""
    config = load_config(
        write_llada(
            tmp_path / "f",
            mlp_hidden_size=None,
            mlp_ratio=3,
            n_kv_heads=None,
            alibi=None,
            embedding_size=None,
        ),
        MASKED_TEXT,
    )
    block = config.decoder.blocks[0]
    assert (block.mlp.width, block.mixer.kv_heads, block.mixer.causal) == (96, 4, False)


@pytest.mark.parametrize(
    ("change", "works", "message"),
    [
        ({"block_type": "sequential"}, {"block_type": "llama"}, "block_type: 'sequential'; layers compute 'llama'"),
        ({"rope": False}, {"rope": None}, "rope: False; layers compute True"),
        ({"include_bias": True}, {"include_qkv_bias": True}, "include_bias: True; layers compute False"),
        ({"embedding_size": 384}, {"embedding_size": 300}, "embedding_size: 384; the embedding has a row for each"),
        ({"mask_token_id": 300}, {"mask_token_id": 299}, "300 is not a token of a vocabulary of 300"),
        ({"mask_token_id": None}, {"mask_token_id": 0}, "mask_token_id: 0 tokens; a text has one mask"),
        ({"n_heads": 5}, {"n_heads": 8}, "d_model: 32 is not a multiple of n_heads, 5"),
        ({"n_kv_heads": 3}, {"n_kv_heads": 1}, "n_kv_heads: 3 does not divide n_heads, 4"),
        ({"rope_theta": 1.0}, {"rope_theta": 1.5}, "rope_theta: 1.0; must be greater than 1"),
        ({"activation_type": "swiglu"}, {"activation_type": "gelu"}, "activation_type: 'swiglu'"),
        ({"max_sequence_length": None}, {"max_sequence_length": 1}, "max_sequence_length: missing"),
    ],
)  # fmt: skip
def test_refuses_a_field_that_no_layer_computes(
    tmp_path: Path, change: dict[str, object], works: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_config(write_llada(tmp_path / "refused", **change), MASKED_TEXT)
    load_config(write_llada(tmp_path / "accepted", **works), MASKED_TEXT)
