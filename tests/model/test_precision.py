"""The dtype of activations: what a name stands for, and how weights are stored beside it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from model.errors import ModelError
from model.families import load_config
from model.layers.precision import cast_weight, choose_activation_dtype
from model.loading.weights import shard_weights

BF16 = ml_dtypes.bfloat16
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": BF16}


def norm_of(dtype: str) -> dict[str, np.ndarray]:
    return {"model.norm.weight": np.ones(4, TYPES[dtype])}


@pytest.fixture
def config(write_model):
    return load_config(write_model())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight_dtype", TYPES)
def test_a_name_is_the_dtype_whatever_the_checkpoint_holds(config, dtype, weight_dtype) -> None:
    assert (
        choose_activation_dtype(dtype, replace(config, dtype=weight_dtype), norm_of(weight_dtype))
        == TYPES[dtype]
    )


@pytest.mark.parametrize(
    ("named", "weight_dtype", "activations"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float16", "float16", "float32"),
        (None, "bfloat16", "bfloat16"),
        (None, "float32", "float32"),
        (None, "float16", "float32"),
    ],
)
def test_auto_is_what_the_config_names_else_what_the_weights_are(
    config, named, weight_dtype, activations
) -> None:
    dtype = choose_activation_dtype("auto", replace(config, dtype=named), norm_of(weight_dtype))
    assert dtype == TYPES[activations]


@pytest.mark.parametrize("dtype", ["float16", "torch.bfloat16", "", "int8"])
def test_refuses_another_name(config, dtype) -> None:
    with pytest.raises(
        ModelError, match=f"dtype '{dtype}' is not supported; known are auto, float32, bfloat16"
    ):
        choose_activation_dtype(dtype, config, norm_of("float32"))


@pytest.mark.parametrize("weight_dtype", TYPES)
@pytest.mark.parametrize(("activations", "kept"), [("float32", True), ("bfloat16", False)])
def test_weights_keep_their_dtype_beside_float32_and_are_rounded_beside_bfloat16(
    random_weights, weight_dtype, activations, kept
) -> None:
    weights = {name: array.astype(TYPES[weight_dtype]) for name, array in random_weights().items()}
    for weight in weights.values():
        stored = cast_weight(weight, np.dtype(TYPES[activations]))
        assert stored.dtype == (weight.dtype if kept else BF16)
        assert np.array_equal(stored, weight if kept else weight.astype(np.float32).astype(BF16))


@pytest.mark.parametrize(
    ("dtype", "cut"), [("float32", np.float32), ("bfloat16", BF16), ("auto", np.float32)]
)
def test_a_rank_holds_the_weights_so(write_model, random_weights, dtype, cut) -> None:
    for rank in shard_weights(load_config(write_model()), random_weights(), 2, dtype=dtype):
        assert {tensor.dtype for tensor in rank.arrays.values()} == {np.dtype(cut)}
        assert rank.dtype == cut
