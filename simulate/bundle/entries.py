"""Measured times of a bundle as entries of the fidelity bench, for `nkw fidelity` and `nkw calibrate`.

An entry of the family `kernel` names a kernel and its arguments as the commands do. `kernel` is MODULE:NAME
or FILE.py:NAME, `shapes` its arguments, `cores` the physical cores of its logical core. The remaining fields
are those of `benchmarks/fidelity/entry.py`.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nkw.files import MOST_SOURCE_BYTES, OutputFile, read_text
from simulate.bundle.manifest import ARRAYS, DTYPE, Argument, Bundle, Case
from simulate.bundle.reading import make_error
from simulate.bundle.result import DEVICE as DEVICE_CLOCK
from simulate.bundle.result import CaseResult, Result, Times
from simulate.kernel_by_name import DTYPES

DEVICE = "device, nki.benchmark latency, median"
HOST = "host clock around a synchronous call, median"
"""Methods of measurement, in the words of the fidelity bench."""

FAMILY = "kernel"
_STEADY, _UNSTEADY = 0.05, 0.2
"""Largest interquartile range over median for high confidence (device times), and for medium confidence (all times)."""
_SHORT = {str(dtype.__name__): short for short, dtype in DTYPES.items()}

Entry = dict[str, Any]


@dataclass(frozen=True)
class Skipped:
    """A kernel without a usable measurement, and the reason."""

    name: str
    why: str


def make_entries(folder: Path, bundle: Bundle, result: Result) -> tuple[list[Entry], list[Skipped]]:
    """Return the entries of the measured cases of a bundle in `folder`, and the skipped cases with reasons.

    A case is skipped without a measured time, or if the kernel's source or arguments cannot be given to `nkw
    fidelity`. Of the launches of a program of a model, only the first is an entry; the others are not listed.

    Raises:
        InvalidArgument: If the result belongs to another bundle or another chip.
    """
    if result.bundle != bundle.digest or result.target != bundle.target:
        raise make_error(
            f"the result in {folder} belongs to another bundle: run this bundle again and copy its whole folder back"
        )
    entries, skipped = [], []
    for case_result in result.cases:
        case = bundle.find_case(case_result.name)
        assert case is not None, "a result has cases of its bundle only"
        if case.like:
            continue
        reason = _explain_missing_time(case_result) or _explain_mismatch(folder, case)
        if reason:
            skipped.append(Skipped(f"{folder.name}/{case_result.name}", reason))
        else:
            assert case_result.times is not None
            entries.append(_make_entry(folder, bundle, result, case, case_result.times))
    return entries, skipped


def write_entries(output_file: OutputFile, entries: Sequence[Entry]) -> None:
    """Write entries as the JSON file that `nkw fidelity --measurements` and `nkw calibrate` read."""
    with output_file.writing() as file:
        file.write(json.dumps(list(entries), indent=1, ensure_ascii=False) + "\n")


def _explain_missing_time(case_result: CaseResult) -> str:
    """Return why a case has no time, or an empty string if it has one above 0."""
    if case_result.times is None:
        return f"it was not timed ({case_result.status}{f' at {case_result.stage}' if case_result.stage else ''})"
    if not case_result.times.median_ns > 0.0:
        return "its median time is 0"
    return ""


def _explain_mismatch(folder: Path, case: Case) -> str:
    """Return why a case cannot be predicted with the installed sources, or an empty string if it can.

    The reasons are an argument that no command line expresses, a source that cannot be read, and a shipped
    kernel whose source differs from the bundle's.
    """
    if any(
        argument.argument_kind == DTYPE or (argument.argument_kind in ARRAYS and argument.dtype not in _SHORT)
        for argument in case.arguments
    ):
        return "an argument cannot be written on a command line"
    installed = _find_installed_file(case.module)
    if installed is None:
        return ""
    path = folder / "sources" / Path(*case.module.split(".")).with_suffix(".py")
    try:
        is_same = read_text(path, MOST_SOURCE_BYTES) == read_text(installed, MOST_SOURCE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        return f"its source cannot be read: {error}"
    return "" if is_same else f"{case.module} here is not the one that was measured"


def _find_installed_file(module: str) -> Path | None:
    """Return the file of a module of `nki_kernels` in this installation; None for a user's kernel."""
    if module.partition(".")[0] != "nki_kernels":
        return None
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin is not None else Path(module)


def _make_entry(folder: Path, bundle: Bundle, result: Result, case: Case, times: Times) -> Entry:
    """Return the entry of a measured case; times in it are in us."""
    module_or_file = case.module
    if _find_installed_file(case.module) is None:
        module_or_file = str((folder / "sources" / Path(*case.module.split("."))).resolve()) + ".py"
    packages = ", ".join(f"{name} {version}" for name, version in sorted(result.environment.packages.items()))
    on_device = times.clock == DEVICE_CLOCK
    return {
        "id": f"{case.name}-{bundle.digest[:12]}",
        "family": FAMILY,
        "kernel": f"{module_or_file}:{case.function}",
        "shapes": shlex.join(map(_format_argument, case.arguments)),
        "dtype": next(
            (argument.dtype for argument in case.arguments if argument.argument_kind in ARRAYS), "-"
        ),
        "target": bundle.target,
        "instance": result.environment.instance or "",
        "cores": case.lnc,
        "latency_us": times.median_ns / 1e3,
        "measured": DEVICE if on_device else HOST,
        "source": f"bundle {bundle.digest[:12]}, run {result.started} launched by {result.launcher} ({packages})",
        "confidence": _rate_confidence(times, on_device),
        "metrics": {"spread_us": times.spread_ns / 1e3, "repetitions": len(times.repetitions_ns)},
    }


def _rate_confidence(times: Times, on_device: bool) -> str:
    """Return "high", "medium" or "low" by the ratio of spread to median, and by the clock.

    A spread above 20 % is low. High needs a time of the device and a spread of at most 5 %.
    """
    spread = times.spread_ns / times.median_ns
    if spread > _UNSTEADY:
        return "low"
    return "high" if on_device and spread <= _STEADY else "medium"


def _format_argument(argument: Argument) -> str:
    """Return an argument as a word of a command line, such as `x=bf16[128,512]` or `scale=0.5`."""
    text = argument.text
    if argument.argument_kind in ARRAYS:
        text = f"{_SHORT[argument.dtype]}[{','.join(map(str, argument.shape))}]"
    return f"{argument.name}={text}"
