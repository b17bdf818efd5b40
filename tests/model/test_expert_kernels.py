"""The kernel of routed experts by predicted time: the rule, its predictions, and times that grow with the prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config.published import PUBLISHED
from model.device import DryDevice, SimulatedDevice, find_sorted_expert_width
from model.families import compose, load_config
from model.layers.experts import RoutedExperts
from model.layers.launch import Launch, Phase
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.dry import DryTimes
from model.plan.plan import Request, make_plan
from model.plan.predict import Predictor
from model.plan.sizes import ModelSizes, load_model
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from tests.deep import deep_except
from tests.model.folders import TINY, random_weights

EITHER = ("experts_decode", "experts_prefill")


def write_config(folder: Path, name: str, **changes: Any) -> ModelSizes:
    """Write the published config of a model with one layer and other fields, and return its sizes."""
    fields = json.loads((PUBLISHED / f"{name}.json").read_text())
    path = folder / "config.json"
    path.write_text(json.dumps(fields | dict(num_hidden_layers=1, vocab_size=1024) | changes))
    return load_model(path)


def launch_experts(predictor: Predictor, rows: int) -> tuple[Launch, dict[str, Launch]]:
    """Return the launch of experts for the rows of a prompt on a rank, and that launch of either kernel."""
    section = next(
        section
        for section, _ in predictor._sections
        if any(isinstance(layer, RoutedExperts) for layer in section)
    )
    layer = next(layer for layer in section if isinstance(layer, RoutedExperts))
    step = replace(predictor._step, phase=Phase.prefill, tokens=rows, sequences=1)
    rows *= step.expert_ranks
    return layer.create_experts_launch(step, rows), {
        kernel: layer.create_experts_launch(step, rows, kernel) for kernel in EITHER
    }


SMALL = [
    ("trn2", 32, 96, 8, "experts_decode"),
    ("trn2", 32, 96, 9, "experts_prefill"),
    ("trn2", 32, 96, 128, "experts_prefill"),
    ("trn2", 32, 256, 64, "experts_decode"),
    ("trn2", 16, 96, 16, "experts_decode"),
    ("trn1", 32, 96, 9, "experts_decode"),
    ("trn1", 32, 96, 128, "experts_decode"),
    ("trn3", 32, 160, 9, "experts_prefill"),
    ("trn3", 32, 512, 64, "experts_decode"),
]
"""Chip, experts of which a token takes four, their width, rows, and the kernel of the rule."""


@pytest.mark.parametrize(("target", "experts", "width", "rows", "kernel"), SMALL)
def test_few_rows_take_the_kernel_that_is_predicted_to_be_faster(
    tmp_path: Path, target: str, experts: int, width: int, rows: int, kernel: str
) -> None:
    fields = dict(num_experts=experts, num_experts_per_tok=4, moe_intermediate_size=width)
    predictor = Predictor(
        write_config(tmp_path, "qwen3-30b-a3b", **fields).config, target, 1, "bfloat16", 1024
    )
    check_choice(predictor, rows, kernel)


NAMED = [
    *(("qwen3-30b-a3b", "trn2.48xlarge", tp, 1, lnc) for tp, lnc in ((4, 1), (8, 1), (16, 1), (8, 2))),
    ("qwen3-30b-a3b", "trn1.32xlarge", 8, 1, 1),
    ("qwen3-30b-a3b", "trn3", 4, 1, 1),
    ("qwen3-30b-a3b", "trn2.48xlarge", 8, 2, 1),
    ("qwen3-next-80b-a3b", "trn2.48xlarge", 16, 1, 1),
    ("qwen3-235b-a22b", "trn2.48xlarge", 64, 1, 1),
    ("gpt-oss-20b", "trn2.48xlarge", 4, 1, 1),
    ("deepseek-v3", "trn2.48xlarge", 64, 1, 2),
    ("mixtral-8x7b", "trn2.48xlarge", 8, 1, 1),
    ("mixtral-8x7b", "trn1.32xlarge", 16, 1, 1),
]


@pytest.mark.deep
@pytest.mark.parametrize("rows", [48, 64, 128])
@pytest.mark.parametrize(("name", "target", "tp", "ep", "lnc"), NAMED)
def test_few_rows_of_published_models_take_the_faster_kernel(
    name: str, target: str, tp: int, ep: int, lnc: int, rows: int
) -> None:
    config = load_model(PUBLISHED / f"{name}.json").config
    predictor = Predictor(config, target, tp, "bfloat16", 1024, expert=ep, lnc=lnc)
    check_choice(predictor, rows // ep, launch_experts(predictor, rows // ep)[0].kernel)


def check_choice(predictor: Predictor, rows: int, kernel: str) -> None:
    """Check the kernel of a launch, and that the other one takes at least 1/1.1 of its time."""
    chosen, either = launch_experts(predictor, rows)
    assert chosen == either[kernel]
    times_ns = {name: predictor._dry.time_launch(launch).program_ns for name, launch in either.items()}
    assert times_ns[kernel] <= 1.1 * min(times_ns.values())


def test_chips_without_loops_sort_no_rows_that_experts_decode_takes() -> None:
    assert [find_sorted_expert_width(target) for target in ("trn1", "inf2")] == [0.0, 0.0]
    assert find_sorted_expert_width("trn2") == pytest.approx(113)
    assert find_sorted_expert_width("trn3") == pytest.approx(113 * 612.5 / 358)


@pytest.mark.parametrize(
    ("rows", "tolerance"), [(256, 1e-9), (300, 0.05), pytest.param(1500, 0.05, marks=pytest.mark.slow)]
)
def test_a_predicted_time_of_sorted_rows_is_near_its_launch(
    tmp_path: Path, rows: int, tolerance: float
) -> None:
    """Times of 8 and 16 experts are not: they are sorted in another way than 32."""
    fields = dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=96)
    model = write_config(tmp_path, "qwen3-30b-a3b", **fields)
    predictor = Predictor(model.config, "trn2", 1, "bfloat16", 2048)
    launched = predictor._dry.time_launch(launch_experts(predictor, rows)[0]).program_ns
    kernels = {kernel.name: kernel for kernel in predictor.predict_prompts(rows).kernels}
    assert kernels["experts_prefill"].time.program_ns == pytest.approx(launched, rel=tolerance)


def test_ranks_that_divide_experts_reserve_room_for_their_share(tmp_path: Path) -> None:
    """512 rows of each of two ranks: with room for all choices of both, the blocks of an expert are twice as long."""
    model = write_config(tmp_path, "qwen3-30b-a3b", num_experts=64, moe_intermediate_size=96)
    predictor = Predictor(model.config, "trn2", 1, "bfloat16", 1024, expert=2)
    launch, _ = launch_experts(predictor, 512)
    assert (launch.kernel, launch.arguments["expert_ranks"]) == ("experts_prefill", 2)
    undivided = replace(launch, arguments={**launch.arguments, "expert_ranks": 1})
    dry = DryTimes("trn2", Mesh(1, 2, expert=2))
    assert dry.time_launch(launch).program_ns < 0.9 * dry.time_launch(undivided).program_ns


STAND_INS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": dict(
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        hidden_size=512,
        num_attention_heads=4,
        num_key_value_heads=1,
    ),
    "mixtral-8x7b": dict(
        intermediate_size=512, hidden_size=1024, num_attention_heads=4, num_key_value_heads=1
    ),
    "qwen3-8b": dict(hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=1),
}
RAGGED = 0.02
"""A last tile that is not full takes further instructions, also in attention, which masks it: at most so much."""


@pytest.mark.parametrize(
    ("name", "target"), deep_except([(name, target) for target in ("trn2", "trn1") for name in STAND_INS], 3)
)
def test_a_longer_prompt_takes_no_less_time(tmp_path: Path, name: str, target: str) -> None:
    model = write_config(tmp_path, name, **STAND_INS[name])
    check_growth(Predictor(model.config, target, 1, "bfloat16", 1024), (64, 128, 129, 256, 257, 511, 512))


@pytest.mark.deep
def test_a_plan_takes_no_mesh_of_all_cores_that_is_slower() -> None:
    """Two groups of 64 ranks that divide the experts compute as many rows for one prompt as for two."""
    model = load_model(PUBLISHED / "qwen3-235b-a22b.json")
    plan = make_plan(model, Request(instance="trn2.48xlarge", lnc=1))
    assert (plan.placement.shape.tp, plan.placement.shape.ep, plan.placement.mesh.copies) == (64, 1, 2)
    divided = Predictor(model.config, "trn2.48xlarge", 64, "bfloat16", plan.context, expert=2)
    assert plan.first_token.predicted is not None
    assert plan.first_token.time.program_ns < divided.predict_prompts(plan.prompt).time.program_ns


@pytest.mark.deep
@pytest.mark.parametrize(("name", "target", "tp", "ep", "lnc"), NAMED)
def test_a_longer_prompt_of_published_models_takes_no_less_time(
    name: str, target: str, tp: int, ep: int, lnc: int
) -> None:
    config = load_model(PUBLISHED / f"{name}.json").config
    predictor = Predictor(config, target, tp, "bfloat16", 4096, expert=ep, lnc=lnc)
    prompts = (64, 128, 129, 256, 257, 512, 768, 1024, 1500, 2047, 2048, 2500, 3072, 3500, 4095, 4096)
    check_growth(predictor, prompts)


def check_growth(predictor: Predictor, prompts: tuple[int, ...]) -> None:
    """Check that no prompt takes more time than a longer one or than two of the longest, but for ragged tiles."""
    passes = [predictor.predict_prompts(tokens) for tokens in prompts]
    times_ns = [done.time.program_ns for done in (*passes, predictor.predict_prompts(prompts[-1], 2))]
    for index, tokens in enumerate(prompts):
        assert times_ns[index] <= (1 + RAGGED) * min(times_ns[index + 1 :]), f"{tokens} tokens"


@cache
def narrow_experts() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and the weights of a Mixtral with 32 experts of 24 elements, two for each token."""
    config = TINY | dict(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        num_hidden_layers=1,
        num_local_experts=32,
        num_experts_per_tok=2,
        intermediate_size=24,
        sliding_window=None,
    )
    weights = {name: array for name, array in random_weights(config).items() if ".mlp." not in name}
    generator = np.random.default_rng(1)
    shapes = {"w1": (24, 32), "w2": (32, 24), "w3": (24, 32)}
    moe = "model.layers.0.block_sparse_moe"
    weights[f"{moe}.gate.weight"] = generator.standard_normal((32, 32)).astype(np.float32)
    for expert in range(32):
        for name, shape in shapes.items():
            matrix = generator.standard_normal(shape) * 1.5 / shape[1] ** 0.5
            weights[f"{moe}.experts.{expert}.{name}.weight"] = matrix.astype(np.float32)
    return config, weights


