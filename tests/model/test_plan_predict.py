"""Predicted passes: the same dry runs as the model's own, at sizes that keep a plan short, never below the peaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.cache import bucket_length
from model.checkpoint import open_checkpoint
from model.config import load_config
from model.device import DryDevice
from model.errors import ModelError
from model.families.llama import KernelModel, shard_weights
from model.plan.calls import RankCalls
from model.plan.dry import DryTimes, Time, continued
from model.plan.families import load_model
from model.plan.parameters import Model
from model.plan.predict import PassTime, Predictor
from tests.model.conftest import TINY

CHIPS = ("trn1", "inf2", "trn2", "trn3")


def tiny(folder: Path, **changes: Any) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return load_model(path)


def predictor(
    model: Model, target: str = "trn2", tp: int = 1, context: int = 64, dtype: str = "float32"
) -> Predictor:
    assert model.kernels is not None
    return Predictor(model, model.kernels, target, tp, dtype, context)


def named(done: PassTime) -> dict[str, Any]:
    return {part.name: part for part in done.parts}


@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_of_one_rank_are_those_of_the_model_made_of_kernels(write_model, target, dtype) -> None:
    folder = write_model()
    config = load_config(folder)
    weights = shard_weights(config, dict(open_checkpoint(folder, config)), 1, dtype=dtype)
    device = DryDevice(target, 1)
    kernels = KernelModel(config, weights, device, bucket_length(64, 64))
    plan = predictor(load_model(folder), target, dtype=dtype)
    for run, done in (
        (lambda: kernels.prefill(list(range(16))), plan.first_token(16)),
        (lambda: kernels.decode(5, 16), plan.step(1)),
    ):
        run()
        expected = device.take_pass().prediction()
        assert done.refusals == ()
        assert done.time.program_ns == pytest.approx(expected.program_ns)
        assert done.time.serial_ns == pytest.approx(expected.serial_ns)
        assert done.time.dataflow_ns >= expected.dataflow_ns or done.time.dataflow_ns == pytest.approx(
            expected.dataflow_ns
        )


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_activations_and_caches_have_the_bytes_of_the_dtype(tmp_path, dtype, size) -> None:
    """Every array a kernel is given or returns, but ids, positions, rotations and the head's results."""
    model = tiny(tmp_path)
    assert model.kernels is not None
    dry, device = DryTimes("trn2", 1), DryDevice("trn2", 1)
    calls = RankCalls(model, model.kernels, 1, dtype, 64, dry.replica_group, columns_searched=16384)
    rows = (calls.embedding, calls.qkv_projection, calls.rope(4), calls.output_projection, calls.mlp)
    for call in (*(each(5) for each in rows), calls.attention_prefill(5), calls.attention_decode()):
        (outputs,) = device.run(call.kernel, call.arguments)
        given = [each for each in call.arguments[0] if isinstance(each, np.ndarray)]
        arrays = [*given, *(outputs if isinstance(outputs, tuple) else (outputs,))]
        if call.kernel == "rope":
            arrays = [each for each in arrays if each.shape[1] != model.kernels.head_dim // 2]
        floats = {each.dtype.itemsize for each in arrays if each.dtype != np.int32}
        assert (call.kernel, floats) == (call.kernel, {size})


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_no_part_is_faster_than_the_peaks_and_the_readings_are_ordered(tmp_path, target, tp) -> None:
    plan = predictor(tiny(tmp_path), target, tp)
    for done in (plan.first_token(40), plan.step(1), plan.step(5)):
        assert done.refusals == ()
        for part in done.parts:
            assert 0 < part.floor_ns <= part.time.dataflow_ns <= part.time.program_ns <= part.time.serial_ns
        assert done.floor_ns < done.time.program_ns
        assert ("all_reduce" in named(done)) == (tp > 1)


def test_layers_sums_and_sequences_are_counted(tmp_path) -> None:
    plan = predictor(tiny(tmp_path, num_hidden_layers=3), tp=2)
    first, step = named(plan.first_token(10)), named(plan.step(4))
    assert (first["mlp"].launches, first["all_reduce"].launches, first["lm_head"].launches) == (3, 6, 1)
    assert (first["attention_prefill"].launches, step["attention_decode"].launches) == (3, 12)


def test_equal_layers_take_equal_times(tmp_path) -> None:
    one, three = (named(predictor(tiny(tmp_path, num_hidden_layers=count)).step(1)) for count in (1, 3))
    assert three["mlp"].time == one["mlp"].time * 3
    assert three["lm_head"] == one["lm_head"]


def test_heads_with_norms_of_their_own_pass_them(tmp_path) -> None:
    parts = named(predictor(tiny(tmp_path, model_type="qwen3", num_hidden_layers=2)).step(1))
    assert parts["rmsnorm, queries"].launches == parts["rmsnorm, keys"].launches == 2


@pytest.mark.parametrize(("batch", "heads"), [(127, [1]), (128, [1]), (129, [1, 1]), (300, [2, 1])])
def test_the_head_takes_128_rows_at_a_time(tmp_path, batch, heads) -> None:
    done = predictor(tiny(tmp_path, num_hidden_layers=1)).step(batch)
    assert [part.launches for part in done.parts if part.name == "lm_head"] == heads


def test_batches_are_launched_at_few_sizes(tmp_path, monkeypatch) -> None:
    launched = set()
    run = DryDevice.run

    def noted(self, kernel, arguments):
        if kernel == "mlp":
            launched.add(arguments[0][0].shape[0])
        return run(self, kernel, arguments)

    monkeypatch.setattr(DryDevice, "run", noted)
    plan = predictor(tiny(tmp_path))
    times = [plan.step(batch).time.program_ns for batch in (1, 2, 8, 16, 17, 64, 128)]
    assert launched == {1, 16, 128}
    assert times == sorted(times)


def test_times_between_two_launches_lie_between_theirs(tmp_path) -> None:
    model = tiny(tmp_path)
    low, middle, high = (named(predictor(model).step(batch))["mlp"].time for batch in (16, 72, 128))
    assert middle.serial_ns == pytest.approx((low.serial_ns + high.serial_ns) / 2)
    assert low.program_ns <= middle.program_ns <= high.program_ns


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("size", [1, 511, 512, 1535, 1536, 2047, 2048, 8192, 8191])
def test_continuation_is_exact_for_polynomials_and_launches_little(order, size) -> None:
    asked = []

    def polynomial(rows: int) -> Time:
        asked.append(rows)
        whole, rest = divmod(rows, 512)
        return Time.exact(float(5 + 3 * whole + 7 * rest + (2 * whole * whole if order == 2 else 0)))

    wanted = polynomial(size)
    asked.clear()
    assert continued(polynomial, size, order) == wanted
    assert len(asked) <= order + 1
    assert max(asked) < 512 * (order + 2)
    assert {rows % 512 for rows in asked} == {size % 512}


@pytest.mark.parametrize(("tokens", "refused"), [(8191, False), (8192, False), (8193, True)])
def test_a_prompt_beyond_the_kernel_s_limit_is_a_roofline_and_says_so(tmp_path, tokens, refused) -> None:
    model = tiny(tmp_path, num_hidden_layers=1, max_position_embeddings=16384, num_attention_heads=2)
    part = named(predictor(model, context=8200).first_token(tokens))["attention_prefill"]
    said = f"attention_prefill takes at most 8192 tokens, not {tokens}" if refused else ""
    assert part.refusal == said
    assert (part.time == Time.exact(part.floor_ns)) == refused


@pytest.mark.parametrize(("context", "refused"), [(8064, False), (8192, False), (8193, True)])
def test_a_cache_beyond_the_kernel_s_limit_is_a_roofline_in_the_kernel_s_words(
    tmp_path, context, refused
) -> None:
    model = tiny(tmp_path, num_hidden_layers=1, max_position_embeddings=16384)
    part = named(predictor(model, context=context).step(1))["attention_decode"]
    assert part.refusal == ("attention_decode takes caches of at most 8192, not 8320" if refused else "")


@pytest.mark.parametrize(("hidden", "refused"), [(8192, False), (8200, True)])
def test_a_hidden_size_beyond_the_kernels_limit_is_named_for_each(tmp_path, hidden, refused) -> None:
    model = tiny(tmp_path, num_hidden_layers=1, hidden_size=hidden, head_dim=16, vocab_size=64)
    parts = named(predictor(model).step(1))
    for kernel in ("qkv_projection", "output_projection", "mlp", "lm_head"):
        said = f"{kernel} takes a hidden size of at most 8192, not {hidden}" if refused else ""
        assert parts[kernel].refusal == said
    assert parts["attention_decode"].refusal == ""


@pytest.mark.parametrize(("window", "refused"), [(63, True), (64, False), (65, False)])
def test_a_window_shorter_than_the_context_has_no_kernel(tmp_path, window, refused) -> None:
    model = tiny(tmp_path, model_type="mistral", sliding_window=window)
    plan = predictor(model, context=64)
    for part in (
        named(plan.first_token(60))["attention_prefill"],
        named(plan.step(1))["attention_decode"],
    ):
        assert bool(part.refusal) == refused
        assert not refused or part.refusal == "no kernel attends within a window, here of 63 tokens"


def test_a_rank_with_a_part_of_the_vocabulary_searches_as_often_as_the_others(tmp_path) -> None:
    """More columns than one search takes: the ranks still meet."""
    model = tiny(tmp_path, vocab_size=2 * 16384 + 10, num_hidden_layers=1)
    assert predictor(model, tp=2).step(2).refusals == ()


def test_more_ranks_shorten_a_wide_layer(tmp_path) -> None:
    model = tiny(tmp_path, intermediate_size=8192, hidden_size=512, num_hidden_layers=1)
    one, four = (named(predictor(model, tp=tp).step(1))["mlp"].time for tp in (1, 4))
    assert four.program_ns < one.program_ns


def test_a_kernel_s_refusal_is_a_model_error(tmp_path) -> None:
    model = tiny(tmp_path)
    assert model.kernels is not None
    dry = DryTimes("trn2", 1)
    calls = RankCalls(model, model.kernels, 1, "float32", 64, dry.replica_group, columns_searched=16384)
    assert dry.launch(calls.mlp(1)).program_ns > 0
    flat = replace(calls.mlp(1), arguments=((np.zeros((1, 1, 1), np.float32),) * 7,))
    with pytest.raises(ModelError, match="expected x"):
        dry.launch(flat)
