"""core_barrier: the two physical cores of a logical core wait for each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Effects, Plan, Rendezvous, Synchronization
from simulate.memory import MemoryRegion, NkiTensor

_CORES = (0, 1)

_EFFECTS = Effects(synchronization=Synchronization.barrier)


@instruction
def core_barrier(
    hardware: Hardware,
    data: NkiTensor,
    cores: Any,
    engine: Engine = Engine.gpsimd,
    name: str | None = None,
) -> Plan:
    """Wait on `engine` until both cores of the logical core arrive; orders their accesses of data before and after.

    data: any shape @ shared HBM; also a tile in SBUF, of which each core means its own [not in the reference; loops of
    the vendor's library name their counter]. cores: (0, 1). From gen3 on, with two physical cores per logical core
    (LNC2); on a logical core of one, the other member can never come, which is reported as a deadlock.

    No byte moves. data stands among the writes, so that both cores' accesses to it before the barrier are ordered
    before both cores' accesses after it. Only the named engine waits.

    Raises RuleViolation. Cost: the record's core_barrier_ns, once both are here.
    """
    barrier_on_chip(hardware)
    rules.is_tensor("data", data)
    rules.lies_in("data", data, MemoryRegion.shared_hbm, MemoryRegion.sbuf)
    rules.not_indirect("data", data)
    both_cores(cores)
    rules.engine_can(engine, Engine.gpsimd, Engine.tensor, Engine.vector, Engine.scalar, Engine.sync)
    tensor_label = "" if data.buffer.on_chip else f", tensor {data.storage.serial}"
    return Plan(
        engine=engine,
        reads=(),
        writes=(data,),
        domain=Domain.bits,
        compute=_nothing_moves,
        cost=costs.fixed(hardware, engine, "core_barrier_ns", rendezvous=True),
        name=name,
        rendezvous=Rendezvous(
            key=("core_barrier",),
            by_rank=False,
            members=_CORES,
            terms={"operation": "core_barrier", "data": f"{data.summary()}{tensor_label}"},
            exchange=_nothing_moves,
        ),
        effects=_EFFECTS,
        undocumented=rules.violations((data_is_shared, data)),
    )


def _nothing_moves(operands: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    return [[] for _ in operands]


@rule("NKW-BARRIER-CHIP", hint="leave it out: the logical core has one physical core")
def barrier_on_chip(hardware: Hardware) -> None:
    """core_barrier exists from gen3 on, where a logical core can have two physical cores.

    Raises RuleViolation otherwise.
    """
    if not hardware.core_barrier:
        raise RuleViolation(barrier_on_chip, f"core_barrier on {hardware.name}")


@rule("NKW-BARRIER-CORES", hint="cores=(0, 1)")
def both_cores(cores: Any) -> None:
    """A core barrier is between cores 0 and 1.

    Raises RuleViolation otherwise.
    """
    if not isinstance(cores, (tuple, list)) or tuple(cores) != _CORES:
        raise RuleViolation(both_cores, f"cores={cores!r:.40}")


@rule("NKW-BARRIER-DATA", limit="shared_hbm", hint="name the tensor in shared HBM that both cores access")
def data_is_shared(data: NkiTensor) -> None:
    """data of core_barrier lies in shared HBM.

    Raises RuleViolation otherwise.
    """
    if data.buffer is not MemoryRegion.shared_hbm:
        raise RuleViolation(data_is_shared, f"data lies in {data.buffer.value}")
