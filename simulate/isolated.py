"""Commands that judge code of the user run in a child process, so that a kernel that ends its process gives no verdict.

Most take a kernel by name, FILE.py:NAME or MODULE:NAME; `memory` and `check` isolate scripts as well.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from nkw.child import ERR, Record, leave_if_copied
from nkw.errors import InvalidArgument, NoVerdict
from nkw.files import STDOUT, OutputFile, Outputs, json_document
from nkw.process import memory_bytes
from nkw.terminal import error
from simulate.child_entry import ChildLimits
from simulate.child_process import ChildEnded, run_in_child
from simulate.kernel_by_name import names_a_kernel
from simulate.memory.storage import Storage
from simulate.run.launch import Launch, LaunchRequest
from simulate.run.machine import NeuronCore
from simulate.run.observers import Observer, observing

NO_VERDICT = 3
"""The exit status where code of the user ended or failed, so that nothing could be judged."""
DEFAULT_SECONDS = 3600.0
"""The time limit without a terminal; the longest command on a kernel of ours takes some minutes."""
_ALWAYS = ("verify", "tune", "bundle", "calibrate")
_WITH_A_KERNEL = ("run", "time", "memory", "check")
_JUDGES_SCRIPTS = ("memory", "check")
"""Commands whose status 0 is a verdict on a script; a script that ends the process leaves none."""
_LIMITS = {"time_limit": "--time-limit", "memory_limit": "--memory-limit"}


def runs_in_child(options: argparse.Namespace) -> bool:
    """Return whether a command runs in a child process: it judges code of the user, and the system is POSIX.

    These are `verify`, `tune`, `bundle`, `calibrate`, `memory` and `check`, and `run` and `time` of a kernel by name.
    """
    if os.name != "posix":
        return False
    by_name = options.command in _WITH_A_KERNEL and names_a_kernel(options.script)
    return by_name or options.command in (*_ALWAYS, *_JUDGES_SCRIPTS)


def check_limits(options: argparse.Namespace) -> None:
    """Raise InvalidArgument if --time-limit or --memory-limit is given with a script, which has no limits."""
    if options.command not in _WITH_A_KERNEL or names_a_kernel(options.script):
        return
    for name, option in _LIMITS.items():
        if getattr(options, name) is not None:
            raise InvalidArgument(
                "NKW-CHILD-LIMIT",
                f"{option} limits a kernel by name, and {options.script:.60} is a script: leave it out, or give "
                "FILE.py:NAME",
            )


def print_no_verdict(failed: NoVerdict) -> int:
    """Print why a command has no verdict and return exit status 3."""
    error(failed)
    return NO_VERDICT


def run_isolated(options: argparse.Namespace, again: Sequence[str]) -> int:
    """Run the command of `options` in a child process, print its output, write its files, and return its exit status.

    Default limits are set in `options` if stdin is no terminal. Then the output of a kernel by name is captured too;
    that of a script never is. Without a verdict the status is 3, and the reason is printed and written to --json.

    Args:
        options: The parsed command line.
        again: Code and arguments with which a new interpreter runs the same command.

    Raises:
        KeyboardInterrupt: The command was interrupted or terminated; its output so far is printed.
    """
    captures = not _is_script(options) and not set_limits(options)
    seconds = None if options.command == "tune" else options.time_limit  # `tune` limits its candidates
    limits = ChildLimits(seconds, options.memory_limit)
    try:
        record = run_in_child(
            lambda: act_in_child(options),
            again,
            limits,
            captures=captures,
            out_to_err=options.json == STDOUT,
        )
    except ChildEnded as ended:
        record = getattr(ended, "record", Record())
        _print(record)
        return _report_no_verdict(options, str(ended))
    except KeyboardInterrupt as stopped:
        _deliver(getattr(stopped, "record", Record()))
        raise
    return _deliver(record)


def set_limits(options: argparse.Namespace) -> bool:
    """Set missing limits in `options` if stdin is no terminal, and return whether stdin is a terminal.

    The defaults are 3600 seconds and the memory of this machine in bytes.
    """
    on_terminal = sys.stdin.isatty()
    if not on_terminal:
        options.time_limit = DEFAULT_SECONDS if options.time_limit is None else options.time_limit
        options.memory_limit = memory_bytes() if options.memory_limit is None else options.memory_limit
    return on_terminal


class _EndsCopies(Observer):
    """Observer that ends copies of this process, forked by a kernel, before they continue with the command."""

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """End this process if it is such a copy."""
        leave_if_copied()

    def ran(self, launch: Launch) -> None:
        """End this process if it is such a copy."""
        leave_if_copied()


def _is_script(options: argparse.Namespace) -> bool:
    """Return whether the command is `memory` or `check` of a script."""
    return options.command in _JUDGES_SCRIPTS and not names_a_kernel(options.script)


def act_in_child(options: argparse.Namespace) -> int:
    """Run a command in its child process and return its exit status.

    A copy of the process that a kernel by name forks is ended at its next launch; copies that a script forks may
    launch.
    """
    with nullcontext() if _is_script(options) else observing(_EndsCopies()):
        status: int = options.act(options)
    return status


def _deliver(record: Record) -> int:
    """Write the files of a record, print its output and return its status; 2 if a file cannot be written."""
    try:
        for path, description, code, text in record.files:
            with OutputFile(path, description, code).writing() as file:
                file.write(text)
    except InvalidArgument as unwritten:
        error(unwritten)
        return 2
    _print(record)
    return record.status


def _print(record: Record) -> None:
    """Print a record's output on stdout and stderr of this process, in the order of the command."""
    for number, text in record.printed:
        print(text, end="", file=sys.stderr if number == ERR else sys.stdout)
    sys.stdout.flush()


def _report_no_verdict(options: argparse.Namespace, reason: str) -> int:
    """Print why a command has no verdict, write the reason to --json if given, and return 3.

    Returns 2 if the JSON file cannot be written.
    """
    command_or_script = getattr(options, "script", options.command)
    try:
        with json_document(options.json, Outputs(tuple), options.command) as contents:
            contents.update({"hardware": options.hardware} if options.hardware else {})
            contents.update(outcome="none", reason=reason)
    except InvalidArgument as unwritten:
        error(unwritten)
        return 2
    error(f"no verdict on {command_or_script}: {reason}")
    return NO_VERDICT
