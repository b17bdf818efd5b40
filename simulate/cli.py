"""The simulator's commands: `python -m simulate …`, and the same as `nkw sim …`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TARGETS = ("trn1", "inf2", "trn2", "trn3")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a kernel that breaks a rule, 2 for bad usage."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "run":
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
    _script_arguments(run)
    run.set_defaults(act=_run)

    time = commands.add_parser(
        "time", help="run a script and print the predicted time of every kernel launch"
    )
    _script_arguments(time)
    time.add_argument("--trace", metavar="FILE", help="write a trace that opens in Perfetto")
    time.set_defaults(act=_time)

    explain = commands.add_parser("explain", help="print the sentence behind a rule code")
    explain.add_argument("code", nargs="?", help="for example NKW-UNWRITTEN; without it, all codes")
    explain.set_defaults(act=_explain)

    targets = commands.add_parser("targets", help="print what is simulated of each chip")
    targets.set_defaults(act=_targets)
    return parser


def _script_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target", choices=_TARGETS, help="the chip (default: the environment's, else trn2)"
    )
    command.add_argument("script", help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")


def _run(options: argparse.Namespace) -> int:
    return _run_script(options)


def _time(options: argparse.Namespace) -> int:
    from simulate.errors import NkwError
    from simulate.run import recorded
    from simulate.timing import Reading, report, schedule, write_trace

    with recorded() as launches:
        status = _run_script(options)
    parts = []
    try:
        for number, launch in enumerate(launches):
            timeline = schedule(launch.streams, launch.hardware, Reading.program)
            parts.append((f"{launch.kernel} #{number}", launch.streams, timeline))
            print(report(launch.streams, launch.hardware, title=f"{launch.kernel} on {launch.hardware.name}"))
        if not launches:
            print("no kernel was launched", file=sys.stderr)
        if options.trace and parts:
            write_trace(options.trace, parts)
            print(f"trace: {options.trace}")
    except NkwError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _run_script(options: argparse.Namespace) -> int:
    from simulate.bind import install
    from simulate.errors import NkwError
    from simulate.run.launch import TARGET_VARIABLE, target_hardware

    script = Path(options.script)
    if not script.is_file():
        print(f"error: {script} is not a file", file=sys.stderr)
        return 2
    if options.target:
        os.environ[TARGET_VARIABLE] = options.target
    try:
        chip = target_hardware()
        install("simulate")
    except NkwError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = "" if os.environ.get(TARGET_VARIABLE) else f" (default; --target or {TARGET_VARIABLE} chooses)"
    print(f"target {chip.name}{chosen}", file=sys.stderr)
    before: tuple[list[str], list[str]] = (sys.argv, list(sys.path))
    sys.argv = [str(script), *options.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except NkwError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _explain(options: argparse.Namespace) -> int:
    from simulate.bind import load_everything
    from simulate.errors import RULES

    load_everything()
    if options.code is None:
        width = max(map(len, RULES))
        for code in sorted(RULES):
            print(f"{code:{width}s}  {RULES[code]}")
        return 0
    sentence = RULES.get(options.code.upper())
    if sentence is None:
        print(f"error: no rule has the code {options.code}; `explain` alone lists them", file=sys.stderr)
        return 2
    print(f"{options.code.upper()}: {sentence}")
    return 0


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
