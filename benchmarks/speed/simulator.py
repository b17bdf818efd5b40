"""Cost of the simulator itself: import, one instruction, one recorded event, scheduling."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

import simulate
from benchmarks.speed.measure import Row, medians, seconds
from nkw.targets import DEFAULT_TARGET
from simulate.hardware import hardware
from simulate.run.machine import Mode
from simulate.timing import Reading, dependences, schedule

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

_INSTRUCTIONS = 2000
_SHAPE = (128, 8)


def rows() -> Iterator[Row]:
    """Yield import times, the cost of an instruction on a small tile, bytes per event, and scheduling speed."""
    yield _import_time("simulate; simulate.install('simulate')", "import simulate and the API that it binds")
    yield _import_time("nkw.commands", "import nkw.commands")
    yield from _per_instruction("tensor_tensor", _adds, lambda tile: np.add(tile, tile, out=tile))
    yield from _per_instruction("activation", _exps, lambda tile: np.exp(tile, out=tile))
    yield _per_event()
    yield from _scheduling()


def _import_time(module: str, label: str) -> Row:
    """Return the time in ms of importing `module` in a new interpreter, less the time of a bare interpreter."""
    bare = [sys.executable, "-c", "pass"]
    loaded = [sys.executable, "-c", f"import {module}"]
    times = [
        seconds(lambda: subprocess.run(loaded, check=True))
        - seconds(lambda: subprocess.run(bare, check=True))
        for _ in range(7)
    ]
    return Row(label, "a bare interpreter's start, subtracted", statistics.median(times) * 1e3, "ms")


def _adds(x):
    tile = nl.load(x)
    for _ in range(_INSTRUCTIONS):
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    nisa.dma_copy(dst=x, src=tile)
    return x


def _exps(x):
    tile = nl.load(x)
    for _ in range(_INSTRUCTIONS):
        nisa.activation(dst=tile, op=nl.exp, data=tile)
    nisa.dma_copy(dst=x, src=tile)
    return x


def _per_instruction(op: str, kernel, plain) -> Iterator[Row]:
    """Yield the overhead of an instruction over the same call of numpy in us, and instructions per second.

    kernel: runs the instruction _INSTRUCTIONS times. plain: the same step on a numpy tile, in place.
    """
    x = np.full(_SHAPE, -1.0, np.float32)

    def numpy_alone() -> None:
        tile = x.copy()
        with np.errstate(all="ignore"):  # as in a kernel
            for _ in range(_INSTRUCTIONS):
                plain(tile)

    simulated, alone = medians([lambda: simulate.launch(kernel, [((x.copy(),), {})]), numpy_alone])
    overhead = (simulated - alone) / _INSTRUCTIONS * 1e6
    yield Row(f"{op} on a {_SHAPE} tile, overhead", "numpy's own call, subtracted", overhead, "us")
    yield Row(f"{op} on a {_SHAPE} tile", "", _INSTRUCTIONS / simulated, "instructions/s")


def _scheduling() -> Iterator[Row]:
    """Yield instructions per second of finding dependences and of scheduling, on a stream recorded before."""
    stream = simulate.launch(_tiles, [((np.zeros((128, 64 * 512), np.float32),), {})], mode=Mode.dry).streams[
        0
    ]
    chip = hardware(DEFAULT_TARGET)
    waits = dependences(stream, every_read=True)
    jobs = {"dependences": lambda: dependences(stream)}
    for reading in (Reading.program, Reading.scheduled):
        jobs[f"schedule, {reading.value} reading"] = lambda reading=reading: schedule(
            stream, chip, reading, waits
        )
    jobs["dependences and scheduled reading together"] = lambda: schedule(stream, chip, Reading.scheduled)
    for label, taken in zip(jobs, medians(list(jobs.values()))):
        known = "dependences known" if label.startswith("schedule,") else ""
        yield Row(label, known, len(stream) / taken, "instructions/s")


def _tiles(x):
    """Run many small steps on all engines: loads, products, copies out of PSUM, additions, stores."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for _ in range(64):
        for first in range(0, x.shape[1], 512):
            tile = nl.load(x[:, first : first + 512])
            bank = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=bank, stationary=tile[:, 0:128], moving=tile)
            nisa.activation(dst=tile, op=nl.exp, data=bank)
            nisa.tensor_tensor(dst=tile, data1=tile, data2=bank, op=nl.add)
            nisa.dma_copy(dst=out[:, first : first + 512], src=tile)
    return out


def _per_event() -> Row:
    """Return the row of the memory that one recorded event takes."""
    stream = simulate.launch(_adds, [((np.zeros(_SHAPE, np.float32),), {})]).streams[0]
    return Row("memory per recorded event", "", stream.nbytes / len(stream), "bytes")
