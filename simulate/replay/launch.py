"""Launches in replay mode: the first launch is eager, later launches are replayed and optionally verified."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from simulate.replay.cache import ReplayCache
from simulate.replay.guards import Guards
from simulate.replay.key import NotFixed, ReplayKey
from simulate.replay.options import ReplayOptions
from simulate.replay.program import SEVERAL_CORES, Program, why_not_replayed
from simulate.replay.verify import (
    Outcome,
    compare_exactly,
    compare_within_bound,
    copy_arrays,
    perturb_within_rounding,
    replace_arrays,
)
from simulate.run.environment import PRECISE_VARIABLE
from simulate.run.launch import Launch, LaunchRequest
from simulate.run.launcher import execute_launch
from simulate.run.machine import Mode


def replay_or_record(request: LaunchRequest, options: ReplayOptions, replays: ReplayCache) -> Launch:
    """Replay a recorded launch; without one, launch eagerly and record the launch if it can be replayed.

    Arrays that the kernel writes to are updated in place. A launch that cannot be replayed is counted in the cache's
    report, by reason.

    Args:
        request: The launch; its mode is replay.
        options: Whether to replay exactly, verify the replay, and multiply bfloat16 matrices with torch.
        replays: The cache of recorded programs.

    Returns:
        The launch. A replay shares the streams of the recorded launch.

    Raises:
        ReplayMismatch: A verified replay differs from an eager launch.
        NkwError: The eager launch fails, or a run-time index of the replay is out of bounds.
    """
    launch_options = _collect_key_options(request, options)
    try:
        if request.logical_core_size != 1:
            raise NotFixed(SEVERAL_CORES)
        key = ReplayKey.from_request(request, launch_options)
    except NotFixed as error:
        return _launch_eagerly(request, replays, str(error))
    with replays.session():
        recording = replays.find(key.key)
        if recording is not None and not recording[1].has_aliased_ranks(key.arrays):
            return _replay(request, key, *recording, options, replays)
    if recording is not None:
        return _launch_eagerly(request, replays, "ranks share memory that one of them writes")
    try:
        guards = Guards(request.kernel, key.classes)
    except NotFixed as error:
        return _launch_eagerly(request, replays, str(error))
    launch = _launch_eagerly(request, replays)
    reason = why_not_replayed(launch) or guards.find_side_effect()
    if reason is None and not key.matches(request, launch_options):
        reason = "the kernel changes its arguments"
    if reason is None:
        replays.keep(key.key, guards, replace(launch, outputs=[]), options.speed)
    else:
        replays.report.refusals[reason] += 1
    return launch


def _collect_key_options(request: LaunchRequest, options: ReplayOptions) -> tuple[Any, ...]:
    """Return further elements of the cache key: the world's ranks, precision, speed, level and rules."""
    precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
    peers = request.peers
    world = (0, len(request.arguments)) if peers is None else (peers.rank, peers.ranks)
    return (*world, precise, options.speed, request.level, request.rules)


def _launch_eagerly(request: LaunchRequest, replays: ReplayCache, reason: str | None = None) -> Launch:
    """Launch eagerly and return the launch, timed as phase `eager` of the report.

    Guards are checked again afterwards. With a `reason`, the launch is counted as refused for it.
    """
    if reason is not None:
        replays.report.refusals[reason] += 1
    replays.forget_checks()
    with replays.report.time_phase("eager"):
        return execute_launch(replace(request, mode=Mode.eager))


def _replay(
    request: LaunchRequest,
    key: ReplayKey,
    recorded_launch: Launch,
    program: Program,
    options: ReplayOptions,
    replays: ReplayCache,
) -> Launch:
    """Replay a program, tell the observers, and return the recorded launch with new outputs."""
    if options.verify:
        outputs = _replay_and_verify(request, key.arrays, program, options, replays)
    else:
        outputs = replays.run(program, key.arrays, options.exact, request.peers)
    launch = recorded_launch.repeated(outputs)
    for observer in request.observers:
        observer.ended(launch, ())
        replays.forget_checks()
    return launch


def _replay_and_verify(
    request: LaunchRequest,
    arrays: list[list[np.ndarray]],
    program: Program,
    options: ReplayOptions,
    replays: ReplayCache,
) -> list[Any]:
    """Launch eagerly on copies of the arrays, then replay on the arrays, and return the replay's outputs.

    Args:
        request: The launch.
        arrays: The array arguments of each rank; the replay updates those that the kernel writes to.
        program: The program.
        options: Whether the replay is exact, and so must have equal bytes.
        replays: The cache.

    Raises:
        ReplayMismatch: The outputs or the array arguments differ by more than reordered sums explain.
    """
    initial_arrays, eager_arrays = copy_arrays(arrays), copy_arrays(arrays)
    eager_arguments = [
        (replace_arrays(arrays, eager_arrays, args), replace_arrays(arrays, eager_arrays, kwargs))
        for args, kwargs in request.arguments
    ]
    eager = _launch_eagerly(replace(request, arguments=eager_arguments, observers=()), replays)
    outputs = replays.run(program, arrays, options.exact, request.peers)
    eager_outcome, replay_outcome = Outcome(eager.outputs, eager_arrays), Outcome(outputs, arrays)
    if options.exact:
        compare_exactly(eager.kernel, replay_outcome, eager_outcome)
    else:

        def run_perturbed(seed: int) -> Outcome:
            run_arrays = copy_arrays(initial_arrays)
            run_outputs = program.run(
                run_arrays, peers=request.peers, perturbation=perturb_within_rounding(seed)
            )
            return Outcome(run_outputs, run_arrays)

        compare_within_bound(
            eager.kernel, replay_outcome, eager_outcome, run_perturbed, single_process=request.peers is None
        )
    replays.report.verified += 1
    return outputs
