"""Lint of launched kernels: of each file only the functions that issued instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nkw.errors import InvalidArgument
from simulate.check.findings import Finding
from simulate.check.lint.rules import findings_in, source_of
from simulate.check.lint.source import Source
from simulate.lines import location
from simulate.run import Launch


def lint_launched(launches: Sequence[Launch]) -> list[Finding]:
    """Return the findings of lint in the functions that issued an instruction in one of the launches.

    A function whose source is not a file, such as a function of a notebook, is skipped. So is a file that
    cannot be read or parsed any more. A function counts as called by others if any of these files calls it.
    """
    functions: dict[str, set[str]] = defaultdict(set)
    for launch in launches:
        for stream in launch.streams:
            for line in stream.lines:
                where = location(line)
                functions[where.file].add(where.function)
    files = {file: names for file, names in functions.items() if Path(file).is_file()}
    sources: dict[str, Source] = {}
    for file in files:
        with suppress(InvalidArgument):  # a file that has changed since it was imported
            sources[file] = source_of(Path(file))
    called = frozenset[str]().union(*(source.called_names for source in sources.values()))
    findings: list[Finding] = []
    for file, source in sources.items():
        source.called = called
        with suppress(InvalidArgument):
            findings += [
                finding
                for finding in findings_in(source, file)
                if finding.where is not None and finding.where.function in files[file]
            ]
    return findings
