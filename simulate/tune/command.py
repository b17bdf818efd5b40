"""`nkw tune`: the options of the command, and what it prints and writes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nkw.child import ending_after, is_child, user_output
from nkw.errors import InvalidArgument, NkwError, NoVerdict
from nkw.files import Outputs, json_document
from nkw.process import remembering_interrupts
from nkw.terminal import error, show, working
from simulate.isolated import NO_VERDICT, without_verdict
from simulate.kernel_by_name import files_read, names_a_kernel
from simulate.options import TRIALS
from simulate.profile.numbers import us
from simulate.profile.profile import profile
from simulate.run.launch import Launch
from simulate.scripts import bound
from simulate.tracebacks import print_of_the_user
from simulate.tune.cluster import Cluster
from simulate.tune.measuring import Bench, Subject
from simulate.tune.page import page
from simulate.tune.parameters import ARGUMENT, tunable
from simulate.tune.report import Report
from simulate.tune.search import BATCH, Found, search
from simulate.tune.table import Table, entry_name
from simulate.tune.workers import Here, Processes, Workers

_LEAST_GAIN = 0.01  # of an entry of the table: less is not worth a line to review


def tune(options: argparse.Namespace) -> int:
    """Search, print the report and write what was asked for; returns the exit status.

    An interrupt during the search ends it: the report is printed and written, and the interrupt passed on.
    """
    found: Found | None = None
    try:
        outputs = Outputs(lambda: files_read(options))
        target = outputs.claim(options.html, "page", "NKW-PAGE-PATH")
        with json_document(options.json, outputs, "tune") as contents:
            _check(options)
            if not bound(options):
                return 2
            report, table = _searched(options)
            found = report.found
            show(report.parts())
            contents.update(report.as_json())
            if target is not None:
                with target.writing() as file:
                    file.write(page(report))
                print(f"page: {options.html}")
            if table is not None:
                _write(report, table, options)
    except InvalidArgument as refused:
        error(refused)
        return 2
    except NoVerdict as failed:  # the kernel's file, or the kernel with the default
        return without_verdict(failed)
    except NkwError as refused:  # by the chip, with the default
        error(refused)
        return 1
    except Exception as failed:  # of the kernel with the default
        if isinstance(failed, OSError):
            raise
        print_of_the_user(failed)
        return NO_VERDICT
    if found.stopped is not None:
        raise found.stopped
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises InvalidArgument unless the words name a kernel whose parameters are left to the search."""
    if not names_a_kernel(options.script):
        why = f"{options.script:.60} names no kernel; give FILE.py:NAME or MODULE:NAME"
    elif any(each.startswith(f"{ARGUMENT}=") for each in options.arguments):
        why = f"{ARGUMENT}= is what the search chooses; leave it out"
    else:
        return
    raise InvalidArgument("NKW-TUNE-ARGUMENTS", why)


def _searched(options: argparse.Namespace) -> tuple[Report, Table | None]:
    """The report of the search, and the table it is for."""
    subject = Subject.of(options.script, options.arguments, options.reading)
    with user_output(to_stderr=True), ending_after(options.time_limit):
        bench = Bench(subject)
        kernel = tunable(bench.kernel)
        launch = bench.launch(kernel.default)  # raises for arguments that the kernel does not take
    default = bench.times(launch)
    table = Table(kernel) if options.write else None
    entry = None
    if options.write or kernel.bucket is not None:
        entry = entry_name(kernel, subject.arguments, launch.hardware.generation)
    also = []
    if table is not None and entry is not None:
        also = [each for each in [{**kernel.default, **table.values(entry)}] if kernel.takes(each)]
    trials = options.trials or (None if options.seconds else TRIALS)
    with _workers(options, subject, bench) as (workers, batch), _progress(options.script) as said:
        found = search(kernel, default, workers, also, batch, trials, options.seconds, options.seed, said)
    title = " ".join([options.script, *options.arguments, "on", launch.hardware.label])
    return Report(title, kernel, options.reading, _floor_ns(launch), found, entry), table


def _floor_ns(launch: Launch) -> float:
    return profile(launch.streams, launch.hardware).roofline.least_ns


@contextmanager
def _workers(options: argparse.Namespace, subject: Subject, bench: Bench) -> Iterator[tuple[Workers, int]]:
    """Where candidates are measured, and how many are proposed at a time."""
    workers: Workers
    processes = options.jobs or _processors()
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
def _progress(words: str) -> Iterator[Callable[[Found], None]]:
    """A block that shows how far the search has come; its function is told what was found, and raises interrupts."""
    said = f"{words}: the first candidate"

    def tell(found: Found) -> None:
        nonlocal said
        raise_lost()
        best = found.tried[0].outcome.length_ns or 0.0
        best = min((each.outcome.length_ns or best for each in found.tried), default=best)
        said = f"{words}: {len(found.tried):,} candidates, best {us(best)} us"

    with working(lambda: said), remembering_interrupts() as raise_lost:
        yield tell


def _processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(report: Report, table: Table, options: argparse.Namespace) -> None:
    """Put what was found into the table, and say so; half a search changes nothing there."""
    assert report.entry is not None
    best = report.found.best
    if report.found.stopped is not None:
        print(f"{table.path} stays as it is, because the search was interrupted")
        return
    gains = report.gain >= _LEAST_GAIN
    table.put(report.entry, " ".join(options.arguments), best.candidate if gains else None)
    said = "is in" if gains else f"saves less than {_LEAST_GAIN:.0%} and is not in".replace("%", " %")
    print(f"{report.entry} {said} {table.path}")
