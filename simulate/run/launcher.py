"""Run of one launch of a kernel on all ranks of this process, in mode eager or dry."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nkw.errors import Location, NkwError, RuleViolation
from simulate.isa.book import CallError
from simulate.level import RULES_VARIABLE, WARNED, Rules
from simulate.lines import location
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.objects import VALUE_READS
from simulate.memory.placement import choose_blamed, live_tiles_fit
from simulate.run.arguments import Arguments, map_leaves
from simulate.run.call_stacks import Calls, TracedTable
from simulate.run.dry_scheduler import DryScheduler
from simulate.run.environment import PRECISE_VARIABLE, check_logical_core
from simulate.run.exits import convert_exit
from simulate.run.kernel_faults import convert_exception, has_entered_kernel, suggest_parameter
from simulate.run.launch import Interface, Launch, LaunchRequest, Result
from simulate.run.location import blame_traceback
from simulate.run.machine import Mode, NeuronCore, Rank, capacity_bytes, set_running_core
from simulate.run.scheduler import CoreScheduler
from simulate.run.stream import Stream, TensorTable


def execute_launch(request: LaunchRequest) -> Launch:
    """Run the kernel's Python on every core of the request, check that its tiles fit, and return the launch.

    Arrays that the kernel writes to are updated in place. Observers are told of each step. Tolerated broken rules
    give Python warnings.

    Raises:
        RuleViolation: A rule is broken, or live tiles do not fit.
        Deadlock: Cores wait for each other.
        RendezvousMismatch: The members of a rendezvous disagree.
        KeyboardInterrupt: The user interrupts the launch; its text has the line that was issued last.
        Exception: Any error of the kernel.
    """
    check_logical_core(request.chip, request.logical_core_size)
    cores = _create_cores(request)
    rank_runs = [_RankRun(request, core) for core in cores if core.number == 0]
    for observer in request.observers:
        observer.began(request, cores, [rank_run.arguments.storages() for rank_run in rank_runs])
    values_read = VALUE_READS.count
    try:
        cores[0].scheduler.run(
            [
                partial(_run_core, core, request.kernel, rank_runs[core.index // request.logical_core_size])
                for core in cores
            ]
        )
    except KeyboardInterrupt as interrupt:
        interrupt.args = (_describe_interrupt(request, cores),)
        raise
    except NkwError:
        if request.observers:
            stopped = _record_launch(request, cores, rank_runs, [], False)
            for observer in request.observers:
                observer.stopped(stopped)
        raise
    outputs = [rank_run.arguments.to_arrays(rank_run.returned) for rank_run in rank_runs]
    for rank_run in rank_runs:
        rank_run.arguments.write_back()
    done = _record_launch(request, cores, rank_runs, outputs, VALUE_READS.count != values_read)
    for observer in request.observers:
        observer.ran(done)
    done = _check_capacity(done, rank_runs)
    done = _report_tolerated(done, rank_runs)
    for observer in request.observers:
        observer.ended(done, [rank_run.returned for rank_run in rank_runs])
    return done


def _record_launch(
    request: LaunchRequest,
    cores: Sequence[NeuronCore],
    rank_runs: Sequence[_RankRun],
    outputs: list[Any],
    reads_values: bool,
) -> Launch:
    """Return the record of a launch whose cores have stopped."""
    return Launch(
        kernel=getattr(request.kernel, "__name__", "kernel"),
        hardware=request.chip,
        mode=request.mode,
        outputs=outputs,
        streams=tuple(core.stream for core in cores),
        warnings=tuple(text for rank_run in rank_runs for text in rank_run.rank.warnings),
        interfaces=tuple(rank_run.interface() for rank_run in rank_runs),
        reads_values=reads_values,
        rules=request.rules,
    )


def _describe_interrupt(request: LaunchRequest, cores: Sequence[NeuronCore]) -> str:
    """Return a text for an interrupt: the core that ran last, its instruction count, last instruction and line."""
    stream = max((core.stream for core in cores), key=lambda stream: stream.resumed[-1:])
    name = getattr(request.kernel, "__name__", "kernel")
    issued = len(stream.line_ids)  # the recording of the last event may be incomplete after its line
    if not issued:
        return f"{name} has issued nothing"
    op, where = stream.template(issued - 1).op, location(stream.lines[stream.line_ids[issued - 1]])
    who = f" on rank {stream.rank}, core {stream.core}," if len(cores) > 1 else ""
    return f"{name}{who} has issued {issued:,} instructions, the last is {op} at {where}"


class _RankRun:
    """State of one rank during a launch: its arguments as tensors, and the return value of its core 0."""

    def __init__(self, request: LaunchRequest, core: NeuronCore) -> None:
        self.rank = core.rank
        self.arguments = converter = Arguments(core.rank, core.stored_dtype, request.mode is Mode.dry)
        args, kwargs = request.arguments[core.index // request.logical_core_size]
        names = _list_parameters(request.kernel)
        self.args = tuple(
            converter.to_tensors(arg, names[i] if i < len(names) else f"arg{i}") for i, arg in enumerate(args)
        )
        self.kwargs = {key: converter.to_tensors(kwarg, key) for key, kwarg in kwargs.items()}
        self.returned: Any = None

    def interface(self) -> Interface:
        """Return the rank's arguments and return value as tensors of its stream."""
        inputs = tuple(storage.serial for storage in self.arguments.storages())
        return Interface(inputs, map_leaves(_describe_result, self.returned), self.arguments.converts)


