"""`MemoryRegion`: the memories in which a tensor may be, `nl.sbuf`, `nl.psum`, `nl.private_hbm` and `nl.shared_hbm`."""

from __future__ import annotations

from enum import Enum


class MemoryRegion(Enum):
    """Memory of a tensor; `on_chip` is True for SBUF and PSUM.

    `private_hbm` is HBM of one core, `shared_hbm` HBM that all cores of a rank share. `register` is no name of NKI: it
    contains the cells of an engine's registers.
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
