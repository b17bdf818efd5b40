"""Predicted passes: the same dry runs as the model's own, at sizes that keep a plan short, never below the peaks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from model.config.published import PUBLISHED
from model.device import DryDevice
from model.engine import Batch, Chunk, Request
from model.engine.buckets import Buckets
from model.execution.launch_list import list_launches
from model.families import load_config
from model.layers.launch import Growth, Phase, StepShape
from model.layers.sample import DRAWS
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.mesh import Mesh
from model.plan.dry import Time, extrapolate
from model.plan.predict import PassTime, Predictor
from model.plan.roofline import LEAST, USUAL
from model.plan.sizes import ModelSizes, load_model
from model.runners.bucket_length import bucket_length
from model.runners.contiguous import KernelModel
from model.runners.paged import PagedModel
from model.sampling import RowSampling
from model.state import BlockTable, PagePool
from tests.deep import deep_except
from tests.model.folders import TINY
from tests.step_shapes import decode_shape, prompt_shape

CHIPS = ("trn1", "inf2", "trn2", "trn3")
STORIES_MOE = Path(__file__).parents[2] / "model" / "pretrained" / "stories-moe"


def tiny(folder: Path, **changes: Any) -> ModelSizes:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return load_model(path)


def predictor(
    model: ModelSizes,
    target: str = "trn2",
    tp: int = 1,
    context: int = 64,
    dtype: str = "float32",
    cuts: bool = False,
) -> Predictor:
    return Predictor(model.config, target, tp, dtype, context, cuts)


def named(done: PassTime) -> dict[str, Any]:
    return {kernel.name: kernel for kernel in done.kernels}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "ranks", "cuts", "dtype"),
    deep_except(
        [
            (*case, dtype)
            for case in (
                *(("trn1", 1, False), ("trn1", 4, False), ("inf2", 2, False), ("trn2.48xlarge", 4, False)),
                *(("trn3", 2, False), ("trn1", 2, True), ("trn2", 4, True), ("trn3", 4, True)),
            )
            for dtype in ("float32", "bfloat16")
        ],
        3,
    ),
)
def test_a_plan_takes_the_time_that_generating_takes(write_model, target, ranks, cuts, dtype) -> None:
    """Launch by launch: the plan launches the same kernels with the same arguments, one rank standing for its equals.

    Only the floor of a launch's work, which a plan keeps to, may lengthen it. 301 tokens leave the last of 4 ranks a
    smaller part of the vocabulary, whose search takes longer.
    """
    folder = write_model(vocab_size=301)
    config = load_config(folder)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), ranks, dtype=dtype)
    device = DryDevice(target, ranks)
    kernels = KernelModel(config, weights, device, bucket_length(64, 64), mesh=Mesh(ranks, sequence=cuts))
    plan = predictor(load_model(folder), target, ranks, dtype=dtype, cuts=cuts)
    tokens = 16 * ranks - 1 if cuts else 16  # ranks that cut rows pad them to 16 each
    for run, done in (
        (lambda: kernels.prefill([list(range(tokens))]), plan.predict_prompts(tokens)),
        (lambda: kernels.decode([5], [16]), plan.predict_step(1)),
    ):
        run()
        launched = device.take_pass()
        assert done.refusals == ()
        assert done.overhead.program_ns == launched.overhead_ns
        heads = sum(kernel.name in ("embedding, last rows", "lm_head") for kernel in done.kernels)
        (embedding, *layers), head = launched.launches[:-heads], launched.launches[-heads:]
        blocks = len(config.blocks)
        assert len(layers) == blocks * (len(done.kernels) - 1 - heads)
        for kernel, expected_launch in zip(
            done.kernels, [embedding, *layers[: len(layers) // blocks], *head]
        ):
            assert kernel.name.split(",")[0] == expected_launch.launch.kernel
            floor_ns, count = kernel.floor_ns / kernel.launches, kernel.launches
            for time_ns, launched_ns in (
                (kernel.time.dataflow_ns, expected_launch.dataflow_ns),
                (kernel.time.program_ns, expected_launch.program_ns),
                (kernel.time.serial_ns, expected_launch.serial_ns),
            ):
                assert time_ns / count == pytest.approx(max(launched_ns, floor_ns), rel=1e-9)


ENDS = ("lm_head", "sample", "embedding, last rows")
ROWS = ("embedding", "qkv_projection", "output_projection", "mlp")


def chunks_of(step: StepShape) -> list[Chunk]:
    """Return chunks that fill a step without its decoding sequences, each of a request of its own."""
    tokens = step.new_tokens
    length = step.cache_length if step.phase is Phase.decode else step.prefix + tokens
    requests = (
        Request(f"{number} of {step}", [7] * length, 1, tables=[BlockTable(0, [])])
        for number in range(step.sequences)
    )
    return [Chunk(request, length - tokens, tokens, True) for request in requests]


STEPS = [
    (decode_shape(1, 1, 128), ()),
    (decode_shape(16, 1, 128), ()),
    (prompt_shape(1, 16, 128), ()),
    (prompt_shape(1, 16, 128, 32), ()),
    (prompt_shape(2, 8, 128), ENDS),
    (prompt_shape(16, 8, 128, 32), ("attention_prefill",)),
    (prompt_shape(1, 112, 128, 0, decode_shape(16, 1, 128)), (*ENDS, "attention_mixed")),
    (prompt_shape(1, 16, 128, 32, decode_shape(16, 1, 128)), (*ENDS, *ROWS)),
    (prompt_shape(2, 8, 128, 0, decode_shape(4, 1, 128)), (*ENDS, *ROWS)),
]


@pytest.mark.parametrize(
    ("ranks", "shape", "between"), deep_except([(ranks, *step) for ranks in (1, 4) for step in STEPS], 4)
)
def test_a_part_of_a_step_takes_the_time_that_the_engine_takes(write_model, ranks, shape, between) -> None:
    """The same launches: tables of pages, a prefix, the last rows of the prompts, head and draw for one row of each.

    The times `between` two sizes that are launched are interpolated, so they are not held against a launch. Attention
    of mixed steps is a sum of launches, within 2 % of one launch.
    """
    folder = write_model(vocab_size=301)
    config = load_config(folder)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), ranks)
    device, pool = DryDevice("trn2", ranks), PagePool(300, 8)
    phases = [phase for phase in (shape, shape.decoding) if phase is not None]
    sequences = sorted({phase.sequences for phase in phases})
    run = PagedModel(config, weights, device, pool, Buckets(tuple(sequences), (shape.new_tokens,), (32, 128)))
    chunks = [chunk for phase in phases for chunk in chunks_of(phase)]
    draws = {chunk.request: [RowSampling(0.5, 1.0, top_k=50)] for chunk in chunks}
    run.step(Batch({chunk.request: chunk for chunk in chunks}), draws)
    assert shape.decoding is None or [step.sizes for step in run.use.steps] == [shape.sizes]
    launched = device.take_pass()
    plan = predictor(load_model(folder), tp=ranks, context=128)
    step = plan.make_paged_step({None: pool.count + 1}, pool.block_size)
    planned = plan.predict_paged(step.resize(shape.sizes))
    assert (planned.refusals, planned.overhead.program_ns) == ((), launched.overhead_ns)
    took = [(launch.launch.kernel, launch.program_ns) for launch in launched.launches]
    if shape.phase is Phase.prefill:
        kernel, time_ns = took[-3]
        took[-3] = (f"{kernel}, last rows", time_ns)
    assert {kernel.name: kernel.launches for kernel in planned.kernels} == Counter(name for name, _ in took)
    for planned_kernel in planned.kernels:
        if planned_kernel.name not in between:
            expected = sum(
                max(time_ns, planned_kernel.floor_ns / planned_kernel.launches)
                for name, time_ns in took
                if name == planned_kernel.name
            )
            rel = 0.02 if planned_kernel.name == "attention_mixed" else 1e-9
            assert planned_kernel.time.program_ns == pytest.approx(expected, rel=rel)


@pytest.mark.slow
def test_steps_of_other_sizes_share_dry_runs_and_stay_within_two_percent(tmp_path, monkeypatch) -> None:
    """Rows of one tile and numbers of decoding sequences are on lines between launches, which all steps share."""
    plan = predictor(tiny(tmp_path), dtype="bfloat16", context=2048)
    step = plan.make_paged_step({None: 4096}, 16)
    shapes = [
        step.resize(prompt_shape(prompts, tokens, 2048, prefix, decode_shape(decoding, 1, 128)).sizes)
        for prompts, tokens, prefix, decoding in ((1, 496, 128, 16), (1, 480, 128, 32), (6, 64, 0, 60))
    ]
    launched = []
    plan_kernel = DryDevice._plan
    monkeypatch.setattr(
        DryDevice,
        "_plan",
        lambda self, kernel, arguments: launched.append(kernel) or plan_kernel(self, kernel, arguments),
    )
    predicted = [plan.predict_paged(shape) for shape in shapes]
    for shape, done in zip(shapes, predicted):
        device_ns = sum(
            max(plan._dry.time_launch(launch).program_ns, 1e9 * plan._core.compute_seconds(*_work_of(launch)))
            * count
            for section, count in plan._sections
            for launch in list_launches(section, replace(shape, draws=DRAWS[1]))
        )
        assert done.time.program_ns - done.overhead.program_ns == pytest.approx(device_ns, rel=0.02)
    shared = len(launched)
    plan.predict_paged(step.resize(prompt_shape(1, 460, 2048, 128, decode_shape(52, 1, 128)).sizes))
    assert launched[shared:].count("attention_prefill") == 0
    assert "mlp" not in launched[shared:]


def _work_of(launch) -> tuple[float, float]:
    """Return the operations and bytes of a launch."""
    return launch.work.operations, launch.work.bytes


@pytest.mark.parametrize(
    "shape", [decode_shape(1, 1, 1024), decode_shape(16, 1, 1024), prompt_shape(1, 16, 512, 512)]
)
def test_layers_with_a_window_take_the_time_of_their_own_tables(write_model, shape) -> None:
    """A window of 20 in pages of 8 reads 128 positions of each sequence, however long it is."""
    folder = write_model(
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        sliding_window=20,
        max_position_embeddings=1024,
    )
    config = load_config(folder)
    pools = [PagePool(600, 8, window) for window in config.list_windows(1024)]
    assert [pool.window for pool in pools] == [20]
    device = DryDevice("trn2", 1)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), 1)
    run = PagedModel(config, weights, device, pools, Buckets((1, 16), (16,), (512, 1024)))
    length = 1000 if shape.phase is Phase.decode else 500
    requests = [
        Request(str(number), [7] * length, 1, tables=[BlockTable((length - 16) // 8 - 3, [])])
        for number in range(shape.sequences)
    ]
    chunks = (Chunk(request, length - shape.new_tokens, shape.new_tokens, True) for request in requests)
    run.step(Batch({chunk.request: chunk for chunk in chunks}))
    took = device.take_pass()
    plan = predictor(load_model(folder), context=1024)
    planned = plan.predict_paged(plan.make_paged_step({20: 601}, 8).resize(shape.sizes))
    assert planned.refusals == ()
    attention = "attention_prefill" if shape.phase is Phase.prefill else "decoder_layer_decode"
    (kernel,) = (kernel for kernel in planned.kernels if kernel.name == attention)
    launches = [launch for launch in took.launches if launch.launch.kernel == attention]
    assert kernel.launches == len(launches)
    floor_ns = kernel.floor_ns / kernel.launches
    assert kernel.time.program_ns == pytest.approx(
        sum(max(launch.program_ns, floor_ns) for launch in launches), rel=1e-9
    )
    if shape.phase is Phase.decode and shape.sequences == 1:
        without_window = plan.predict_paged(plan.make_paged_step({None: 601}, 8).resize(shape.sizes))
        assert kernel.time.program_ns < named(without_window)[attention].time.program_ns


@pytest.mark.parametrize("copies", [1, 3, 128, 131])
def test_copies_of_pages_take_the_time_that_the_engine_takes(write_model, copies) -> None:
    folder = write_model()
    config = load_config(folder)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), 1)
    device, pool = DryDevice("trn2", 1), PagePool(400, 8)
    run = PagedModel(config, weights, device, pool, Buckets((1,), (16,), (128,)))
    run.step(Batch(copies={(0, new): new + 200 for new in range(copies)}))
    launched = device.take_pass().launches
    layers = len(config.blocks)
    assert [launch.launch.kernel for launch in launched] == ["copy_pages"] * (layers * -(-copies // 128))
    plan = predictor(load_model(folder), context=128)
    planned = plan.time_copies(copies, None, plan.make_paged_step({None: pool.count + 1}, 8))
    assert planned.program_ns == pytest.approx(sum(launch.program_ns for launch in launched), rel=1e-9)


@pytest.mark.parametrize(("target", "tp"), deep_except(product(CHIPS, [1, 2, 4]), 4))
def test_no_part_is_faster_than_the_peaks_and_the_readings_are_ordered(tmp_path, target, tp) -> None:
    plan = predictor(tiny(tmp_path), target, tp)
    for done in (plan.predict_prompts(40), plan.predict_step(1), plan.predict_step(5)):
        assert done.refusals == ()
        for kernel in done.kernels:
            assert (
                0
                < kernel.floor_ns
                <= kernel.time.dataflow_ns
                <= kernel.time.program_ns
                <= kernel.time.serial_ns
            )
        assert done.floor_ns < done.time.program_ns


def test_layers_and_sequences_are_counted(tmp_path) -> None:
    plan = predictor(tiny(tmp_path, num_hidden_layers=3), tp=2)
    first, step = named(plan.predict_prompts(10)), named(plan.predict_step(4))
    assert (first["mlp"].launches, first["embedding"].launches, first["lm_head"].launches) == (3, 1, 1)
    assert (first["attention_prefill"].launches, step["decoder_layer_decode"].launches) == (3, 3)


@pytest.mark.parametrize(("tokens", "batch"), [(10, 3), (130, 2)])
def test_packed_prompts_share_products_and_attend_each_to_itself(tmp_path, tokens, batch) -> None:
    """Products are those of one prompt as long as all; attention's work is that of each, and so is the head's."""
    plan = predictor(tiny(tmp_path), context=512)
    packed, one = named(plan.predict_prompts(tokens, batch)), named(plan.predict_prompts(tokens))
    unpacked = named(plan.predict_prompts(batch * tokens))
    for kernel in ("embedding", "qkv_projection", "output_projection", "mlp"):
        assert packed[kernel] == unpacked[kernel]
    assert packed["lm_head"] == named(plan.predict_step(batch))["lm_head"]
    assert packed["embedding, last rows"].launches == 1  # which are gathered before the head
    attention, alone = packed["attention_prefill"], one["attention_prefill"]
    assert attention.floor_ns == pytest.approx(batch * alone.floor_ns)
    assert alone.time.program_ns < attention.time.program_ns <= batch * alone.time.program_ns
    assert alone.time.serial_ns < attention.time.serial_ns


def test_equal_layers_take_equal_times(tmp_path) -> None:
    one, three = (
        named(predictor(tiny(tmp_path, num_hidden_layers=count)).predict_step(1)) for count in (1, 3)
    )
    assert three["decoder_layer_decode"].time == one["decoder_layer_decode"].time * 3
    assert three["lm_head"] == one["lm_head"]


def test_heads_with_norms_of_their_own_pass_them(tmp_path) -> None:
    plan = predictor(tiny(tmp_path, model_type="qwen3", num_hidden_layers=2))
    for done in (plan.predict_prompts(3), plan.predict_step(1)):
        assert done.refusals == ()
        assert not any(kernel.name.startswith("rmsnorm") for kernel in done.kernels)


@pytest.mark.parametrize(("batch", "heads"), [(127, [1]), (128, [1]), (129, [1, 1]), (300, [2, 1])])
def test_the_head_takes_128_rows_at_a_time(tmp_path, batch, heads) -> None:
    done = predictor(tiny(tmp_path, num_hidden_layers=1)).predict_step(batch)
    assert [kernel.launches for kernel in done.kernels if kernel.name == "lm_head"] == heads


def test_batches_are_launched_at_few_sizes(tmp_path, monkeypatch) -> None:
    launched = set()
    run = DryDevice.run

    def noted(self, kernel, arguments):
        if kernel == "decoder_layer_decode":
            launched.add(arguments[0]["x"].shape[0])
        return run(self, kernel, arguments)

    monkeypatch.setattr(DryDevice, "run", noted)
    plan = predictor(tiny(tmp_path))
    times = [plan.predict_step(batch).time.program_ns for batch in (1, 2, 8, 16, 17, 64, 128)]
    assert launched == {1, 16, 128}
    assert times == sorted(times)


@pytest.mark.slow
def test_times_between_two_launches_lie_between_theirs(tmp_path) -> None:
    model = tiny(tmp_path)
    low, middle, high = (
        named(predictor(model).predict_step(batch))["decoder_layer_decode"].time for batch in (16, 72, 128)
    )
    assert middle.serial_ns == pytest.approx((low.serial_ns + high.serial_ns) / 2)
    assert low.program_ns <= middle.program_ns <= high.program_ns


@pytest.mark.parametrize("period", [512, 1536])
@pytest.mark.parametrize("repeats", [(1, 2), (2, 4), (1, 2, 4)])
@pytest.mark.parametrize("size", [1, 511, 512, 1535, 1536, 2047, 2048, 8192, 8191])
def test_continuation_is_exact_for_polynomials_and_launches_little(repeats, size, period) -> None:
    timed_rows = []

    def polynomial(rows: int) -> Time:
        timed_rows.append(rows)
        periods, remainder = divmod(rows, period)
        return Time.exact(
            float(5 + 3 * periods + 7 * remainder + (2 * periods * periods if len(repeats) == 3 else 0))
        )

    wanted = polynomial(size)
    timed_rows.clear()
    assert extrapolate(polynomial, size, period, repeats).program_ns == pytest.approx(wanted.program_ns)
    assert len(timed_rows) <= len(repeats)
    assert max(timed_rows) < period * (repeats[-1] + 1)
    assert {rows % period for rows in timed_rows} == {size % period}


@pytest.mark.slow
@pytest.mark.parametrize("cuts", deep_except([True, False], 2))
def test_products_of_long_prompts_take_the_time_of_their_launches(tmp_path, cuts) -> None:
    """Within 1 % where groups of the MLP have under 512 rows and ranks do not divide 128."""
    fields = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=6144, intermediate_size=256)
    model = tiny(tmp_path, num_hidden_layers=1, head_dim=16, max_position_embeddings=8192, **fields)
    plan = predictor(model, tp=3, context=8192, cuts=cuts)
    section, _ = plan._sections[1]
    step = replace(plan._step, phase=Phase.prefill).with_rows(5001)
    for launch in list_launches(section, step):
        if launch.growth is Growth.rows:
            launched = plan._dry.time_launch(launch).program_ns
            assert plan._time_slowest_rank(section, launch, step).program_ns == pytest.approx(
                launched, rel=0.01
            )


@pytest.mark.parametrize(("tokens", "refused"), deep_except([(8193, True), (8191, False), (8192, False)], 2))
def test_a_prompt_beyond_the_kernel_s_limit_is_a_roofline_and_says_so(tmp_path, tokens, refused) -> None:
    model = tiny(tmp_path, num_hidden_layers=1, max_position_embeddings=16384, num_attention_heads=2)
    kernel = named(predictor(model, context=8200).predict_prompts(tokens))["attention_prefill"]
    refusal = f"attention_prefill takes at most 8192 tokens, not {tokens}; " if refused else ""
    assert kernel.refusal.startswith(refusal) and bool(kernel.refusal) == refused
    estimate = Time(kernel.floor_ns, kernel.floor_ns / USUAL.operations, kernel.floor_ns / LEAST.operations)
    assert (asdict(kernel.time) == pytest.approx(asdict(estimate))) == refused


@pytest.mark.parametrize(("context", "refused"), [(16256, False), (16384, False), (16385, True)])
def test_a_cache_beyond_the_kernel_s_limit_is_a_roofline_in_the_kernel_s_words(
    tmp_path, context, refused
) -> None:
    model = tiny(tmp_path, num_hidden_layers=1, max_position_embeddings=32768)
    kernels = named(predictor(model, context=context).predict_step(1))
    if not refused:
        assert kernels["decoder_layer_decode"].refusal == ""
        return
    refusal = "attention_decode takes caches of at most 16384 positions, not 16512"
    assert (
        kernels["attention_decode"].refusal,
        kernels["qkv_projection"].refusal,
        kernels["mlp"].refusal,
    ) == (
        refusal,
        "",
        "",
    )


@pytest.mark.parametrize(("hidden", "refused"), [(8192, False), (8200, True)])
def test_a_hidden_size_beyond_the_kernels_limit_is_named_for_each(tmp_path, hidden, refused) -> None:
    model = tiny(tmp_path, num_hidden_layers=1, hidden_size=hidden, head_dim=16, vocab_size=64)
    kernels = named(predictor(model).predict_step(1))
    layer = ("qkv_projection", "mlp") if refused else ("decoder_layer_decode",)
    for kernel in (*layer, "lm_head"):
        refusal = f"{kernel} takes a hidden size of at most 8192, not {hidden}" if refused else ""
        assert kernels[kernel].refusal == refusal


@pytest.mark.slow
def test_a_window_shortens_a_prompt_and_its_floor(tmp_path) -> None:
    """Beyond the window every token sees as many positions: 1,024 tokens more always take as much more."""
    fields = dict(num_hidden_layers=1, max_position_embeddings=16384, num_attention_heads=2)
    wide = tiny(tmp_path, model_type="mistral", sliding_window=None, **fields)
    narrow = tiny(tmp_path, model_type="mistral", sliding_window=500, **fields)
    unwindowed, *windowed = (
        named(predictor(model, context=8192).predict_prompts(tokens))["attention_prefill"]
        for model, tokens in ((wide, 8192), (narrow, 6144), (narrow, 7168), (narrow, 8192))
    )
    assert (
        windowed[2].time.program_ns < unwindowed.time.program_ns
        and windowed[2].floor_ns < unwindowed.floor_ns
    )
    before, after = (later.time - earlier.time for earlier, later in pairwise(windowed))
    assert after.program_ns == pytest.approx(before.program_ns)
    assert after.program_ns > 0


def test_a_rank_with_a_part_of_the_vocabulary_searches_as_often_as_the_others(tmp_path) -> None:
    """More columns than one search takes: the ranks still meet."""
    model = tiny(tmp_path, vocab_size=2 * 16384 + 10, num_hidden_layers=1)
    assert predictor(model, tp=2).predict_step(2).refusals == ()


@pytest.mark.slow
def test_more_ranks_shorten_a_wide_layer(tmp_path) -> None:
    model = tiny(tmp_path, intermediate_size=8192, hidden_size=512, num_hidden_layers=1)
    one, four = (named(predictor(model, tp=tp).predict_step(1))["decoder_layer_decode"].time for tp in (1, 4))
    assert four.program_ns < one.program_ns


@pytest.mark.slow
def test_a_refused_attention_block_is_timed_by_its_three_launches() -> None:
    """At 1,750 positions the block's tiles exceed SBUF of inf2; at 2,048 they do not."""
    config = load_model(PUBLISHED / "llama-3.1-8b.json").config
    shorter, longer = (
        Predictor(config, "inf2", 8, "bfloat16", context).predict_step(32) for context in (1750, 2048)
    )
    assert not shorter.refusals and not longer.refusals
    names = [kernel.name for kernel in shorter.kernels]
    assert names == ["embedding", "qkv_projection", "attention_decode", "output_projection", "mlp", "lm_head"]
    assert "decoder_layer_decode" in [kernel.name for kernel in longer.kernels]
    assert shorter.time.program_ns <= longer.time.program_ns


