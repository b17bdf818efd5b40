"""Builder of measurements of one instruction of one engine, repeated so that its interval or latency can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from benchmarks.fidelity.case import Case, NotCovered, Quantity, Run, Schedule, array, chip_of, dtype_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import dma, instructions
from simulate.hardware import Hardware, guessed

_REPEATS = 12  # enough for a full pipeline, whose last start-to-start is read


def build(entry: Entry) -> Case:
    """Return the case of the first row of `_FORMS` whose words the description contains.

    Raises NotCovered if none fits.
    """
    chip = _at_one_clock(entry, chip_of(entry))
    for words, make in _FORMS:
        if entry.says(*words):
            return make(entry, chip)
    raise NotCovered("no instruction of the book is described")


def _at_one_clock(entry: Entry, chip: Hardware) -> Hardware:
    """Return the chip with the Tensor engine always at full clock, or always throttled if the entry says so."""
    if entry.says("half rate") or entry.says("throttle 4/8"):
        always = guessed(math.inf, "the entry", "no work opens the throttle")
        return chip.with_numbers(activity_throttle_window_ns=always)
    return chip.with_numbers(
        activity_throttle=guessed(False, "the entry", "the array runs at its full clock")
    )


def _quantity(entry: Entry) -> Quantity:
    """Return whether the entry's time is an interval or a latency, from its `measured` text; else raise NotCovered."""
    text = entry.measured.lower()
    if "interval" in text or "dependent" in text or "total of" in text:
        return Quantity.interval
    if "start to end" in text or "time of one block" in text or "instruction duration" in text:
        return Quantity.latency
    raise NotCovered(f"measured as {entry.measured!r}, which is neither an interval nor a latency")


def _shape(entry: Entry, default_rows: int = 128) -> tuple[int, int]:
    """Return (partitions, elements per partition) of the instruction's tile.

    They are read from `shapes`, or from a "moving" free size with `default_rows` partitions. Raises NotCovered
    without.
    """
    ranged = re.search(r"(\d+)x(\d+)\.\.\d+", entry.shapes)
    if ranged:
        return int(ranged.group(1)), int(ranged.group(2))
    block = re.search(r"\[(\d+),(\d+)\]", entry.shapes)
    if block:
        return int(block.group(1)), int(block.group(2))
    sizes = entry.product()
    if len(sizes) > 1:
        free = 1
        for size in sizes[1:]:
            free *= size
        return sizes[0], free
    moving = entry.integer(r"moving(?: free size)? (\d+)")
    if moving is None:
        raise NotCovered(f"shapes {entry.shapes!r} name no tile")
    return default_rows, moving


def _repeated(
    entry: Entry, chip: Hardware, kernel: Callable[..., object], arguments: tuple[object, ...], operation: str
) -> Case:
    """Return the case of an instruction repeated by `kernel`; a "total of" several counts that many intervals."""
    count = re.search(r"(\d+) x \[", entry.shapes)
    divisor = 1.0 / int(count.group(1)) if count and "total of" in entry.measured else 1.0
    return Case(chip, (Run(kernel, (arguments,)),), _quantity(entry), Schedule.primitive, operation, divisor)


def _matmul(entry: Entry, chip: Hardware) -> Case:
    """Return the case of a matmul, or of one of the instructions that a float32 matmul becomes."""
    dtype = dtype_of(entry) if entry.dtype != "-" else np.dtype(ml_dtypes.bfloat16)
    _, columns = _shape(entry)
    case = _repeated(
        entry, chip, instructions.matmuls, (array((128, 128), dtype), array((128, columns), dtype), _REPEATS),
        "nc_matmul",
    )  # fmt: skip
    halves = dtype == np.float32 and (entry.says("hardware MATMUL") or entry.says("half-product"))
    if not halves:
        return case
    if case.quantity is Quantity.latency:
        return _half_product(entry, chip, columns)
    return Case(
        chip, case.runs, case.quantity, case.schedule, case.operation, float(chip.matmul_fp32_instructions)
    )


def _transpose(entry: Entry, chip: Hardware) -> Case:
    arguments = (array(_shape(entry), dtype_of(entry)), _REPEATS)
    return _repeated(entry, chip, instructions.transposes, arguments, "nc_transpose")


