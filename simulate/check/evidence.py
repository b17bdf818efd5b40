"""What the detectors need beyond the stream: exact footprints, run-time indices, value ranges, and what was returned.

The stream keeps a box per operand. A box can overstate what a strided pattern touches, so whatever has to be exact
(accesses of shared HBM by two cores, a DMA within one tensor) is noted here by its pattern while the kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulate.check.findings import Finding
from simulate.check.footprint import Footprint, folds, footprint, written
from simulate.isa.enums import Engine
from simulate.isa.plan import Accumulate, Argument, Domain, Plan, Registers, State
from simulate.memory import MemoryRegion, NkiTensor
from simulate.run import Launch
from simulate.run.machine import NeuronCore
from simulate.run.stream import Access, Stream

_EXACT_INTEGERS = 2**24  # every integer up to this magnitude is a float32
_FP8_MAX = {"float8_e4m3": 240.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_FP8_E4M3_MAX = 240.0  # of the chip's own e4m3, to which chips without e4m3fn convert it


@dataclass(frozen=True, slots=True)
class Note:
    """Something about the values of one operand of an event: the operand's tensor and what was seen."""

    event: int
    tensor: int
    seen: str


@dataclass
class CoreEvidence:
    """What was seen of one core's stream."""

    shared: dict[int, tuple[tuple[Footprint, bool], ...]] = field(
        default_factory=dict
    )  # event: (where, writes)
    onto_themselves: set[int] = field(default_factory=set)  # DMAs from a place to the same place, by event
    overlapping_dmas: list[tuple[int, int]] = field(default_factory=list)  # event, tensor
    written: dict[int, Footprint] = field(default_factory=dict)  # by DMAs and matmuls, with digests, by event
    repeated_rows: list[Note] = field(default_factory=list)
    large_integers: list[Note] = field(default_factory=list)
    wide_fp8: list[Note] = field(default_factory=list)
    overflowing_fp8: list[Note] = field(default_factory=list)
    spread_by_transpose: list[Note] = field(default_factory=list)
    outside_domain: list[Note] = field(default_factory=list)
    registers: dict[int, Registers] = field(default_factory=dict)  # by event
    generators: dict[int, State] = field(
        default_factory=dict
    )  # the random state that an event uses, by event
    automatic: set[int] = field(default_factory=set)  # matmuls with accumulate=None
    accesses: list[tuple[Access, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Returned:
    """One tensor that a rank's kernel returned."""

    rank: int
    tensor: int
    unwritten_bytes: int


class Evidence:
    """An observer of one launch."""

    def __init__(self) -> None:
        self._cores: dict[int, CoreEvidence] = {}
        self._kept: list[Stream] = []
        self.returned: list[Returned] = []
        self.varied: list[Finding] = []
        """What showed when the launch was carried out again in other orders."""

    def of(self, stream: Stream) -> CoreEvidence:
        """What was seen of a stream; empty for one that ran without this observer."""
        known = self._cores.get(id(stream))
        if known is None:
            known = self._cores[id(stream)] = CoreEvidence()
            self._kept.append(stream)  # so that its id stays its own
        return known

    def accesses(self, stream: Stream) -> list[tuple[Access, ...]]:
        """The operands of every event of a stream that has ended, spelled out once for all detectors."""
        core = self.of(stream)
        if len(core.accesses) != len(stream):
            core.accesses = [stream.accesses(index) for index in range(len(stream))]
        return core.accesses

    def issuing(self, running: NeuronCore, plan: Plan, operands: Sequence[Any]) -> None:
        """Note which values an instruction reads, and which state of its engine it uses."""
        core = self.of(running.stream)
        event = len(running.stream)
        if plan.registers is not None:
            core.registers[event] = plan.registers
        elif plan.state is not None:
            core.generators[event] = plan.state
        if plan.domain is Domain.float32 and len(operands) == len(plan.reads):
            self._values(core, event, plan, operands)
            if plan.accumulate is not None and len(plan.reads) == 1:
                self._transpose(core, event, plan.reads[0], operands[0])
            if plan.argument is not None:
                self._argument(core, event, plan, plan.argument, operands)

    def issued(self, running: NeuronCore, plan: Plan, operands: Sequence[Any]) -> None:
        """Note what an instruction touched."""
        core = self.of(running.stream)
        event = len(running.stream)
        if plan.accumulate is Accumulate.first_write_overwrites:
            core.automatic.add(event)
        by_dma = plan.engine is Engine.dma and plan.rendezvous is None
        if (
            (by_dma or plan.accumulate not in (None, Accumulate.add))
            and len(plan.writes) == 1
            and plan.writes[0].dynamic is None
        ):
            core.written[event] = written(plan.writes[0], plan)
        if by_dma:
            self._transfer(core, event, plan)
        if running.rank.logical_core_size > 1 and plan.rendezvous is None:
            touched = [
                (
                    written(tile, plan, keep=True) if writes else footprint(tile, plan.skip_out_of_range),
                    writes,
                )
                for tiles, writes in ((plan.reads, False), (plan.writes, True))
                for tile in tiles
                if tile.buffer is MemoryRegion.shared_hbm
            ]
            if touched:
                core.shared[event] = tuple(touched)
        for tile in plan.writes:
            if tile.dtype in _FP8_MAX and tile.dynamic is None and plan.domain is Domain.float32:
                self._overflow(core, event, tile, operands)

    @staticmethod
    def _transfer(core: CoreEvidence, event: int, plan: Plan) -> None:
        for tile in plan.writes:
            if tile.dynamic is not None or folds(tile):
                touched = footprint(tile, plan.skip_out_of_range)
                size = tile.size if touched.elements is None else touched.elements.size
                repeated = size - touched.numbers().size
                if repeated:
                    seen = f"{repeated} of {size} elements are written more than once"
                    core.repeated_rows.append(Note(event, tile.storage.serial, seen))
            for source in plan.reads:
                if source.storage is not tile.storage:
                    continue
                there, here = (footprint(each, plan.skip_out_of_range) for each in (source, tile))
                same = there == here if there.elements is None else source is tile
                if same and source.dtype == tile.dtype and len(plan.reads) == 1:
                    core.onto_themselves.add(event)
                if not same and there.meets(here):
                    core.overlapping_dmas.append((event, tile.storage.serial))

    @staticmethod
    def _values(core: CoreEvidence, event: int, plan: Plan, operands: Sequence[Any]) -> None:
        for tile, operand in zip(plan.reads, operands):
            if tile.dynamic is not None:
                continue
            if tile.dtype in ("int32", "uint32"):
                lost = int((tile.array.astype(np.int64) != operand.astype(np.int64)).sum())
                if lost:
                    seen = f"{lost} integers above {_EXACT_INTEGERS} lose bits as float32"
                    core.large_integers.append(Note(event, tile.storage.serial, seen))
            elif tile.dtype == "float8_e4m3fn":
                most = float(np.nanmax(np.abs(operand))) if operand.size else 0.0
                if most > _FP8_E4M3_MAX:
                    core.wide_fp8.append(Note(event, tile.storage.serial, f"a value of magnitude {most:g}"))

    @staticmethod
    def _transpose(core: CoreEvidence, event: int, tile: NkiTensor, operand: np.ndarray) -> None:
        """A transpose that multiplies by an identity: 0 times what is not finite is NaN."""
        count = int((~np.isfinite(operand)).sum())
        if count:
            seen = (
                f"{count} of {tile.size} elements are NaN or infinite, and make their rows of the result NaN"
            )
            core.spread_by_transpose.append(Note(event, tile.storage.serial, seen))

    @staticmethod
    def _argument(
        core: CoreEvidence, event: int, plan: Plan, argument: Argument, operands: Sequence[Any]
    ) -> None:
        function = argument.function
        if function.domain is None:
            return
        values = np.asarray(argument.of(*operands))
        outside = ~function.in_domain(values)
        if function.name == "sqrt":
            outside &= (
                values != 0
            )  # the documented lower end says nothing of an exact zero, whose root is exact
        count = int(outside.sum())
        if count:
            low, high = function.domain
            sign = "magnitudes of " if function.domain_of_magnitude else ""
            seen = (
                f"{count} of {values.size} arguments of {function.name} lie outside {sign}{low:g} to {high:g}, "
                f"for example {float(values[outside].flat[0]):g}"
            )
            core.outside_domain.append(Note(event, plan.reads[0].storage.serial, seen))

    @staticmethod
    def _overflow(core: CoreEvidence, event: int, tile: NkiTensor, operands: Sequence[Any]) -> None:
        lost = int((~np.isfinite(tile.array.astype(np.float32))).sum())
        if lost and all(np.isfinite(operand).all() for operand in operands):
            limit = _FP8_MAX[str(tile.dtype)]
            seen = f"{lost} of {tile.size} results overflow; the largest value is {limit:g}"
            core.overflowing_fp8.append(Note(event, tile.storage.serial, seen))

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Note which tensors were returned and how much of each was written."""
        for rank, value in enumerate(returned):
            for tensor in tensors_of(value):
                _, shape, strides, offset, width = tensor.byte_view()
                states = tensor.storage.validity.states(shape, strides, offset, width)
                if isinstance(states, int):
                    missing = 0 if states else tensor.size * width
                else:
                    missing = int(np.count_nonzero(states == 0)) * width
                self.returned.append(Returned(rank, tensor.storage.serial, missing))


def tensors_of(value: Any) -> Iterator[NkiTensor]:
    """The tensors in what a kernel returned."""
    if isinstance(value, NkiTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
