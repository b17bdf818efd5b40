"""Memories of a tensor."""

from __future__ import annotations

from enum import Enum


class MemoryRegion(Enum):
    """Memory: HBM private to a core or shared by the cores of a rank; SBUF and PSUM, on the chip, of a core.

    `register` is not an NKI name: it contains the cells of an engine's registers.
    """

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"
    register = "register"

    def __init__(self, name: str) -> None:
        self.on_chip = name in ("sbuf", "psum")  # whether this is SBUF or PSUM

    def __repr__(self) -> str:
        return f"nl.{self.value}"
