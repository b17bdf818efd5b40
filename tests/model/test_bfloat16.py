"""bfloat16 activations: the kernels are as near to float32 as the reference, and nearer to it than chance.

Kernels need not round where the reference does: the weight of a norm is multiplied into other weights, say, and heads
are rotated before they are rounded. So single logits differ by what bfloat16 costs, and averages tell who loses more.
That a kernel rounds no more often than numpy would is what the tests of its accuracy see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.device import SimulatedDevice
from model.device.binding import bind_arguments
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.tokenizer import Tokenizer
from model.loading.weights import shard_weights
from model.runners.bucket_length import bucket_length
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.model.shapes import SHARDED

BF16 = np.dtype(ml_dtypes.bfloat16)
Weights = dict[str, np.ndarray]


def load(folder: Path) -> tuple[ModelConfig, Weights]:
    config = load_config(folder)
    return config, dict(open_checkpoint(folder, config))


def cores(ranks: int) -> SimulatedDevice:
    return SimulatedDevice("trn1", ranks)


def kernel_model(
    config: ModelConfig, weights: Weights, device: SimulatedDevice, positions: int
) -> KernelModel:
    shards = shard_weights(config, weights, device.ranks, dtype="bfloat16")
    length = bucket_length(positions, config.max_position_embeddings)
    return KernelModel(config, shards, device, length)


def logits_of(model: Any, ids: Sequence[int], prompt: int) -> np.ndarray:
    rows = [model.prefill([ids[:prompt]])[0].logits]
    rows += [model.decode([ids[position]], [position])[0].logits for position in range(prompt, len(ids))]
    return np.stack(rows)


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def story(config: ModelConfig, weights: Weights, folder: Path, count: int) -> list[int]:
    """Return `count` tokens of running text: the greedy continuation in float32."""
    ids = Tokenizer(folder, config.vocab_size).encode("Once upon a time")
    model = ReferenceModel(config, weights)
    step = model.prefill([ids])[0]
    while len(ids) < count:
        ids.append(int(np.argmax(step.logits)))
        step = model.decode([ids[-1]], [len(ids) - 1])[0]
    return ids[:count]


TEXTS = 16
"""Texts of a comparison: what bfloat16 costs on one of them scatters by some 20 %."""


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "ranks"), SHARDED)
def test_kernels_lose_no_more_to_bfloat16_than_the_reference(write_model, changes, ranks) -> None:
    """Over several texts the kernels are as near to float32 as the reference, within three standard errors.

    The two share most roundings. So they differ by less than two models would whose roundings are independent, the root
    of the sum of both squares.
    """
    config, weights = load(write_model(**changes))
    wide, plain, model = (
        ReferenceModel(config, weights),
        ReferenceModel(config, weights, "bfloat16", ranks=ranks),
        kernel_model(config, weights, cores(ranks), 12),
    )
    texts = [np.random.default_rng(seed).integers(3, 300, 8).tolist() for seed in range(TEXTS)]
    exact, rounded, computed = (
        np.stack([logits_of(network, ids, 6) for ids in texts]) for network in (wide, plain, model)
    )
    logs = np.log(
        [root_mean_square(o - e) / root_mean_square(r - e) for o, r, e in zip(computed, rounded, exact)]
    )
    standard_error = logs.std(ddof=1) / TEXTS**0.5
    assert standard_error < 0.1
    assert logs.mean() <= 3 * standard_error
    independent = np.hypot(root_mean_square(computed - exact), root_mean_square(rounded - exact))
    assert root_mean_square(computed - rounded) <= independent
    assert np.abs(computed - rounded).max() <= 4 * np.abs(rounded - exact).max()


def test_products_of_another_library_round_there_too(write_model, monkeypatch) -> None:
    """Replayed with NKW_SPEED=torch, at sizes whose products are worth a call: 128 rows, 64 by 128."""
    pytest.importorskip("torch", reason="torch is the extra of speed")
    config, weights = load(write_model(hidden_size=64, intermediate_size=128, max_position_embeddings=256))
    ids = np.random.default_rng(5).integers(3, 300, 128).tolist()
    wanted = ReferenceModel(config, weights, "bfloat16").prefill([ids])[0].logits
    cost = np.abs(ReferenceModel(config, weights).prefill([ids])[0].logits - wanted).max()
    monkeypatch.setenv("NKW_SPEED", "torch")
    monkeypatch.setattr("simulate.replay.fusion.speed.measure_relative_time", lambda: 0.5)  # on any processor
    device = cores(1)
    model = kernel_model(config, weights, device, 128)
    eager, replayed = (model.prefill([ids])[0].logits for _ in range(2))
    assert device.replays.report.hits > 0
    for logits in (eager, replayed):
        assert np.abs(logits - wanted).max() <= 4 * cost


@pytest.mark.parametrize("prompt", [512, 513, 640])
def test_prompts_of_more_keys_than_a_bank_holds(write_model, prompt) -> None:
    """512 keys lie in one bank; beyond, exponentials are rounded relative to the largest score so far."""
    config, weights = load(write_model(max_position_embeddings=1024))
    ids = np.random.default_rng(prompt).integers(3, 300, prompt).tolist()
    wanted = ReferenceModel(config, weights, "bfloat16").prefill([ids])[0].logits
    cost = np.abs(ReferenceModel(config, weights).prefill([ids])[0].logits - wanted).max()
    difference = np.abs(
        kernel_model(config, weights, cores(1), prompt).prefill([ids])[0].logits - wanted
    ).max()
    assert difference <= 4 * cost


class Recording(SimulatedDevice):
    """A device that notes the dtypes of arrays that kernels are given and return."""

    def run(self, kernel: str, arguments: Sequence[Mapping[str, Any]], written: Any = ()) -> list[Any]:
        outputs = super().run(kernel, arguments, written)
        arrays = [array for array in bind_arguments(kernel, arguments[0]) if isinstance(array, np.ndarray)]
        returned = outputs[0] if isinstance(outputs[0], tuple) else outputs
        self.seen = {
            **getattr(self, "seen", {}),
            kernel: ([a.dtype for a in arrays], [a.dtype for a in returned]),
        }
        return outputs


@pytest.mark.parametrize(("dtype", "activations"), [("bfloat16", BF16), ("float32", np.dtype(np.float32))])
def test_everything_between_kernels_is_of_the_dtype_but_positions_rotations_and_logits(
    write_model, dtype, activations
) -> None:
    config, weights = load(write_model(dtype=np.float32))
    device = Recording("trn1", 1)
    model = KernelModel(config, shard_weights(config, weights, 1, dtype=dtype), device, 128)
    logits_of(model, [3, 4, 5], 2)
    int32, wide = np.dtype(np.int32), np.dtype(np.float32)
    assert device.seen == {
        "embedding": ([int32, activations], [activations]),
        "qkv_projection": ([activations] * 3 + [int32, wide, wide], [activations] * 3),
        "attention_prefill": ([activations] * 5, [activations] * 3),
        "decoder_layer_decode": (
            [activations] * 5 + [int32] + [activations] * 5 + [wide, wide],
            [activations] * 3,
        ),
        "output_projection": ([activations] * 3, [activations]),
        "mlp": ([activations] * 5, [activations]),
        "lm_head": ([activations] * 3 + [int32], [wide, wide, int32]),
    }


def trained(name: str, request: pytest.FixtureRequest) -> tuple[Path, ModelConfig, Weights]:
    folder = request.getfixturevalue(name)
    return folder, *load(folder)


def cost_and_difference(config: ModelConfig, weights: Weights, ids: list[int], prompt: int, ranks: int):
    """Return the cost of bfloat16, the kernels' difference, the margins, and where choices differ."""
    wide = logits_of(ReferenceModel(config, weights), ids, prompt)
    plain = logits_of(ReferenceModel(config, weights, "bfloat16", ranks=ranks), ids, prompt)
    computed = logits_of(kernel_model(config, weights, cores(ranks), len(ids)), ids, prompt)
    second, first = np.sort(plain, axis=1)[:, -2:].T
    unequal = computed.argmax(axis=1) != plain.argmax(axis=1)
    return np.abs(plain - wide).max(), np.abs(computed - plain).max(), first - second, unequal