def _activation(entry: Entry, chip: Hardware) -> Case:
    function = "exp" if entry.says("exp") else "copy"
    chained = "dependent" in entry.measured
    arguments = (array(_shape(entry), dtype_of(entry)), _REPEATS, function, entry.says("PSUM"), chained)
    return _repeated(entry, chip, instructions.activations, arguments, "activation")


def _reduction(entry: Entry, chip: Hardware) -> Case:
    rows, columns = _shape(entry)
    middle = re.search(r"middle axis of size (\d+)", entry.kernel)
    operator = "maximum" if entry.says("max") else "add"
    size = int(middle.group(1)) if middle else 1
    from_psum = entry.says("PSUM")
    arguments = (array((rows, columns), dtype_of(entry)), _REPEATS, from_psum, operator, size)
    return _repeated(entry, chip, instructions.reductions, arguments, "tensor_reduce")


def _vector_copy(entry: Entry, chip: Hardware) -> Case:
    arguments = (array(_shape(entry), dtype_of(entry)), _REPEATS, entry.says("PSUM"))
    return _repeated(entry, chip, instructions.vector_copies, arguments, "tensor_copy")


def _tensor_scalar(entry: Entry, chip: Hardware) -> Case:
    arguments = (array(_shape(entry), dtype_of(entry)), _REPEATS)
    return _repeated(entry, chip, instructions.tensor_scalars, arguments, "tensor_scalar")


def _tensor_tensor(entry: Entry, chip: Hardware) -> Case:
    rows, columns = _shape(entry)
    if "," in entry.dtype:
        dtype = np.dtype(np.float32)
    else:
        dtype = dtype_of(entry)
    second = 1 if entry.says("column broadcast") else columns
    arguments = (array((rows, columns), dtype), array((rows, second), dtype), _REPEATS)
    return _repeated(entry, chip, instructions.additions, arguments, "tensor_tensor")


def _reciprocal_then_scale(entry: Entry, chip: Hardware) -> Case:
    """Return the case of the time from the start of a reciprocal to the start of the instruction that depends on it.

    It is half of the interval from one reciprocal to the next.
    """
    arguments = (array(_shape(entry), dtype_of(entry)), _REPEATS)
    runs = (Run(instructions.reciprocals_then_scales, (arguments,)),)
    return Case(chip, runs, Quantity.interval, Schedule.primitive, "reciprocal", 2.0)


def _table_load(entry: Entry, chip: Hardware) -> Case:
    runs = (Run(instructions.table_loads, ((array((128, 4)), _REPEATS),)),)
    return Case(chip, runs, Quantity.table_load, Schedule.primitive, "activation")


def _register_load(entry: Entry, chip: Hardware) -> Case:
    arguments = (array((1, 1), np.int32), _REPEATS)
    return _repeated(entry, chip, instructions.register_loads, arguments, "register_load")


def _core_barrier(entry: Entry, chip: Hardware) -> Case:
    runs = (Run(instructions.core_barriers, ((array((128, 4)), _REPEATS),), cores_per_rank=2),)
    return Case(chip, runs, _quantity(entry), Schedule.primitive, "core_barrier")


