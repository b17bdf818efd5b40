"""The model made of kernels, on simulated ranks: same logits, same tokens, planned without computing."""

from __future__ import annotations

import gc
import json
import weakref

import numpy as np
import pytest

from model.config import ModelConfig
from model.device import DryDevice, SimulatedDevice, write_passes
from model.errors import ModelError
from model.loading.weights import shard_weights
from model.runners.bucket_length import bucket_length
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.model.conftest import WAYS
from tests.model.folders import load
from tests.model.reordering import reordered
from tests.model.shapes import SHARDED

IDS = np.random.default_rng(3).integers(3, 300, 12).tolist()
PROMPT = 9


def logits_of(model, ids: list[int]) -> np.ndarray:
    rows = [model.prefill([ids[:PROMPT]])[0].logits]
    rows += [model.decode([ids[position]], [position])[0].logits for position in range(PROMPT, len(ids))]
    return np.stack(rows)


def noise(config: ModelConfig, weights: dict[str, np.ndarray], wanted: np.ndarray) -> float:
    """Return the largest change of the logits over 8 orders of the float32 sums."""
    reordered_logits = [
        logits_of(ReferenceModel(config, reordered(config, weights, seed)), IDS) for seed in range(8)
    ]
    return max(float(np.abs(other - wanted).max()) for other in reordered_logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated", "changes", "ranks"),
    deep_except([(way, *sharded) for way in WAYS for sharded in SHARDED], 4),
    indirect=["simulated"],
)
def test_logits_equal_the_numpy_reference(write_model, simulated, changes, ranks) -> None:
    """Kernels take float32 sums in another order and nothing else differs, so reordering noise is the yardstick.

    Both sides carry it, and eight samples need not hold the largest: hence four times.
    """
    config, weights = load(write_model(**changes))
    wanted = logits_of(ReferenceModel(config, weights), IDS)
    shards = shard_weights(config, weights, ranks)
    model = KernelModel(config, shards, simulated("trn1", ranks), bucket_length(len(IDS), 64))
    assert np.abs(logits_of(model, IDS) - wanted).max() <= 4 * noise(config, weights, wanted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_candidates_are_the_largest_logits_of_all_ranks(write_model, simulated, ranks) -> None:
    config, weights = load(write_model())
    model = KernelModel(config, shard_weights(config, weights, ranks), simulated("trn1", ranks), 128, 12)
    step = model.prefill([IDS])[0]
    order = np.argsort(-step.logits, kind="stable")[:16]
    assert step.ids.tolist() == order.tolist()
    assert np.array_equal(step.values, step.logits[order])


@pytest.mark.parametrize("target", ["trn1", "inf2", "trn2", "trn3"])
def test_a_pass_is_predicted_without_computing(write_model, target) -> None:
    config, weights = load(write_model())
    device = DryDevice(target, 2)
    model = KernelModel(config, shard_weights(config, weights, 2), device, 128)
    assert not model.prefill([IDS])[0].logits.any()
    prompt = device.take_pass()
    model.decode([5], [len(IDS)])
    token = device.take_pass()
    for done, layer in (
        (prompt, ["qkv_projection", "attention_prefill", "output_projection", "mlp"]),
        (token, ["decoder_layer_decode"]),
    ):
        kernels = [launch.launch.kernel for launch in done.launches]
        assert kernels == ["embedding", *layer * len(config.blocks), "lm_head"]
        prediction = done.prediction()
        assert prediction.target == target
        assert 0 < prediction.dataflow_ns <= prediction.program_ns <= prediction.serial_ns
        assert prediction.busiest_engine in ("Tensor", "Vector", "Scalar", "GpSimd", "Sync")
        assert prediction.busiest_queue.startswith("DMA")
        assert all(0 <= share <= 1 for share in prediction.busy_share.values())
        assert 0 < prediction.sbuf_bytes <= prediction.sbuf_usable_bytes
        assert 0 < prediction.psum_bytes <= prediction.psum_usable_bytes


def test_equal_launches_are_planned_once(write_model) -> None:
    config, weights = load(write_model(num_hidden_layers=3))
    device = DryDevice("trn1", 1)
    KernelModel(config, shard_weights(config, weights, 1), device, 128).prefill([IDS])
    done = device.take_pass()
    assert len(done.launches) == 2 + 4 * 3
    # embedding, lm_head, and of each layer the projection, attention, output, mlp
    assert len({id(launch) for launch in done.launches}) == 2 + 4


def test_time_of_a_pass_is_the_sum_of_its_kernels_and_one_start(write_model) -> None:
    lengths = []
    for layers in (1, 2, 3):
        config, weights = load(write_model(name=f"layers{layers}", num_hidden_layers=layers))
        device = DryDevice("trn1", 1)
        KernelModel(config, shard_weights(config, weights, 1), device, 128).prefill([IDS])
        lengths.append(device.take_pass().prediction().program_ns)
    rounding = 3 * 20 * np.spacing(lengths[2])  # three sums of at most 20 kernels
    assert abs((lengths[2] - lengths[1]) - (lengths[1] - lengths[0])) <= rounding
    assert lengths[0] > lengths[1] - lengths[0]


def test_trace_holds_every_kernel_of_both_passes(write_model, tmp_path) -> None:
    config, weights = load(write_model())
    device = DryDevice("trn1", 1)
    model = KernelModel(config, shard_weights(config, weights, 1), device, 128)
    model.prefill([IDS])
    prompt = device.take_pass()
    model.decode([5], [len(IDS)])
    write_passes(tmp_path / "trace.json", [("prompt", prompt), ("token", device.take_pass())])
    text = (tmp_path / "trace.json").read_text()
    assert json.loads(text)["traceEvents"]
    for name in (
        "prompt: attention_prefill",
        "token: decoder_layer_decode",
        "prompt: lm_head",
        "prompt: mlp",
    ):
        assert name in text


def test_what_a_kernel_refuses_is_one_line_that_names_it(write_model) -> None:
    config, weights = load(write_model(head_dim=514, num_hidden_layers=1))
    model = KernelModel(config, shard_weights(config, weights, 1), DryDevice("trn1", 1), 128)
    with pytest.raises(ModelError, match="qkv_projection takes heads of at most 512, not 514"):
        model.prefill([IDS])


def test_refuses_an_unknown_target() -> None:
    with pytest.raises(ModelError, match="trn9"):
        SimulatedDevice("trn9", 1)


@pytest.mark.slow
def test_weights_do_not_outlive_their_model(write_model) -> None:
    """A program holds the arrays of its last launch, so that two models of one process would be there at once."""
    config, weights = load(write_model())
    shards = shard_weights(config, weights, 1)
    reference = weakref.ref(shards[0].arrays["layers.0.attention.w_qkv"])
    model = KernelModel(config, shards, SimulatedDevice("trn1", 1), 128)
    model.prefill([IDS])
    model.prefill([IDS])
    del shards, model
    gc.collect()
    assert reference() is None
