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
    """Run the script of a command as `__main__`, with `nki` bound to the simulator, and return an exit status.

    The status is 0 at the script's end, and 2 if the script is no file or the options are refused. If one of its
    kernels raises an NkwError it is 1, or 3 if the kernel's code ended the program. Messages are printed. Other
    exceptions of the script are raised.

    Args:
        options: The parsed command line.
        raises: Whether an NkwError is raised instead of printed.
    """
    from nkw.errors import LONGEST_PATH, NkwError, shown
    from nkw.files import is_file
    from simulate.kernel_by_name import find_import_folder, importing_from
    from simulate.run.exits import UserExit

    script = Path(options.script)
    if not is_file(script):
        error(f"{shown(str(script), LONGEST_PATH)} is not a file")
        return 2
    if not prepare_process(options):
        return 2
    before = sys.argv
    sys.argv = [str(script), *options.arguments]
    try:
        with importing_from(find_import_folder(options.script)):
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
    """Run a command's script, or launch its kernel by name (FILE.py:KERNEL or MODULE:KERNEL); returns an exit status.

    The status is 0 for success, 1 for a kernel that the rules refuse, 2 for a wrong argument or option, or a missing
    file; refusals are printed. For a script see `run_script`.

    Args:
        options: The parsed command line.
        computes: Whether a kernel by name computes values; otherwise its launch is dry.
        raises: Whether a refusal by the rules is raised instead of printed.

    Raises:
        NoVerdict: The code of a kernel by name fails or ends the program.
    """
    from nkw.errors import InvalidArgument, NkwError, NoVerdict
    from simulate.kernel_by_name import InstructionCount, launch_by_name, names_a_kernel
    from simulate.run.machine import Mode
    from simulate.run.observers import observing

    if not names_a_kernel(options.script):
        return run_script(options, raises)
    if not prepare_process(options):
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
    """Run the script or launch the kernel of a command, so that launches before an early end can be reported as well.

    Returns:
        The exit status of `run_script_or_kernel`, or the one that the script gave to `sys.exit`. It is 1 if an
        exception ended the script, whose traceback is printed, and if `sys.exit` got a text, which is printed.

    Raises:
        NoVerdict: The code of a kernel by name fails or ends the program.
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


def prepare_process(options: argparse.Namespace) -> bool:
    """Apply the command's chip, overlay, level, rules and ranks to this process, and bind `nki` to the simulator.

    Prints the target. Returns False, after printing why, if one of them is refused, or if a module of the script has
    the name of a package of this project.
    """
    from nkw.errors import NkwError
    from nkw.targets import TARGET_VARIABLE
    from simulate.bind import install
    from simulate.hardware import use_overlay
    from simulate.kernel_by_name import find_import_folder
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
        check_names(options.script, find_import_folder(options.script))
        install("simulate", options.level, options.rules)
    except NkwError as refused:
        error(refused)
        return False
    chosen = "" if os.environ.get(TARGET_VARIABLE) else f" (default; --target or {TARGET_VARIABLE} chooses)"
    print(f"target {chip.label}{chosen}", file=choose_progress_stream(), flush=True)
    return True
