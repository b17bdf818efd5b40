"""`nkw traffic --stack`: passes take as long as those of a plan, in the sizes that the stack pads to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from model.engine import Batch, Chunk, Request, SchedulerOptions
from model.engine.buckets import Buckets
from model.errors import ModelError
from model.plan.stack_records import NXDI, OPTIMUM, STACKS, THIS
from model.state import BlockTable
from model.traffic.clock import PredictedClock
from model.traffic.deployment import Setup
from model.traffic.text import explain_half_the_buckets
from model.traffic.traffic import Request as TrafficRequest
from model.traffic.variants import HALF_THE_BUCKETS
from tests.model.test_plan_parameters import CONFIGS
from tests.traffic.clocks import Shapes

SETUP = Setup("trn2.48xlarge", "bfloat16", 1000, options=SchedulerOptions(4, 1024))


def _batch(decoding: int, prompts: int) -> Batch:
    """Return a batch of sequences that decode at position 40, and of prompts of 16 tokens."""
    lengths = [(41, 40, 1)] * decoding + [(16, 0, 16)] * prompts
    requests = [
        (Request(str(number), [7] * length, 1, tables=[BlockTable(0, [])]), computed, tokens)
        for number, (length, computed, tokens) in enumerate(lengths)
    ]
    return Batch({request: Chunk(request, computed, tokens, True) for request, computed, tokens in requests})


def _clock(stack, mixes: bool = True) -> PredictedClock:
    buckets = replace(Buckets.powers(8, 64, 64), mixes=mixes)
    return PredictedClock(Shapes(), buckets, (None,), stack=stack)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STACKS)
def test_a_step_takes_the_time_that_a_plan_gives_its_user(name) -> None:
    """One clock knows the kernels alone, so the plan's terms of the stack make the other one."""
    stack, clock, kernels = STACKS[name], _clock(STACKS[name], False), _clock(None, False)
    for decoding, prompts in ((1, 0), (3, 0), (0, 1), (0, 2)):
        step = clock.step(_batch(decoding, prompts))
        kernels.step(_batch(decoding, prompts))
        (predicted,) = list(kernels.shapes.values())[-1:]
        served = (
            stack.serve_prompts(predicted, prompts) if prompts else stack.serve_step(predicted.time, decoding)
        )
        assert step.time_ns == round(served.time.program_ns)
        assert step.prompts_ns == (step.time_ns if prompts else 0)


def test_a_mixed_pass_has_one_base_of_engine_time() -> None:
    times = [clock.step(_batch(2, 1)).time_ns for clock in (_clock(THIS), _clock(None))]
    step, prompt = THIS.step_engine, THIS.prompt_engine
    expected_ms = max(step.base_ms, prompt.base_ms) + 2 * step.slot_ms + prompt.slot_ms
    assert times[0] - times[1] == pytest.approx(1e6 * expected_ms, abs=1)


def test_each_stack_pads_to_its_own_sizes() -> None:
    engine_buckets, buckets, full = (
        replace(SETUP, stack=name).buckets for name in ("this", "nxdi", "optimum")
    )
    assert engine_buckets.mixes
    assert engine_buckets.tokens[0] == 16
    assert not buckets.mixes
    assert buckets.tokens == buckets.context == (128, 256, 512, 1024)
    assert full.tokens == full.context == (1024,)
    for stack, length, padded in ((NXDI, 200, 256), (OPTIMUM, 200, 1024)):
        assert stack.pad_prompt(length, 1024) == padded


def test_sizes_of_another_stack_are_not_chosen() -> None:
    config = CONFIGS / "llama-3.2-1b.json"
    with pytest.raises(ModelError, match="--stack nxdi pads to its own sizes"):
        TrafficRequest(config, stack="nxdi", buckets="auto")
    assert TrafficRequest(config, buckets="auto").stack == "this"


@pytest.mark.parametrize(("itl_ns", "explained"), [(14e6, 0), (15e6, 0), (16e6, 1)])
def test_half_the_buckets_are_explained_where_they_are_slow(itl_ns, explained) -> None:
    base, slow = (SimpleNamespace(itl={50: time_ns}, utilisation=0.7) for time_ns in (10e6, itl_ns))
    sentences = list(explain_half_the_buckets([("as above", base), (HALF_THE_BUCKETS, slow), ("tp 4", slow)]))  # type: ignore[list-item]
    assert len(sentences) == explained
    assert all("16 times the positions in use" in sentence for sentence in sentences)