@pytest.mark.slow
@pytest.mark.parametrize("ranks", deep_except([1, 2, 4], [2]))
@pytest.mark.parametrize("name", ["default_model", "stories260k"])
def test_trained_models_choose_as_the_reference_where_its_margin_exceeds_the_tolerance(
    request, name, ranks
) -> None:
    """Each side is as far from float32 as bfloat16 takes it, both together twice that; another 2 since maxima scatter.

    Of 59 choices the margin exceeds that at 95 % (the default model) and at 71 % (stories260K).
    """
    folder, config, weights = trained(name, request)
    ids = story(config, weights, folder, 64)
    cost, difference, margins, unequal = cost_and_difference(config, weights, ids, 6, ranks)
    tolerance = 4 * cost
    assert difference <= tolerance
    assert not unequal[margins > tolerance].any()
    assert (margins > tolerance).mean() > 0.5
    assert unequal.mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("prompt", deep_except([1, 127, 128, 129], [129]))
@pytest.mark.parametrize("ranks", [1, 2])
def test_prompts_around_a_tile(default_model, prompt, ranks) -> None:
    config, weights = load(default_model)
    ids = story(config, weights, default_model, prompt + 1)
    cost, difference, _, _ = cost_and_difference(config, weights, ids, prompt, ranks)
    assert difference <= 4 * cost


