"""The simulator's commands: `python -m simulate …`, and the same as `nkw sim …`."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulate.check import commands as checks
from simulate.occupancy import command as occupancy
from simulate.profile import command as profiles

_TARGETS = ("trn1", "inf2", "trn2", "trn3")
_SCRIPT_OR_KERNEL = (
    "a Python file; or a kernel, FILE.py:NAME or MODULE:NAME, and arguments: f32[128,512] or literals"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a kernel that breaks a rule, 2 for bad usage."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    if rest and options.command not in ("run", "fidelity"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return options.act(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulate", description="Run and time NKI kernels without a chip."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a script whose `import nki` is the simulator")
    _replay_arguments(run)
    _script_arguments(run)
    run.set_defaults(act=_run)

    time = commands.add_parser(
        "time", help="run a script and print the predicted time of every kernel launch"
    )
    profiles.add_arguments(time)
    _script_arguments(time, _SCRIPT_OR_KERNEL)
    time.set_defaults(act=_time)

    memory = commands.add_parser(
        "memory", help="run a script and print what every kernel launch has in SBUF and PSUM"
    )
    occupancy.add_arguments(memory)
    _script_arguments(memory, _SCRIPT_OR_KERNEL)
    memory.set_defaults(act=_memory)

    check = commands.add_parser("check", help="run a script and look for faults in every kernel launch")
    checks.add_arguments(check)
    checks.add_variations(check)
    _script_arguments(check, _SCRIPT_OR_KERNEL)
    check.set_defaults(act=_check)

    lint = commands.add_parser(
        "lint", help="look for Python that the NKI compiler refuses, without running it"
    )
    lint.add_argument("path", help="a Python file or a folder")
    lint.add_argument(
        "--level", choices=checks.level_names(), default="0.6", help="the release of NKI (default 0.6)"
    )
    checks.add_arguments(lint)
    lint.set_defaults(act=checks.lint)

    doctor = commands.add_parser("doctor", help="print what is installed and what works")
    doctor.set_defaults(act=_doctor)

    explain = commands.add_parser(
        "explain", help="print the sentence behind a code of a rule, a finding or lint"
    )
    explain.add_argument("code", nargs="?", help="for example NKW-UNWRITTEN; without it, all codes")
    explain.set_defaults(act=_explain)

    fidelity = commands.add_parser(
        "fidelity", help="compare predicted with published times, from a checkout", add_help=False
    )
    fidelity.set_defaults(act=_fidelity)

    targets = commands.add_parser("targets", help="print what is simulated of each chip")
    targets.set_defaults(act=_targets)
    return parser


def _script_arguments(command: argparse.ArgumentParser, script: str = "a Python file") -> None:
    command.add_argument(
        "--target", choices=_TARGETS, help="the chip (default: the environment's, else trn2)"
    )
    command.add_argument("script", help=script)
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to it")


def _replay_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--replay",
        action="store_true",
        help="replay launches like one that was checked before, with less work",
    )
    command.add_argument(
        "--exact", action="store_true", help="replay instruction by instruction: the bytes of an eager launch"
    )
    command.add_argument(
        "--verify-replay",
        action="store_true",
        help="compare every replay with an eager launch, and stop at a difference",
    )
    command.add_argument("--replay-report", action="store_true", help="print what became of the launches")


def _run(options: argparse.Namespace) -> int:
    from simulate.run.options import EXACT_VARIABLE, REPLAY_VARIABLE, VERIFY_VARIABLE

    replays = options.replay or options.exact or options.verify_replay
    asked = {REPLAY_VARIABLE: replays, EXACT_VARIABLE: options.exact, VERIFY_VARIABLE: options.verify_replay}
    for variable, wanted in asked.items():
        if wanted:
            os.environ[variable] = "1"
    status = _run_script(options)
    if options.replay_report:
        from simulate.run import REPLAYS

        print(REPLAYS.report.text(), file=sys.stderr)
    return status


def _time(options: argparse.Namespace) -> int:
    return profiles.time_command(options, _run_script_or_kernel)


def _memory(options: argparse.Namespace) -> int:
    return occupancy.memory(options, _run_script_or_kernel)


def _check(options: argparse.Namespace) -> int:
    def run(options: argparse.Namespace) -> int:
        return _run_script_or_kernel(options, computes=True, raises=True)

    return checks.check(options, run)


def _bound(options: argparse.Namespace) -> bool:
    """Choose the chip and bind `nki`; prints what is refused."""
    from simulate.bind import install
    from simulate.errors import NkwError
    from simulate.run.target import TARGET_VARIABLE, target_hardware

    if options.target:
        os.environ[TARGET_VARIABLE] = options.target
    try:
        chip = target_hardware()
        install("simulate")
    except NkwError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    chosen = "" if os.environ.get(TARGET_VARIABLE) else f" (default; --target or {TARGET_VARIABLE} chooses)"
    print(f"target {chip.name}{chosen}", file=sys.stderr)
    return True


def _run_script_or_kernel(options: argparse.Namespace, computes: bool = False, raises: bool = False) -> int:
    """Run the script, or launch FILE.py:KERNEL or MODULE:KERNEL with the arguments that follow.

    A kernel is launched dry unless `computes`. With `raises`, what a kernel's rules refuse is not printed but raised.
    """
    from simulate.errors import InvalidArgument, NkwError
    from simulate.run.by_name import launch_by_name, names_a_kernel
    from simulate.run.machine import Mode

    if not names_a_kernel(options.script):
        return _run_script(options, raises)
    if not _bound(options):
        return 2
    try:
        launch_by_name(options.script, options.arguments, Mode.eager if computes else Mode.dry)
    except NkwError as error:
        if raises and not isinstance(error, InvalidArgument):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from simulate.bind import install

    return checks.doctor(options, install)


def _run_script(options: argparse.Namespace, raises: bool = False) -> int:
    """Run the script; an NkwError of its kernels is printed, or passed on with `raises`."""
    from simulate.errors import NkwError

    script = Path(options.script)
    if not script.is_file():
        print(f"error: {script} is not a file", file=sys.stderr)
        return 2
    if not _bound(options):
        return 2
    before: tuple[list[str], list[str]] = (sys.argv, list(sys.path))
    sys.argv = [str(script), *options.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except NkwError as error:
        if raises:
            raise
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _explain(options: argparse.Namespace) -> int:
    from simulate.bind import load_everything
    from simulate.check import KINDS
    from simulate.check.lint import load_rules
    from simulate.errors import RULES

    load_everything()
    load_rules()
    sentences = {**RULES, **{code: kind.sentence for code, kind in KINDS.items()}}
    if options.code is None:
        width = max(map(len, sentences))
        for code in sorted(sentences):
            print(f"{code:{width}s}  {sentences[code]}")
        return 0
    code = options.code.upper()
    if code not in sentences:
        print(f"error: no rule has the code {options.code}; `explain` alone lists them", file=sys.stderr)
        return 2
    severity = f" ({KINDS[code].severity.value})" if code in KINDS else ""
    print(f"{code}{severity}: {sentences[code]}")
    return 0


def _fidelity(options: argparse.Namespace) -> int:
    """Handed over by name: the benchmarks are no part of the installed package."""
    try:
        command = importlib.import_module("benchmarks.fidelity.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not "benchmarks.fidelity.__main__".startswith(error.name):
            raise
        print("error: fidelity runs from a checkout of the repository, in its top folder", file=sys.stderr)
        return 2
    status: int = command.main(options.rest)
    return status


def _targets(options: argparse.Namespace) -> int:
    from simulate.hardware import TARGETS, hardware

    rows: list[tuple[str, Any]] = [
        ("core", lambda h: h.core),
        ("chip", lambda h: h.chip),
        ("Tensor clock, GHz", lambda h: h.tensor_clock_ghz),
        ("Vector clock, GHz", lambda h: h.vector_clock_ghz),
        ("Scalar clock, GHz", lambda h: h.scalar_clock_ghz),
        ("SBUF, bytes/partition", lambda h: h.sbuf_usable_bytes_per_partition),
        ("PSUM, bytes/partition", lambda h: h.psum_bytes_per_partition),
        ("HBM per core, GB/s", lambda h: h.hbm_gb_per_s_per_core),
        ("physical cores/rank", lambda h: " or ".join(map(str, h.logical_core_sizes))),
    ]
    chips = [hardware(target) for target in TARGETS]
    print(f"{'':22s}" + "".join(f"{chip.name:>14s}" for chip in chips))
    for label, value in rows:
        print(f"{label:22s}" + "".join(f"{value(chip)!s:>14s}" for chip in chips))
    return 0
