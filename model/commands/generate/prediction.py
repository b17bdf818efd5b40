"""Predicted times of `nkw generate` on several chips, and the files of timelines.

A pass is one run of all launches of a step for one micro-batch, on a dry device that predicts times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from model.commands.generate.generation import Generation
from model.commands.generate.job import Job
from model.commands.generate.micro_batches import split_into_micro_batches
from model.commands.generate.report import TargetPrediction
from model.errors import ModelError
from model.execution.stages import SEND
from nkw.files import OutputFile
from nkw.terminal import progress

if TYPE_CHECKING:  # the numpy backend must not load the simulator
    from model.device import Pass

COMPARED_TARGETS = ("trn1", "inf2", "trn2")


def iterate_targets(target: str) -> Iterable[str]:
    """Yield the chips for which times are predicted: trn1, inf2, trn2 and `target`; show the progress on a terminal."""
    return progress(list(dict.fromkeys((*COMPARED_TARGETS, target))), "predictions")


def check_cores(options: argparse.Namespace) -> None:
    """Check, if times are predicted, that a rank of --target can have the physical cores of --lnc.

    Raises:
        ModelError: It cannot.
    """
    if options.backend == "simulate":
        from model.device import choose_lnc

        choose_lnc(options.target, options.lnc)


def check_timelines(options: argparse.Namespace) -> None:
    """Check that the backend predicts timelines if --trace, --profile or --html asks for them.

    Raises:
        ModelError: It does not.
    """
    for option in ("trace", "profile", "html"):
        if getattr(options, option) and options.backend != "simulate":
            raise ModelError(f"--{option} needs the simulate backend; {options.backend} predicts no timeline")


def predict(job: Job, generations: list[Generation]) -> tuple[list[TargetPrediction], list[tuple[str, Pass]]]:
    """Predict the times of the prompts and of the last decode step, on each compared target.

    Args:
        job: The model and the prompts.
        generations: The finished generations, whose last positions and tokens the decode step has.

    Returns:
        The predictions by target, and the passes of --target with their labels.
    """
    from model.device import PipelinedPass

    options = job.options
    positions = [generation.last_position for generation in generations]
    tokens = [generation.generated_ids[-1] for generation in generations]
    predictions, labelled = [], []
    for target in iterate_targets(options.target):
        passes = _plan_passes(job, target, tokens, positions)
        count = len(job.micro_batches)
        first, token = PipelinedPass(tuple(passes[:count]), SEND), PipelinedPass(tuple(passes[count:]), SEND)
        predictions.append(TargetPrediction(first.prediction(), token.prediction()))
        if target == options.target:
            labels = [
                *map(_label_prompts, split_into_micro_batches(job.sequence_ids, job.micro_batches)),
                *map(_label_step, split_into_micro_batches(positions, job.micro_batches)),
            ]
            labelled = list(zip(labels, passes))
    return predictions, labelled


def _plan_passes(job: Job, target: str, tokens: Sequence[int], positions: Sequence[int]) -> list[Pass]:
    """Return the pass of the prompts of each micro-batch, then the pass of a decode step of each micro-batch.

    Args:
        job: The model and the prompts.
        target: The chip.
        tokens: Last token of each sequence.
        positions: Position of each of these tokens.
    """
    from model.device import DryDevice, limit_lnc

    lnc = limit_lnc(target, job.options.lnc)
    device = DryDevice(target, job.mesh.ranks, lnc=lnc)
    passes: list[Pass] = []
    model = job.create_dry_model(
        device, target, device.layer_done, lambda: passes.append(device.take_pass()), lnc
    )
    model.prefill(job.sequence_ids)
    model.decode(tokens, positions)
    return passes


def _label_prompts(prompt_ids: Sequence[list[int]]) -> str:
    """Return the label of a pass of prompts, such as "2 prompts of up to 7 tokens"."""
    longest = max(map(len, prompt_ids))
    tokens = f"{longest} token" + ("" if longest == 1 else "s")
    return f"prompt of {tokens}" if len(prompt_ids) == 1 else f"{len(prompt_ids)} prompts of up to {tokens}"


def _label_step(positions: Sequence[int]) -> str:
    """Return the label of a decode step, such as "token at position 9"."""
    if len(positions) == 1:
        return f"token at position {positions[0]}"
    return f"{len(positions)} tokens at positions up to {max(positions)}"


def write_timelines(
    options: argparse.Namespace,
    ranks: int,
    passes: Sequence[tuple[str, Pass]],
    names: Sequence[str],
    trace: OutputFile | None,
    page: OutputFile | None,
) -> None:
    """Write passes as a Perfetto trace and as an HTML page; None writes no such file.

    Args:
        options: The options, with the model and the chip.
        ranks: Ranks of a pass.
        passes: The passes with their labels on the page.
        names: Short labels of the passes, in the trace.
        trace: File of the trace, or None.
        page: File of the page, or None.
    """
    from model.device import write_page, write_passes

    if trace is not None:
        write_passes(trace, [(name, done) for name, (_, done) in zip(names, passes)])
    if page is not None:
        cores = "1 core" if ranks == 1 else f"{ranks} cores"
        write_page(page, f"{options.model.name} on {cores} of {options.target}", passes)
