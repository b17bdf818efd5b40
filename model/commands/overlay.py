"""Application of the option --hardware of the model's commands, an overlay of the chips' numbers."""

from __future__ import annotations

import argparse

from model.device import use_overlay
from nkw.errors import InvalidArgument


def apply_overlay(options: argparse.Namespace) -> None:
    """Apply the overlay of --hardware to this process and to its child processes.

    Raises:
        InvalidArgument: The backend of the command predicts no times, or the overlay cannot be used.
    """
    backend = getattr(options, "backend", "simulate")
    if backend != "simulate":
        raise InvalidArgument(
            "NKW-HARDWARE", f"--hardware needs the simulate backend; {backend} predicts no times"
        )
    use_overlay(options.hardware)
