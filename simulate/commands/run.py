"""The command `run`: a script, or a kernel by name, with `import nki` bound to the simulator."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext

from nkw import terminal
from nkw.errors import InvalidArgument, NoVerdict
from nkw.files import Outputs, json_document
from nkw.process import replace_unprintable
from simulate.isolated import print_no_verdict
from simulate.kernel_by_name import list_read_files, names_a_kernel
from simulate.replay.options import EXACT_VARIABLE, VERIFY_VARIABLE
from simulate.run import Launch, recorded
from simulate.run.environment import REPLAY_VARIABLE
from simulate.run.launch_text import report, summary
from simulate.run.observers import observing
from simulate.run.output_warnings import OutputWarnings
from simulate.scripts import run_script_or_kernel

_REPLAY_OPTIONS = ("--replay", "--exact", "--verify-replay", "--replay-report")


def run(options: argparse.Namespace) -> int:
    """Run a script or a kernel, and print what a launch by name returned and the warnings about outputs.

    The options of replay are put into the environment of this process.

    Returns:
        The exit status of `run_script_or_kernel`; 2 for options or a JSON file that cannot be used; 3 if a
        kernel by name ended or crashed.
    """
    by_name = names_a_kernel(options.script)
    outputs = OutputWarnings(options.script)
    try:
        _set_replay_variables(options, by_name)
    except InvalidArgument as useless:
        terminal.error(useless)
        return 2
    kept: AbstractContextManager[list[Launch]] = (
        recorded(outputs=by_name) if by_name or options.json is not None else nullcontext([])
    )
    try:
        with (
            json_document(options.json, Outputs(lambda: list_read_files(options)), "run") as contents,
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
                    contents["launches"] = [summary(launch) for launch in launches]
            if by_name and status == 0:
                replace_unprintable()
                terminal.show(report(launches[-1]))
    except NoVerdict as failed:
        return print_no_verdict(failed)
    except InvalidArgument as unwritten:  # run_script prints what it refuses
        if unwritten.code != "NKW-JSON-PATH":
            raise
        terminal.error(unwritten)
        return 2
    if options.replay_report:
        from simulate.world import process_replays

        print(process_replays().report.text(), file=sys.stderr)
    return status


def _set_replay_variables(options: argparse.Namespace, by_name: bool) -> None:
    """Set the environment variables of the replay options that are given, to "1".

    Raises:
        InvalidArgument: NKW-REPLAY-OPTION. A replay option is given with a kernel by name, which is launched
            once.
    """
    flags = [flag for flag in _REPLAY_OPTIONS if getattr(options, flag.lstrip("-").replace("-", "_"))]
    if by_name and flags:
        raise InvalidArgument(
            "NKW-REPLAY-OPTION",
            f"{flags[0]} is about launches that a script repeats, and {options.script:.60} is launched once: leave it "
            "out, or give a script",
        )
    replays = options.replay or options.exact or options.verify_replay
    switches = {
        REPLAY_VARIABLE: replays,
        EXACT_VARIABLE: options.exact,
        VERIFY_VARIABLE: options.verify_replay,
    }
    for variable, is_on in switches.items():
        if is_on:
            os.environ[variable] = "1"
