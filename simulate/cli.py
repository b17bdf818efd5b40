"""The simulator's commands: `python -m simulate …`, and the same as `nkw sim …`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from simulate import terminal
from simulate.check import commands as checks
from simulate.level import LEVEL_VARIABLE, LEVELS, NEWEST, RULES_VARIABLE, Rules
from simulate.occupancy import command as occupancy
from simulate.profile import command as profiles
from simulate.scripts import run_script, run_script_or_kernel, run_to_its_end
from simulate.targets import TARGETS

_SCRIPT_OR_KERNEL = (
    "a Python file; or a kernel, FILE.py:NAME or MODULE:NAME, and arguments: f32[128,512] or literals"
)
_RUN_ENDS = "Exit status: the script's; 1 if it or a kernel failed, 2 if the command could not run."
_CHECK_ENDS = (
    "Exit status: 0 no findings, 1 findings, 2 nothing could be checked, 3 the script failed before its end (findings "
    "until then are printed)."
)
_LINT_ENDS = "Exit status: 0 no errors (warnings may be printed), 1 errors, 2 nothing could be read."
_REPLAY_OPTIONS = {
    "--replay": "replay a launch whose program an earlier, checked launch recorded",
    "--exact": "replay instruction by instruction: the bytes of an eager launch",
    "--verify-replay": "compare every replay with an eager launch, and stop at a difference",
    "--replay-report": "print which launches were replayed, and why others were not",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0, 1 for a kernel that breaks a rule or for findings, 2 for what the command cannot do, 3 where `check` met a script
    that failed.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    if rest and options.command not in ("run", "fidelity"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "own" in options:
        _take_late_options(parser, options)
    try:
        status: int = options.act(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if options.command == "run" or error.filename is not None:
            raise  # from the script; errors of report files are typed
        terminal.error(f"the report cannot be written: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulate", description="Run and time NKI kernels without a chip."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="run a script whose `import nki` is the simulator", epilog=_RUN_ENDS
    )
    for option, help in _REPLAY_OPTIONS.items():
        run.add_argument(option, action="store_true", help=help)
    _machine_arguments(run)
    _script_arguments(run, "a Python file")
    run.set_defaults(act=_run)

    _reporting(
        commands,
        "time",
        "run a script and print the predicted time of every kernel launch",
        partial(_reported, profiles.time_command),
        profiles.add_arguments,
        _trips_argument,
        ends=_RUN_ENDS,
    )
    _reporting(
        commands,
        "memory",
        "run a script and print what every kernel launch has in SBUF and PSUM",
        partial(_reported, occupancy.memory),
        occupancy.add_arguments,
        _trips_argument,
        ends=_RUN_ENDS,
    )
    _reporting(
        commands,
        "check",
        "run a script and look for faults in every kernel launch",
        _check,
        checks.add_arguments,
        checks.add_variations,
        ends=_CHECK_ENDS,
    )

    lint = commands.add_parser(
        "lint", help="look for Python that the NKI compiler refuses, without running it", epilog=_LINT_ENDS
    )
    lint.add_argument("path", help="a Python file or a folder")
    _level_argument(lint)
    checks.add_arguments(lint)
    lint.set_defaults(act=checks.lint)

    doctor = commands.add_parser("doctor", help="print what is installed and what works")
    doctor.set_defaults(act=_doctor)

    explain = commands.add_parser(
        "explain",
        help="print what a code of a message means, with an example and its source; also codes of neuronx-cc",
    )
    explain.add_argument("code", nargs="?", help="for example NKW-UNWRITTEN; without it, all codes")
    explain.set_defaults(act=_explain)

    fidelity = commands.add_parser(
        "fidelity",
        help="compare predicted with published times; needs a checkout of the repository",
        add_help=False,
    )
    fidelity.set_defaults(act=_fidelity)

    targets = commands.add_parser("targets", help="print what is simulated of each chip")
    targets.set_defaults(act=_targets)
    return parser


Run = Callable[[argparse.Namespace], int]


class _Options(argparse.ArgumentParser):
    """A parser of one command's options that raises ArgumentError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _reporting(
    commands: Any, name: str, help: str, act: Run, *adds: Callable[[argparse.ArgumentParser], None], ends: str
) -> None:
    """A command that reports on the launches of a script, or of a kernel by name; `ends` has its exit statuses."""
    own = _Options(add_help=False, allow_abbrev=False)
    for add in adds:
        add(own)
    _machine_arguments(own)
    command: argparse.ArgumentParser = commands.add_parser(name, parents=[own], help=help, epilog=ends)
    _script_arguments(command, _SCRIPT_OR_KERNEL)
    command.set_defaults(act=act, own=own)


def _machine_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", choices=TARGETS, help="the chip (default: the environment's, else trn2)")
    _level_argument(command)
    command.add_argument(
        "--rules",
        choices=[each.value for each in Rules],
        help="whose refusals hold: the chip's, or those of the vendor's simulator; the others become warnings "
        f"(default: {RULES_VARIABLE}, else chip)",
    )


def _trips_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trips",
        type=_counts,
        default=(),
        metavar="N[,N…]",
        help="how often device loops of a kernel run whose bounds only the device knows, in the order they are reached",
    )


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no list of counts; give N or N,N")
    return tuple(map(int, parts))


