"""The enums of `nki.isa`, with the documented member values; `EXPORTED` has them under their NKI names."""

from __future__ import annotations

from enum import Enum
from functools import total_ordering


class Engine(Enum):
    """`nki.isa.engine`: the five instruction streams of a core, the DMA engines, and `unknown` for "choose"."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6

    def __init__(self, number: int) -> None:
        self.number = (
            number  # its value, without the detour of a property: it is asked for at every instruction
        )

    def __repr__(self) -> str:
        return f"nisa.engine.{self.name}"


class ReduceCmd(Enum):
    """`nki.isa.reduce_cmd`: what an instruction does with the accumulator registers.

    idle: nothing; Vector's are undefined afterwards. reset: set them to the operator's identity. reduce: combine its
    results with them. reset_reduce: reset, then reduce. load_reduce: start from the given initial value, then reduce.
    """

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class DgeMode(Enum):
    """`nki.isa.dge_mode`: what writes the descriptors of a DMA.

    swdge: GpSimd's software. hwdge: the hardware. none: prepared before the launch. unknown: the simulator chooses.
    """

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class OobMode(Enum):
    """`nki.isa.oob_mode`: whether a run-time index out of range is an error, or its elements are skipped."""

    error = 0
    skip = 1


class MatmulPerfMode(Enum):
    """`nki.isa.matmul_perf_mode`: whether nc_matmul takes two fp8 rows of the contraction in one (double_row)."""

    none = "none"
    double_row = "double_row"


@total_ordering
class NcVersion(Enum):
    """`nki.isa.nc_version`: the NeuronCore generations, in order: kernels ask `get_nc_version() >= gen3`."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: object) -> bool:
        return self.value < other.value if isinstance(other, NcVersion) else NotImplemented


class DmaEngine(Enum):
    """`nki.isa.dma_engine`: the DMA engines of the core, or the one inside GpSimd."""

    dma = 1
    gpsimd_dma = 2


EXPORTED = {
    "engine": Engine,
    "reduce_cmd": ReduceCmd,
    "dge_mode": DgeMode,
    "oob_mode": OobMode,
    "matmul_perf_mode": MatmulPerfMode,
    "nc_version": NcVersion,
    "dma_engine": DmaEngine,
}
"""NKI's names for these enums."""
