"""`nki.isa.constants`: the enums of `nki.isa` under the module path that public kernels import them from."""

from __future__ import annotations

from simulate.isa.enums import DgeMode as dge_mode
from simulate.isa.enums import DmaEngine as dma_engine
from simulate.isa.enums import Engine as engine
from simulate.isa.enums import MatmulPerfMode as matmul_perf_mode
from simulate.isa.enums import NcVersion as nc_version
from simulate.isa.enums import OobMode as oob_mode
from simulate.isa.enums import ReduceCmd as reduce_cmd

__all__ = [
    "dge_mode",
    "dma_engine",
    "engine",
    "matmul_perf_mode",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
]
