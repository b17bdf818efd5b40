"""Command `nkw verify`: one verdict on a kernel by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from nkw.child import user_output
from nkw.errors import InvalidArgument, NoVerdict
from nkw.files import Outputs, json_document
from nkw.terminal import error, show, working
from simulate.isolated import print_no_verdict
from simulate.kernel_by_name import (
    InstructionCount,
    build_call,
    find_import_folder,
    importing_from,
    list_read_files,
    load_callable,
    names_a_kernel,
)
from simulate.run.observers import observing
from simulate.scripts import prepare_process
from simulate.verification.judging import ONE_RANK, SEVERAL_RANKS, verify
from simulate.verification.trial import make_refusal
from simulate.verification.verdict import Verdict


def verify_command(options: argparse.Namespace) -> int:
    """Print the verdict on a kernel, write the document of --json if asked, and return the exit status.

    The status is 0 for a right and clean kernel, 1 for another one, 2 if the words or options cannot be used, 3 if
    there is no verdict, because the kernel or the reference ended, crashed or failed. Their output goes to stderr.
    """
    if not names_a_kernel(options.script):
        error(f"{options.script:.60} names no kernel; give FILE.py:NAME or MODULE:NAME")
        return 2
    reference = options.reference or options.script
    outputs = Outputs(lambda: [*list_read_files(options), reference.rpartition(":")[0]])
    try:
        if (options.ranks or 1) > 1:
            raise make_refusal(f"{ONE_RANK}; {SEVERAL_RANKS}")
        with json_document(options.json, outputs, "verify") as contents:
            if not prepare_process(options):
                return 2
            verdict = _judge(options, reference)
            show(verdict.build_text())
            contents.update(verdict.as_json())
    except NoVerdict as failed:
        return print_no_verdict(failed)
    except InvalidArgument as refused:
        error(refused)
        return 2
    return verdict.status


def _judge(options: argparse.Namespace, named: str) -> Verdict:
    """Load the kernel, the reference and the arguments, and return the verdict of `verify`.

    Args:
        options: The options of the command line.
        named: The reference as FILE.py:NAME or MODULE:NAME, or the kernel's name if there is none.

    Raises:
        NoVerdict: The kernel or the reference ended, crashed or failed.
        InvalidArgument: The arguments or the reference cannot be used.
    """
    count, current = InstructionCount(), "trial 1"

    def count_trials(trials: Sequence[Any], _: str) -> Iterator[Any]:
        nonlocal current
        for number, trial in enumerate(trials, 2):
            current = f"trial {number} of {len(trials) + 1}"
            yield trial

    with (
        user_output(to_stderr=True),
        importing_from(find_import_folder(named)),
        importing_from(find_import_folder(options.script)),
        observing(count),
        working(lambda: f"{options.script}: {current}, {count.instructions:,} instructions"),
    ):
        kernel = load_callable(options.script)
        reference = load_callable(named) if options.reference else None
        args, keywords = build_call(options.arguments)
        return verify(kernel, args, reference, keywords=keywords, progress=count_trials)
