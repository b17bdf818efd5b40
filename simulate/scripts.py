"""Running the script or the kernel that a command names, with `import nki` bound to the simulator."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from nkw.child import choose_progress_stream, user_output
from nkw.process import reopen_streams
from nkw.terminal import error, working
from simulate.isolated import NO_VERDICT
from simulate.tracebacks import print_user_traceback


def run_script(options: argparse.Namespace, raises: bool = False) -> int:
    """Run the script; an NkwError of its kernels is printed, or passed on with `raises`."""
    from nkw.errors import LONGEST_PATH, NkwError, shown
    from nkw.files import is_file
    from simulate.kernel_by_name import folder_of, importing_from
    from simulate.run.exits import UserExit

    script = Path(options.script)
    if not is_file(script):
        error(f"{shown(str(script), LONGEST_PATH)} is not a file")
        return 2
    if not bound(options):
        return 2
    before = sys.argv
    sys.argv = [str(script), *options.arguments]
    try:
        with importing_from(folder_of(options.script)):
            runpy.run_path(str(script), run_name="__main__")
    except NkwError as refused:
        if raises:
            raise
        sys.stdout.flush()
        error(refused)
        return NO_VERDICT if isinstance(refused, UserExit) else 1
    finally:
        sys.argv = before
        reopen_streams()
    return 0


def run_script_or_kernel(options: argparse.Namespace, computes: bool = False, raises: bool = False) -> int:
    """Run the script, or launch FILE.py:KERNEL or MODULE:KERNEL with the arguments that follow.

    A kernel is launched dry unless `computes`. With `raises`, what a kernel's rules refuse is not printed but raised.
    Raises NoVerdict where the code of a kernel by name fails or ends.
    """
    from nkw.errors import InvalidArgument, NkwError, NoVerdict
    from simulate.kernel_by_name import InstructionCount, launch_by_name, names_a_kernel
    from simulate.run.machine import Mode
    from simulate.run.observers import observing

    if not names_a_kernel(options.script):
        return run_script(options, raises)
    if not bound(options):
        return 2
    try:
        mode, trips = (Mode.eager, ()) if computes else (Mode.dry, options.trips)
        count = InstructionCount()
        with (
            user_output(to_stderr=False),
            observing(count),
            working(lambda: f"{options.script}: {count.instructions:,} instructions"),
        ):
            launch_by_name(options.script, options.arguments, mode, trips)
    except NoVerdict:
        raise
    except NkwError as refused:
        if raises and not isinstance(refused, InvalidArgument):
            raise
        error(refused)
        return 2 if isinstance(refused, InvalidArgument) else 1
    return 0


def run_to_its_end(options: argparse.Namespace) -> int:
    """Run the script or the kernel; launches before an early end are reported as well.

    Returns its exit status; 1 with the script's traceback on stderr where an error ended it.
    """
    from nkw.errors import NkwError

    try:
        return run_script_or_kernel(options)
    except NkwError:
        raise  # NoVerdict of a kernel by name
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except Exception as failed:
        sys.stdout.flush()
        print_user_traceback(failed)
    return 1


def bound(options: argparse.Namespace) -> bool:
    """Choose chip, level, rules and ranks, and bind `nki`; prints what is refused."""
    from nkw.errors import NkwError
    from nkw.targets import TARGET_VARIABLE
    from simulate.bind import install
    from simulate.hardware import use_overlay
    from simulate.kernel_by_name import folder_of
    from simulate.run.environment import RANKS_VARIABLE, read_rank_count, target_hardware
    from simulate.shadows import check_names

    if options.target:
        os.environ[TARGET_VARIABLE] = options.target
    if options.ranks:
        os.environ[RANKS_VARIABLE] = str(options.ranks)
    try:
        if options.hardware is not None:
            use_overlay(options.hardware)
        chip = target_hardware()
        read_rank_count()
        check_names(options.script, folder_of(options.script))
        install("simulate", options.level, options.rules)
    except NkwError as refused:
        error(refused)
        return False
    chosen = "" if os.environ.get(TARGET_VARIABLE) else f" (default; --target or {TARGET_VARIABLE} chooses)"
    print(f"target {chip.label}{chosen}", file=choose_progress_stream(), flush=True)
    return True
