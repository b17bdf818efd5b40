"""Predicted times of a generation, and the timelines and pages that show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from model.commands.generate.generation import Generation
from model.commands.generate.job import Job
from model.commands.generate.micro_batches import of_micro_batches
from model.commands.generate.report import TargetPrediction
from model.execution.stages import SEND
from nkw.files import OutputFile
from nkw.terminal import progress

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import Pass

COMPARED_TARGETS = ("trn1", "inf2", "trn2")


def predict(job: Job, generations: list[Generation]) -> tuple[list[TargetPrediction], list[tuple[str, Pass]]]:
    """Predicted times of the prompts and of the last decode step on each compared target; the chosen one's passes."""
    from model.device import PipelinedPass

    options = job.options
    last = [len(each.prompt_ids) + max(1, len(each.generated_ids) - 1) - 1 for each in generations]
    tokens_fed = [each.generated_ids[-1] for each in generations]
    predictions, chosen = [], []
    for target in progress(list(dict.fromkeys((*COMPARED_TARGETS, options.target))), "predictions"):
        passes = _passes(job, target, tokens_fed, last)
        count = len(job.micro_batches)
        first, token = (PipelinedPass(tuple(own), SEND) for own in (passes[:count], passes[count:]))
        predictions.append(TargetPrediction(first.prediction(), token.prediction()))
        if target == options.target:
            labels = [_prompt_label(own) for own in of_micro_batches(job.sequence_ids, job.micro_batches)]
            labels += [_step_label(own) for own in of_micro_batches(last, job.micro_batches)]
            chosen = list(zip(labels, passes))
    return predictions, chosen


def _passes(job: Job, target: str, tokens: Sequence[int], positions: Sequence[int]) -> list[Pass]:
    """The passes of the prompts of every micro-batch, then those of a step of each."""
    from model.device import DryDevice

    device = DryDevice(target, job.mesh.ranks)
    passes: list[Pass] = []
    model = job.dry_model(device, device.layer_done, lambda: passes.append(device.take_pass()))
    model.prefill(job.sequence_ids)
    model.decode(tokens, positions)
    return passes


def _prompt_label(prompt_ids: Sequence[list[int]]) -> str:
    longest = max(map(len, prompt_ids))
    tokens = f"{longest} token" + ("" if longest == 1 else "s")
    return f"prompt of {tokens}" if len(prompt_ids) == 1 else f"{len(prompt_ids)} prompts of up to {tokens}"


def _step_label(positions: Sequence[int]) -> str:
    if len(positions) == 1:
        return f"token at position {positions[0]}"
    return f"{len(positions)} tokens at positions up to {max(positions)}"


def write_timelines(
    job: Job, passes: list[tuple[str, Pass]], trace: OutputFile | None, page: OutputFile | None
) -> None:
    """Write the passes of a prediction to the trace and the page that the options ask for."""
    from model.device import write_page, write_passes

    if trace is not None:
        names = [name for name in ("prompt", "token") for _ in job.micro_batches]
        write_passes(trace, [(name, done) for name, (_, done) in zip(names, passes)])
    if page is not None:
        options = job.options
        cores = "1 core" if job.mesh.ranks == 1 else f"{job.mesh.ranks} cores"
        write_page(page, f"{options.model.name} on {cores} of {options.target}", passes)
