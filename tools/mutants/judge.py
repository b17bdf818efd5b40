"""Finds the fate of a mutant: runs it on the cases until something notices it, then examines it more closely.

A finding is a report of a detector of `simulate.check`. Poison is a byte with which fresh memory is filled.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import simulate
from nkw.errors import NkwError
from simulate.check import Finding, Severity, detect, gathered
from simulate.check.outputs import UNUSED
from simulate.lines import PACKAGE
from simulate.memory.storage import Storage
from tests.kernels.accuracy import REPORTED_REFUSALS, as_tuple, copied
from tools.mutants.calls import Call
from tools.mutants.cases.case import Case, Outputs
from tools.mutants.log import record_calls, same_calls
from tools.mutants.rows import printed_times
from tools.mutants.source import FOLDER, Mutant, apply_mutant, file_of


class Fate(str, Enum):
    """What noticed a mutant.

    refused: a typed error of the simulator. guarded: an assertion of the kernel. python: an exception of Python
    itself in the kernel. raw: an exception of Python or NumPy inside the simulator, which is a fault of the
    simulator. reported ("found" in tables): a detector. numbers: the outputs differ from the reference. poison: the
    outputs depend on bytes that were never written, which should have been noticed without numbers. time: a launch of
    benchmarks/kernels takes another time than its stored table says. limit: it exceeded its limit of time or memory.
    equal: nothing, and its calls are equivalent to the original's, in the way that `how` says. same: nothing, and the
    outputs have the same bytes. close: nothing, and the outputs are within the tolerance of the reference.
    """

    refused = "refused"
    guarded = "guarded"
    python = "python"
    raw = "raw"
    reported = "found"
    numbers = "numbers"
    poison = "poison"
    time = "time"
    limit = "limit"
    equal = "equal"
    same = "same"
    close = "close"


@dataclass(frozen=True)
class Verdict:
    """The fate of a mutant, its evidence (a code, an exception, how it is equal), and the case that showed it."""

    fate: Fate
    how: str = ""
    case: str = ""


@dataclass(frozen=True)
class Baseline:
    """What the shipped kernel does on one case: outputs, calls by rank, and the (module, function) pairs that ran."""

    outputs: Outputs
    calls: dict[int, list[Call]]
    functions: frozenset[tuple[str, str]]


def launched(case: Case) -> tuple[Outputs, list[Any]]:
    """Launch a case and return the outputs of every rank and the findings; errors of the launch are not caught.

    A dry case, one without a judge, returns two empty lists.
    """
    kernel = getattr(sys.modules["nki_kernels"], case.kernel)
    world = simulate.World(case.target, case.ranks, case.cores)
    if case.judge is None:
        world.launch(kernel, [(arguments, {}) for arguments in case.arguments], mode=simulate.Mode.dry)
        return [], []
    launch_arguments = [(copied(operands), {}) for operands in case.arguments]
    with gathered() as seen:
        done = world.launch(kernel, launch_arguments)
    findings = [
        finding
        for launch, evidence in seen.launches
        for finding in detect(launch, evidence)
        if finding.code not in REPORTED_REFUSALS and not _is_unread(finding, case)
    ]
    return [as_tuple(output) for output in done.outputs], findings


def _is_unread(finding: Finding, case: Case) -> bool:
    """Return whether a finding is about an input that the case does not use."""
    return finding.code == UNUSED.code and any(
        finding.message.startswith(f"input {name} ") for name in case.unread
    )


def baseline(case: Case) -> Baseline:
    """Run a case on the shipped kernels and return what they do.

    Raises AssertionError if a detector finds something or the outputs are wrong.
    """
    functions: set[tuple[str, str]] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(FOLDER)):
            functions.add((frame.f_globals["__name__"].removeprefix("nki_kernels."), frame.f_code.co_name))

    with record_calls() as calls, _profiled(profile):
        outputs, findings = launched(case)
    assert not findings, f"{case.kernel} as shipped has findings: {findings}"
    if case.judge is not None:
        case.judge(outputs)
    return Baseline(outputs, calls, frozenset(functions))


@contextmanager
def _profiled(profile: Callable[..., None]) -> Iterator[None]:
    """Set a profile function in this and new threads for the block."""
    import threading

    before = sys.getprofile()
    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def judge_mutant(
    mutant: Mutant, cases: Sequence[Case], baselines: Sequence[Baseline], times: Mapping[str, str]
) -> Verdict:
    """Run a mutant in this process and return the verdict; the process must not be used for anything else afterwards.

    Args:
        mutant: Change of a kernel's source.
        cases: Launches to try; those whose shipped kernel never runs the changed function are skipped.
        baselines: Results of the shipped kernels, one for each case.
        times: `printed_times` of the shipped kernels.
    """
    try:
        _install(mutant)
    except Exception as error:
        return Verdict(Fate.python, type(error).__name__)
    touched = [
        (case, known)
        for case, known in zip(cases, baselines)
        if not mutant.function or (mutant.module, mutant.function) in known.functions
    ]
    how: set[str] = set()
    for number, (case, known) in enumerate(touched):
        name = f"{case.kernel} {case.target} #{number}"
        with record_calls() as calls:
            try:
                outputs, findings = launched(case)
            except BaseException as error:
                return Verdict(*_judge_error(error), name)
        if findings:
            worst = min(findings, key=lambda finding: (finding.severity is not Severity.error, finding.code))
            return Verdict(Fate.reported, worst.code, name)
        try:
            if case.judge is not None:
                case.judge(outputs)
        except AssertionError:
            fate = Fate.poison if _depends_on_poison(case) else Fate.numbers
            return Verdict(fate, "", name)
        same = _same_bytes(outputs, known.outputs)
        equal = same_calls(calls, known.calls) if same else None
        how.add(equal or ("same" if same else "close"))
    for number, (case, _) in enumerate(touched):
        if case.judge is not None and _depends_on_poison(case):
            return Verdict(Fate.poison, "", f"{case.kernel} {case.target} #{number}")
    if how & {"same", "close"} or how <= {"identical"}:
        verdict = _judge_times({case.kernel for case, _ in touched}, times)
        if verdict is not None:
            return verdict
    if how & {"same", "close"}:
        return Verdict(Fate.close if "close" in how else Fate.same)
    return Verdict(Fate.equal, ", ".join(sorted(how)))


def _judge_times(kernels: set[str], known: Mapping[str, str]) -> Verdict | None:
    """Return a verdict if a launch of the stored tables is refused or takes another time than before, else None."""
    name = "the first row"
    try:
        for name, printed in printed_times(kernels):
            if printed != known[name]:
                return Verdict(Fate.time, "", name)
    except BaseException as error:
        return Verdict(*_judge_error(error), f"after {name}")
    return None


def _judge_error(error: BaseException) -> tuple[Fate, str]:
    """Return the fate that an error means, and its code or type."""
    if isinstance(error, NkwError):
        return Fate.refused, error.code
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    if isinstance(error, AssertionError) and innermost.startswith(str(FOLDER)):
        return Fate.guarded, "assert"
    if innermost.startswith(str(FOLDER)):
        return Fate.python, type(error).__name__
    inside = any(
        frame.filename.startswith(PACKAGE) for frame in traceback.extract_tb(error.__traceback__)[-1:]
    )
    return (Fate.raw if inside or "numpy" in innermost else Fate.python), f"{type(error).__name__}: {error}"[
        :120
    ]


def _same_bytes(outputs: Outputs, known: Outputs) -> bool:
    """Return whether all outputs of two runs are equal in dtype, shape and bytes."""
    return all(
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        for ours, theirs in zip(outputs, known)
        for one, other in zip(ours, theirs)
    )


def _depends_on_poison(case: Case) -> bool:
    """Return whether the outputs change with the content of fresh memory, so that unwritten bytes are read.

    Returns False if the launch is refused.
    """
    results = []
    for poison in (0x00, 0x3F):
        with _poisoned(poison):
            try:
                results.append(launched(case)[0])
            except NkwError:
                return False
    return not _same_bytes(*results)


@contextmanager
def _poisoned(value: int) -> Iterator[None]:
    """Fill fresh simulated memory with one byte inside a block."""
    plain = Storage.__init__

    def poisoned(self: Storage, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.host is None:
            self.array.fill(value)

    Storage.__init__ = poisoned  # type: ignore[method-assign]
    try:
        yield
    finally:
        Storage.__init__ = plain  # type: ignore[method-assign]


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder and loader that imports one module of nki_kernels from a changed syntax tree."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != f"nki_kernels.{self.mutant.module}":
            return None
        file = str(file_of(self.mutant.module))
        return importlib.util.spec_from_loader(name, self, origin=file)

    def exec_module(self, module: ModuleType) -> None:
        file = str(file_of(self.mutant.module))
        exec(compile(apply_mutant(self.mutant), file, "exec"), module.__dict__)


def _install(mutant: Mutant) -> None:
    """Import nki_kernels again with the changed module."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "nki_kernels"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Mutated(mutant))
    importlib.import_module("nki_kernels")
