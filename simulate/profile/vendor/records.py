"""What a device profile says, in frozen records: times in ns, sizes in bytes; None is what the profile does not say.

Tables and fields are those of the vendor's page "Profile Parquet Schema Reference" (Neuron SDK documentation,
tools/neuron-explorer/profile-schema-reference, schema 7.4.0 of SDK 2.31).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ActiveEngine:
    """One engine of one physical core: how long it processes anything, and how long its instructions wait.

    `active_ns` excludes semaphore waits and counts instructions side by side once; `instructions` excludes the waits
    too, `wait_ns` adds up Instruction.evt_wait_time_ns.
    """

    core: int
    name: str
    active_ns: float
    instructions: int | None = None
    wait_ns: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredLine:
    """One line of a kernel: instructions, and the time that they and the DMAs they triggered hold engines and queues.

    `file` is the path that the profile gives, `function` the innermost frame around the instruction, where the NEFF has
    kernel debug info.
    """

    file: str
    line: int
    function: str
    instructions: int
    held_ns: float


@dataclass(frozen=True, slots=True)
class Queue:
    """The DMA queues that one engine triggers, or one queue whose name says no engine.

    `transfers` are rows of DmaPacketAggregated, `active_ns` the time covered by them.
    """

    core: int
    name: str
    transfers: int
    bytes: int
    active_ns: float


@dataclass(frozen=True, slots=True)
class Dma:
    """All DMA of a profile. `bytes` leave out instruction fetches; see the vendor's performance-bounds.md."""

    active_ns: float | None = None
    bytes: int | None = None
    transfers: int | None = None
    packets: int | None = None
    hbm_read_bytes: int | None = None
    hbm_written_bytes: int | None = None
    queues: tuple[Queue, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: what it is used for (IN, OUT, WEIGHT, or empty), its size, and the bytes that DMAs move of it."""

    name: str
    use: str
    bytes: int | None
    moved_bytes: int | None
    loaded_bytes: int | None
    loads: float | None


@dataclass(frozen=True, slots=True)
class OnChip:
    """SBUF and PSUM: the most bytes of a partition that are occupied at one time, and the highest average fullness.

    Fullness is a part of 1: samples are written as parts of 1 or as percentages, and count as percentages where one of
    them exceeds 1.
    """

    sbuf_occupied_bytes: int | None = None
    sbuf_fullest: float | None = None
    psum_fullest: float | None = None


@dataclass(frozen=True, slots=True)
class Synchronization:
    """Waiting and throttling: rows of SemaphoreUpdate, core barriers, DMAs that wait in a queue, throttled time.

    `throttled_to` is the lowest utilisation that a throttle allowed (k / n), a part of 1. `dependences` counts the rows
    of Flow by their type.
    """

    semaphore_updates: int | None = None
    barriers: int | None = None
    barrier_ns: float | None = None
    pending_dmas_most: int | None = None
    throttled_ns: float | None = None
    throttled_to: float | None = None
    dependences: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """What was measured where: the fields of Metadata; peaks are those of one physical core.

    `simulated` marks a profile that the compiler's own simulation wrote.
    """

    schema: str = ""
    instance: str = ""
    explorer: str = ""
    runtime: str = ""
    compiler: str = ""
    simulated: bool = False
    cores: int | None = None
    dma_peak_bytes_per_ns: float | None = None
    tensor_peak_flops_per_ns: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One execution on the device.

    `total_ns` is the time between start and stop on the device (Summary.total_time), `work_ns` that between the first
    and the last event that is no setup (Summary.total_exec_time). `warnings` are the profiler's own, `notes` say what
    this reader left out, and why.
    """

    path: str
    total_ns: float
    work_ns: float | None = None
    engines: tuple[ActiveEngine, ...] = ()
    dma: Dma = Dma()
    lines: tuple[MeasuredLine, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    necessary_bytes: int | None = None
    hw_flops: int | None = None
    transpose_flops: int | None = None
    on_chip: OnChip = OnChip()
    synchronization: Synchronization = Synchronization()
    origin: Origin = Origin()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
