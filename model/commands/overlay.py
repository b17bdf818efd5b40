"""Option --hardware of the model's commands."""

from __future__ import annotations

import argparse

from model.device import use_overlay
from nkw.errors import InvalidArgument


def apply_overlay(options: argparse.Namespace) -> None:
    """Apply the overlay of --hardware to this process and to its child processes.

    Raises: InvalidArgument if the command's backend predicts no times.
    """
    backend = getattr(options, "backend", "simulate")
    if backend != "simulate":
        raise InvalidArgument(
            "NKW-HARDWARE", f"--hardware needs the simulate backend; {backend} predicts no times"
        )
    use_overlay(options.hardware)