def test_routed_experts_of_a_step_are_timed_by_their_kernel() -> None:
    """A step of one token reaches 2 of 8 experts, and one of 8 tokens reaches more."""
    model = load_model(STORIES_MOE)
    alone, eight = (named(predictor(model, context=32).predict_step(batch)) for batch in (1, 8))
    for kernels in (alone, eight):
        assert kernels["experts_decode"].refusal == ""
        assert kernels["experts_decode"].time.program_ns > kernels["experts_decode"].floor_ns > 0
    assert eight["experts_decode"].time.program_ns > alone["experts_decode"].time.program_ns


@pytest.mark.slow
def test_mlp_of_a_quantised_model_is_timed_with_its_stored_weights(tmp_path) -> None:
    """A wide MLP is bound by its weights, which are half as many bytes; blocks of scales are widened."""
    sizes = dict(hidden_size=1024, intermediate_size=8192, num_hidden_layers=1)
    floors, times = [], []
    for quantisation in (
        None,
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
    ):
        changes = sizes if quantisation is None else sizes | {"quantization_config": quantisation}
        kernel = named(predictor(tiny(tmp_path, **changes), dtype="bfloat16").predict_prompts(16))["mlp"]
        floors.append(kernel.floor_ns)
        times.append(kernel.time.program_ns)
    plain, stored, blocks = floors
    assert stored / plain == pytest.approx(0.5, rel=0.01) and blocks == plain
    assert times[1] < 0.7 * times[0]