def _level_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--level",
        choices=[str(level) for level in LEVELS],
        help=f"the release of NKI that kernels are written for (default: {LEVEL_VARIABLE}, else {NEWEST})",
    )


def _script_arguments(command: argparse.ArgumentParser, script: str) -> None:
    command.add_argument("script", help=script)
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script or the kernel")


def _take_late_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Options after a kernel's name belong to the command; all words after a script belong to the script.

    A note names the words after a script that are also options of the command.
    """
    from simulate.kernel_by_name import names_a_kernel

    if not names_a_kernel(options.script):
        with suppress(argparse.ArgumentError):
            _, others = options.own.parse_known_args(options.arguments)
            own = [word for word in options.arguments if word.startswith("--") and word not in others]
            if own:
                print(
                    f"note: {options.script} gets {' '.join(own)}; options of {options.command} go before the script",
                    file=sys.stderr,
                )
        return
    try:
        _, options.arguments = options.own.parse_known_args(options.arguments, options)
    except argparse.ArgumentError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> int:
    from simulate.replay.options import EXACT_VARIABLE, VERIFY_VARIABLE
    from simulate.run.environment import REPLAY_VARIABLE

    replays = options.replay or options.exact or options.verify_replay
    asked = {REPLAY_VARIABLE: replays, EXACT_VARIABLE: options.exact, VERIFY_VARIABLE: options.verify_replay}
    for variable, wanted in asked.items():
        if wanted:
            os.environ[variable] = "1"
    status = run_script(options)
    if options.replay_report:
        from simulate.world import process_replays

        print(process_replays().report.text(), file=sys.stderr)
    return status


def _reported(command: Callable[[argparse.Namespace, Run], int], options: argparse.Namespace) -> int:
    """The status of a command that prints a report; characters that the encoding lacks become `?`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return command(options, run_to_its_end)


def _check(options: argparse.Namespace) -> int:
    def run(options: argparse.Namespace) -> int:
        return run_script_or_kernel(options, computes=True, raises=True)

    return checks.check(options, run)


def _doctor(options: argparse.Namespace) -> int:
    from simulate.bind import install

    return checks.doctor(options, install)


def _explain(options: argparse.Namespace) -> int:
    from simulate.explain import close_matches, explained, explanations, vendor_codes

    if options.code is None:
        known = {code: each.sentence for code, each in explanations().items()}
        known |= {code: each.meaning for code, each in vendor_codes().items()}
        terminal.show_lines("".join(f"{code}  {known[code]}\n" for code in sorted(known)))
        return 0
    found = explained(options.code)
    if not found:
        close = close_matches(options.code)
        hint = f"close are {', '.join(close)}" if close else "`explain` without a code lists all"
        terminal.error(f"no code {options.code:.40}; {hint}")
        return 2
    terminal.show_lines("\n".join(map(str, found)))
    return 0


def _fidelity(options: argparse.Namespace) -> int:
    """Run the benchmark by its name: it belongs to the repository and is not installed with the package."""
    from simulate.errors import InvalidArgument

    name = "benchmarks.fidelity.__main__"
    try:
        command = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        missing = InvalidArgument(
            "NKW-FIDELITY-CHECKOUT",
            "fidelity needs the folder benchmarks/fidelity, which is not installed with the package: run "
            "`python -m simulate fidelity` in the top folder of a checkout of the repository",
        )
        terminal.error(missing)
        return 2
    status: int = command.main(options.rest)
    return status


def _targets(options: argparse.Namespace) -> int:
    from simulate.hardware import hardware

    facts: list[tuple[str, Any]] = [
        ("core", lambda h: h.core),
        ("chip", lambda h: h.chip),
        ("Tensor clock, GHz", lambda h: h.tensor_clock_ghz),
        ("Vector clock, GHz", lambda h: h.vector_clock_ghz),
        ("Scalar clock, GHz", lambda h: h.scalar_clock_ghz),
        ("physical cores/chip", lambda h: h.physical_cores_per_chip),
        ("SBUF, MiB", lambda h: h.sbuf_physical_bytes_per_partition * h.partitions // 2**20),
        ("SBUF, bytes/partition", lambda h: h.sbuf_usable_bytes_per_partition),
        ("PSUM, bytes/partition", lambda h: h.psum_bytes_per_partition),
        ("HBM per chip, GiB", lambda h: h.hbm_bytes_per_chip // 2**30),
        ("HBM per chip, GB/s", lambda h: h.hbm_gb_per_s_per_chip),
        ("HBM per core, GB/s", lambda h: h.hbm_gb_per_s_per_core),
        ("physical cores/rank", lambda h: " or ".join(map(str, h.logical_core_sizes))),
    ]
    chips = [hardware(target) for target in TARGETS]
    rows = [(label, *(str(value(chip)) for chip in chips)) for label, value in facts]
    terminal.show([terminal.table("|".join(["", *(chip.name for chip in chips)]), rows, firm=(0,), gap=1)])
    return 0
