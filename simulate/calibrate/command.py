"""The command `calibrate`: results of bundles, or files of measured times, against the hardware records."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nkw.child import user_output
from nkw.errors import InvalidArgument, NkwError
from nkw.files import OutputFile, Outputs, imported_files, is_folder, json_document
from nkw.targets import HARDWARE_VARIABLE, TARGETS
from nkw.terminal import error, show
from simulate.bind import install
from simulate.bundle.entries import Skipped
from simulate.calibrate.calibration import Calibration, calibrate
from simulate.calibrate.entries import measurements
from simulate.calibrate.measurement import Measurement
from simulate.calibrate.report import document, parts
from simulate.hardware import use_overlay
from simulate.timing import Reading


def calibrate_command(options: argparse.Namespace) -> int:
    """Calibrate every chip that was measured, print and write what was found; returns the exit status."""
    try:
        if options.hardware is not None:
            use_overlay(options.hardware)
        install("simulate")
        outputs = Outputs(lambda: [*_inputs(options), *imported_files()])
        out = outputs.claim(options.out, "overlay", "NKW-CALIBRATE")
        with json_document(options.json, outputs, "calibrate") as contents:
            with user_output(to_stderr=True):
                by_target, skipped = _measured(options)
            found = [calibrate(target, by_target[target]) for target in TARGETS if target in by_target]
            for each in found:
                show([*parts(each), ""])
            for left in skipped:
                show([f"left out: {left.name}: {left.why}"])
            contents["chips"] = [document(each) for each in found]
            contents["skipped"] = [{"name": each.name, "why": each.why} for each in skipped]
            if out is not None:
                _write(out, found, options)
    except NkwError as refused:
        error(refused)
        return 2
    return 0


def _inputs(options: argparse.Namespace) -> list[str]:
    """The files that the command reads."""
    folders = [path for path in options.results if is_folder(path)]
    read = [folder / name for folder in folders for name in ("bundle.json", "result/result.json")]
    overlay = os.environ.get(HARDWARE_VARIABLE)
    return [*map(str, [*options.results, *read]), *([overlay] if overlay else [])]


def _measured(options: argparse.Namespace) -> tuple[dict[str, list[Measurement]], list[Skipped]]:
    """The measurements of all results by chip. Raises InvalidArgument where there are none."""
    by_target: dict[str, list[Measurement]] = defaultdict(list)
    skipped: list[Skipped] = []
    for place in options.results:
        found, left = measurements(place, Reading(options.reading))
        skipped += left
        for each in found:
            by_target[each.target].append(each)
    if not by_target:
        why = "; ".join(f"{each.name}: {each.why}" for each in skipped[:3])
        raise InvalidArgument("NKW-CALIBRATE", "no kernel was measured" + (f" ({why})" if why else ""))
    return by_target, skipped


def _write(out: OutputFile, found: Sequence[Calibration], options: argparse.Namespace) -> None:
    """Write the overlay and say what it replaces."""
    source = "nkw calibrate of " + ", ".join(each.name or str(each) for each in options.results)
    content: dict[str, Any] = {each.record.name: each.overlay(source) for each in found}
    with out.writing() as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    count = sum(map(len, content.values()))
    show([f"overlay: {options.out}, {'1 number' if count == 1 else f'{count} numbers'}"])
