"""Cases: a measurement rebuilt as kernels to run and as the quantity to read from their timeline.

Builders return a `Case`; `predict` runs it. The functions here read an entry's dtype, chip, quantity and time.
"""

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
    """An entry that no builder can rebuild as a case; the message says why."""


class Schedule(enum.Enum):
    """What decided the order of a measured kernel's instructions; the accuracy that can be expected depends on it.

    primitive: one instruction or DMA, so there is no order. explicit: the kernel's author. compiler: the kernel
    leaves the order to the compiler. collective: the collective engine.
    """

    primitive = "primitive"
    explicit = "explicit"
    compiler = "compiler"
    collective = "collective"

    @property
    def reading(self) -> Reading:
        """The reading to compare with a measurement: scheduled if a compiler decided the order, else program order."""
        return Reading.scheduled if self is Schedule.compiler else Reading.program


class Quantity(enum.Enum):
    """The quantity of a launch that was measured, and so the one to read from its timeline.

    Of the last occurrence of one instruction: interval is the time from the start before to its start, latency from
    its start to its result. Phases of a DMA or an activation: table_load, trigger, first_byte (trigger to first
    data), data, completion (last data to completion). Of a whole kernel: data_phase is the time from first to last
    data, length from the first start to the last result; benchmark and profiler add the overhead of starting and
    ending a kernel that such figures contain; host is a synchronous call from the host. formula: a term of the cost
    model that no event shows alone.
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
    """One launch: a kernel, its positional arguments for each rank, and the number of cores per rank."""

    kernel: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    cores_per_rank: int = 1


@dataclass(frozen=True)
class Case:
    """The kernels to run for an entry, and the quantity to read from them.

    chip: hardware to predict for. runs: launches whose times are added up. quantity: what to read from each timeline.
    schedule: what decided the order of the measured kernel. operation: name of the operator whose last occurrence is
    read, if the quantity is one of an instruction. divisor: the sum is divided by it, as by the number of
    repetitions. formula: for `Quantity.formula`, a function from a chip to the time in ns, and `runs` is empty.
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
    """Return the dtype that an entry's `dtype` text names, by the first matching pattern of `_DTYPES`.

    Raises NotCovered if no pattern matches.
    """
    for pattern, dtype in _DTYPES:
        if re.search(pattern, entry.dtype.strip().lower()):
            return dtype
    raise NotCovered(f"dtype {entry.dtype!r} is not one the builders know")


def compiled_mode(chip: Hardware) -> str:
    """Return the `dge_mode` to assume where a compiler chose it: "hwdge" if the chip has hardware DGE, else "none"."""
    return "hwdge" if chip.hardware_dge else "none"


_GENERATIONS = {"trn1": "gen2", "trn1n": "gen2", "trn2": "gen3", "trn2u": "gen3", "trn3": "gen4"}


def chip_of(entry: Entry) -> Hardware:
    """Return the hardware that an entry was measured on.

    It has the collective constants of the entry's instance if a known instance is named. If several cores ran, it has
    one core's share of the HBM bandwidth. Raises NotCovered if `target` names no single generation.
    """
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
    """Return the chip with the HBM bandwidth that one core gets while all cores of the stack are working."""
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
    """Return the quantity that an entry's time is of, from its `measured` text, which says how the time was taken.

    Raises NotCovered if the text is not about a time of a kernel on the device.
    """
    text = entry.measured.lower()
    if "subtract about" in entry.notes:
        return Quantity.length  # what launching takes is subtracted from the measurement
    for words, quantity in _MEASURED:
        if words in text:
            return quantity
    raise NotCovered(f"measured as {entry.measured!r}, which is no time of a kernel on the device")


def array(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Allocate an uninitialised argument of a dry run, which reads only its shape and dtype."""
    return np.empty(shape, dtype)


def measured_us(entry: Entry, chip: Hardware) -> float:
    """Return the measured time in us.

    It is `latency_us`, less the launch time that `notes` says to subtract. Without a latency, it is computed from the
    estimate, relative throughput or bus bandwidth in `metrics`. Raises NotCovered if the entry has none of them.
    """
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
