"""Measured times of a bundle as entries of the fidelity bench, for `nkw fidelity` and `nkw calibrate`.

An entry of the family `kernel` names a kernel and its arguments as the commands take them: `kernel` is MODULE:NAME or
FILE.py:NAME, `shapes` its arguments, `cores` the physical cores of its logical core. The other fields are those of
`benchmarks/fidelity/entry.py`.
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
from simulate.bundle.reading import refused
from simulate.bundle.result import DEVICE as DEVICE_CLOCK
from simulate.bundle.result import CaseResult, Result, Times
from simulate.kernel_by_name import DTYPES

DEVICE = "device, nki.benchmark latency, median"
HOST = "host clock around a synchronous call, median"
"""How a time was taken, in the words by which the fidelity bench knows what it holds."""

FAMILY = "kernel"
_STEADY, _UNSTEADY = 0.05, 0.2
"""Interquartile range over median up to which a time of the device is of high, and any time of medium confidence."""
_SHORT = {str(dtype.__name__): short for short, dtype in DTYPES.items()}

Entry = dict[str, Any]


@dataclass(frozen=True)
class Skipped:
    """A kernel without a measurement that can be used, and why."""

    name: str
    why: str


def entries_of(folder: Path, bundle: Bundle, result: Result) -> tuple[list[Entry], list[Skipped]]:
    """The entries of the fidelity bench for the measured cases of a bundle in `folder`, and the cases that have none.

    Of a model there is one for each program, for the launch that was timed as kernels are.
    Raises InvalidArgument where the result is that of another bundle.
    """
    if result.bundle != bundle.digest or result.target != bundle.target:
        raise refused(
            f"the result in {folder} is that of another bundle: run it again and bring it back whole"
        )
    entries, skipped = [], []
    for each in result.cases:
        case = bundle.case(each.name)
        assert case is not None, "a result has cases of its bundle only"
        if case.like:
            continue
        why = _unmeasured(each) or _unlike(folder, case)
        if why:
            skipped.append(Skipped(f"{folder.name}/{each.name}", why))
        else:
            assert each.times is not None
            entries.append(_entry(folder, bundle, result, case, each.times))
    return entries, skipped


def write_entries(place: OutputFile, entries: Sequence[Entry]) -> None:
    """Write entries as a file that `nkw fidelity --measurements` and `nkw calibrate` read."""
    with place.writing() as file:
        file.write(json.dumps(list(entries), indent=1, ensure_ascii=False) + "\n")


def _unmeasured(found: CaseResult) -> str:
    """Why a case has no time, or none."""
    if found.times is None:
        return f"it was not timed ({found.status}{f' at {found.stage}' if found.stage else ''})"
    if not found.times.median_ns > 0.0:
        return "its median time is 0"
    return ""


def _unlike(folder: Path, case: Case) -> str:
    """Why a case cannot be predicted here, or none."""
    if any(
        each.kind == DTYPE or (each.kind in ARRAYS and each.dtype not in _SHORT) for each in case.arguments
    ):
        return "an argument has no form on a command line"
    installed = _installed(case.module)
    if installed is None:
        return ""
    path = folder / "sources" / Path(*case.module.split(".")).with_suffix(".py")
    try:
        same = read_text(path, MOST_SOURCE_BYTES) == read_text(installed, MOST_SOURCE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        return f"its source cannot be read: {error}"
    return "" if same else f"{case.module} here is not the one that was measured"


def _installed(module: str) -> Path | None:
    """The file of a kernel of this project; None for a user's."""
    if module.partition(".")[0] != "nki_kernels":
        return None
    found = importlib.util.find_spec(module)
    return Path(found.origin) if found is not None and found.origin is not None else Path(module)


def _entry(folder: Path, bundle: Bundle, result: Result, case: Case, times: Times) -> Entry:
    place = case.module
    if _installed(case.module) is None:
        place = str((folder / "sources" / Path(*case.module.split("."))).resolve()) + ".py"
    packages = ", ".join(f"{name} {version}" for name, version in sorted(result.environment.packages.items()))
    on_device = times.clock == DEVICE_CLOCK
    return {
        "id": f"{case.name}-{bundle.digest[:12]}",
        "family": FAMILY,
        "kernel": f"{place}:{case.function}",
        "shapes": shlex.join(map(_word, case.arguments)),
        "dtype": next((each.dtype for each in case.arguments if each.kind in ARRAYS), "-"),
        "target": bundle.target,
        "instance": result.environment.instance or "",
        "cores": case.lnc,
        "latency_us": times.median_ns / 1e3,
        "measured": DEVICE if on_device else HOST,
        "source": f"bundle {bundle.digest[:12]}, run {result.started} launched by {result.launcher} ({packages})",
        "confidence": _confidence(times, on_device),
        "metrics": {"spread_us": times.spread_ns / 1e3, "repetitions": len(times.repetitions_ns)},
    }


def _confidence(times: Times, on_device: bool) -> str:
    spread = times.spread_ns / times.median_ns
    if spread > _UNSTEADY:
        return "low"
    return "high" if on_device and spread <= _STEADY else "medium"


def _word(argument: Argument) -> str:
    """Return an argument by name, as a command line has it."""
    text = argument.text
    if argument.kind in ARRAYS:
        text = f"{_SHORT[argument.dtype]}[{','.join(map(str, argument.shape))}]"
    return f"{argument.name}={text}"
