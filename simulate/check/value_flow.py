"""Flow of possible values through a launch: from arguments, constants and numbers, instruction by instruction.

A tensor's possible values are those of all writes so far, whatever their elements. Only a write to all elements of a
tile on chip discards those before it. What an instruction does to values is never read off its name: an instruction
that computes element by element is applied to all possible values of its operands, and one that permutes bits is
applied to single bits. Everything else, and data from other ranks or cores, may be any value of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simulate.check.possible_values import (
    MOST_CODES,
    Codes,
    Possible,
    Words,
    as_rows,
    describe_bits,
    expand_words,
    get_all_values,
    join,
    list_codes,
    reinterpret,
)
from simulate.isa import propagation
from simulate.isa.plan import Accumulate, Domain, Plan
from simulate.isa.shapes import unchanged
from simulate.isa.template import WRITE, Template
from simulate.memory import NkiTensor
from simulate.numerics.cast import to_float32
from simulate.numerics.dtypes import DType
from simulate.numerics.quiet import quiet
from simulate.run import Launch, Mode
from simulate.run.execute import round_to_dtype
from simulate.run.stream import Stream

_MOST_OPERANDS = 2
_EXACT_PASSES = 4
"""Passes over streams of several cores in which values of a tensor may grow one by one, such as those of a counter."""

Visit = Callable[[Stream, int, Template, Sequence[int], Sequence[Possible]], None]
"""Function that is called for each event with its stream, index, template, tensors of its operands, and the possible
values of its reads."""


class ValueFlow:
    """Possible values of the tensors of one rank, updated event by event.

    Attributes:
        changed: Whether an update since the last reset of this attribute added values to a shared tensor.
        widens: Whether a tensor to which values are added may be any value from then on, so that passes end.
    """

    def __init__(self) -> None:
        self.changed = self.widens = False
        self._tensors: dict[int, dict[DType, Possible]] = {}
        self._reads: dict[int, dict[DType, Possible]] = {}  # of tensors since their values changed
        self._results: dict[tuple[int, ...], list[Possible]] = {}
        self._contained: set[tuple[int, int]] = set()  # ids of values, and of values that are among them
        self._kept: list[Any] = []  # values and templates whose ids are keys

    def read(self, tensor: int, dtype: DType) -> Possible:
        """Return the possible values of elements of a tensor, given by its serial number, that are read as a dtype."""
        reads = self._reads.setdefault(tensor, {})
        if dtype not in reads:
            writes = self._tensors.get(tensor, {})
            values = [reinterpret(possible, stored, dtype) for stored, possible in writes.items()]
            joined = values[0] if values else None
            for possible in values[1:]:
                joined = join(joined, possible)
            reads[dtype] = get_all_values(dtype) if joined is None else joined
        return reads[dtype]

    def write(self, tensor: int, dtype: DType, possible: Possible, is_shared: bool = True) -> None:
        """Add possible values of a dtype to those of a tensor, given by its serial number.

        is_shared: whether other cores read the tensor; else `changed` stays as it is. Tiles on chip are overwritten and
        written again in each pass, so that their values never settle.
        """
        writes = self._tensors.setdefault(tensor, {})
        if dtype in writes:
            before, key = writes[dtype], (id(writes[dtype]), id(possible))
            if before is possible or key in self._contained:
                return
            after = join(before, possible)
            if _are_equal(before, after):
                self._contained.add(key)
                self._kept.append((before, possible))
                return
            if self.widens:
                after = get_all_values(dtype)
        else:
            after = possible
        writes[dtype] = after
        self._reads.pop(tensor, None)
        self.changed |= is_shared

    def overwrite(self, tensor: int, dtype: DType, possible: Possible) -> None:
        """Replace all possible values of a tile on chip, given by its serial number; does not set `changed`."""
        writes = self._tensors.get(tensor)
        if writes is None or len(writes) != 1 or writes.get(dtype) is not possible:
            self._tensors[tensor] = {dtype: possible}
            self._reads.pop(tensor, None)

    def pass_event(
        self, template: Template, tensors: Sequence[int], is_masked: bool = False
    ) -> list[Possible]:
        """Add the results of an event to the tensors that it writes; returns the possible values of its reads.

        Args:
            template: The template of the event.
            tensors: Serial numbers of the tensors of its operands.
            is_masked: Whether the event leaves elements of a result unchanged.
        """
        operands = [self.read(tensors[index], template.operands[index].dtype) for index in template.reads]
        key = (id(template), *map(id, operands))
        results = self._results.get(key)
        if results is None:
            results = self._results[key] = compute_results(template.plan, operands)
            self._kept.append((template, operands))
        for index, possible in zip(template.writes, results):
            tile = template.operands[index]
            if not is_masked and template.boxes[index][0] == WRITE and covers_tile(tile):
                self.overwrite(tensors[index], tile.dtype, possible)
            else:
                self.write(tensors[index], tile.dtype, possible, not tile.buffer.on_chip)
        return operands


def covers_tile(view: NkiTensor) -> bool:
    """Return whether a view is on chip and contains every element of its tensor, at an address known before the run."""
    form = view.layout.form
    tensor_bytes = form.size * form.dtype.itemsize
    is_complete = view.layout.boxes[0] is not None and view.size * view.dtype.itemsize == tensor_bytes
    return view.buffer.on_chip and view.dynamic is None and is_complete


def follow_values(launch: Launch, visit: Visit) -> None:
    """Call a function for every event of a launch, core by core in program order, with the values of its reads.

    The values of cores that share HBM are first followed until no write adds any, since the order of the cores is not
    that of their streams.
    """
    ranks: dict[int, list[Stream]] = {}
    for stream in launch.streams:
        ranks.setdefault(stream.rank, []).append(stream)
    for streams, interface in zip(ranks.values(), launch.interfaces):
        flow = ValueFlow()
        for serial, constant in streams[0].constants.items():
            dtype = streams[0].tensors[serial].form.dtype
            flow.write(serial, dtype, _list_constant(dtype, constant.contents))
        for serial in interface.inputs:
            dtype = streams[0].tensors[serial].form.dtype
            flow.write(serial, dtype, get_all_values(dtype))
        flow.changed = len(streams) > 1
        passes = 0
        while flow.changed:
            flow.changed, flow.widens = False, passes >= _EXACT_PASSES
            passes += 1
            for stream in streams:
                _pass_stream(flow, stream, launch.mode, None)
        flow.widens = False
        for stream in streams:
            _pass_stream(flow, stream, launch.mode, visit)


def _pass_stream(flow: ValueFlow, stream: Stream, mode: Mode, visit: Visit | None) -> None:
    # A dry launch has no masks, so each of its instructions may leave elements unchanged.
    is_dry = mode is Mode.dry
    for event in range(len(stream)):
        template, tensors = stream.template(event), stream.tensors_of(event)
        operands = flow.pass_event(template, tensors, is_dry or event in stream.masked)
        if visit is not None:
            visit(stream, event, template, tensors, operands)


def compute_results(plan: Plan, operands: Sequence[Possible]) -> list[Possible]:
    """Return the possible values of each result of a plan from those of its reads; at worst all values of its dtype."""
    if len(plan.writes) == 1 and _is_pure(plan):
        (dst,) = plan.writes
        possible = _compute_result(plan, dst, operands)
        if possible is not None:
            return [possible]
    return [get_all_values(dst.dtype) for dst in plan.writes]


def _is_pure(plan: Plan) -> bool:
    """Return whether the results of a plan depend on its reads alone and replace what was written before."""
    replaces = plan.accumulate in (None, Accumulate.overwrite)
    return replaces and plan.state is None and plan.rendezvous is None and plan.registers is None


def _compute_result(plan: Plan, dst: NkiTensor, operands: Sequence[Possible]) -> Possible:
    if not plan.reads:
        return list_codes(dst.dtype, _to_storage(plan, dst, plan.compute()[0]))
    if plan.effects.rearranges:
        return _rearrange(plan, dst, operands)
    if plan.propagate is not propagation.elementwise:
        return None
    if plan.effects.permutes_bits and isinstance(operands[0], Words):
        return _permute_bits(plan, operands[0], dst)
    if plan.compute is unchanged and plan.domain is Domain.bits:
        return operands[0]
    return _apply(plan, dst, operands)


def _rearrange(plan: Plan, dst: NkiTensor, operands: Sequence[Possible]) -> Possible:
    """Return the values of all operands with 0, which -0 may become, if all are finite and of the result's dtype."""
    joined: Possible = list_codes(dst.dtype, np.zeros(1, dst.dtype.storage))
    for tile, possible in zip(plan.reads, operands):
        is_finite = isinstance(possible, Codes) and possible.integers is not None
        joined = join(joined, possible) if is_finite and tile.dtype == dst.dtype else None
    return joined


