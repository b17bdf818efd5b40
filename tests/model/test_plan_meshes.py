"""Meshes that a plan finds: what their ranks hold, which is taken and why, and the predicted time of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import ml_dtypes
import numpy as np
import pytest

from model.config.published import PUBLISHED
from model.device import DryDevice, PipelinedPass, chip, find_instance
from model.errors import ModelError
from model.execution.stages import SEND, divide_stages
from model.families import compose, load_config, read_config
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.memory import MeshShape, compute_footprint, find_smallest_tp
from model.plan.meshes import Meshes
from model.plan.plan import Request, make_plan
from model.plan.predict import BUBBLE, Predictor
from model.plan.roofline import count_prefill_work
from model.plan.sizes import ModelSizes, load_model
from model.runners.contiguous import KernelModel
from tests.model.test_kernel_model import load
from tests.model.tiny_families import write_tiny

CONFIGS = PUBLISHED
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ULTRASERVER = "trn2 UltraServer"


def model(name: str) -> ModelSizes:
    return load_model(CONFIGS / f"{name}.json")


def widened(name: str) -> ModelSizes:
    """Return the sizes of a model without a weight format, as its kernels get it where all weights are widened."""
    return ModelSizes(replace(read_config(CONFIGS / f"{name}.json"), weight_format=None, quant_method=None))


def meshes(name: str, instance: str, batch: int = 1, context: int = 1024) -> Meshes:
    return Meshes(model(name), "bfloat16", find_instance(instance), context, batch)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "gemma-2-2b", "olmoe-1b-7b"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 8)])
def test_a_rank_holds_the_weights_and_caches_of_its_stage(name: str, tp: int, pp: int) -> None:
    """As the layers state them, tensor by tensor."""
    counts = model(name)
    candidate = meshes(name, "trn2.48xlarge").create_candidate(MeshShape(tp, pp))
    step = StepShape(Phase.decode, 1, 1, 1024, 1024, tp, BFLOAT16, WeightDtypes(BFLOAT16))
    rank_bytes = []
    for stage in divide_stages(compose(counts.config), pp, step):
        layers = [layer for section in stage for layer in section]
        weights = 2 * sum(prod(weight.shape(step.shard)) for layer in layers for weight in layer.weights)
        rank_bytes.append(weights)
    # Counts share elements evenly where layers pad; that is less than a thousandth here.
    assert candidate.weight_bytes == pytest.approx(max(rank_bytes), rel=1e-3)


def test_groups_of_experts_hold_them_once() -> None:
    one, four = (
        meshes("deepseek-v3", ULTRASERVER).create_candidate(shape)
        for shape in (MeshShape(8), MeshShape(8, ep=4))
    )
    experts = model("deepseek-v3").count_component_bytes("bfloat16")["experts"]
    assert one.weight_bytes - four.weight_bytes == pytest.approx(experts / 8 * 3 / 4, rel=1e-6)
    assert one.cache_bytes_per_sequence == four.cache_bytes_per_sequence


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "gemma-2-9b", "mixtral-8x7b"])
def test_tensor_parallel_ranks_alone_are_taken_where_they_hold_a_model(name: str, batch: int) -> None:
    best = meshes(name, "trn2.48xlarge", batch).rank()[0]
    core_bytes = chip("trn2").hbm_bytes_per_core
    assert best.shape == MeshShape(
        find_smallest_tp(model(name), "bfloat16", 1024, batch, 128, core_bytes) or 0
    )


@pytest.mark.slow
def test_a_mesh_holds_a_batch_to_the_last_sequence() -> None:
    estimator = meshes("deepseek-v3", ULTRASERVER)
    shape = MeshShape(32, 4)
    most = estimator.create_candidate(shape).sequences
    fits = [
        meshes("deepseek-v3", ULTRASERVER, most + more).create_candidate(shape).step for more in (-1, 0, 1)
    ]
    assert [fit is not None for fit in fits] == [True, True, False]


@pytest.mark.deep
@pytest.mark.parametrize("batch", [1, 64])
def test_deepseek_v3_fits_the_ultraserver_on_a_mesh_of_more_than_tensor_parallel_ranks(batch: int) -> None:
    counts = widened("deepseek-v3")
    capacity = chip("trn2").hbm_bytes_per_core
    assert all(compute_footprint(counts, "bfloat16", tp, 1024).weight_bytes > capacity for tp in (1, 64, 128))
    plan = make_plan(counts, Request(instance=ULTRASERVER, batch=batch))
    mesh, compared = plan.placement.mesh, plan.placement.meshes
    assert plan.rate.fits and mesh.shape.pp * mesh.shape.ep > 1
    assert mesh.needed_bytes <= capacity < compared[-1].needed_bytes
    assert mesh.copies * mesh.shape.ranks <= 512
    assert plan.rate.step.roofline_ns == pytest.approx(mesh.step.step_ns)
    rates = [mesh.tokens_per_s for mesh in compared]
    assert rates == sorted(rates, reverse=True) and rates[0] > 0 == rates[-1]


def test_deepseek_v3_as_published_fits_tensor_parallel_ranks_that_do_not_hold_it_widened() -> None:
    capacity = chip("trn2").hbm_bytes_per_core
    stored, plain = (
        compute_footprint(sizes("deepseek-v3"), "bfloat16", 128, 1024).weight_bytes
        for sizes in (model, widened)
    )
    assert stored < capacity < plain


@pytest.mark.deep
def test_a_plan_without_room_keeps_to_tensor_parallel_ranks() -> None:
    plan = make_plan(model("deepseek-v3"), Request(instance="trn1.32xlarge"))
    assert (plan.placement.shape, plan.placement.holds_weights) == (MeshShape(32), False)


@pytest.mark.parametrize(
    "shape", [MeshShape(1), MeshShape(4), MeshShape(2, 4), MeshShape(8, 2, 4), MeshShape(32, 1, 8)], ids=str
)
def test_the_shares_of_a_step_are_all_of_it(shape: MeshShape) -> None:
    step = meshes("deepseek-v3", ULTRASERVER).estimate_step(shape, 32)
    assert step.core + step.collectives + step.bubble == pytest.approx(1)
    assert (step.collectives > 0) == (shape.ranks > 1) and (step.bubble > 1e-9) == (shape.pp > 1)


@pytest.mark.parametrize("shape", [MeshShape(1), MeshShape(8)], ids=str)
def test_a_step_of_quantised_weights_is_estimated_by_their_stored_bytes(shape: MeshShape) -> None:
    """The core's time of a step is that of its bytes; fp8 halves those of the layers, scales aside."""
    sizes = [load_model(CONFIGS / "llama-3.1-8b.json", quantization=name) for name in (None, "fp8")]
    steps = [
        Meshes(model, "bfloat16", find_instance("trn2.48xlarge"), 64, 1).estimate_step(shape, 1)
        for model in sizes
    ]
    plain, stored = (step.core * step.step_ns for step in steps)
    read = [size.count_bytes_read(1, "bfloat16") - size.embedding.parameters.total() * 2 for size in sizes]
    assert stored / plain == pytest.approx(read[1] / read[0], rel=1e-2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_takes_the_time_that_generating_takes(write_model, ranks: int) -> None:
    """As the dry runs of all ranks say, but for floors, to which a plan keeps."""
    folder = write_model(vocab_size=304, num_hidden_layers=4)
    config, weights = load(folder)
    mesh = Mesh(ranks, pipeline=2)
    device = DryDevice("trn2", mesh.ranks)
    kernels = KernelModel(config, shard_weights(config, weights, ranks), device, 128, mesh=mesh)
    plan = Predictor(load_config(folder), "trn2", ranks, "float32", 64, pipeline=2)
    kernels.prefill([list(range(16))])
    for done, run in (
        (plan.predict_prompts(16), lambda: None),
        (plan.predict_step(1), lambda: kernels.decode([5], [16])),
    ):
        run()
        wanted = PipelinedPass((device.take_pass(),), SEND).prediction()
        named = {kernel.name: kernel for kernel in done.kernels}
        assert done.time.program_ns == pytest.approx(wanted.program_ns, rel=0.02)
        assert named[BUBBLE].time.program_ns / done.time.program_ns == pytest.approx(
            wanted.bubble_share, abs=0.02
        )
        assert named[SEND].launches == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_that_divide_experts_take_the_time_that_generating_takes(tmp_path, ranks: int) -> None:
    """As the dry runs of all ranks say, but for floors; each group computes one of both prompts."""
    folder = write_tiny(tmp_path, "mixtral")
    config, weights = load(folder)
    mesh = Mesh(ranks, 2, expert=2)
    device = DryDevice("trn2", mesh.ranks)
    shards = shard_weights(config, weights, ranks, list({mesh.shard(rank) for rank in range(mesh.ranks)}))
    kernels = KernelModel(config, shards, device, 128, mesh=mesh, sequences=2)
    plan = Predictor(load_config(folder), "trn2", ranks, "float32", 64, expert=2)
    kernels.prefill([list(range(16)), list(range(16))])
    for done, run in (
        (plan.predict_prompts(16, 2), lambda: None),
        (plan.predict_step(2), lambda: kernels.decode([5, 6], [16, 16])),
    ):
        run()
        wanted = device.take_pass().prediction()
        assert done.time.program_ns == pytest.approx(wanted.program_ns, rel=0.02)
        named = {kernel.name: kernel for kernel in done.kernels}
        assert named["experts_dispatch"].launches == named["experts_combine"].launches == len(config.blocks)
        assert not done.refusals


@pytest.mark.deep
def test_a_plan_on_groups_of_experts_is_predicted_by_kernels() -> None:
    request = Request(instance="trn2.48xlarge", tp=8, ep=2, batch=4, prompt=64, generate=8)
    plan = make_plan(model("mixtral-8x7b"), request)
    assert plan.placement.shape == MeshShape(8, ep=2)
    assert plan.rate.step.predicted is not None and not plan.rate.step.predicted.refusals
    names = {kernel.name: kernel.launches for kernel in plan.rate.step.predicted.kernels}
    assert names["experts_dispatch"] == names["experts_combine"] == 32
    alone = make_plan(model("mixtral-8x7b"), replace(request, ep=None))
    assert alone.placement.mesh.weight_bytes > plan.placement.mesh.weight_bytes


@pytest.mark.slow
def test_micro_batches_shorten_prompts_and_no_mesh_takes_more_than_one_stage_at_a_time() -> None:
    one, four = (
        Predictor(model("llama-3.2-1b").config, "trn2", 1, "bfloat16", 256, pipeline=pp) for pp in (1, 4)
    )
    alone, piped = (predictor.predict_prompts(128, 4).time.program_ns for predictor in (one, four))
    assert alone / 4 < piped < alone
    assert four.predict_prompts(128, 1).time.program_ns > one.predict_prompts(128, 1).time.program_ns


@pytest.mark.parametrize(
    ("request_of", "works", "message"),
    [
        ({"pp": 33}, {"pp": 32}, "33 pipeline stages for 32 layers; this model takes --pp 1 to 32"),
        ({"ep": 2}, {"ep": 1}, "--ep 2 divides routed experts, and this model has none; leave it out"),
        (
            {"tp": 32, "pp": 4},
            {"tp": 32, "pp": 2},
            "128 ranks on trn2.48xlarge, which has 64 logical cores (LNC 2)",
        ),
        (
            {"tp": 32, "pp": 8, "lnc": 1},
            {"tp": 32, "pp": 4, "lnc": 1},
            "256 ranks on trn2.48xlarge, which has 128 cores",
        ),
        (
            {"accelerator": "h100", "pp": 2},
            {"accelerator": "h100", "pp": 1},
            "--pp and --ep are for the cores of an instance, not for an accelerator",
        ),
    ],
)
def test_refuses_a_mesh_that_there_is_not(monkeypatch, request_of, works, message) -> None:
    monkeypatch.setattr(
        "model.plan.plan.find_unsupported", lambda config: ("anything",)
    )  # rooflines are enough
    counts = model("llama-3.1-8b")
    with pytest.raises(ModelError) as refusal:
        make_plan(counts, Request(**request_of))
    assert message in str(refusal.value)
    assert make_plan(counts, replace(Request(), **works)).rate.step.time.program_ns > 0


@pytest.mark.parametrize(("tp", "factor"), [(16, 1), (32, 1), (64, 2), (128, 4)])
def test_padding_counts_as_work_of_a_rank(tp: int, factor: int) -> None:
    """Gemma-3-27b has 32 heads: with 128 ranks each one of them computes a head, as with 32."""
    (section, *_) = model("gemma-3-27b").blocks
    for phase in Phase:
        assert section.count_products(phase, 1024, tp) * tp == factor * section.count_products(phase, 1024)


@pytest.mark.parametrize(("name", "tp", "least"), [("llama-2-7b", 32, 1.0), ("llama-2-7b", 64, 1.3)])
def test_an_estimate_of_a_prompt_counts_what_ranks_repeat(name: str, tp: int, least: float) -> None:
    """Attention has a third of the weights of llama-2-7b; 64 ranks compute its 32 heads with zeros, twice the work."""
    estimator = meshes(name, "trn2.48xlarge")
    row_bytes = 512 * 4096 * 2
    collectives_ns = 32 * estimator._compute_collectives_ns(estimator._blocks[0], MeshShape(tp), row_bytes)
    even_ns = 1e9 * count_prefill_work(model(name), "bfloat16", 1, 512).compute_seconds(
        estimator._peaks.scale(tp)
    )
    ratio = (estimator.estimate_prompt(MeshShape(tp), 512) - collectives_ns) / even_ns
    assert ratio == pytest.approx(least, rel=0.04)
