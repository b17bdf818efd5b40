"""The commands `bundle` and `compare`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from nkw.child import user_output
from nkw.errors import InvalidArgument, NkwError, NoVerdict
from nkw.files import OutputFile, Outputs, json_document
from nkw.parts import Hanging
from nkw.terminal import error, show, working
from simulate.bundle.blame import Comparison
from simulate.bundle.cases import Cases, Written, several
from simulate.bundle.compare import compare_bundle, document, report
from simulate.bundle.entries import entries_of, write_entries
from simulate.bundle.folder import check_free, names_of
from simulate.bundle.manifest import KERNELS
from simulate.bundle.reading import refused
from simulate.isolated import NO_VERDICT, without_verdict
from simulate.kernel_by_name import (
    InstructionCount,
    callable_named,
    files_read,
    folder_of,
    importing_from,
    names_a_kernel,
)
from simulate.run import target_hardware
from simulate.run.observers import observing
from simulate.scripts import bound
from simulate.tracebacks import print_of_the_user

_EXAMPLES = "examples"
"""The module of a package that gives its kernels arguments: `EXAMPLES` and `RANKS`, as `nki_kernels.examples`."""


def bundle_command(options: argparse.Namespace) -> int:
    """Write a bundle; returns the exit status. What the kernels print goes to stderr."""
    outputs = Outputs(lambda: files_read(options))
    try:
        if (options.ranks or 1) > 1:
            raise refused("a bundle holds launches of one rank; leave --ranks out")
        if options.catalogue == names_a_kernel(options.script):
            raise refused(
                f"{options.script:.60} names a kernel; --catalogue takes a package"
                if options.catalogue
                else f"{options.script:.60} names no kernel; give FILE.py:NAME or MODULE:NAME, or --catalogue PACKAGE"
            )
        if options.out is None:
            raise refused("--out DIR is missing: the folder to write")
        folder = Path(options.out)
        check_free(folder)
        with json_document(options.json, outputs, "bundle") as document:
            if not bound(options):
                return 2
            written, left_out = _bundled(options, folder)
            show(written.report(left_out))
            document.update(written.document(left_out))
    except NoVerdict as failed:
        return without_verdict(failed)
    except NkwError as wrong:
        error(wrong)
        return 2 if isinstance(wrong, InvalidArgument) else 1
    except Exception as failed:  # of the kernel
        print_of_the_user(failed)
        return NO_VERDICT
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """Print what came back against what was expected and predicted; returns the exit status."""
    folder = Path(options.folder)
    outputs = Outputs(lambda: (path for path in folder.rglob("*") if path.is_file()))
    try:
        place = outputs.claim(options.measurements, "measurements", "NKW-BUNDLE")
        with json_document(options.json, outputs, "compare") as contents:
            seen = compare_bundle(folder)
            show(report(seen))
            contents.update(document(seen))
            if place is not None:
                _write_measurements(place, folder, seen)
    except InvalidArgument as unread:
        error(unread)
        return 2
    return 0 if seen.agrees else 1


def _write_measurements(place: OutputFile, folder: Path, seen: Comparison) -> None:
    """Write the measured times as entries of the fidelity bench, and say what has none."""
    entries, skipped = entries_of(folder, seen.bundle, seen.result)
    write_entries(place, entries)
    show([f"measurements: {place.path.name}, {several(len(entries))}"])
    show([Hanging(f"left out: {each.name}: {each.why}") for each in skipped])


def _bundled(options: argparse.Namespace, folder: Path) -> tuple[Written, list[str]]:
    """Build and write; the bundle, and what of a catalogue was left out, with the reasons."""
    count, cases = InstructionCount(), Cases()
    left_out: list[str] = []
    with (
        user_output(to_stderr=True),
        importing_from(folder_of(options.script)),
        observing(count),
        working(lambda: f"{len(cases.cases)} kernels, {count.instructions:,} instructions"),
    ):
        if options.catalogue:
            left_out = _add_catalogue(options, cases)
        else:
            named = options.reference
            reference = None
            if named:
                with importing_from(folder_of(named)):
                    reference = callable_named(named)
            cases.add(options.script, options.arguments, options.script.rpartition(":")[2], reference)
    return cases.write(folder, KERNELS, target_hardware().name), left_out


def _add_catalogue(options: argparse.Namespace, cases: Cases) -> list[str]:
    """Add the kernels of a package; returns which are left out, with the reasons."""
    package, left_out = options.script, []
    table, ranks = _examples(package)
    names = names_of([each.rpartition(":")[2] for each in table])
    for name, (kernel, arguments) in zip(names, table.items()):
        words = f"{package}.{kernel}" if ":" in kernel else f"{package}:{kernel}"
        try:
            if kernel in ranks:
                raise refused(f"it runs on {ranks[kernel]} ranks, and a bundle holds launches of one")
            cases.add(words, arguments, name)
        except NkwError as why:
            left_out.append(f"{name}: {getattr(why, 'message', why)}")
    if not cases.cases:
        raise refused(
            f"no kernel of {package} can be bundled; {left_out[0] if left_out else 'it lists none'}"
        )
    return left_out


def _examples(package: str) -> tuple[Mapping[str, Sequence[str]], Mapping[str, int]]:
    """The arguments of a package's kernels and the ranks of some, as its module `examples` lists them."""
    try:
        module = importlib.import_module(f"{package}.{_EXAMPLES}")
        table: Mapping[str, Sequence[str]] = module.EXAMPLES
    except (ImportError, AttributeError, ValueError, TypeError) as missing:
        raise refused(f"{package:.60} has no table of examples: {missing}") from None
    return table, getattr(module, "RANKS", {})