@pytest.mark.parametrize(("target", "tokens", "kernel"), [("trn2", 17, 1), ("trn2", 16, 0), ("trn1", 17, 0)])
def test_a_prompt_launches_the_kernel_that_a_plan_predicts(
    tmp_path: Path, target: str, tokens: int, kernel: int
) -> None:
    """Each token takes two of 32 experts: 17 tokens have more choices than there are experts."""
    fields, weights = narrow_experts()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config, prompt = load_config(tmp_path), [3 + 7 * index % 250 for index in range(tokens)]
    assert compose(config).blocks
    shards = shard_weights(config, weights, 1)
    dry = DryDevice(target, 1)
    KernelModel(config, shards, dry, 64).prefill([prompt])
    launched = {launch.launch.kernel for launch in dry.take_pass().launches}
    assert launched & set(EITHER) == {EITHER[kernel]}
    plan = Predictor(config, target, 1, "float32", 64).predict_prompts(tokens)
    assert {kernel.name for kernel in plan.kernels} & set(EITHER) == {EITHER[kernel]}
    (output,) = KernelModel(config, shards, SimulatedDevice(target, 1), 64).prefill([prompt])
    (wanted,) = ReferenceModel(config, weights).prefill([prompt])
    np.testing.assert_allclose(output.logits, wanted.logits, rtol=0, atol=1e-4 * np.abs(wanted.logits).max())
