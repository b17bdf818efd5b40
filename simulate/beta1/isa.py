"""`neuronxcc.nki.isa`: instructions that return their result as a tile, with `dtype=` and `mask=`.

Each one calls the planner of its name in the instruction book. `derived.py` derives most of them from it; those whose
parameters or results differ more are written by hand. `**_` takes options of the compiler that change no value.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from simulate.beta1.derived import DERIVED
from simulate.beta1.isa_matmul import nc_matmul, nc_transpose
from simulate.beta1.isa_select import affine_select, iota, memset
from simulate.beta1.missing import not_in_beta1
from simulate.beta1.movement import dma_copy, dma_transpose
from simulate.isa.enums import DgeMode, Engine, MatmulPerfMode, OobMode, ReduceCmd
from simulate.nki import constants
from simulate.run import current_core

engine = Engine
reduce_cmd = ReduceCmd
dge_mode = DgeMode
oob_mode = OobMode
matmul_perf_mode = MatmulPerfMode
tensor_engine, vector_engine, scalar_engine = Engine.tensor, Engine.vector, Engine.scalar
gpsimd_engine, unknown_engine = Engine.gpsimd, Engine.unknown


class nc_version(IntEnum):
    """Generation of a NeuronCore; later ones are greater."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


def get_nc_version() -> nc_version:
    """Return the generation of the core that runs the kernel. Raises NkwError outside of a kernel."""
    return nc_version(current_core().hardware.generation)


globals().update(DERIVED)


def __getattr__(name: str) -> Any:
    return not_in_beta1("neuronxcc.nki.isa", name)


__all__ = [
    "affine_select",
    "constants",
    "dma_copy",
    "dma_transpose",
    "get_nc_version",
    "iota",
    "memset",
    "nc_matmul",
    "nc_transpose",
    *DERIVED,
]
