"""A measurement rebuilt: the kernels to run, and what of their timeline the measurement speaks of."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.fidelity.entry import Entry
from nkw.errors import InvalidArgument
from simulate.hardware import INSTANCES, Hardware, hardware
from simulate.timing import Reading


class NotCovered(Exception):
    """No builder can stand for an entry; the message says why."""


class Schedule(enum.Enum):
    """Who decided the order of a kernel's instructions; the accuracy that can be expected follows from it.

    primitive: one instruction or DMA. explicit: the kernel's author. compiler: the kernel leaves it to the compiler.
    collective: the collective engine.
    """

    primitive = "primitive"
    explicit = "explicit"
    compiler = "compiler"
    collective = "collective"

    @property
    def reading(self) -> Reading:
        """The reading whose time counts: the order as written, or what a compiler makes of it."""
        return Reading.scheduled if self is Schedule.compiler else Reading.program


class Quantity(enum.Enum):
    """What of a launch was timed.

    interval, latency: of the last occurrence of one instruction, start to start and start to result. table_load,
    trigger, first_byte, data, completion: the phases of a DMA or an activation. data_phase: first data of the kernel to
    last. length: first start to last result. benchmark, profiler: with the parts of starting and ending a kernel that
    such a figure holds. host: a synchronous call from the host. formula: a term of the cost model
    that no event shows alone.
    """

    interval = "interval"
    latency = "latency"
    table_load = "table load"
    trigger = "trigger"
    first_byte = "first byte"
    data = "data"
    completion = "completion"
    data_phase = "data phase"
    length = "length"
    benchmark = "benchmark"
    profiler = "profiler"
    host = "host"
    formula = "formula"


@dataclass(frozen=True)
class Run:
    """One launch: a kernel and, per rank, its arguments."""

    kernel: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    cores_per_rank: int = 1


@dataclass(frozen=True)
class Case:
    """What stands for an entry. Times of several runs add; `divisor` is how many times the timed thing occurs.

    `operation` names the operator that an instruction's quantity is read from. `formula` gives the nanoseconds of a
    term on a chip, without a run.
    """

    chip: Hardware
    runs: tuple[Run, ...]
    quantity: Quantity
    schedule: Schedule
    operation: str = ""
    divisor: float = 1.0
    formula: Callable[[Hardware], float] = field(default=lambda chip: 0.0)


_DTYPES = (
    (r"fp8|float8|e4m3|e5m2", np.dtype(ml_dtypes.float8_e4m3)),
    (r"^(?:fp32|float32|f32|tf32)", np.dtype(np.float32)),
    (r"bf16|bfloat16", np.dtype(ml_dtypes.bfloat16)),
    (r"fp16|float16|^f16", np.dtype(np.float16)),
    (r"fp32|float32|^f32|^-?$", np.dtype(np.float32)),
    (r"u?int8", np.dtype(np.uint8)),
)
"""By what the text of an entry holds, the first that fits: a float32 kernel may have bfloat16 parts."""


def dtype_of(entry: Entry) -> np.dtype:
    """Return the dtype of an entry's operands. Raises NotCovered for an unknown one."""
    for pattern, dtype in _DTYPES:
        if re.search(pattern, entry.dtype.strip().lower()):
            return dtype
    raise NotCovered(f"dtype {entry.dtype!r} is not one the builders know")


def compiled_mode(chip: Hardware) -> str:
    """Who writes descriptors where a compiler decides: the hardware where it can, else a ring prepared at load time."""
    return "hwdge" if chip.hardware_dge else "none"


_GENERATIONS = {"trn1": "gen2", "trn1n": "gen2", "trn2": "gen3", "trn2u": "gen3", "trn3": "gen4"}


def chip_of(entry: Entry) -> Hardware:
    """Return the chip of an entry's generation, with the collectives of its instance where that is named."""
    target = entry.target.strip().lower()
    if entry.instance.startswith("inf2") or target.startswith("inf2"):
        return hardware("inf2")
    try:
        chip = hardware(_GENERATIONS.get(target.split(".")[0], target))
    except InvalidArgument:
        raise NotCovered(f"target {entry.target!r} names no single generation") from None
    named = INSTANCES.get(entry.instance.split(" ")[0])
    if named is not None and named.target == chip.name:
        chip = hardware(named.name)
    return _shared(chip) if entry.cores > 1 else chip


@lru_cache
def _shared(chip: Hardware) -> Hardware:
    """Return the chip with all of its cores working, so that the one simulated has only its share of the HBM stack."""
    return chip.with_numbers(hbm_gb_per_s_per_stack=chip.provenance["hbm_gb_per_s_per_core"])


_MEASURED = (
    ("first user dma", Quantity.data_phase),
    ("first descriptor start to last end", Quantity.data),
    ("phase length", Quantity.length),
    ("packet sums", Quantity.data),
    ("profiler total_time", Quantity.profiler),
    ("nki.benchmark", Quantity.benchmark),
    ("device benchmark", Quantity.benchmark),
    ("derived from the reported mfu", Quantity.benchmark),
    ("device mfu", Quantity.benchmark),
    ("profiling service", Quantity.benchmark),
    ("upper bound asserted", Quantity.benchmark),
    ("grading threshold", Quantity.benchmark),
    ("synchronous call", Quantity.host),
    ("host wall clock minus", Quantity.length),
    ("per layer", Quantity.length),
    ("device profile", Quantity.length),
)


def quantity_of(entry: Entry) -> Quantity:
    """Return the quantity that an entry's measurement holds, judged by how it was taken."""
    text = entry.measured.lower()
    if "subtract about" in entry.notes:
        return Quantity.length  # what launching takes is subtracted from the measurement
    for words, quantity in _MEASURED:
        if words in text:
            return quantity
    raise NotCovered(f"measured as {entry.measured!r}, which is no time of a kernel on the device")


def array(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Allocate an argument of a dry run: its shape and dtype count, its pages are never touched."""
    return np.empty(shape, dtype)


def measured_us(entry: Entry, chip: Hardware) -> float:
    """Return the measured time in us: as stated, or worked out from the rate that an entry gives in its place."""
    if entry.latency_us is not None:
        launching = re.search(r"subtract about (\d+) us", entry.notes)
        return entry.latency_us - (float(launching.group(1)) if launching else 0.0)
    metrics = entry.metrics
    if "estimate_us" in metrics:
        return float(metrics["estimate_us"])
    if "relative_throughput" in metrics and len(entry.product()) == 2:
        rows, per_partition = entry.product()
        descriptor = chip.dma_descriptor_bytes_max
        engine = descriptor / (chip.dma_descriptor_ns + descriptor / chip.dma_engine_bytes_per_ns)
        peak = min(chip.dma_engines * engine, chip.hbm_gb_per_s_per_stack)
        return rows * per_partition / (float(metrics["relative_throughput"]) * peak) / 1000.0
    per_rank = re.search(r"(\d+) B per rank", entry.shapes)
    if "busbw_GBps" in metrics and per_rank and entry.says("all-gather"):
        moved = (entry.cores - 1) * int(per_rank.group(1))
        return moved / float(metrics["busbw_GBps"]) / 1000.0
    raise NotCovered("the entry gives no time, and none of its metrics is one")
