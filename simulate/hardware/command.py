"""Command `targets`, which prints what is simulated of each chip."""

from __future__ import annotations

import argparse
from typing import Any

from nkw.errors import InvalidArgument
from nkw.files import Outputs, json_document, list_imported_files
from nkw.report import Hanging, table
from nkw.targets import TARGETS
from nkw.terminal import error, show
from simulate.hardware import hardware, use_overlay

_FACTS: list[tuple[str, Any]] = [
    ("core", lambda h: h.core),
    ("chip", lambda h: h.chip),
    ("Tensor clock, GHz", lambda h: h.tensor_clock_ghz),
    ("Vector clock, GHz", lambda h: h.vector_clock_ghz),
    ("Scalar clock, GHz", lambda h: h.scalar_clock_ghz),
    ("physical cores/chip", lambda h: h.physical_cores_per_chip),
    ("SBUF, MiB", lambda h: h.sbuf_physical_bytes_per_partition * h.partitions // 2**20),
    ("SBUF, bytes/partition", lambda h: h.sbuf_usable_bytes_per_partition),
    ("PSUM, bytes/partition", lambda h: h.psum_bytes_per_partition),
    ("HBM per chip, GiB", lambda h: h.hbm_bytes_per_chip // 2**30),
    ("HBM per chip, GB/s", lambda h: h.hbm_gb_per_s_per_chip),
    ("HBM per core, GB/s", lambda h: h.hbm_gb_per_s_per_core),
    ("physical cores/rank", lambda h: " or ".join(map(str, h.logical_core_sizes))),
]
"""Rows of the table: a label with its unit, and the value of a hardware record."""


def targets(options: argparse.Namespace) -> int:
    """Print the table of the chips, and write the JSON document that `--json` requests.

    Returns:
        The exit status: 0, or 2 with an error on stderr if the overlay is wrong or the document cannot be written.
    """
    try:
        if options.hardware is not None:
            use_overlay(options.hardware)
        chips = [hardware(target) for target in TARGETS]
        rows = [(label, *(str(value(chip)) for chip in chips)) for label, value in _FACTS]
        with json_document(options.json, Outputs(list_imported_files), "targets") as contents:
            overlays = [chip.label for chip in chips if chip.replaced]
            names = table("|".join(["", *(chip.name for chip in chips)]), rows, firm=(0,), gap=1)
            show([names, *map(Hanging, overlays)])
            contents["targets"] = [
                {"name": chip.name, "facts": {label: value(chip) for label, value in _FACTS}}
                for chip in chips
            ]
    except InvalidArgument as refused:
        error(refused)
        return 2
    return 0
