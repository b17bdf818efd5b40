"""The command `nkw tune`: searches the fastest parameters of a kernel, prints a report and writes files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nkw.child import end_after, is_child, user_output
from nkw.errors import InvalidArgument, NkwError, NoVerdict
from nkw.files import Outputs, json_document
from nkw.process import remember_interrupts
from nkw.terminal import error, show, working
from simulate.isolated import NO_VERDICT, print_no_verdict
from simulate.kernel_by_name import list_read_files, names_a_kernel
from simulate.options import TRIALS
from simulate.profile.numbers import format_us
from simulate.profile.profile import profile
from simulate.run.launch import Launch
from simulate.scripts import prepare_process
from simulate.tracebacks import print_user_traceback
from simulate.tune.cluster import Cluster
from simulate.tune.measuring import Bench, Subject
from simulate.tune.page import make_page
from simulate.tune.parameters import ARGUMENT, read_declaration
from simulate.tune.report import Report
from simulate.tune.search import BATCH, SearchState, search
from simulate.tune.table import Table, make_entry_name
from simulate.tune.workers import Here, Processes, Workers

_LEAST_GAIN = 0.01  # least gain of an entry of the table, so that small gains need no review


def tune(options: argparse.Namespace) -> int:
    """Search the fastest parameters, print the report and write the requested files.

    An interrupt ends the search: the report of its candidates so far is printed and written, then the
    interrupt is raised.

    Returns:
        The exit status: 0 after a search, 2 for wrong options or files, 1 if the launch with the default is refused,
        and NO_VERDICT if the kernel's Python code fails or has no verdict with the default.
    """
    outcome: SearchState | None = None
    try:
        outputs = Outputs(lambda: list_read_files(options))
        target = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
        with json_document(options.json, outputs, "tune") as contents:
            _check_arguments(options)
            if not prepare_process(options):
                return 2
            report, table = _run_search(options)
            outcome = report.search_state
            show(report.make_parts())
            contents.update(report.as_json())
            if target is not None:
                with target.writing() as file:
                    file.write(make_page(report))
                print(f"page: {options.html}")
            if table is not None:
                _write_table(report, table, options)
    except InvalidArgument as refused:
        error(refused)
        return 2
    except NoVerdict as failed:  # of the kernel's file, or of the kernel with its default
        return print_no_verdict(failed)
    except NkwError as refused:  # of the chip, with the default
        error(refused)
        return 1
    except Exception as failed:  # of the kernel's code, with the default
        if isinstance(failed, OSError):
            raise
        print_user_traceback(failed)
        return NO_VERDICT
    if outcome.stopped is not None:
        raise outcome.stopped
    return 0


def _check_arguments(options: argparse.Namespace) -> None:
    """Raise InvalidArgument unless the options name a kernel, and its arguments leave `tuning` to the search."""
    if not names_a_kernel(options.script):
        reason = f"{options.script:.60} names no kernel, and tune takes one; give FILE.py:NAME or MODULE:NAME"
    elif any(word.startswith(f"{ARGUMENT}=") for word in options.arguments):
        reason = f"the arguments set {ARGUMENT}=, which the search chooses; leave it out"
    else:
        return
    raise InvalidArgument("NKW-TUNE-ARGUMENTS", reason)


def _run_search(options: argparse.Namespace) -> tuple[Report, Table | None]:
    """Search, and return the report and the table of tuned values to write, None without `--write`.

    The kernel is launched with its default first. Nothing is written.

    Raises:
        InvalidArgument: If the kernel declares no parameters, or if `--write` is given and there is no table.
        NkwError: If the launch with the default is refused. Errors of the kernel's Python code pass through.
    """
    subject = Subject.from_arguments(options.script, options.arguments, options.reading)
    with user_output(to_stderr=True), end_after(options.time_limit):
        bench = Bench(subject)
        kernel = read_declaration(bench.kernel)
        launch = bench.launch(kernel.default)  # refuses arguments that the kernel does not accept
    default = bench.time_launch(launch)
    table = Table(kernel) if options.write else None
    entry = None
    if options.write or kernel.bucket is not None:
        entry = make_entry_name(kernel, subject.arguments, launch.hardware.generation)
    extra_candidates = []
    if table is not None and entry is not None:
        extra_candidates = [
            candidate
            for candidate in [{**kernel.default, **table.values(entry)}]
            if kernel.accepts(candidate)
        ]
    trials = options.trials or (None if options.seconds else TRIALS)
    with (
        _start_workers(options, subject, bench) as (workers, batch),
        _show_progress(options.script) as notify,
    ):
        search_state = search(
            kernel, default, workers, extra_candidates, batch, trials, options.seconds, options.seed, notify
        )
    title = " ".join([options.script, *options.arguments, "on", launch.hardware.label])
    return Report(title, kernel, options.reading, _compute_floor_ns(launch), search_state, entry), table


def _compute_floor_ns(launch: Launch) -> float:
    """Return the roofline of a launch in ns: the time that its work takes at peak rates."""
    return profile(launch.streams, launch.hardware).roofline.least_ns


@contextmanager
def _start_workers(
    options: argparse.Namespace, subject: Subject, bench: Bench
) -> Iterator[tuple[Workers, int]]:
    """Start the workers that the options ask for, inside a `with` block, and provide them with the size of a batch.

    They are this process, processes of this machine, or those of a cluster. They end with the block.
    """
    workers: Workers
    processes = options.jobs or _count_processors()
    if options.cluster:
        workers = Cluster(subject, options.cluster, options.jobs)
        processes = workers.processors
    elif processes == 1 and not is_child():
        workers = Here(bench)
    else:
        workers = Processes(subject, processes, options.time_limit)
    try:
        yield workers, max(BATCH, processes)
    finally:
        workers.close()


@contextmanager
def _show_progress(title: str) -> Iterator[Callable[[SearchState], None]]:
    """Show progress on stderr inside a `with` block, and provide the function to call after each candidate.

    That function updates the progress. It raises KeyboardInterrupt if the user interrupted since the last call.
    """
    message = f"{title}: the first candidate"

    def notify(search_state: SearchState) -> None:
        nonlocal message
        raise_lost()
        best = search_state.trials[0].outcome.length_ns or 0.0
        best = min((trial.outcome.length_ns or best for trial in search_state.trials), default=best)
        message = f"{title}: {len(search_state.trials):,} candidates, best {format_us(best)} us"

    with working(lambda: message), remember_interrupts() as raise_lost:
        yield notify


def _count_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_table(report: Report, table: Table, options: argparse.Namespace) -> None:
    """Store the best candidate in the table's file, and print what was done.

    If the best candidate saves less than 1 %, its entry is removed. An interrupted search changes nothing.
    """
    assert report.entry is not None
    best = report.search_state.best
    if report.search_state.stopped is not None:
        print(f"{table.path} stays as it is, because the search was interrupted")
        return
    is_worthwhile = report.gain >= _LEAST_GAIN
    table.put(report.entry, " ".join(options.arguments), best.candidate if is_worthwhile else None)
    action = (
        "is in" if is_worthwhile else f"saves less than {_LEAST_GAIN:.0%} and is not in".replace("%", " %")
    )
    print(f"{report.entry} {action} {table.path}")
