"""sendrecv: the two physical cores of a logical core exchange tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import dma_costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import DmaEngine, Engine
from simulate.isa.plan import Domain, Effects, Masked, Plan, Rendezvous, Synchronization
from simulate.memory import MemoryRegion, NkiTensor

_CORES = (0, 1)
_GPSIMD_BYTES = {4: 1024, 2: 512, 1: 256}

_EFFECTS = Effects(synchronization=Synchronization.exchange)


@instruction
def sendrecv(
    hardware: Hardware,
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
) -> Plan:
    """Send src to the other core's dst and receive its src in dst. gen3 on, two physical cores per logical core.

    src, dst: one shape and dtype @ SBUF. send_to_rank, recv_from_rank: 0 or 1; each core receives what is
    sent to it, so with two cores the two are equal and name the other core. Calls with one pipe_id pair up: both
    complete together. dma_engine gpsimd_dma moves at most 1024, 512 or 256 bytes per partition of 32-, 16- or
    8-bit dtypes.

    Raises RuleViolation; RendezvousMismatch and Deadlock when the cores disagree. Cost: with dma that of a DMA
    and a core barrier, with gpsimd_dma its latency and rate from the record.
    """
    on_chip(hardware)
    rules.check_tile(hardware, "src", src, MemoryRegion.sbuf)
    rules.check_tile(hardware, "dst", dst, MemoryRegion.sbuf)
    rules.same_dtype("dst", dst, "src", src)
    same_shape(dst, src)
    both_cores(send_to_rank, recv_from_rank)
    pipe_number(pipe_id)
    transfer_engine(dma_engine)
    total = src.size * src.dtype.itemsize
    by_gpsimd = dma_engine is DmaEngine.gpsimd_dma
    if by_gpsimd:
        fits_gpsimd(src)

    def exchange(operands: list[list[Any]]) -> list[list[Any]]:
        return [[_copy_values(operands[1][0])], [_copy_values(operands[0][0])]]

    def admits(core: int) -> None:
        names_the_other_core(send_to_rank, core)

    return Plan(
        engine=Engine.dma,
        reads=(src,),
        writes=(dst,),
        domain=Domain.bits,
        compute=exchange,
        cost=dma_costs.exchanged(hardware, total, src.free_size * src.dtype.itemsize, by_gpsimd),
        name=name,
        trigger=Engine.gpsimd if by_gpsimd else Engine.sync,
        rendezvous=Rendezvous(
            key=("sendrecv", pipe_id),
            by_rank=False,
            members=_CORES,
            terms={
                "operation": "sendrecv",
                "pipe_id": pipe_id,
                "shape": src.shape,
                "dtype": str(src.dtype),
                "dma_engine": dma_engine.name,
            },
            exchange=exchange,
            admits=admits,
        ),
        propagate=propagation.elementwise,
        effects=_EFFECTS,
    )


def _copy_values(values: np.ndarray | Masked) -> np.ndarray | Masked:
    """Return a copy of a member's values, because its core may overwrite src before the other core has taken it."""
    if isinstance(values, Masked):
        return Masked(values.values.copy(), values.chosen.copy())
    return values.copy()


@rule("NKW-SENDRECV-CHIP", hint="nki.collectives over ranks")
def on_chip(hardware: Hardware) -> None:
    """sendrecv exists from gen3 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.sendrecv:
        raise RuleViolation(on_chip, f"sendrecv on {hardware.name}")


@rule("NKW-SENDRECV-SHAPE", hint="allocate or slice dst with the shape of src")
def same_shape(dst: NkiTensor, src: NkiTensor) -> None:
    """src and dst have the same shape.

    Raises RuleViolation if the shapes differ.
    """
    if dst.shape != src.shape:
        raise RuleViolation(same_shape, f"dst is {dst.shape}, src is {src.shape}")


@rule("NKW-SENDRECV-CORES", hint="peer = 1 - nl.program_id(0), for both")
def both_cores(send_to_rank: Any, recv_from_rank: Any) -> None:
    """send_to_rank and recv_from_rank name the other core of the pair, 0 or 1.

    Raises RuleViolation otherwise.
    """
    if send_to_rank not in _CORES or recv_from_rank not in _CORES or send_to_rank != recv_from_rank:
        raise RuleViolation(
            both_cores, f"send_to_rank={send_to_rank!r:.20}, recv_from_rank={recv_from_rank!r:.20}"
        )


@rule("NKW-SENDRECV-SELF", hint="peer = 1 - nl.program_id(0), for both")
def names_the_other_core(send_to_rank: int, core: int) -> None:
    """A core exchanges data with the other core of the pair, not with itself.

    Raises RuleViolation otherwise.
    """
    if send_to_rank == core:
        raise RuleViolation(
            names_the_other_core,
            f"core {core} calls with send_to_rank={send_to_rank}, recv_from_rank={send_to_rank}",
        )


@rule("NKW-SENDRECV-PIPE", hint="pipe_id=0")
def pipe_number(pipe_id: Any) -> None:
    """pipe_id is an integer.

    Raises RuleViolation otherwise.
    """
    if not isinstance(pipe_id, (int, np.integer)) or isinstance(pipe_id, bool):
        raise RuleViolation(pipe_number, f"pipe_id={pipe_id!r:.40}")


@rule("NKW-SENDRECV-ENGINE", hint="nisa.dma_engine.dma")
def transfer_engine(dma_engine: Any) -> None:
    """dma_engine is nisa.dma_engine.dma or nisa.dma_engine.gpsimd_dma.

    Raises RuleViolation otherwise.
    """
    if not isinstance(dma_engine, DmaEngine):
        raise RuleViolation(transfer_engine, f"dma_engine={dma_engine!r:.40}")


@rule("NKW-SENDRECV-GPSIMD-BYTES", hint="dma_engine=nisa.dma_engine.dma, or several calls")
def fits_gpsimd(src: NkiTensor) -> None:
    """GpSimd's DMA moves per partition at most 1024 bytes of 32-bit dtypes, 512 of 16-bit, 256 of 8-bit.

    Raises RuleViolation otherwise.
    """
    width = src.dtype.itemsize
    if src.free_size * width > _GPSIMD_BYTES[width]:
        raise RuleViolation(
            fits_gpsimd,
            f"{src.free_size * width} bytes per partition of {src.dtype}",
            limit=f"{_GPSIMD_BYTES[width]}",
        )