def transformers_logits(folder: Path, module: Any, ids: list[int], dtype: str) -> np.ndarray:
    import torch

    oracle = module.LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        return oracle(torch.tensor([ids])).logits[0].float().numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"head_dim": 16, "dtype": ml_dtypes.bfloat16},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ],
)
def test_tiny_models_are_as_near_to_float32_as_transformers(write_model, transformers_llama, changes) -> None:
    """Round less often than transformers, which rounds scores, halves of rotations, cosines, gate, sums and logits."""
    folder = write_model(**changes)
    config, weights = load(folder)
    ids = np.random.default_rng(1).integers(3, 300, 40).tolist()
    rounded = {name: array.astype(BF16).astype(np.float32) for name, array in weights.items()}
    wide = logits_of(ReferenceModel(config, rounded), ids, 9)
    theirs = transformers_logits(folder, transformers_llama, ids, "bfloat16")[8:]
    computed = logits_of(kernel_model(config, weights, cores(1), 40), ids, 9)
    assert 0 < root_mean_square(computed - wide) <= root_mean_square(theirs - wide)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default_model", "stories260k"])
def test_trained_models_choose_as_transformers_in_bfloat16(request, transformers_llama, name) -> None:
    """Equal wherever transformers' own margin exceeds four times what bfloat16 costs it, and nearer to float32."""
    folder, config, weights = trained(name, request)
    ids = story(config, weights, folder, 64)
    wide = transformers_logits(folder, transformers_llama, ids, "float32")[5:]
    theirs = transformers_logits(folder, transformers_llama, ids, "bfloat16")[5:]
    computed = logits_of(kernel_model(config, weights, cores(1), 64), ids, 6)
    assert 0 < root_mean_square(computed - wide) <= root_mean_square(theirs - wide)
    second, first = np.sort(theirs, axis=1)[:, -2:].T
    sure = first - second > 4 * np.abs(theirs - wide).max()
    assert np.array_equal(computed.argmax(axis=1)[sure], theirs.argmax(axis=1)[sure])
    assert sure.mean() > 0.25
