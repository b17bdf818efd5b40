"""Launches in replay mode: eager the first time, replayed from then on, verified on request."""

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
    copied,
    disturbance,
    in_place_of,
)
from simulate.run.environment import PRECISE_VARIABLE
from simulate.run.launch import Launch, LaunchRequest
from simulate.run.launcher import execute_launch
from simulate.run.machine import Mode


def replayed(request: LaunchRequest, options: ReplayOptions, replays: ReplayCache) -> Launch:
    """Replay a recorded launch; without one, launch eagerly and record the launch if it can be replayed.

    Raises what an eager launch raises, and ReplayMismatch where replays are verified.
    """
    launch_options = _launch_options(request, options)
    try:
        if request.logical_core_size != 1:
            raise NotFixed(SEVERAL_CORES)
        key = ReplayKey.of(request, launch_options)
    except NotFixed as error:
        return _eager(request, replays, str(error))
    with replays.session():
        found = replays.find(key.key)
        if found is not None and not found[1].ranks_alias(key.arrays):
            return _again(request, key, *found, options, replays)
    if found is not None:
        return _eager(request, replays, "ranks share memory that one of them writes")
    try:
        guards = Guards(request.kernel, key.classes)
    except NotFixed as error:
        return _eager(request, replays, str(error))
    done = _eager(request, replays)
    reason = why_not_replayed(done) or guards.disturbance()
    if reason is None and not key.matches(request, launch_options):
        reason = "the kernel changes its arguments"
    if reason is None:
        replays.keep(key.key, guards, replace(done, outputs=[]), options.speed)
    else:
        replays.report.refusals[reason] += 1
    return done


def _launch_options(request: LaunchRequest, options: ReplayOptions) -> tuple[Any, ...]:
    """The parts of the cache key besides kernel, chip and arguments."""
    precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
    peers = request.peers
    world = (0, len(request.arguments)) if peers is None else (peers.rank, peers.ranks)
    return (*world, precise, options.speed, request.level, request.rules)


def _eager(request: LaunchRequest, replays: ReplayCache, reason: str | None = None) -> Launch:
    """Launch eagerly; with a reason, count the launch as refused."""
    if reason is not None:
        replays.report.refusals[reason] += 1
    replays.forget_checks()
    with replays.report.timed("eager"):
        return execute_launch(replace(request, mode=Mode.eager))


def _again(
    request: LaunchRequest,
    key: ReplayKey,
    known: Launch,
    program: Program,
    options: ReplayOptions,
    replays: ReplayCache,
) -> Launch:
    if options.verify:
        outputs = _verified(request, key.arrays, program, options, replays)
    else:
        outputs = replays.run(program, key.arrays, options.exact, request.peers)
    done = known.repeated(outputs)
    for observer in request.observers:
        observer.ended(done, ())
        replays.forget_checks()
    return done


def _verified(
    request: LaunchRequest,
    arrays: list[list[np.ndarray]],
    program: Program,
    options: ReplayOptions,
    replays: ReplayCache,
) -> list[Any]:
    """Replay, launch eagerly on copies as well, and raise ReplayMismatch where the values differ."""
    before, held = copied(arrays), copied(arrays)
    given = [
        (in_place_of(arrays, held, args), in_place_of(arrays, held, kw)) for args, kw in request.arguments
    ]
    eager = _eager(replace(request, arguments=given, observers=()), replays)
    outputs = replays.run(program, arrays, options.exact, request.peers)
    wanted, got = Outcome(eager.outputs, held), Outcome(outputs, arrays)
    if options.exact:
        compare_exactly(eager.kernel, got, wanted)
    else:

        def disturbed(seed: int) -> Outcome:
            own = copied(before)
            runs = program.run(own, peers=request.peers, disturbance=disturbance(seed))
            return Outcome(runs, own)

        compare_within_bound(eager.kernel, got, wanted, disturbed, single_process=request.peers is None)
    replays.report.verified += 1
    return outputs
