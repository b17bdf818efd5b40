"""Launches in mode replay: recorded eagerly the first time, replayed after that, verified on request."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulate.hardware import Hardware
from simulate.memory import NkiTensor
from simulate.memory.objects import VALUE_READS
from simulate.replay.cache import REPLAYS, ReplayKey
from simulate.replay.guards import Watch
from simulate.replay.options import ReplayOptions
from simulate.replay.program import Program, storages_of
from simulate.replay.verify import (
    Outcome,
    compare_exactly,
    compare_within_bound,
    copied,
    disturbance,
    in_place_of,
)
from simulate.run.launch import Launch, announce, run_once
from simulate.run.machine import Mode, Recorder, SparingRecorder
from simulate.run.processes import Processes
from simulate.run.target import PRECISE_VARIABLE

_LARGE_BYTES = 32 * 2**20
"""Arguments above this are recorded sparingly: planning a launch twice then costs little beside computing it."""


def replayed(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    chip: Hardware,
    logical_core_size: int,
    options: ReplayOptions,
    elsewhere: Processes | None = None,
) -> Launch:
    """Replay a launch that was recorded before; else launch eagerly, and keep it if it can be replayed."""
    kind = None
    if logical_core_size == 1:
        precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
        world = (0, len(arguments)) if elsewhere is None else (elsewhere.rank, elsewhere.ranks)
        kind = REPLAYS.kind(kernel, arguments, (chip, *world, precise, options.speed))
    else:
        REPLAYS.report.refuse("a logical core of several physical cores")
    if kind is not None:
        with REPLAYS.turn():
            known = REPLAYS.find(kind.key)
            if known is not None:
                done = _again(kernel, arguments, kind, known, options, elsewhere)
                if done is not None:
                    return done
                kind = None
    watch = REPLAYS.watch(kernel, kind) if kind is not None else None
    with REPLAYS.report.timed("eager"):
        if kind is not None and watch is not None:
            return _recorded(kernel, arguments, chip, kind, watch, options, elsewhere)
        return run_once(kernel, arguments, chip, logical_core_size, Mode.eager, elsewhere=elsewhere)[0]


def _again(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    kind: ReplayKey,
    known: tuple[Any, Program | Sequence[Any]],
    options: ReplayOptions,
    elsewhere: Processes | None,
) -> Launch | None:
    """Replay what is known of a kind of launch; None, with the reason counted, where that cannot be after all."""
    launched, program = known
    if not isinstance(program, Program):
        planned = _planned_again(kernel, arguments, launched, program, options)
        if planned is None:
            REPLAYS.forget(kind.key, "the kernel's instructions differ from launch to launch")
            return None
        program = planned
        REPLAYS.complete(kind.key, program)
    if len(arguments) > 1 and program.ranks_share(kind.arrays):
        REPLAYS.pass_by("ranks share memory that one of them writes")
        return None
    if options.verify:
        outputs = _verified(kernel, arguments, kind.arrays, launched, program, options, elsewhere)
    else:
        outputs = REPLAYS.run(program, kind.arrays, options.exact, elsewhere)
    done = launched.repeated(outputs)
    announce(done)
    return done


def _recorded(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    chip: Hardware,
    kind: ReplayKey,
    watch: Watch,
    options: ReplayOptions,
    elsewhere: Processes | None,
) -> Launch:
    """Launch eagerly, and keep the program if nothing in it may depend on data or on what will have changed.

    The plans of a launch with large arguments are not kept, because they would hold the bytes of all its tiles at
    once; they are made again, without bytes, when the launch is replayed for the first time.
    """
    looked_before = VALUE_READS.count
    large = elsewhere is None and _argument_bytes(arguments) > _LARGE_BYTES
    recorders = [SparingRecorder() if large else Recorder() for _ in arguments]
    done, held, returned = run_once(
        kernel, arguments, chip, 1, Mode.eager, recorders=recorders, elsewhere=elsewhere
    )
    reasons = [recorder.refusal for recorder in recorders if recorder.refusal]
    if VALUE_READS.count != looked_before:
        reasons.append("the kernel looks at values")
    if done.warnings:
        reasons.append("the launch has warnings")
    if any(taker.converts for taker in held):
        reasons.append("an argument is held in another dtype")
    reasons += [f"the kernel returns a {name}" for name in map(_not_given_back, returned) if name]
    for recorder, value in zip(recorders, returned):
        if any(id(storage) in recorder.constants for storage in storages_of(value)):
            reasons.append("a constant is returned")
    disturbed = watch.disturbance()
    if disturbed is not None:
        reasons.append(disturbed)
    elif not kind.is_of(arguments):
        reasons.append("the kernel changes its arguments")
    if reasons:
        REPLAYS.report.refuse(reasons[0])
    elif large:
        REPLAYS.keep(kind.key, watch, replace(done, outputs=[]), recorders)
    else:
        inputs = [taker.storages() for taker in held]
        program = Program([recorder.plans for recorder in recorders], inputs, returned, options.speed)
        REPLAYS.keep(kind.key, watch, replace(done, outputs=[]), program)
    return done


def _not_given_back(value: Any) -> str | None:
    """The type of what a kernel returned and a replay cannot return anew; None if there is nothing of the kind."""
    if isinstance(value, (tuple, list, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return next((name for name in map(_not_given_back, parts) if name), None)
    known = value is None or isinstance(value, (NkiTensor, bool, int, float, str))
    return None if known else type(value).__name__


def _planned_again(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    launched: Launch,
    seen: Sequence[Recorder],
    options: ReplayOptions,
) -> Program | None:
    """The program of a launch of which only what was seen is kept; None if its instructions are others this time."""
    recorders = [Recorder() for _ in arguments]
    with REPLAYS.report.timed("planning again"):
        _, held, returned = run_once(
            kernel, arguments, launched.hardware, 1, Mode.dry, recorders=recorders, observed=False
        )
    plans = [
        before.with_plans(again)
        for before, again in zip(seen, recorders)
        if isinstance(before, SparingRecorder)
    ]
    whole = [rank for rank in plans if rank is not None]
    if len(whole) < len(arguments):
        return None
    return Program(whole, [taker.storages() for taker in held], returned, options.speed)


def _argument_bytes(arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> int:
    """The bytes of the arrays that are arguments themselves."""
    values = (value for args, kwargs in arguments for value in (*args, *kwargs.values()))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def _verified(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    arrays: list[list[np.ndarray]],
    launched: Launch,
    program: Program,
    options: ReplayOptions,
    elsewhere: Processes | None,
) -> list[Any]:
    """Replay, launch eagerly on copies as well, and raise ReplayMismatch where the two differ."""
    before, held = copied(arrays), copied(arrays)
    given = [(in_place_of(arrays, held, args), in_place_of(arrays, held, kw)) for args, kw in arguments]
    eager = run_once(kernel, given, launched.hardware, 1, Mode.eager, elsewhere=elsewhere, observed=False)[0]
    outputs = REPLAYS.run(program, arrays, options.exact, elsewhere)
    wanted, got = Outcome(eager.outputs, held), Outcome(outputs, arrays)
    if options.exact:
        compare_exactly(launched.kernel, got, wanted)
    else:

        def disturbed(seed: int) -> Outcome:
            own = copied(before)
            return Outcome(program.run(own, elsewhere=elsewhere, disturbance=disturbance(seed)), own)

        compare_within_bound(launched.kernel, got, wanted, disturbed, alone=elsewhere is None)
    REPLAYS.report.verified += 1
    return outputs