def _hardware_dge(entry: Entry, chip: Hardware) -> Case:
    """Return the case of triggering a hardware-DGE DMA; `metrics` gives the number of descriptors, else it is 128."""
    descriptors = int(entry.metrics.get("descriptors", 128))
    total = entry.integer(r"(\d+) KiB")
    match = re.search(r"([\d.]+) MB", entry.shapes)
    size = total * 1024 if total else int(float(match.group(1)) * 1e6) if match else descriptors * 4096
    partitions = max(count for count in range(1, 129) if descriptors % count == 0)
    rows = descriptors // partitions
    width = max(min(size // descriptors, chip.sbuf_usable_bytes_per_partition // rows - 1), 1)
    runs = (Run(dma.load_pieces, ((array((partitions, rows, width + 64), np.uint8), width, "hwdge"),)),)
    return Case(chip, runs, Quantity.trigger, Schedule.primitive, "dma_copy")


def _formula(chip: Hardware, formula: Callable[[Hardware], float]) -> Case:
    """Return a case without a run, whose time in ns is a function of the chip."""
    return Case(chip, (), Quantity.formula, Schedule.primitive, formula=formula)


def _weight_load(entry: Entry, chip: Hardware) -> Case:
    """Return the case of a weight load, a formula because it has no event in the timeline.

    With the array at half rate only the time of its rows grows.
    """
    fp32, slow = entry.dtype != "-" and dtype_of(entry) == np.float32, entry.says("half rate")

    def formula(hardware: Hardware) -> float:
        time_ns = hardware.load_weights_fp32_latency_ns if fp32 else hardware.load_weights_latency_ns
        if slow:
            passes = hardware.matmul_fp32_passes / hardware.matmul_fp32_instructions if fp32 else 1
            longer = 1.0 / hardware.tensor_throttled_clock_ghz - 1.0 / hardware.tensor_clock_ghz
            time_ns += passes * hardware.contraction_max * longer
        return time_ns

    return _formula(chip, formula)


def _half_product(entry: Entry, chip: Hardware, columns: int) -> Case:
    """Return the case of the latency of one of the instructions that a float32 matmul becomes, a formula."""

    def formula(hardware: Hardware) -> float:
        passes = hardware.matmul_fp32_passes / hardware.matmul_fp32_instructions
        return passes * columns / hardware.tensor_clock_ghz + hardware.matmul_latency_ns

    return _formula(chip, formula)


def _semaphore(entry: Entry, chip: Hardware) -> Case:
    return _formula(chip, lambda hardware: hardware.semaphore_ns)


def _loop(entry: Entry, chip: Hardware) -> Case:
    return _formula(chip, lambda hardware: hardware.device_loop_iteration_ns)


def _control(entry: Entry, chip: Hardware) -> Case:
    raise NotCovered("DRAIN is not in a kernel's stream")


def _dynamic_dma(entry: Entry, chip: Hardware) -> Case:
    """Return the case of the trigger of a DMA of one row whose address is read at run time.

    GpSimd writes the descriptor.
    """
    table, rows = array((1024, 128)), array((1, 1), np.int32)
    runs = (Run(dma.gathers, ((table, rows, _REPEATS),)),)
    return Case(chip, runs, Quantity.trigger, Schedule.primitive, "dma_copy")


def _pairs(entry: Entry, chip: Hardware) -> Case:
    """Return the case of the total time of several weight loads and matmuls.

    Moving tiles have the mean size of the range.
    """
    count = entry.integer(r"(\d+) LDWEIGHTS")
    low, high = re.search(r"N=(\d+)\.\.(\d+)", entry.shapes).groups()  # type: ignore[union-attr]
    columns = (int(low) + int(high)) // 2
    dtype = dtype_of(entry)
    arguments = (array((128, 128), dtype), array((128, columns), dtype), _REPEATS)
    runs = (Run(instructions.matmuls, (arguments,)),)
    return Case(chip, runs, Quantity.interval, Schedule.primitive, "nc_matmul", 1.0 / (count or 1))


_FORMS: tuple[tuple[tuple[str, ...], Callable[[Entry, Hardware], Case]], ...] = (
    (("LDWEIGHTS+MATMUL pairs",), _pairs),
    (("nc_transpose",), _transpose),
    (("LDWEIGHTS",), _weight_load),
    (("nc_matmul",), _matmul),
    (("MATMUL",), _matmul),
    (("ACT_TABLE_LOAD",), _table_load),
    (("reciprocal", "tensor_scalar"), _reciprocal_then_scale),
    (("Scalar engine copy",), _activation),
    (("activation",), _activation),
    (("tensor_reduce",), _reduction),
    (("Vector engine copy",), _vector_copy),
    (("tensor_tensor",), _tensor_tensor),
    (("tensor_scalar",), _tensor_scalar),
    (("TENSOR_LOAD",), _register_load),
    (("EVENT_SEMAPHORE",), _semaphore),
    (("DRAIN",), _control),
    (("device loop",), _loop),
    (("DMA_DIRECT2D",), _hardware_dge),
    (("core barrier",), _core_barrier),
    (("dynamic DMA",), _dynamic_dma),
)
