"""The only file that touches the simulator: launching kernels on simulated ranks, and predicting their time.

A predicted time is the sum over a pass's kernels, one after another, plus starting and ending a kernel once: a model
is compiled into one graph, which has no such overhead between its parts. Overlap between neighbouring kernels, which
a compiler may find, is not counted.
"""

from __future__ import annotations

import importlib
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import simulate
from model.errors import ModelError
from simulate.bind import real_package
from simulate.hardware import INSTANCES, Hardware, Instance, hardware, instance
from simulate.memory import MemoryRegion
from simulate.occupancy import occupancies, svg
from simulate.profile import Profile, profile
from simulate.profile.page import Part, Step
from simulate.profile.page import write_page as write_profiles
from simulate.run import REPLAYS, ReplayOptions
from simulate.timing import Reading, Timeline, dependences, schedule, write_trace

__all__ = [
    "INSTANCES",
    "DryDevice",
    "Hardware",
    "Instance",
    "KernelTime",
    "Pass",
    "Prediction",
    "SimulatedDevice",
    "bind_neuron",
    "chip",
    "instance_named",
    "kernel_limit",
    "neuron_package_installed",
    "nki_dtype",
    "replay_report",
    "started_by_torchrun",
    "write_page",
    "write_passes",
]


@dataclass(frozen=True)
class Prediction:
    """What a pass is predicted to take on one target: its bracket, busy tracks and high-water marks.

    `program_ns` runs engines and DMA queues concurrently, each in program order; the true time should lie between
    `dataflow_ns` and `serial_ns`. `busy_share` is of `program_ns`, per engine and DMA queue, averaged over the ranks.
    Marks are the highest of any kernel, in bytes per partition.
    """

    target: str
    dataflow_ns: float
    program_ns: float
    serial_ns: float
    busy_share: dict[str, float]
    sbuf_bytes: int
    sbuf_usable_bytes: int
    psum_bytes: int
    psum_usable_bytes: int

    @property
    def busiest_engine(self) -> str:
        """The engine that is busy longest."""
        return self._busiest(queue=False)

    @property
    def busiest_queue(self) -> str:
        """The DMA queue that is busy longest."""
        return self._busiest(queue=True)

    def _busiest(self, queue: bool) -> str:
        names = [name for name in self.busy_share if name.startswith("DMA") == queue]
        return max(names, key=lambda name: self.busy_share[name])


def replay_report() -> str:
    """What became of the launches of this process, in some lines."""
    return REPLAYS.report.text()


class SimulatedDevice:
    """Ranks of one chip that compute: all in this process, or each in one of those that torchrun started.

    The first launch of a kind is checked instruction by instruction; with `replay`, later ones run what was recorded
    on new data, rewritten to be faster: float32 sums of matrix products may be taken in another order. `exact` gives
    the bytes of an eager launch, `verify` compares every replay with one. Both are also the environment's to ask for.
    """

    def __init__(
        self,
        target: str,
        ranks: int,
        replay: bool = True,
        processes: bool = False,
        exact: bool = False,
        verify: bool = False,
    ) -> None:
        _bind_kernels()
        self.ranks = ranks
        self._mode = simulate.Mode.replay if replay else simulate.Mode.eager
        self.replica_group = _replica_group(ranks)
        self._world = _typed(
            lambda: simulate.World.of_processes(target) if processes else simulate.World(target, ranks)
        )
        asked = _typed(ReplayOptions.from_environment)
        self._world.replay = replace(asked, exact=asked.exact or exact, verify=asked.verify or verify)
        # Programs hold the arrays of their last launch: without this, a model's weights would outlive it.
        weakref.finalize(self, REPLAYS.let_go).atexit = False
        self.own = range(self._world.rank, self._world.rank + self._world.ranks)
        if self._world.size != ranks:
            raise ModelError(
                f"torchrun started {self._world.size} processes for {ranks} ranks; --tp has to be equal"
            )

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument."""
        return nki_dtype(name)

    def run(self, kernel: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Launch a kernel on all ranks; returns each rank's outputs."""
        return _launch(self._world, kernel, arguments, self._mode).outputs

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """An array of every rank, in their order, of those that the own ranks give."""
        return _typed(lambda: self._world.gather(arrays))  # type: ignore[no-any-return]


