"""The command `calibrate`: compares results of bundles, or files of measured times, with the hardware records."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nkw.child import user_output
from nkw.errors import InvalidArgument, NkwError
from nkw.files import OutputFile, Outputs, is_folder, json_document, list_imported_files
from nkw.targets import HARDWARE_VARIABLE, TARGETS
from nkw.terminal import error, show
from simulate.bind import install
from simulate.bundle.entries import Skipped
from simulate.calibrate.calibration import Calibration, calibrate
from simulate.calibrate.entries import read_measurements
from simulate.calibrate.measurement import Measurement
from simulate.calibrate.report import make_document, make_parts
from simulate.hardware import use_overlay
from simulate.timing import Reading


def calibrate_command(options: argparse.Namespace) -> int:
    """Calibrate every measured chip, print the report, and write the overlay and the document that are requested.

    Returns:
        The exit status: 0, or 2 with an error on stderr if no chip could be calibrated or a file cannot be used.
    """
    try:
        if options.hardware is not None:
            use_overlay(options.hardware)
        install("simulate")
        outputs = Outputs(lambda: [*_list_inputs(options), *list_imported_files()])
        out = outputs.claim(options.out, "overlay", "NKW-CALIBRATE")
        with json_document(options.json, outputs, "calibrate") as contents:
            with user_output(to_stderr=True):
                by_target, skipped = _load_measurements(options)
            calibrations = [calibrate(target, by_target[target]) for target in TARGETS if target in by_target]
            for calibration in calibrations:
                show([*make_parts(calibration), ""])
            for skip in skipped:
                show([f"left out: {skip.name}: {skip.why}"])
            contents["chips"] = [make_document(calibration) for calibration in calibrations]
            contents["skipped"] = [{"name": skip.name, "why": skip.why} for skip in skipped]
            if out is not None:
                _write_overlay(out, calibrations, options)
    except NkwError as refused:
        error(refused)
        return 2
    return 0


def _list_inputs(options: argparse.Namespace) -> list[str]:
    """Return the paths of the files that the command reads, which no output may replace."""
    folders = [path for path in options.results if is_folder(path)]
    read = [folder / name for folder in folders for name in ("bundle.json", "result/result.json")]
    overlay = os.environ.get(HARDWARE_VARIABLE)
    return [*map(str, [*options.results, *read]), *([overlay] if overlay else [])]


def _load_measurements(options: argparse.Namespace) -> tuple[dict[str, list[Measurement]], list[Skipped]]:
    """Read the measurements of all results that the options name.

    Returns:
        The measurements by chip, and the kernels that were skipped with the reasons.

    Raises:
        InvalidArgument: If no measurement is usable, or if a folder or file contains neither results nor measurements.
    """
    by_target: dict[str, list[Measurement]] = defaultdict(list)
    skipped: list[Skipped] = []
    for path in options.results:
        path_measurements, skips = read_measurements(path, Reading(options.reading))
        skipped += skips
        for measurement in path_measurements:
            by_target[measurement.target].append(measurement)
    if not by_target:
        reasons = "; ".join(f"{skip.name}: {skip.why}" for skip in skipped[:3])
        raise InvalidArgument(
            "NKW-CALIBRATE",
            "the results contain no usable measurement of a kernel; docs/calibrate.md says which are"
            + (f" (left out: {reasons})" if reasons else ""),
        )
    return by_target, skipped


def _write_overlay(out: OutputFile, calibrations: Sequence[Calibration], options: argparse.Namespace) -> None:
    """Write the overlay of all calibrated chips as JSON, and print how many numbers it replaces."""
    source = "nkw calibrate of " + ", ".join(path.name or str(path) for path in options.results)
    content: dict[str, Any] = {
        calibration.record.name: calibration.overlay(source) for calibration in calibrations
    }
    with out.writing() as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    count = sum(map(len, content.values()))
    show([f"overlay: {options.out}, {'1 number' if count == 1 else f'{count} numbers'}"])
