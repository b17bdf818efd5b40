"""Every published config whose family is computed: one rank's launches run dry where `nkw plan` puts the model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from model.config import ModelConfig
from model.config.blocks import SpeechEncoder
from model.device import DryDevice, chip, find_instance
from model.errors import ModelError
from model.families import SPEECH, TEXT, compose, load_config, read_config
from model.formats import Format, Mx, Scaled
from model.layers.shard import Shard
from model.loading.weights import RankWeights, plan_weight_dtypes
from model.plan.memory import compute_footprint, find_smallest_tp, list_possible_tp
from model.plan.plan import DEFAULT_INSTANCE, DEFAULT_TOKENS, Request, make_plan
from model.plan.predict import PassTime, Predictor
from model.plan.sizes import ModelSizes, load_model
from model.runners.bucket_length import bucket_length
from model.runners.contiguous import KernelModel
from tests.deep import deep_except
from tests.model.test_plan_parameters import CONFIGS

ALL = {path.stem: read_config(path) for path in CONFIGS.glob("*.json")}
COMPUTED = sorted(name for name, config in ALL.items() if config.architecture)
PLANNED = sorted(set(ALL) - set(COMPUTED))
ONE_OF_EACH = [
    "gemma-2-27b",
    "gemma-3-1b",
    "gpt-oss-20b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "mistral-7b-v0.1",
    "mixtral-8x7b",
    "olmo-2-13b",
    "olmoe-1b-7b",
    "qwen3-0.6b",
    "qwen3-next-80b-a3b",
    "smollm2-135m",
    "tinyllama-1.1b",
    "whisper-tiny",
]


def rank_of(config: ModelConfig, tp: int, dtype: np.dtype) -> RankWeights:
    """Return weights of one rank that have shapes and no memory."""
    shard, weights = Shard(0, tp), list(compose(config).weights)
    dtypes = plan_weight_dtypes(weights, config.weight_format, dtype)
    arrays = {
        name: np.broadcast_to(np.zeros((), element if weight.find_format(shard, dtypes) else dtype), shape)
        for weight in weights
        for name, (shape, element) in weight.describe(shard, dtypes).items()
    }
    return RankWeights(shard, dtype, arrays, dict(dtypes.formats))


def launched(config: ModelConfig, target: str, tp: int, dtype: str, prompt: int, context: int):
    """Return the predicted first token and last step of a model on a device that plans rank 0, in ns."""
    device = DryDevice(target, tp, one_for_all=True)
    weights = rank_of(config, tp, np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16))
    model = KernelModel(config, [weights], device, bucket_length(context, context))
    if isinstance(config.encoder, SpeechEncoder):
        model.encode([np.zeros((config.encoder.mel_bins, 2 * config.encoder.positions))])
    model.prefill([list(range(prompt))])
    first = device.take_pass().prediction().program_ns
    model.decode([5], [prompt])
    return first, device.take_pass().prediction().program_ns


def equal(times: tuple[float, float], *planned: PassTime, has_blocks: bool = False) -> None:
    """Check that launches take what the plan says, which counts a launch as no shorter than its work.

    Those of routed experts are planned from launches of fewer ones. Prompts of experts in blocks that share a scale are
    planned up to 7 percent shorter than their launches, of 256 and 384 experts.
    """
    for time_ns, done in zip(times, planned):
        assert done.refusals == ()
        routed = any(kernel.name.startswith("experts_") for kernel in done.kernels)
        tolerance = 0.07 if has_blocks else 0.03
        assert done.time.program_ns == pytest.approx(time_ns, rel=tolerance if routed else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", deep_except(ONE_OF_EACH, 7))
def test_one_layer_of_each_kind_takes_the_planned_time(name) -> None:
    """Equal layers make equal launches, so one of each kind stands for all. The ranks are those of the whole model."""
    full_model = load_model(CONFIGS / f"{name}.json")
    config = replace(full_model.config, blocks=tuple(dict.fromkeys(full_model.config.blocks)))
    dtype = config.dtype or "bfloat16"
    instance = find_instance(DEFAULT_INSTANCE)
    capacity = chip(instance.target).hbm_bytes_per_core
    tp = find_smallest_tp(full_model, dtype, DEFAULT_TOKENS, 1, instance.physical_cores, capacity)
    assert tp is not None
    prompt, context = 16, 128
    plan = Predictor(config, instance.name, tp, dtype, context)
    times = launched(config, instance.name, tp, dtype, prompt, context)
    equal(times, plan.predict_prompts(prompt), plan.predict_step(1))


@pytest.mark.deep
@pytest.mark.parametrize("name", COMPUTED)
def test_all_layers_take_the_planned_times(name) -> None:
    plan = make_plan(load_model(CONFIGS / f"{name}.json"), Request())
    launch_arguments = (
        plan.model.config,
        plan.placement.name,
        plan.placement.shape.tp,
        plan.dtype,
        plan.prompt,
        plan.context,
    )
    first, step = plan.first_token.predicted, plan.rate.step.predicted
    assert first is not None and step is not None
    has_blocks = bool(plan.model.list_quantised_readers())
    equal(launched(*launch_arguments), first, step, has_blocks=has_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", deep_except(COMPUTED, 12))
def test_a_rank_holds_what_the_plan_says(name) -> None:
    """Where the plan says that a model fits, the weights of a rank fit."""
    model = load_model(CONFIGS / f"{name}.json")
    for tp in list_possible_tp(model, 64):
        arrays = rank_of(model.config, tp, np.dtype(ml_dtypes.bfloat16)).arrays.values()
        rank_bytes, planned = (
            sum(array.nbytes for array in arrays),
            compute_footprint(model, "bfloat16", tp, 1).weight_bytes,
        )
        assert rank_bytes == planned


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_config_loads(name, tmp_path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    assert load_config(tmp_path, TEXT, SPEECH).blocks == ALL[name].blocks


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_config_is_refused_by_what_is_missing(name, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    with pytest.raises(ModelError) as refused:
        load_config(tmp_path)
    sentence = str(refused.value)
    assert sentence.startswith(f"{tmp_path / 'config.json'}: model_type: {ALL[name].model_type} needs ")
    assert sentence.endswith(", which no layer computes; nkw plan takes it")
    assert ModelSizes(ALL[name]).total > 0


FP8 = Scaled("fp8", 128, 128)
DEEPSEEK_V3_STORED = {
    (2048, 7168): 58 * 257 * 3,
    (18432, 7168): 3 * 3,
    (1536, 7168): 61,
    (576, 7168): 61,
    (7168, 128 * 128): 61,
}
"""Numbers of matrices by outputs and inputs. Kernels do not read blocks of the expansions of latents."""


def count_saved_bytes(outputs: int, inputs: int) -> int:
    """Return how many bytes a matrix in blocks of 128 by 128 takes less than in two bytes for each element."""
    return outputs * inputs - 4 * math.ceil(outputs / 128) * math.ceil(inputs / 128)


@pytest.mark.parametrize(
    ("name", "format", "stored", "parameters"),
    [
        ("deepseek-v3", FP8, DEEPSEEK_V3_STORED, 671_026_404_352),
        (
            "kimi-k2",
            FP8,
            {
                (2048, 7168): 60 * 385 * 3,
                (18432, 7168): 3,
                (1536, 7168): 61,
                (576, 7168): 61,
                (7168, 64 * 128): 61,
            },
            1_026_408_209_408,
        ),
        (
            "minimax-m2.5",
            FP8,
            {(1536, 3072): 62 * 256 * 3, (48 * 128, 3072): 2 * 62, (8 * 128, 3072): 2 * 62},
            None,
        ),
        ("gpt-oss-20b", Mx(), {}, None),
        ("gpt-oss-120b", Mx(), {}, None),
    ],
)
def test_models_published_in_fewer_bits_are_planned_as_they_are_stored(
    name: str, format: Format, stored: dict[tuple[int, int], int], parameters: int | None
) -> None:
    """A block has one byte for each element and four for its scale; other weights have two bytes for each element.

    stored: numbers of matrices that kernels read in blocks, by their outputs and inputs.
    """
    model = load_model(CONFIGS / f"{name}.json")
    assert model.config.weight_format is not None and model.config.weight_format.formats == (format,)
    assert parameters in (None, model.total)
    saved = sum(count * count_saved_bytes(*shape) for shape, count in stored.items())
    expected = 2 * model.total - saved
    assert sum(model.count_component_bytes("bfloat16").values()) == expected
    # Ranks have the biases of routers in float32.
    footprint = compute_footprint(model, "bfloat16", 1, 1)
    assert footprint.weight_bytes == pytest.approx(expected, rel=1e-6)