class DryDevice:
    """Ranks of one chip that only plan: kernels are checked, placed and timed, and return zeros.

    Launches that are equal (kernel, shapes, dtypes, static arguments) are planned and scheduled once.
    """

    def __init__(self, target: str, ranks: int) -> None:
        _bind_kernels()
        self.ranks = ranks
        self.own = range(ranks)
        self.replica_group = _replica_group(ranks)
        self._world = _typed(lambda: simulate.World(target=target, ranks=ranks))
        self._launches: dict[tuple[Any, ...], _Timed] = {}
        self._sequence: list[_Timed] = []
        self._layer_ends: list[int] = []

    def dtype(self, name: str) -> Any:
        """A dtype as kernels take it for an argument."""
        return nki_dtype(name)

    def run(self, kernel: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Plan a kernel on all ranks; returns zeros of the shapes and dtypes that each rank would return."""
        key = (kernel, *(_signature(each) for rank in arguments for each in rank))
        if key not in self._launches:
            launch = _launch(self._world, kernel, arguments, simulate.Mode.dry)
            self._launches[key] = _typed(lambda: _Timed.of(launch))
        self._sequence.append(self._launches[key])
        return self._launches[key].launch.outputs

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of all ranks, which are all here."""
        return list(arrays)

    def layer_done(self, done: int, layers: int) -> None:
        """So many of a model's layers are behind the launches until now."""
        self._layer_ends.append(len(self._sequence))

    def take_pass(self) -> Pass:
        """The launches since the last call, as one pass of the model."""
        done = Pass(tuple(self._sequence), tuple(self._layer_ends))
        self._sequence, self._layer_ends = [], []
        return done


@dataclass(frozen=True)
class Pass:
    """The planned launches of one pass of a model; layer i lies between the entries i and i + 1 of `layer_ends`."""

    launches: tuple[_Timed, ...]
    layer_ends: tuple[int, ...] = ()

    @property
    def overhead_ns(self) -> float:
        """What starting and ending a kernel takes, which a pass pays once."""
        return self.launches[0].timeline.overhead_ns

    def prediction(self) -> Prediction:
        """Their time, one after another, and what they use."""
        chip = self.launches[0].launch.hardware
        overhead = self.overhead_ns
        program = overhead + sum(each.timeline.length_ns for each in self.launches)
        busy: defaultdict[str, float] = defaultdict(float)
        for each in self.launches:
            for track, time_ns in each.timeline.busy_ns.items():
                busy[_without_rank(track)] += time_ns / len(each.launch.streams)
        return Prediction(
            target=chip.name,
            dataflow_ns=overhead + sum(each.dataflow_ns for each in self.launches),
            program_ns=program,
            serial_ns=overhead + sum(each.serial_ns for each in self.launches),
            busy_share={track: time_ns / program for track, time_ns in busy.items()},
            sbuf_bytes=max(each.launch.high_water_bytes(MemoryRegion.sbuf) for each in self.launches),
            sbuf_usable_bytes=chip.sbuf_usable_bytes_per_partition,
            psum_bytes=max(each.launch.high_water_bytes(MemoryRegion.psum) for each in self.launches),
            psum_usable_bytes=chip.psum_bytes_per_partition,
        )

    def part_of_model(self, number: int) -> str:
        """The layer that a launch belongs to, counted from 0; outside of the layers, the launch's kernel."""
        layer = bisect_right(self.layer_ends, number) - 1
        if 0 <= layer < len(self.layer_ends) - 1:
            return f"layer {layer}"
        return self.launches[number].launch.kernel

    def kernel_times(self) -> list[KernelTime]:
        """Every launch in order, with what it makes of the chip."""
        return [each.kernel_time(self.part_of_model(number)) for number, each in enumerate(self.launches)]


@dataclass(frozen=True)
class KernelTime:
    """One launch of a pass: its time in the program reading, and its shares of the chip's peaks over that time.

    `mfu` is of the Tensor engines' peak for 16-bit operands, `mbu` of the cores' part of the HBM bandwidth.
    """

    part: str
    kernel: str
    length_ns: float
    mfu: float
    mbu: float
    busiest: str
    busiest_share: float


@dataclass(frozen=True)
class _Timed:
    """One planned launch and its times."""

    launch: simulate.Launch
    timeline: Timeline
    dataflow_ns: float
    serial_ns: float

    @classmethod
    def of(cls, launch: simulate.Launch) -> _Timed:
        waits = dependences(launch.streams)
        dataflow, program, serial = (
            schedule(launch.streams, launch.hardware, reading, waits)
            for reading in (Reading.dataflow, Reading.program, Reading.serial)
        )
        return cls(launch, program, dataflow.length_ns, serial.length_ns)

    @cached_property
    def profile(self) -> Profile:
        """Where its time goes."""
        return profile(self.launch.streams, self.launch.hardware, self.launch.kernel)

    def kernel_time(self, part: str) -> KernelTime:
        """Its time as the launch of a part of the model."""
        roof, busiest = self.profile.roofline, self.timeline.busiest
        share = self.timeline.busy_ns[busiest] / self.timeline.length_ns if self.timeline.length_ns else 0.0
        return KernelTime(
            part,
            self.launch.kernel,
            self.timeline.length_ns,
            roof.mfu,
            roof.mbu,
            _without_rank(busiest),
            share,
        )


def write_passes(path: Path, passes: Sequence[tuple[str, Pass]]) -> None:
    """Write a trace for Perfetto in which the launches of labelled passes follow each other."""
    parts = [
        (f"{label}: {each.launch.kernel}", each.launch.streams, each.timeline)
        for label, done in passes
        for each in done.launches
    ]
    _typed(lambda: write_trace(path, parts))


def write_page(path: Path, title: str, passes: Sequence[tuple[str, Pass]]) -> None:
    """Write a page that profiles labelled passes: their launches in order, and each distinct launch in full."""
    parts: dict[int, tuple[int, Part]] = {}
    steps = []
    for label, done in passes:
        for number, each in enumerate(done.launches):
            if id(each) not in parts:
                launch = each.launch
                name = f"{label}: {launch.kernel}"
                maps = svg([(name, occupancy) for occupancy in occupancies(launch)[:1]])
                parts[id(each)] = (len(parts), Part(replace(each.profile, title=name), maps))
            steps.append(Step((label, done.part_of_model(number), each.launch.kernel), parts[id(each)][0]))
    _typed(lambda: write_profiles(path, title, [part for _, part in parts.values()], steps))


def chip(target: str) -> Hardware:
    """The record of one chip, with a core's limits, clocks and bandwidths."""
    return _typed(lambda: hardware(target))


def instance_named(name: str) -> Instance:
    """An instance type by its name, or several of them over EFA; ModelError for a name that is neither."""
    return _typed(lambda: instance(name))


def kernel_limit(kernel: str, name: str) -> int:
    """A limit that a kernel's file states, such as `MAX_TOKENS` of `attention_prefill`."""
    _bind_kernels()
    limit: int = getattr(importlib.import_module(f"nki_kernels.{kernel}"), name)
    return limit


def started_by_torchrun() -> bool:
    """Whether the ranks are processes that torchrun started, this one among them."""
    return simulate.World.has_processes()


def neuron_package_installed() -> bool:
    """Whether the vendor's `nki` is installed, and not a placeholder of that name."""
    return real_package()


def bind_neuron() -> None:
    """Bind `nki` to the vendor's package for this process."""
    _typed(lambda: simulate.install("neuron"))


def _bind_kernels() -> None:
    """Bind `nki` to the simulator, before the kernels are imported and decide for themselves."""
    _typed(lambda: simulate.install("simulate"))


def nki_dtype(name: str) -> Any:
    """A dtype of `nki.language`, which a device has bound before."""
    import nki.language

    return getattr(nki.language, name)


def _replica_group(ranks: int) -> Any:
    """All ranks as one group of a collective; None for a rank alone, which has nobody to meet."""
    if ranks == 1:
        return None
    from nki.collectives import ReplicaGroup

    return ReplicaGroup([list(range(ranks))])


def _launch(
    world: simulate.World, kernel: str, arguments: Sequence[tuple[Any, ...]], mode: simulate.Mode
) -> simulate.Launch:
    import nki_kernels

    function = getattr(nki_kernels, kernel)
    return _typed(
        lambda: world.launch(function, [(tuple(each), {}) for each in arguments], mode=mode), kernel
    )


def _typed(action: Callable[[], Any], kernel: str = "") -> Any:
    """Carry out a call into the simulator; what it refuses becomes a ModelError that names the kernel."""
    try:
        return action()
    except (simulate.NkwError, AssertionError) as error:
        raise ModelError(f"{kernel}: {error}" if kernel else str(error)) from error


def _signature(argument: Any) -> Any:
    """What decides which instructions an argument gives rise to."""
    if isinstance(argument, np.ndarray):
        return argument.shape, str(argument.dtype)
    return repr(argument)


def _without_rank(track: str) -> str:
    """A track's name without the core it belongs to: "rank 1 DMA q Sync" -> "DMA q Sync"."""
    words = track.split()
    while len(words) > 1 and words[0] in ("rank", "core"):
        words = words[2:]
    return " ".join(words)
