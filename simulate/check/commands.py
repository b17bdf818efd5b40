"""The commands `check`, `lint` and `doctor`. Each returns 0, 1 (findings) or 2 (could not run).

`check` returns 3 where the script itself failed; launches before that are reported.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from simulate.check import Finding, Format, Gatherer, Severity, findings_of, gathered, in_order, render
from simulate.check.findings import from_error
from simulate.check.formats import plain
from simulate.check.lint import calls_of, lint_file, lint_launched
from simulate.errors import InvalidArgument, NkwError
from simulate.files import Outputs, imported_files, json_document
from simulate.kernel_by_name import files_read, nothing_launched
from simulate.level import Level, Rules
from simulate.process import reopen_streams
from simulate.run import target_hardware
from simulate.run.launch_text import summary
from simulate.targets import DEFAULT_TARGET
from simulate.terminal import Hanging, error, progress, show, show_lines, table
from simulate.tracebacks import print_of_the_user

_DEVICES = "neuron*"
_PACKAGES = {"nki": (0, 2), "neuronx-cc": (2, 20), "torch-neuronx": (2, 7), "libneuronxla": (2, 2)}
"""The vendor's packages, each with a version that lies above every placeholder of the public index."""
_PLACEHOLDER_FILES = 3  # a placeholder is a module or two that raise ImportError


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options that `check` and `lint` share."""
    command.add_argument("--format", choices=[each.value for each in Format], default=Format.text.value)
    command.add_argument("--ignore", action="append", default=[], metavar="CODE", help="leave out a code")
    command.add_argument(
        "--as-error",
        "--error",
        action="append",
        default=[],
        metavar="CODE",
        help="count a warning as an error; `all` for every one",
    )


def add_variations(command: argparse.ArgumentParser) -> None:
    """The options of `check` that execute launches again."""
    command.add_argument(
        "--orders",
        type=_count,
        default=0,
        metavar="N",
        help="execute every launch again in N other orders of instructions that its dependences allow",
    )
    command.add_argument(
        "--seeds",
        type=_count,
        default=0,
        metavar="N",
        help="run every launch of several cores again with N other schedules of its cores",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; give an integer of 0 or more")
    return int(text)


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
    with gathered(options.orders, options.seeds) as seen, redirect_stdout(sys.stderr):
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
            any(each.severity is Severity.error or not (tolerant or each in advice) for each in kept)
        )
    if failed:
        error(f"{options.script} failed before its end: {failed}")
        return 3
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
    except NkwError as error:
        if error not in seen.errors:
            seen.errors.append(error)
    except SystemExit as end:
        return 0, f"it exited with {end.code}" if end.code else ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        print_of_the_user(error)
        return 0, type(error).__name__
    return 0, ""


def lint(options: argparse.Namespace) -> int:
    """Look at the source of a file, or of every Python file below a folder."""
    path = Path(options.path)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    try:
        with json_document(options.json, Outputs(lambda: [*files, *imported_files()]), "lint") as contents:
            return _linted(options, path, files, contents)
    except InvalidArgument as refused:
        error(refused)
        return 2


def _linted(options: argparse.Namespace, path: Path, files: Sequence[Path], contents: dict[str, Any]) -> int:
    try:
        level = Level.of(options.level)
    except NkwError as unknown:
        error(unknown)
        return 2
    findings: list[Finding] = []
    called = frozenset[str]()
    for file in files:
        with suppress(NkwError):
            called |= calls_of(file)
    for file in progress(files, "files"):
        try:
            findings += lint_file(file, level, called)
        except NkwError as unreadable:
            if not path.is_dir():
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


def doctor(options: argparse.Namespace, backend: Callable[[], str]) -> int:
    """Say what is installed, what `import nki` and the target would be here, and whether a small kernel runs.

    `backend` decides what `nki` means, and raises NkwError where it cannot be what was asked for.
    """
    works = True
    devices = sorted(path.name for path in Path("/dev").glob(_DEVICES))
    found = {
        "Python": platform.python_version(),
        **{name: _version(name) or "not installed" for name in ("numpy", "ml_dtypes", "torch")},
        **{name: _vendor_package(name) for name in _PACKAGES},
        "chip": ", ".join(devices) or "no Neuron device files",
    }
    for label, asked in (("import nki", backend), ("target", lambda: target_hardware().name)):
        try:
            found[label] = asked()
        except NkwError as refused:
            found[label] = str(refused)
            works = False
    try:
        right = _trial()
        found["simulator"] = f"a small kernel ran and returned {'the right' if right else 'a wrong'} answer"
        works = works and right
    except Exception as failed:
        found["simulator"] = f"a small kernel failed: {type(failed).__name__}: {failed}"
        works = False
    try:
        with json_document(options.json, Outputs(imported_files), "doctor") as contents:
            rows = [(label, Hanging(value, 0)) for label, value in found.items()]
            show([table("", rows, left=(0, 1), firm=(0,))])
            contents["found"] = found
            contents["works"] = works
    except InvalidArgument as refused:
        error(refused)
        return 2
    return 0 if works else 1


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _vendor_package(name: str) -> str:
    """Whether a package is the vendor's or a placeholder of the public index; nothing of it is executed."""
    version = _version(name)
    if version is None:
        return "not installed"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    code = [file for file in metadata.files(name) or [] if file.suffix in (".py", ".so")]
    if numbers < _PACKAGES[name] and len(code) <= _PLACEHOLDER_FILES:
        return f"{version}, a placeholder that cannot be imported; uninstall it"
    return version


def _trial() -> bool:
    """Run one matmul and compare it with numpy; small integers, so that both are exact."""
    import numpy as np

    from simulate.hardware import hardware
    from simulate.isa import INSTRUCTIONS
    from simulate.memory import MemoryRegion, NkiTensor
    from simulate.numerics import as_dtype
    from simulate.run import current_core
    from simulate.run.issue import call
    from simulate.world import launch

    def kernel(stationary: NkiTensor, moving: NkiTensor) -> NkiTensor:
        core = current_core()
        float32 = as_dtype("float32")
        tiles = [core.allocate(each.shape, float32) for each in (stationary, moving)]
        sums = core.allocate((4, 3), float32, MemoryRegion.psum)
        copied = core.allocate((4, 3), float32)
        out = core.allocate((4, 3), float32, MemoryRegion.shared_hbm)
        for tile, source in zip(tiles, (stationary, moving)):
            call(INSTRUCTIONS["dma_copy"], (), {"dst": tile, "src": source})
        call(INSTRUCTIONS["nc_matmul"], (), {"dst": sums, "stationary": tiles[0], "moving": tiles[1]})
        call(INSTRUCTIONS["tensor_copy"], (), {"dst": copied, "src": sums})
        call(INSTRUCTIONS["dma_copy"], (), {"dst": out, "src": copied})
        return out

    a = np.arange(20, dtype=np.float32).reshape(5, 4)
    b = np.arange(15, dtype=np.float32).reshape(5, 3)
    result = launch(kernel, [((a, b), {})], hardware(DEFAULT_TARGET)).outputs[0]
    return bool(np.array_equal(result, a.T @ b))