@quiet
def _apply(plan: Plan, dst: NkiTensor, operands: Sequence[Possible]) -> Codes | None:
    """Return the values that an element-wise instruction computes from every combination of its operands' values."""
    arrays = []
    for tile, possible in zip(plan.reads, operands):
        codes = expand_words(possible, tile.dtype)
        if codes is None:
            return None
        arrays.append(to_float32(codes.array, tile.dtype) if plan.domain is Domain.float32 else codes.array)
    if len(arrays) > _MOST_OPERANDS or np.prod([array.size for array in arrays]) > MOST_CODES:
        return None
    grids = [grid.reshape(-1) for grid in np.meshgrid(*arrays, indexing="ij")]
    ndim = plan.reads[0].ndim
    computed = plan.compute(*(as_rows(grid, ndim) for grid in grids))[0]
    if not isinstance(computed, np.ndarray) or computed.size != grids[0].size:
        return None
    return list_codes(dst.dtype, _to_storage(plan, dst, computed))


def _permute_bits(plan: Plan, words: Words, dst: NkiTensor) -> Possible:
    """Return the bits of a result each bit of which is a bit of the operand, its inverse, or a constant."""
    (source,) = plan.reads
    if source.dtype.storage.itemsize != dst.dtype.storage.itemsize:
        return None
    varying = [1 << bit for bit in range(32) if words.varying >> bit & 1]
    inputs = np.array([words.constant, *(words.constant ^ bit for bit in varying)], np.uint32)
    outputs = plan.compute(as_rows(inputs.view(source.dtype.storage), source.ndim))[0]
    bits = np.ascontiguousarray(outputs).reshape(-1).view(np.uint32)
    changed = int(np.bitwise_or.reduce(bits ^ bits[0]))
    return Words(changed, int(bits[0]) & ~changed)


def _to_storage(plan: Plan, dst: NkiTensor, computed: np.ndarray) -> np.ndarray:
    """Return a result in the storage type of its destination, rounded once if the plan computes in float32."""
    return round_to_dtype(dst, computed) if plan.domain is Domain.float32 else np.asarray(computed)


def _list_constant(dtype: DType, contents: np.ndarray) -> Possible:
    array = np.asarray(contents)
    return list_codes(dtype, array) if array.dtype == dtype.storage else get_all_values(dtype)


def _are_equal(first: Possible, second: Possible) -> bool:
    """Return whether two possible values of one dtype are equal; of listed values one contains the other."""
    if isinstance(first, Codes) and isinstance(second, Codes):
        return first.array.size == second.array.size
    return first == second or (first is None and describe_bits(second) is None)
