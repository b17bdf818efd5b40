"""Commands on kernels by name run in a child process: a kernel that ends its process ends no verdict with it."""

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
    """Return whether a command judges code of the user and the system has child processes with pipes (POSIX)."""
    if os.name != "posix":
        return False
    by_name = options.command in _WITH_A_KERNEL and names_a_kernel(options.script)
    return by_name or options.command in (*_ALWAYS, *_JUDGES_SCRIPTS)


def check_limits(options: argparse.Namespace) -> None:
    """Raise InvalidArgument for a limit given with a script, which runs in this process and has none."""
    if options.command not in _WITH_A_KERNEL or names_a_kernel(options.script):
        return
    for name, option in _LIMITS.items():
        if getattr(options, name) is not None:
            raise InvalidArgument(
                "NKW-CHILD-LIMIT",
                f"{option} limits a kernel by name, and {options.script:.60} is a script: leave it out, or give "
                "FILE.py:NAME",
            )


def without_verdict(failed: NoVerdict) -> int:
    """Print why a command has no verdict; returns the exit status."""
    error(failed)
    return NO_VERDICT


def run_isolated(options: argparse.Namespace, again: Sequence[str]) -> int:
    """Run the command of `options` in a child, print and write what it returns; returns the exit status.

    A script has no limits, and its output is not captured. `again` is the code and the arguments with which a new
    interpreter runs the same command.
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
        return _without_verdict(options, str(ended))
    except KeyboardInterrupt as stopped:
        _deliver(getattr(stopped, "record", Record()))
        raise
    return _deliver(record)


def set_limits(options: argparse.Namespace) -> bool:
    """Set the default limits where stdin is no terminal; returns whether stdin is one."""
    on_terminal = sys.stdin.isatty()
    if not on_terminal:
        options.time_limit = DEFAULT_SECONDS if options.time_limit is None else options.time_limit
        options.memory_limit = memory_bytes() if options.memory_limit is None else options.memory_limit
    return on_terminal


class _EndsCopies(Observer):
    """Ends a copy of the child that a fork in a kernel made, before the copy continues with the command."""

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """End this process if it is a copy."""
        leave_if_copied()

    def ran(self, launch: Launch) -> None:
        """End this process if it is a copy."""
        leave_if_copied()


def _is_script(options: argparse.Namespace) -> bool:
    return options.command in _JUDGES_SCRIPTS and not names_a_kernel(options.script)


def act_in_child(options: argparse.Namespace) -> int:
    """Run a command in its child process; returns the exit status. Copies that a script forks may launch kernels."""
    with nullcontext() if _is_script(options) else observing(_EndsCopies()):
        status: int = options.act(options)
    return status


def _deliver(record: Record) -> int:
    """Write the files of a record and print its texts; returns its status, 2 where a file cannot be written."""
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
    for number, text in record.printed:
        print(text, end="", file=sys.stderr if number == ERR else sys.stdout)
    sys.stdout.flush()


def _without_verdict(options: argparse.Namespace, reason: str) -> int:
    """Print and document that a command has no verdict and why; return the exit status."""
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
