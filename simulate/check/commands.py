"""The commands `check` and `lint`. Each returns 0, 1 (findings) or 2 (could not run).

`check` returns 3 where the script itself failed; launches before that are reported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nkw.child import user_output
from nkw.errors import InvalidArgument, NkwError, NoVerdict, one_line
from nkw.files import Outputs, imported_files, json_document
from nkw.process import reopen_streams
from nkw.terminal import error, progress, show_lines
from simulate.check import (
    Finding,
    Format,
    Gatherer,
    Severity,
    fails_a_check,
    findings_of,
    gathered,
    in_order,
    render,
)
from simulate.check.findings import from_error
from simulate.check.formats import plain
from simulate.check.lint import findings_in, lint_launched, source_of
from simulate.isolated import NO_VERDICT
from simulate.kernel_by_name import files_read, nothing_launched
from simulate.level import Level, Rules
from simulate.run.launch_text import summary
from simulate.tracebacks import print_of_the_user


def check(options: argparse.Namespace, run_script: Callable[[argparse.Namespace], int]) -> int:
    """Run a script, look at every launch it makes and at the source of the launched kernels.

    `run_script` raises NkwError where a kernel breaks a rule. What the script prints goes to stderr, so that stdout
    holds the report and nothing else. Warnings of lint are printed and, as in `lint`, do not count as findings.
    """
    outputs = Outputs(lambda: files_read(options))
    try:
        with json_document(options.json, outputs, "check") as contents:
            return _checked(options, run_script, contents)
    except InvalidArgument as refused:
        error(refused)
        return 2


def _checked(
    options: argparse.Namespace,
    run_script: Callable[[argparse.Namespace], int],
    contents: dict[str, Any],
) -> int:
    with gathered(options.orders, options.seeds) as seen, user_output(to_stderr=True):
        status, failed = _run(options, run_script, seen)
    reopen_streams()  # the script saw stderr in place of stdout
    if status:
        return status
    if seen.launches or seen.errors:
        found = findings_of(seen, progress)
        advice = lint_launched([launch for launch, _ in seen.launches])
        kept = _report([*found, *advice], options)
        contents["launches"] = [summary(launch) for launch, _ in seen.launches]
        contents["findings"] = plain(in_order(kept or ()))
        if kept is None:
            return 2
        # Under the rules of the vendor's simulator warnings do not fail a script that is written against it.
        tolerant = Rules.of() is Rules.simulator
        status = int(
            any(
                each.severity is Severity.error if each in advice else fails_a_check(each, tolerant)
                for each in kept
            )
        )
    if failed:
        contents.update(outcome="partial" if seen.launches or seen.errors else "none", reason=failed)
        error(f"{options.script} failed before its end: {failed}")
        return NO_VERDICT
    if not (seen.launches or seen.errors):
        error(nothing_launched(options.script))
        return 2
    return status


def _run(
    options: argparse.Namespace, run_script: Callable[[argparse.Namespace], int], seen: Gatherer
) -> tuple[int, str]:
    """Run the script; returns the status of a start that was refused, and why the script failed, in words."""
    try:
        return run_script(options), ""
    except NoVerdict as failed:
        seen.errors[:] = [each for each in seen.errors if each is not failed]
        return 0, str(failed)
    except NkwError as error:
        if error not in seen.errors:
            seen.errors.append(error)
    except SystemExit as end:
        return 0, f"it exited with {end.code}" if end.code else ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        print_of_the_user(error)
        return 0, one_line(error).removesuffix(": ")
    return 0, ""


def lint(options: argparse.Namespace) -> int:
    """Look at the source of files, and of every Python file below folders."""
    paths = [Path(path) for path in options.paths]
    found = (sorted(path.rglob("*.py")) if path.is_dir() else [path] for path in paths)
    files = list(dict.fromkeys(file for each in found for file in each))
    try:
        with json_document(options.json, Outputs(lambda: [*files, *imported_files()]), "lint") as contents:
            return _linted(options, files, contents)
    except InvalidArgument as refused:
        error(refused)
        return 2


def _linted(options: argparse.Namespace, files: Sequence[Path], contents: dict[str, Any]) -> int:
    try:
        level = Level.of(options.level)
    except NkwError as unknown:
        error(unknown)
        return 2
    findings: list[Finding] = []
    called = frozenset[str]()
    for file in files:
        with suppress(NkwError):
            called |= source_of(file, level).own_calls
    for file in progress(files, "files"):
        try:
            source = source_of(file, level)  # again: syntax trees of a large folder would not fit into memory
            source.called = called
            findings += findings_in(source, str(file))
        except NkwError as unreadable:
            if len(options.paths) == 1 and not Path(options.paths[0]).is_dir():
                error(unreadable)
                return 2
            findings.append(from_error(unreadable))  # one file that cannot be read does not hide the others
    kept = _report(findings, options)
    contents["files"] = len(files)
    contents["findings"] = plain(in_order(kept or ()))
    if kept is None:
        return 2
    # Warnings of lint are advice on source that compiles; only errors make it fail.
    return 1 if any(finding.severity is Severity.error for finding in kept) else 0


def _report(findings: Iterable[Finding], options: argparse.Namespace) -> list[Finding] | None:
    """Print all findings but the ignored ones; returns them, or None where they cannot be written."""
    ignored, raised = ({code.upper() for code in codes} for codes in (options.ignore, options.as_error))
    kept = [
        replace(finding, severity=Severity.error) if finding.code in raised or "ALL" in raised else finding
        for finding in findings
        if finding.code not in ignored
    ]
    try:
        how = Format(options.format)
        text = render(in_order(kept), how)
        if how is Format.text:
            show_lines(text)
        else:
            print(text, end="")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, UnicodeEncodeError) as unwritten:
        error(f"the report cannot be written: {unwritten}")
        return None
    return kept
