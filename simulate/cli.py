"""The simulator's commands: `python -m simulate …`, and the same as `nkw …`."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

from nkw import terminal
from nkw.errors import LONGEST_PATH, InvalidArgument, NoVerdict, shown
from nkw.files import Outputs, json_document
from nkw.process import begin, imported
from simulate.bundle import command as bundles
from simulate.calibrate import command as calibrating
from simulate.check import commands as checks
from simulate.child_entry import become_spawned_child
from simulate.explain.command import explain
from simulate.hardware.command import targets
from simulate.isolated import (
    act_in_child,
    check_limits,
    run_isolated,
    runs_in_child,
    set_limits,
    without_verdict,
)
from simulate.occupancy import command as occupancy
from simulate.options import (
    add_command,
    add_hardware,
    add_json,
    add_level,
    add_ranks,
    add_running,
    add_trips,
    take_words,
)
from simulate.profile import command as profiles
from simulate.profile.sweep import time_sweep
from simulate.scripts import bound, run_script_or_kernel, run_to_its_end
from simulate.tune import command as tuning
from simulate.verification import command as verification

_REPLAY_OPTIONS = {
    "--replay": "replay a launch whose program an earlier, checked launch recorded",
    "--exact": "replay instruction by instruction: the bytes of an eager launch",
    "--verify-replay": "compare every replay with an eager launch, and stop at a difference",
    "--replay-report": "print which launches were replayed, and why others were not",
}


def main(argv: Sequence[str] | None = None, prog: str = "python -m simulate", isolates: bool = False) -> int:
    """Run one command; returns the exit status.

    0, 1 for a kernel that breaks a rule or for findings, 2 for what the command cannot do, 3 where code of the user
    ended or failed, so that there is no verdict.

    Args:
        prog: the name of the command line, for its help.
        isolates: whether commands on a kernel by name run in a child process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _options(arguments, prog)
    try:
        if isolates and runs_in_child(options):
            return run_isolated(options, [_SPAWNED.format(path=sys.path), prog, *arguments])
        status: int = options.act(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        words = sys.argv[1:] if argv is None else argv
        if error.errno == errno.ENAMETOOLONG and str(error.filename) in words:
            terminal.error(f"{shown(str(error.filename), LONGEST_PATH)} cannot be used: {error.strerror}")
            return 2
        if error.filename is not None or (options.command == "run" and Path(options.script).is_file()):
            raise  # from the script; errors of report files are typed
        terminal.error(f"the report cannot be written: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
        return 2


_SPAWNED = "import sys; sys.path[:] = {path!r}; from simulate.cli import spawned; spawned(sys.argv[1:])"
"""The code of a child that is a new interpreter."""


def spawned(arguments: Sequence[str]) -> NoReturn:
    """Run a command as the child process of another interpreter, see `run_in_child`."""
    given, prog, *words = arguments
    begin()
    imported()
    options = _options(words, prog)
    set_limits(options)
    become_spawned_child(partial(act_in_child, options), given)


def _options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """Return the options of a command line; exits with status 2 where it is wrong."""
    parser = _parser(prog)
    options, rest = parser.parse_known_args(arguments)
    options.prog, options.rest = prog, rest
    if rest and options.command != "fidelity":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "words" in options:
        _take_words(parser, options)
    return options


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Run and time NKI kernels without a chip.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    time = partial(_reported, partial(_once_or_swept, profiles.time_command, time_sweep))
    memory = partial(_reported, partial(_once_or_swept, occupancy.memory, occupancy.memory_sweep))
    verify = partial(_reported, verification.verify_command)
    add_running(commands, prog, "run", _run, _replay_arguments, add_ranks)
    add_running(commands, prog, "time", time, profiles.add_arguments, add_trips, add_ranks)
    add_running(commands, prog, "memory", memory, occupancy.add_arguments, add_trips, add_ranks)
    add_running(commands, prog, "check", _check, checks.add_arguments, checks.add_variations, add_ranks)
    add_running(commands, prog, "verify", verify, verification.add_arguments)
    add_running(commands, prog, "tune", partial(_reported, tuning.tune), tuning.add_arguments, add_ranks)
    add_running(commands, prog, "bundle", partial(_reported, bundles.bundle_command), bundles.add_arguments)

    comparison = add_command(commands, prog, "compare")
    comparison.add_argument("folder", help="a bundle with the folder result/ that its run.py wrote")
    comparison.add_argument(
        "--measurements",
        metavar="FILE",
        help="write the measured times as entries for nkw fidelity and nkw calibrate",
    )
    add_json(comparison)
    comparison.set_defaults(act=partial(_reported, bundles.compare_command))

    lint = add_command(commands, prog, "lint")
    lint.add_argument("paths", nargs="+", metavar="path", help="a Python file or a folder")
    add_level(lint)
    add_json(lint)
    checks.add_arguments(lint)
    lint.set_defaults(act=checks.lint)

    doctor = add_command(commands, prog, "doctor")
    add_json(doctor)
    doctor.set_defaults(act=_doctor)

    code = add_command(commands, prog, "explain")
    code.add_argument("code", nargs="?", help="for example NKW-UNWRITTEN; without it, all codes")
    add_json(code)
    code.set_defaults(act=explain)

    add_command(commands, prog, "fidelity", add_help=False).set_defaults(act=_fidelity)
    calibration = add_command(commands, prog, "calibrate")
    calibrating.add_arguments(calibration)
    calibration.set_defaults(act=partial(_reported, calibrating.calibrate_command))
    chips = add_command(commands, prog, "targets")
    add_hardware(chips)
    add_json(chips)
    chips.set_defaults(act=targets)
    return parser


Run = Callable[[argparse.Namespace], int]


def _replay_arguments(command: argparse.ArgumentParser) -> None:
    for option, help in _REPLAY_OPTIONS.items():
        command.add_argument(option, action="store_true", help=help)


def _take_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Take script or kernel and what follows it; exits with status 2 where that cannot be taken."""
    from simulate.kernel_by_name import names_a_kernel

    try:
        take_words(options, parser.prog, names_a_kernel)
        check_limits(options)
    except InvalidArgument as misplaced:
        terminal.error(misplaced)
        sys.exit(2)
    except argparse.ArgumentError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> int:
    from simulate.kernel_by_name import files_read, names_a_kernel
    from simulate.run import Launch, recorded
    from simulate.run.launch_text import report, summary
    from simulate.run.observers import observing
    from simulate.run.output_warnings import OutputWarnings

    by_name = names_a_kernel(options.script)
    outputs = OutputWarnings(options.script)
    try:
        _take_replay_options(options, by_name)
    except InvalidArgument as useless:
        terminal.error(useless)
        return 2
    kept: AbstractContextManager[list[Launch]] = (
        recorded(outputs=by_name) if by_name or options.json is not None else nullcontext([])
    )
    try:
        with (
            json_document(options.json, Outputs(lambda: files_read(options)), "run") as contents,
            kept as launches,
        ):
            status = 2
            try:
                with observing(outputs):
                    status = run_script_or_kernel(options, computes=True)
            finally:
                if outputs.texts:
                    terminal.show_lines("\n".join(outputs.texts), sys.stderr)
                if launches or not by_name or status == 1:
                    contents["launches"] = [summary(each) for each in launches]
            if by_name and status == 0:
                _question_marks_for_what_cannot_be_printed()
                terminal.show(report(launches[-1]))
    except NoVerdict as failed:
        return without_verdict(failed)
    except InvalidArgument as unwritten:  # run_script prints what it refuses
        if unwritten.code != "NKW-JSON-PATH":
            raise
        terminal.error(unwritten)
        return 2
    if options.replay_report:
        from simulate.world import process_replays

        print(process_replays().report.text(), file=sys.stderr)
    return status


def _take_replay_options(options: argparse.Namespace, by_name: bool) -> None:
    """Put the options of replay into the environment. Raises InvalidArgument for one beside a kernel by name."""
    from simulate.replay.options import EXACT_VARIABLE, VERIFY_VARIABLE
    from simulate.run.environment import REPLAY_VARIABLE

    given = [each for each in _REPLAY_OPTIONS if getattr(options, each.lstrip("-").replace("-", "_"))]
    if by_name and given:
        raise InvalidArgument(
            "NKW-REPLAY-OPTION",
            f"{given[0]} is about launches that a script repeats, and {options.script:.60} is launched once: leave it "
            "out, or give a script",
        )
    replays = options.replay or options.exact or options.verify_replay
    asked = {REPLAY_VARIABLE: replays, EXACT_VARIABLE: options.exact, VERIFY_VARIABLE: options.verify_replay}
    for variable, wanted in asked.items():
        if wanted:
            os.environ[variable] = "1"


def _reported(command: Run, options: argparse.Namespace) -> int:
    """The status of a command that prints a report."""
    _question_marks_for_what_cannot_be_printed()
    return command(options)


def _question_marks_for_what_cannot_be_printed() -> None:
    """Print `?` for characters that the encoding of stdout lacks, from now on."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _once_or_swept(
    once: Callable[[argparse.Namespace, Run], int],
    sweep: Callable[[argparse.Namespace, Callable[[argparse.Namespace], bool]], int],
    options: argparse.Namespace,
) -> int:
    """The status of a command for the launches of a script or kernel, or for those of a sweep."""
    return once(options, run_to_its_end) if options.sweep is None else sweep(options, bound)


def _check(options: argparse.Namespace) -> int:
    def run(options: argparse.Namespace) -> int:
        return run_script_or_kernel(options, computes=True, raises=True)

    return checks.check(options, run)


def _doctor(options: argparse.Namespace) -> int:
    from simulate.doctor import doctor  # what it looks packages up with takes long to import

    return doctor(options)


def _fidelity(options: argparse.Namespace) -> int:
    """Run the benchmark by its name: it belongs to the repository and is not installed with the package."""
    from simulate.kernel_by_name import importing_from

    name = "benchmarks.fidelity.__main__"
    try:
        with importing_from(Path.cwd()):
            command = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        missing = InvalidArgument(
            "NKW-FIDELITY-CHECKOUT",
            "fidelity needs the folder benchmarks/fidelity, which is not installed with the package: run "
            f"`{options.prog} fidelity` in the top folder of a checkout of the repository",
        )
        terminal.error(missing)
        return 2
    status: int = command.main(options.rest, f"{options.prog} fidelity")
    return status
