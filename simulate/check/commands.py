"""Commands `check` and `lint`. Their exit status is 0 without findings, 1 with findings, 2 if they could not run.

`check` returns 3 if the script itself failed; launches before the failure are reported.
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
from nkw.files import Outputs, json_document, list_imported_files
from nkw.process import reopen_streams
from nkw.terminal import error, progress, show_lines
from simulate.check import (
    Finding,
    Format,
    Gatherer,
    Severity,
    collect_findings,
    fails_a_check,
    gathered,
    render,
    sort_findings,
)
from simulate.check.findings import convert_error
from simulate.check.formats import plain_findings
from simulate.check.integer_products import format_lines, list_lines
from simulate.check.lint import findings_in, lint_launched, source_of
from simulate.isolated import NO_VERDICT
from simulate.kernel_by_name import explain_no_launch, list_read_files
from simulate.level import Level, Rules
from simulate.run.launch_text import summary
from simulate.tracebacks import print_user_traceback


def check(options: argparse.Namespace, run_script: Callable[[argparse.Namespace], int]) -> int:
    """Run a script, and report the findings about its launches and about the source of the launched kernels.

    What the script prints goes to stderr, so that stdout contains the report only. Warnings of lint are
    printed and do not change the exit status.

    Args:
        options: The options of the command line.
        run_script: Runs the script; raises NkwError if a kernel breaks a rule.

    Returns:
        The exit status: 0 without findings that fail a check, 1 with such findings, 2 if nothing was
        launched, the start was refused or the report cannot be written, 3 if the script failed before its
        end.
    """
    outputs = Outputs(lambda: list_read_files(options))
    try:
        with json_document(options.json, outputs, "check") as contents:
            return _check_script(options, run_script, contents)
    except InvalidArgument as refused:
        error(refused)
        return 2


def _check_script(
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
        findings = collect_findings(seen, progress)
        advice = lint_launched([launch for launch, _ in seen.launches])
        products = list_lines(seen.launches)
        kept = _report([*findings, *advice], options, format_lines(products, options.products))
        contents["integer_products"] = products
        contents["launches"] = [summary(launch) for launch, _ in seen.launches]
        contents["findings"] = plain_findings(sort_findings(kept or ()))
        if kept is None:
            return 2
        # Under the rules of the vendor's simulator warnings do not fail a script that is written against it.
        tolerant = Rules.resolve() is Rules.simulator
        status = int(
            any(
                finding.severity is Severity.error if finding in advice else fails_a_check(finding, tolerant)
                for finding in kept
            )
        )
    if failed:
        contents.update(outcome="partial" if seen.launches or seen.errors else "none", reason=failed)
        error(f"{options.script} failed before its end: {failed}")
        return NO_VERDICT
    if not (seen.launches or seen.errors):
        error(explain_no_launch(options.script))
        return 2
    return status


def _run(
    options: argparse.Namespace, run_script: Callable[[argparse.Namespace], int], seen: Gatherer
) -> tuple[int, str]:
    """Run the script; an NkwError that stopped a launch is appended to `seen.errors` and not raised.

    Returns:
        The exit status of a start that was refused, else 0; and the reason why the script failed, empty if it
        ended well or a kernel broke a rule.

    Raises:
        KeyboardInterrupt: The user interrupts the script. The traceback of any other error is printed.
    """
    try:
        return run_script(options), ""
    except NoVerdict as failed:
        seen.errors[:] = [error for error in seen.errors if error is not failed]
        return 0, str(failed)
    except NkwError as error:
        if error not in seen.errors:
            seen.errors.append(error)
    except SystemExit as end:
        return 0, f"it exited with {end.code}" if end.code else ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        print_user_traceback(error)
        return 0, one_line(error).removesuffix(": ")
    return 0, ""


def lint(options: argparse.Namespace) -> int:
    """Report the findings of lint about files, and about every Python file below folders; return the exit status.

    The status is 1 if a finding is an error. It is 2 if the level is unknown, the report cannot be written,
    or the only path is a file that cannot be read. Of several files, one that cannot be read gives a finding.
    """
    paths = [Path(path) for path in options.paths]
    folders = (sorted(path.rglob("*.py")) if path.is_dir() else [path] for path in paths)
    files = list(dict.fromkeys(file for folder in folders for file in folder))
    try:
        with json_document(
            options.json, Outputs(lambda: [*files, *list_imported_files()]), "lint"
        ) as contents:
            return _lint_files(options, files, contents)
    except InvalidArgument as refused:
        error(refused)
        return 2


def _lint_files(options: argparse.Namespace, files: Sequence[Path], contents: dict[str, Any]) -> int:
    try:
        level = Level.resolve(options.level)
    except NkwError as unknown:
        error(unknown)
        return 2
    findings: list[Finding] = []
    called = frozenset[str]()
    for file in files:
        with suppress(NkwError):
            called |= source_of(file, level).called_names
    for file in progress(files, "files"):
        try:
            source = source_of(file, level)  # again: syntax trees of a large folder would not fit into memory
            source.called = called
            findings += findings_in(source, str(file))
        except NkwError as unreadable:
            if len(options.paths) == 1 and not Path(options.paths[0]).is_dir():
                error(unreadable)
                return 2
            findings.append(
                convert_error(unreadable)
            )  # one file that cannot be read does not hide the others
    kept = _report(findings, options)
    contents["files"] = len(files)
    contents["findings"] = plain_findings(sort_findings(kept or ()))
    if kept is None:
        return 2
    # Warnings of lint are advice on source that compiles; only errors make it fail.
    return 1 if any(finding.severity is Severity.error for finding in kept) else 0


def _report(
    findings: Iterable[Finding], options: argparse.Namespace, statements: str = ""
) -> list[Finding] | None:
    """Print the findings whose codes `--ignore` does not name, in the format of `--format`.

    Args:
        findings: The findings.
        options: The options of the command line.
        statements: Lines that a report in text begins with.

    Returns:
        The printed findings, in the order of the argument. Codes of `--error` have severity error. None,
        after an error message, if the report cannot be written.
    """
    ignored, raised = ({code.upper() for code in codes} for codes in (options.ignore, options.as_error))
    kept = [
        replace(finding, severity=Severity.error) if finding.code in raised or "ALL" in raised else finding
        for finding in findings
        if finding.code not in ignored
    ]
    try:
        report_format = Format(options.format)
        text = render(sort_findings(kept), report_format)
        if report_format is Format.text:
            show_lines(statements + text)
        else:
            print(text, end="")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, UnicodeEncodeError) as unwritten:
        error(
            f"the report cannot be written: {unwritten}; free space, or choose --format json for ASCII output"
        )
        return None
    return kept
