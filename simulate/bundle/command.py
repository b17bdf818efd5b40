"""The commands `nkw bundle` and `nkw compare`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from nkw.child import user_output
from nkw.errors import InvalidArgument, NkwError, NoVerdict
from nkw.files import OutputFile, Outputs, json_document
from nkw.report import Hanging
from nkw.terminal import error, show, working
from simulate.bundle.blame import Comparison
from simulate.bundle.cases import Cases, Written, format_launch_count
from simulate.bundle.compare import compare_bundle, make_document, make_report
from simulate.bundle.entries import make_entries, write_entries
from simulate.bundle.folder import check_free, number_names
from simulate.bundle.manifest import KERNELS
from simulate.bundle.reading import make_error
from simulate.isolated import NO_VERDICT, print_no_verdict
from simulate.kernel_by_name import (
    InstructionCount,
    find_import_folder,
    importing_from,
    list_read_files,
    load_callable,
    names_a_kernel,
)
from simulate.run import target_hardware
from simulate.run.observers import observing
from simulate.scripts import prepare_process
from simulate.tracebacks import print_user_traceback

_EXAMPLES = "examples"
"""Module of a package with example arguments of its kernels: `EXAMPLES` and `RANKS`, as `nki_kernels.examples`."""


def bundle_command(options: argparse.Namespace) -> int:
    """Write the bundle that the options of `nkw bundle` describe; return the exit status.

    Output of the kernels goes to stderr.

    Returns:
        0 for a written bundle; 2 if options are refused; 1 for other errors of the launch; NO_VERDICT if the
            kernel raises an error of its own.
    """
    outputs = Outputs(lambda: list_read_files(options))
    try:
        if (options.ranks or 1) > 1:
            raise make_error("a bundle holds launches of one rank; leave --ranks out")
        if options.catalogue == names_a_kernel(options.script):
            raise make_error(
                f"{options.script:.60} names a kernel; --catalogue takes a package"
                if options.catalogue
                else f"{options.script:.60} names no kernel; give FILE.py:NAME or MODULE:NAME, or --catalogue PACKAGE"
            )
        if options.out is None:
            raise make_error("--out DIR is missing: the folder to write")
        folder = Path(options.out)
        check_free(folder)
        with json_document(options.json, outputs, "bundle") as document:
            if not prepare_process(options):
                return 2
            written, left_out = _build_bundle(options, folder)
            show(written.make_report(left_out))
            document.update(written.make_document(left_out))
    except NoVerdict as failed:
        return print_no_verdict(failed)
    except NkwError as wrong:
        error(wrong)
        return 2 if isinstance(wrong, InvalidArgument) else 1
    except Exception as failed:  # of the kernel
        print_user_traceback(failed)
        return NO_VERDICT
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """Print the comparison of a bundle's results with expectations and predictions; return the exit status.

    Writes the files of `--json` and `--measurements` too.

    Returns:
        0 if everything agrees, 1 if not, 2 if the bundle or its result cannot be read.
    """
    folder = Path(options.folder)
    outputs = Outputs(lambda: (path for path in folder.rglob("*") if path.is_file()))
    try:
        output_file = outputs.claim(options.measurements, "measurements", "NKW-BUNDLE")
        with json_document(options.json, outputs, "compare") as contents:
            comparison = compare_bundle(folder)
            show(make_report(comparison))
            contents.update(make_document(comparison))
            if output_file is not None:
                _write_measurements(output_file, folder, comparison)
    except InvalidArgument as unread:
        error(unread)
        return 2
    return 0 if comparison.agrees else 1


def _write_measurements(output_file: OutputFile, folder: Path, comparison: Comparison) -> None:
    """Write the measured times as JSON entries for `nkw fidelity` and `nkw calibrate`.

    Print skipped kernels.
    """
    entries, skipped = make_entries(folder, comparison.bundle, comparison.result)
    write_entries(output_file, entries)
    show([f"measurements: {output_file.path.name}, {format_launch_count(len(entries))}"])
    show([Hanging(f"left out: {skip.name}: {skip.why}") for skip in skipped])


def _build_bundle(options: argparse.Namespace, folder: Path) -> tuple[Written, list[str]]:
    """Launch the kernels, write the bundle to `folder`, and return it with a line for every kernel left out.

    Kernels are left out of a catalogue only; a single kernel that cannot be bundled raises the error.
    """
    count, cases = InstructionCount(), Cases()
    left_out: list[str] = []
    with (
        user_output(to_stderr=True),
        importing_from(find_import_folder(options.script)),
        observing(count),
        working(lambda: f"{len(cases.cases)} kernels, {count.instructions:,} instructions"),
    ):
        if options.catalogue:
            left_out = _add_catalogue(options, cases)
        else:
            reference_name = options.reference
            reference = None
            if reference_name:
                with importing_from(find_import_folder(reference_name)):
                    reference = load_callable(reference_name)
            cases.add(options.script, options.arguments, options.script.rpartition(":")[2], reference)
    return cases.write(folder, KERNELS, target_hardware().name), left_out


def _add_catalogue(options: argparse.Namespace, cases: Cases) -> list[str]:
    """Add a case for each example of a package to `cases`.

    Return a line with the reason for each kernel left out.

    Raises:
        InvalidArgument: If the package has no examples, or if no kernel can be bundled.
    """
    package, left_out = options.script, []
    table, ranks = _load_examples(package)
    names = number_names([example.rpartition(":")[2] for example in table])
    for name, (kernel, arguments) in zip(names, table.items()):
        kernel_name = f"{package}.{kernel}" if ":" in kernel else f"{package}:{kernel}"
        try:
            if kernel in ranks:
                raise make_error(f"it runs on {ranks[kernel]} ranks, and a bundle holds launches of one")
            cases.add(kernel_name, arguments, name)
        except NkwError as reason:
            left_out.append(f"{name}: {getattr(reason, 'message', reason)}")
    if not cases.cases:
        raise make_error(
            f"no kernel of {package} can be bundled; {left_out[0] if left_out else 'it lists none'}"
        )
    return left_out


def _load_examples(package: str) -> tuple[Mapping[str, Sequence[str]], Mapping[str, int]]:
    """Return example arguments and rank counts by kernel, from the module `examples` of a package.

    Returns:
        EXAMPLES, the arguments of each kernel as words of a command line; and RANKS, with the kernels that
            run on several ranks.

    Raises:
        InvalidArgument: If there is no such module or it has no EXAMPLES.
    """
    try:
        module = importlib.import_module(f"{package}.{_EXAMPLES}")
        table: Mapping[str, Sequence[str]] = module.EXAMPLES
    except (ImportError, AttributeError, ValueError, TypeError) as missing:
        raise make_error(
            f"{package:.60} has no table of examples: {missing}; --catalogue takes a package with a module {_EXAMPLES}"
        ) from None
    return table, getattr(module, "RANKS", {})
