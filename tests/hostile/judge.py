"""Running one command on bad input, in a process of its own, and judging what it said and left behind."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CPU_SECONDS = 60
MEMORY_BYTES = 6 * 2**30
LONGEST_LINE = 1000
_SEEN_BY_TERMINALS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BESIDE_THE_ERROR = ("target ", "note: ", "usage: ", "plan of ", " ")


@dataclass(frozen=True)
class Case:
    """One command line in a folder: its environment, what it may write, and which statuses are in order."""

    name: str
    main: Callable[[list[str]], int]
    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    json_output: Path | None = None
    statuses: tuple[int, ...] = (0, 2)


@dataclass(frozen=True)
class Outcome:
    """The end of a case: exit status, or minus the signal; and what it printed on stderr."""

    status: int
    errors: str


def run(case: Case, folder: Path) -> Outcome:
    """Run a case whose files are in `folder` and return its outcome."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as printed:
        child = os.fork()
        if not child:
            _become(case, folder, printed.fileno(), errors.fileno())
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return Outcome(os.waitstatus_to_exitcode(status), errors.read().decode(errors="replace"))


def _mapped_bytes() -> int:
    """Return the address space of this process, inherited from its parent: a test worker's may be large."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _become(case: Case, folder: Path, stdout: int, stderr: int) -> None:
    status = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        limit = _mapped_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
        os.environ.update(case.environment)
        os.chdir(folder)
        try:
            status = case.main(case.words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def contents(folder: Path) -> dict[str, object]:
    """Read every file below a folder, so that two states of the folder can be compared."""
    entries: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        name = str(path.relative_to(folder))
        if stat.S_ISLNK(mode):
            entries[name] = os.readlink(path)
        else:
            entries[name] = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return entries


def faults(case: Case, folder: Path) -> list[str]:
    """Run a case; returns what is wrong with how it ended."""
    before = contents(folder)
    outcome = run(case, folder)
    after = contents(folder)
    problems = []
    if outcome.status not in case.statuses:
        problems.append(f"status {outcome.status}")
    lines = [line for line in outcome.errors.splitlines() if not line.startswith(_BESIDE_THE_ERROR)]
    # A kernel's own broken rule (status 1) says more than one line.
    expected = {0: 0, 2: 1}.get(outcome.status)
    if "Traceback" in outcome.errors or (expected is not None and len(lines) != expected):
        problems.append(f"{len(lines)} lines on stderr")
    if any(len(line) > LONGEST_LINE for line in lines):
        problems.append(f"a line of {max(map(len, lines))} characters")
    if _SEEN_BY_TERMINALS.search(outcome.errors):
        problems.append("a control character on stderr")
    written = {case.json_output.name} if case.json_output is not None else set()
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name) and (name not in written or name in before):
            problems.append(f"{name} is not what it was")
    if case.json_output is not None and outcome.status == 0:
        problems += _strict(case.json_output)
    return [f"{problem}: {outcome.errors[-1500:]}" for problem in problems]


def _strict(path: Path) -> list[str]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in JSON")

    try:
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except (OSError, ValueError) as error:
        return [f"the document is not JSON: {error}"]
    return []