def _create_cores(request: LaunchRequest) -> list[NeuronCore]:
    """Return the cores of all ranks of this process, rank by rank, ready to run."""
    precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
    instruction_observers = (
        () if request.mode is Mode.dry else tuple(o for o in request.observers if o.sees_instructions)
    )
    keeps_calls = any(observer.keeps_calls for observer in request.observers)
    cores: list[NeuronCore] = []
    streams: list[Stream] = []
    size = request.logical_core_size
    scheduler = _create_scheduler(request, len(request.arguments) * size, streams)
    first = 0 if request.peers is None else request.peers.rank
    for number in range(first, first + len(request.arguments)):
        table = TracedTable(Calls()) if keeps_calls else TensorTable()
        rank = Rank(number, request.chip, size, table, level=request.level, rules=request.rules)
        rank.config, rank.trips = request.config, request.trips
        for core_number in range(size):
            core = NeuronCore(rank, core_number, len(cores), scheduler, request.mode, precise)
            core.has_grid = request.has_grid
            core.observers = instruction_observers
            cores.append(core)
            streams.append(core.stream)
    return cores


def _create_scheduler(request: LaunchRequest, count: int, streams: Sequence[Stream]) -> CoreScheduler:
    """Return the scheduler of a launch's cores; it records resumptions in the streams.

    Args:
        request: The launch.
        count: The number of cores.
        streams: The list to which the caller appends the streams of the cores later.
    """
    one_core_each = request.logical_core_size == 1 and request.peers is None
    if count > 1 and one_core_each and request.mode is Mode.dry and request.seed is None:
        return DryScheduler(count, streams)
    schedule_numbers = itertools.count()

    def on_resume(core: int) -> None:
        streams[core].resumed.append((next(schedule_numbers), len(streams[core])))

    return CoreScheduler(count, request.peers, request.seed, on_resume, request.logical_core_size)


def _run_core(core: NeuronCore, kernel: Callable[..., Any], rank_run: _RankRun) -> None:
    """Run the kernel on one core, in the calling thread; the return value of core 0 is stored in `rank_run.returned`.

    Raises:
        CallError: Python refuses the call because the kernel does not take these arguments.
        KernelError: The kernel's Python code raises a NameError, AttributeError, TypeError or IndexError.
        UserExit: The kernel's Python code ends the program.
        Exception: Any other error of the kernel, unchanged.
    """
    before = set_running_core(core)
    try:
        with np.errstate(all="ignore"):
            result = kernel(*rank_run.args, **rank_run.kwargs)
    except NkwError as error:
        blame_traceback(error)
        raise
    except (NameError, AttributeError, TypeError, IndexError) as error:
        if isinstance(error, TypeError) and not has_entered_kernel(error):
            raise CallError("NKW-KERNEL-CALL", str(error) + suggest_parameter(str(error), kernel)) from None
        kernel_error = convert_exception(error)
        if kernel_error is None:
            raise
        raise kernel_error from None
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as end:
        ended = convert_exit(f"the kernel {getattr(kernel, '__name__', 'kernel')}", end)
        if ended is None:
            raise
        raise ended from None
    finally:
        set_running_core(before)
    if core.number == 0:
        rank_run.returned = result


def _describe_result(value: Any) -> Any:
    """Return a Result for a tensor, and any other object unchanged."""
    return Result(value.storage.serial, value.layout) if isinstance(value, NkiTensor) else value


def _report_tolerated(done: Launch, rank_runs: Sequence[_RankRun]) -> Launch:
    """Give a Python warning for each tolerated broken rule; return the launch with these rules and their texts."""
    tolerated = tuple(error for rank_run in rank_runs for error in rank_run.rank.tolerated)
    if not tolerated:
        return done
    texts = tuple(f"{error}\n  tolerated: {_explain_tolerance(error)}" for error in tolerated)
    for text, error in zip(texts, tolerated):
        where = error.where or Location("", 0, "")
        warnings.warn_explicit(text, ToleratedRule, where.file, where.line)
    return replace(done, warnings=(*done.warnings, *texts), tolerated=tolerated)


def _explain_tolerance(error: RuleViolation) -> str:
    """Return why a broken rule does not end the launch: public kernels break it too, or NKI_RULES is simulator."""
    if error.code in WARNED:
        return "public kernels that compile break this documented sentence too"
    return f"{RULES_VARIABLE} is {Rules.simulator.value}"


class ToleratedRule(UserWarning):
    """Category of Python warnings about rules that a kernel breaks and that the rules of its launch do not refuse."""


def _check_capacity(done: Launch, rank_runs: Sequence[_RankRun]) -> Launch:
    """Check that live tiles fit into SBUF and PSUM, and return the launch.

    Tiles beyond PSUM are only a warning of the launch if the kernel's dialect has a compiler that reorders loops, so
    that program order does not decide which tiles are live.

    Raises:
        RuleViolation: Live tiles exceed a memory; the error has the line of an allocation.
    """
    texts: list[str] = []
    cores = len(done.streams) // len(rank_runs)
    for number, (stream, placements) in enumerate(zip(done.streams, done.placements)):
        for buffer, placement in placements.items():
            limit = capacity_bytes(done.hardware, buffer)
            try:
                live_tiles_fit(placement, buffer, limit, done.hardware.name, stream.label, stream.elements)
            except RuleViolation as error:
                error.where = stream.tensors[choose_blamed(placement).serial].where
                rank = rank_runs[number // cores].rank
                if buffer is not MemoryRegion.psum or not rank.reorders_loops:
                    rank.report_violation(error)
                    continue
                texts.append(
                    f"[{error.code}] {error.seen}; so in program order, which this dialect's compiler changes, "
                    f"at {error.where}"
                )
    return replace(done, warnings=(*done.warnings, *texts)) if texts else done


def _list_parameters(kernel: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's positional parameters; an empty tuple if it is no plain function."""
    code = getattr(kernel, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()
