"""Rotary tables equal those of transformers, in every scaling variant."""

from __future__ import annotations

import json

import numpy as np
import pytest

from model.config import rope
from model.families import load_config

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
SCALINGS = {
    "default": None,
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16, "truncate": False},
    "proportional": dict(rope_type="proportional", partial_rotary_factor=0.3, factor=2.0),
    "yarn with attention_factor": {**YARN, "attention_factor": 1.25},
}
POSITIONS = 256


def angle_bound(inverse: np.ndarray, positions: int) -> np.ndarray:
    """Return the largest difference of two float32 computations of one angle.

    Each frequency is theta to some power, inverted and rescaled: at most eight float32 roundings on transformers' side
    (pow, its exponent, reciprocal, wavelength, ramp, two products, sum), one on ours; then one product with the
    position on each side.
    """
    unit = np.finfo(np.float32).eps / 2
    return np.arange(positions)[:, None] * inverse * (8 + 1 + 2) * unit


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (128, 500000.0), (8, 10000.0)])
def test_tables_equal_transformers(write_model, transformers_llama, scaling, head_dim, theta) -> None:
    import torch
    from transformers import AutoConfig

    folder = write_model(
        rope_scaling=scaling, rope_theta=theta, head_dim=head_dim, max_position_embeddings=POSITIONS
    )
    config = load_config(folder)
    oracle = transformers_llama.LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    wanted = oracle(torch.zeros(1), torch.arange(POSITIONS)[None])
    inverse = rope.compute_inverse_frequencies(config.blocks[0].mixer.positions.rope, head_dim, POSITIONS)
    factor = max(1.0, config.blocks[0].mixer.positions.rope.attention_factor)
    bound = factor * (
        angle_bound(inverse, POSITIONS) + 4 * np.finfo(np.float32).eps
    )  # cos, sin and scaling round too
    for ours, theirs in zip(
        rope.compute_tables(config.blocks[0].mixer.positions.rope, head_dim, POSITIONS, POSITIONS), wanted
    ):
        half = theirs[0].numpy()[:, : head_dim // 2]
        assert ours.dtype == np.float32
        assert ours.shape == half.shape
        assert (np.abs(ours - half) <= bound).all()


@pytest.mark.parametrize("length", [255, 256, 257, 600])
def test_dynamic_stretches_beyond_the_context_only(write_model, transformers_llama, length) -> None:
    import torch
    from transformers import AutoConfig

    folder = write_model(rope_scaling=SCALINGS["dynamic"], head_dim=64, max_position_embeddings=POSITIONS)
    config = load_config(folder)
    oracle = transformers_llama.LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    oracle(torch.zeros(1), torch.arange(length)[None])
    ours = rope.compute_inverse_frequencies(config.blocks[0].mixer.positions.rope, 64, POSITIONS, length)
    theirs = oracle.inv_freq.numpy()
    assert (np.abs(ours - theirs) <= angle_bound(theirs, 2)[1]).all()
    unchanged = rope.compute_inverse_frequencies(config.blocks[0].mixer.positions.rope, 64, POSITIONS)
    assert (length > POSITIONS) != np.array_equal(ours, unchanged)


def test_position_zero_is_no_rotation() -> None:
    cos, sin = rope.compute_tables(rope.RopeParameters(10000.0), 16, 32, 1)
    assert (cos == 1).all()
    assert (sin == 0).all()


def test_frequencies_fall_from_one_to_nearly_theta() -> None:
    inverse = rope.compute_inverse_frequencies(rope.RopeParameters(10000.0), 4, 32)
    assert inverse.tolist() == [1.0, np.float32(0.01)]


def test_scaling_of_the_new_config_format_is_what_transformers_saves(write_model, transformers_llama) -> None:
    from transformers import AutoConfig

    folder = write_model(rope_scaling=LLAMA3, rope_theta=500000.0)
    before = load_config(folder)
    AutoConfig.from_pretrained(folder).save_pretrained(folder)
    assert "rope_parameters" in json.loads((folder / "config.json").read_text())
    assert load_config(folder).blocks[0].mixer.positions == before.blocks[0].mixer.positions
