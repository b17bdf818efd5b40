"""Measured times of kernels: from what a bundle brought back, and from files of entries of the fidelity bench."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from nkw.errors import LONGEST_PATH, InvalidArgument, NkwError, shown
from nkw.files import is_folder, read_text
from simulate.bundle.entries import DEVICE, FAMILY, HOST, Entry, Skipped, entries_of
from simulate.bundle.result import load
from simulate.calibrate.measurement import Measurement, predictor
from simulate.hardware import hardware
from simulate.kernel_by_name import importing_from
from simulate.run.environment import check_logical_core
from simulate.timing import Reading

_NORMAL = 1.349
"""The interquartile range of a normal distribution over its standard deviation."""


def measurements(place: Path, reading: Reading) -> tuple[list[Measurement], list[Skipped]]:
    """The measurements in the folder of a bundle that ran, or in a file of entries; what could not be taken.

    Raises InvalidArgument for a folder or a file that holds neither.
    """
    if is_folder(place):
        folder = place.resolve()
        if folder.name == "result" and not (folder / "bundle.json").exists():
            folder = folder.parent
        bundle, result = load(folder)
        entries, skipped = entries_of(folder, bundle, result)
    else:
        entries, skipped = _read(place), []
        if any(not isinstance(each, dict) or each.get("family") != FAMILY for each in entries):
            return _of_the_bench(place)
    found = []
    for number, entry in enumerate(entries):
        name = str(entry.get("id") or f"entry {number}")
        try:
            found.append(_measurement(name, entry, reading))
        except NkwError as refused:
            skipped.append(Skipped(name, refused.message))
        except Exception as failed:  # whatever the file of a kernel does
            skipped.append(Skipped(name, f"{type(failed).__name__}: {failed!s:.100}"))
    return found, skipped


def _read(place: Path) -> list[Any]:
    try:
        content = json.loads(read_text(place))
    except (OSError, UnicodeDecodeError) as error:
        name = shown(str(place), LONGEST_PATH)
        raise _refused(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:
        raise _refused(f"{place} is no JSON: {error}") from None
    if not isinstance(content, list):
        raise _refused(f"{place} is neither the folder of a bundle nor a list of measurements")
    return content


def _measurement(name: str, entry: Entry, reading: Reading) -> Measurement:
    kernel, shapes, target, taken = (
        _text(entry, each) for each in ("kernel", "shapes", "target", "measured")
    )
    cores, latency, spread = entry.get("cores", 1), entry.get("latency_us"), _spread(entry)
    if isinstance(cores, bool) or cores not in (1, 2):
        raise _refused(f"its cores are {cores!r:.40}; a kernel runs on 1 or 2")
    if isinstance(latency, bool) or not isinstance(latency, (int, float)) or not 1e-4 <= latency <= 1e12:
        raise _refused(f"its latency_us is {latency!r:.40}, no time of a kernel")
    if taken not in (DEVICE, HOST):
        raise _refused(f"it was measured as {taken!r:.60}, not as {DEVICE!r} or {HOST!r}")
    chip = hardware(target)
    check_logical_core(chip, cores)
    predict = predictor(kernel, shapes, chip.name, cores, taken == HOST, reading)
    return Measurement(name, chip.name, 1e3 * float(latency), spread / float(latency), predict)


def _text(entry: Entry, name: str) -> str:
    text = entry.get(name)
    if not isinstance(text, str):
        raise _refused(f"its {name} is {text!r:.40}, not a string")
    return text


def _spread(entry: Entry) -> float:
    """The standard deviation in us, 0 where the entry has no spread."""
    metrics = entry.get("metrics")
    spread = metrics.get("spread_us", 0.0) if isinstance(metrics, dict) else 0.0
    if isinstance(spread, bool) or not isinstance(spread, (int, float)) or not 0.0 <= spread <= 1e12:
        raise _refused(f"its spread_us is {spread!r:.40}, no spread of times")
    return float(spread) / _NORMAL


def _of_the_bench(place: Path) -> tuple[list[Measurement], list[Skipped]]:
    """Measurements whose kernels are described in words: the fidelity bench of a checkout stands kernels for them."""
    try:
        with importing_from(Path.cwd()):
            bench = importlib.import_module("benchmarks.fidelity.calibration")
    except ModuleNotFoundError as error:
        if error.name is None or not "benchmarks.fidelity.calibration".startswith(error.name):
            raise
        raise InvalidArgument(
            "NKW-FIDELITY-CHECKOUT",
            f"{place} holds kernels that are described in words, which the fidelity bench builds: run this in the top "
            "folder of a checkout of the repository",
        ) from None
    found: tuple[list[Measurement], list[Skipped]] = bench.measurements(place)
    return found


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument("NKW-CALIBRATE", shown(why))
