"""Shares of the chip's peak rates that prompts and decode steps reach: planned for this project, and published.

A share is the time at the peaks over the planned or published time.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.stacks.entries import Half, read_published
from model.config.published import PUBLISHED
from model.device import chip, choose_lnc
from model.plan.predict import Predictor
from model.plan.roofline import compute_core_peaks, count_decode_work, count_prefill_work
from model.plan.sizes import load_model
from model.plan.stack_records import TRANSFORMERS_NEURONX

_MODELS = (
    *("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "gemma-2-9b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"),
)
_CORES = {"trn1.32xlarge": 8, "trn2.48xlarge": 8}
"""Tensor-parallel ranks by instance."""
_TOKENS = 2048
_BATCHES = (1, 8)
_LARGE = 30 * 10**9
"""Parameters of a large model."""


def list_shares() -> Iterator[str]:
    """Yield the tables of planned and of published shares of the peaks, and their medians and extremes."""
    planned = list(plan_shares())
    yield "| model | instance | prompts of 2,048 | step, batch 1 | step, batch 8 |"
    yield "|---|---|---:|---:|---:|"
    for name, instance, prompt, *steps in planned:
        yield f"| {name} | {instance} | {' | '.join(f'{share:.2f}' for share in (prompt, *steps))} |"
    yield ""
    prompts = [prompt for _, _, prompt, *_ in planned]
    steps = [share for *_, single, batched in planned for share in (single, batched)]
    published_prompts, published_steps = zip(*publish_shares())
    for words, shares in (
        ("planned, prompts", prompts),
        ("planned, steps", steps),
        ("published, prompts of large models", [share for share in published_prompts if share is not None]),
        ("published, steps", published_steps),
    ):
        yield f"- {words}: {min(shares):.2f} to {max(shares):.2f}, median {median(shares):.2f}, {len(shares)} values"


def plan_shares() -> Iterator[tuple[str, str, float, float, float]]:
    """Yield (model, instance, share of a prompt, share of a step with batch 1, share with batch 8), as planned."""
    for name in _MODELS:
        model = load_model(PUBLISHED / f"{name}.json")
        for instance, ranks in _CORES.items():
            lnc = choose_lnc(chip(instance).name, None, largest=True)
            predictor = Predictor(model.config, instance, ranks, "bfloat16", _TOKENS, lnc=lnc)
            passes = [predictor.predict_prompts(_TOKENS), *map(predictor.predict_step, _BATCHES)]
            prompt, single, batched = (pass_time.floor_ns / pass_time.time.program_ns for pass_time in passes)
            yield name, instance, prompt, single, batched


def publish_shares() -> Iterator[tuple[float | None, float]]:
    """Yield (share of prompts, share of a step) of each run in the fitted half, without the fitted time of the engine.

    The share of prompts is None for models of up to 30 billion parameters: their attention takes 32 times as long in
    that stack.
    """
    stack = TRANSFORMERS_NEURONX
    for run in read_published().runs:
        if run.half is not Half.fitted:
            continue
        model = run.load()
        peaks = compute_core_peaks(chip(run.instance), "bfloat16").scale(run.cores)
        step = count_decode_work(model, "bfloat16", run.batch, run.prompt + run.generate // 2)
        prompts = count_prefill_work(model, "bfloat16", run.batch, run.prompt)
        step_ns = 1e6 * run.tpot_ms - stack.step_engine.compute_ns(run.batch)
        prompts_ns = 1e6 * run.ttft_ms - stack.prompt_engine.compute_ns(run.batch)
        large = model.total > _LARGE
        yield (
            1e9 * prompts.compute_seconds(peaks) / prompts_ns if large else None,
            1e9 * step.compute_seconds(peaks) / step_ns,
        )
