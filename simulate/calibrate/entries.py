"""Measured times of kernels, from results of bundles and from files of the fidelity bench.

A bundle is a folder in which `nkw bundle` puts kernels for a machine with chips, and that machine its results. An entry
is a JSON object with the measured time of one kernel. The fidelity bench (`benchmarks/fidelity`) keeps files of entries
from publications, whose kernels are described in words.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from nkw.errors import LONGEST_PATH, InvalidArgument, NkwError, shown
from nkw.files import is_folder, read_text
from simulate.bundle.entries import DEVICE, FAMILY, HOST, Entry, Skipped, make_entries
from simulate.bundle.result import load
from simulate.calibrate.measurement import Measurement, make_predictor
from simulate.hardware import hardware
from simulate.kernel_by_name import importing_from
from simulate.run.environment import check_logical_core
from simulate.timing import Reading

_NORMAL = 1.349
"""Interquartile range of a normal distribution over its standard deviation."""


def read_measurements(path: Path, reading: Reading) -> tuple[list[Measurement], list[Skipped]]:
    """Read the measurements of a bundle's folder or of a file of entries.

    Args:
        path: Folder of a bundle, its folder `result`, or a JSON file with a list of entries.
        reading: The reading by which the times are predicted.

    Returns:
        The measurements; and the entries that cannot be used, with the reasons.

    Raises:
        InvalidArgument: If the folder has no bundle with results, or the file no list of entries.
    """
    if is_folder(path):
        folder = path.resolve()
        if folder.name == "result" and not (folder / "bundle.json").exists():
            folder = folder.parent
        bundle, result = load(folder)
        entries, skipped = make_entries(folder, bundle, result)
    else:
        entries, skipped = _read_entries(path), []
        if any(not isinstance(entry, dict) or entry.get("family") != FAMILY for entry in entries):
            return _read_bench_measurements(path)
    measurements = []
    for number, entry in enumerate(entries):
        name = str(entry.get("id") or f"entry {number}")
        try:
            measurements.append(_make_measurement(name, entry, reading))
        except NkwError as refused:
            skipped.append(Skipped(name, refused.message))
        except Exception as failed:  # any error of the kernel's file
            skipped.append(Skipped(name, f"{type(failed).__name__}: {failed!s:.100}"))
    return measurements, skipped


def _read_entries(path: Path) -> list[Any]:
    """Return the list in a JSON file, whose elements are not checked.

    Raises:
        InvalidArgument: If the file cannot be read, is no JSON, or is no list.
    """
    try:
        content = json.loads(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        name = shown(str(path), LONGEST_PATH)
        raise _make_error(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:
        raise _make_error(f"{path} is no JSON: {error}") from None
    if not isinstance(content, list):
        raise _make_error(f"{path} is neither the folder of a bundle nor a list of measurements")
    return content


def _make_measurement(name: str, entry: Entry, reading: Reading) -> Measurement:
    """Return the measurement of an entry, with the predictor of its kernel.

    Args:
        name: The name of the measurement in reports.
        entry: The entry.
        reading: The reading by which the time is predicted.

    Raises:
        InvalidArgument: If a field is missing, malformed or out of range, or if the kernel or its arguments are wrong.
    """
    kernel, shapes, target, clock = (
        _get_string(entry, field) for field in ("kernel", "shapes", "target", "measured")
    )
    cores, latency, spread = entry.get("cores", 1), entry.get("latency_us"), _get_spread(entry)
    if isinstance(cores, bool) or cores not in (1, 2):
        raise _make_error(f"its cores are {cores!r:.40}; a kernel runs on 1 or 2")
    if isinstance(latency, bool) or not isinstance(latency, (int, float)) or not 1e-4 <= latency <= 1e12:
        raise _make_error(f"its latency_us is {latency!r:.40}; it must be a number from 1e-4 to 1e12")
    if clock not in (DEVICE, HOST):
        raise _make_error(f"its field measured is {clock!r:.60}; it must be {DEVICE!r} or {HOST!r}")
    chip = hardware(target)
    check_logical_core(chip, cores)
    predict = make_predictor(kernel, shapes, chip.name, cores, clock == HOST, reading)
    return Measurement(name, chip.name, 1e3 * float(latency), spread / float(latency), predict)


def _get_string(entry: Entry, name: str) -> str:
    """Return a field of an entry; raise InvalidArgument if it is missing or no string."""
    text = entry.get(name)
    if not isinstance(text, str):
        raise _make_error(f"its {name} is {text!r:.40}; it must be a string")
    return text


def _get_spread(entry: Entry) -> float:
    """Return the standard deviation of an entry's time in us, from its interquartile range `spread_us`.

    Returns 0 without a spread; raises InvalidArgument if it is no number from 0 to 1e12.
    """
    metrics = entry.get("metrics")
    spread = metrics.get("spread_us", 0.0) if isinstance(metrics, dict) else 0.0
    if isinstance(spread, bool) or not isinstance(spread, (int, float)) or not 0.0 <= spread <= 1e12:
        raise _make_error(f"its spread_us is {spread!r:.40}; it must be a number from 0 to 1e12")
    return float(spread) / _NORMAL


def _read_bench_measurements(path: Path) -> tuple[list[Measurement], list[Skipped]]:
    """Read measurements whose kernels are described in words, with the fidelity bench in the current folder.

    Raises:
        InvalidArgument: If the current folder is no checkout of the repository.
    """
    try:
        with importing_from(Path.cwd()):
            bench = importlib.import_module("benchmarks.fidelity.calibration")
    except ModuleNotFoundError as error:
        if error.name is None or not "benchmarks.fidelity.calibration".startswith(error.name):
            raise
        raise InvalidArgument(
            "NKW-FIDELITY-CHECKOUT",
            f"{path} holds kernels that are described in words, which the fidelity bench builds: run this in the top "
            "folder of a checkout of the repository",
        ) from None
    bench_measurements: tuple[list[Measurement], list[Skipped]] = bench.measurements(path)
    return bench_measurements


def _make_error(reason: str) -> InvalidArgument:
    """Return the error for a wrong file or entry; the caller raises it."""
    return InvalidArgument("NKW-CALIBRATE", shown(reason))
