"""Records of a device profile. Times are in ns, sizes in bytes; None means that the profile lacks the figure.

Tables and fields are those of the vendor's page "Profile Parquet Schema Reference" (Neuron SDK documentation,
tools/neuron-explorer/profile-schema-reference, schema 7.4.0 of SDK 2.31).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ActiveEngine:
    """Activity of an engine of a physical core, in ns.

    `active_ns` excludes semaphore waits and counts overlapping instructions once. `instructions` excludes the
    waits too. `wait_ns` adds up Instruction.evt_wait_time_ns. None means that the profile lacks the figure.
    """

    core: int
    name: str
    active_ns: float
    instructions: int | None = None
    wait_ns: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredLine:
    """A kernel line: number of its instructions, and ns that these and the DMAs they trigger occupy engines and queues.

    `file` is the path in the profile. `function` is the innermost frame around the instruction, if the NEFF
    has kernel debug info, else empty.
    """

    file: str
    line: int
    function: str
    instructions: int
    held_ns: float


@dataclass(frozen=True, slots=True)
class Queue:
    """The DMA queues of a core that an engine triggers, or a single queue whose name mentions no engine.

    `transfers` counts rows of DmaPacketAggregated, `bytes` adds up their sizes, and `active_ns` is the time
    that they cover.
    """

    core: int
    name: str
    transfers: int
    bytes: int
    active_ns: float


@dataclass(frozen=True, slots=True)
class Dma:
    """All DMA of a profile. `bytes` excludes instruction fetches; see the vendor's performance-bounds.md.

    `active_ns` is the time in which any DMA moves bytes. None means that the profile lacks the figure.
    """

    active_ns: float | None = None
    bytes: int | None = None
    transfers: int | None = None
    packets: int | None = None
    hbm_read_bytes: int | None = None
    hbm_written_bytes: int | None = None
    queues: tuple[Queue, ...] = ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its use (IN, OUT, WEIGHT, or empty), its size, and the bytes that DMAs move of it.

    `loaded_bytes` are those loaded to SBUF, `loads` how many times the tensor is loaded on average. None
    means that the profile lacks the figure.
    """

    name: str
    use: str
    bytes: int | None
    moved_bytes: int | None
    loaded_bytes: int | None
    loads: float | None


@dataclass(frozen=True, slots=True)
class OnChip:
    """Occupancy of SBUF and PSUM: the most occupied bytes of a partition, and the highest average fullness.

    Fullness is a share between 0 and 1. Samples are shares or percentages; they count as percentages if any
    exceeds 1.
    """

    sbuf_occupied_bytes: int | None = None
    sbuf_fullest: float | None = None
    psum_fullest: float | None = None


@dataclass(frozen=True, slots=True)
class Synchronization:
    """Waits and throttling: semaphore updates, core barriers, pending DMAs, throttled time.

    `barrier_ns` adds up the barriers. `pending_dmas_most` is the largest number of DMAs pending at one time.
    `throttled_to` is the lowest utilisation that a throttle allowed (k / n), a share. `dependences` counts
    the rows of Flow by type. None means that the profile lacks the figure.
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
    """Circumstances of the measurement: the fields of Metadata. Peaks are those of a physical core.

    `simulated` marks a profile that the compiler's simulation wrote.
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
    """Execution of a launch on the device.

    `total_ns` is the time between start and stop on the device (Summary.total_time). `work_ns` is the time
    between the first and the last event that is no setup (Summary.total_exec_time). `warnings` are the
    profiler's; `notes` say what this reader omitted, and why.
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
