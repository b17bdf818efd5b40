"""Observation of NaN and infinities: which instruction makes them out of finite operands, and which results get them.

A birth is such an instruction. Each byte of a tensor that contains such a value has an origin: the index of a
birth in `births`, or INTENDED for what a kernel writes or receives on purpose. Origins follow the values
through every instruction: element by element where the instruction works so, else from any operand to the
whole result. The detector `nonfinite` reports the births whose values arrive in an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.check.tile_values import (
    find_defined_elements,
    has_nonfinite_values,
    is_finite,
    read_values,
    resolve_elements,
)
from simulate.isa import propagation
from simulate.isa.enums import ReduceCmd
from simulate.isa.plan import Domain, Masked, Plan
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor, Storage
from simulate.numerics.quiet import quiet
from simulate.run.execute import round_to_dtype
from simulate.run.machine import Issue, NeuronCore
from simulate.run.stream import Stream

_FINITE, INTENDED = -1, -2
_RESETS = (ReduceCmd.reset, ReduceCmd.reset_reduce)
_Origins = np.ndarray
_Key = tuple[int, int]  # rank and serial number of a tensor


@dataclass(frozen=True, slots=True)
class Birth:
    """Instruction that made NaN or infinities out of operands that do not explain them.

    `tensor` is the result, `seen` the clause of the message about it, and `function` the activation function
    or empty.
    """

    stream: Stream
    event: int
    tensor: int
    is_nan: bool
    seen: str
    function: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """Returned or written tensor that contains NaN or infinities of a birth, and the number of these elements."""

    birth: Birth
    rank: int
    tensor: int
    count: int


@dataclass(frozen=True, slots=True)
class _Operand:
    """NaN, infinities and their origins in one operand, in the operand's shape."""

    nan: np.ndarray
    infinite: np.ndarray
    origins: _Origins


class NonFinite:
    """Births and arrivals of one launch, and the origins of the values that are not finite now."""

    def __init__(self) -> None:
        self.births: list[Birth] = []
        self.arrivals: list[Arrival] = []
        self._origins: dict[_Key, _Origins] = {}  # for each byte of a tensor; absent if all of it is finite
        self._known: set[_Key] = set()
        self._arguments: list[tuple[int, NkiTensor]] = []  # with their ranks
        self._operands: dict[_Key, list[_Operand | None]] = {}  # of the running instruction of a core
        self._exchanged: set[int] = set()  # origins that entered a rendezvous

    def before(self, core: NeuronCore, issue: Issue) -> None:
        """Copy the operands and the old results that are not finite, with their origins, before they change."""
        plan, reads, writes = issue
        rank = core.rank.number
        for tile in (*reads, *writes):
            self._mark_contents(rank, tile.storage)
        sources = [self._read_nonfinite(rank, tile) for tile in (*reads, *writes)]
        if any(sources):
            self._operands[rank, core.number] = sources
            if plan.rendezvous is not None:
                self._exchanged |= {
                    int(origin) for source in sources if source for origin in np.unique(source.origins)
                }

    def after(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Record the origins of the results that are not finite, and a birth if no operand explains some of them."""
        plan, reads, writes = issue
        rank, event = core.rank.number, len(core.stream)
        sources = self._operands.pop((rank, core.number), None) or [None] * (len(reads) + len(writes))
        for number, tile in enumerate(writes):
            key = rank, tile.storage.serial
            if not has_nonfinite_values(tile) or is_finite(tile):
                if key in self._origins:
                    self._clear(key, tile)
                continue
            values = read_values(tile)
            nan, infinite = np.isnan(values), np.isinf(values)
            defined = find_defined_elements(tile)
            previous = sources[len(reads) + number]
            keeps = plan.accumulate is not None or event in core.stream.masked
            causes = [source for source in sources[: len(reads)] if source is not None]
            if keeps and previous is not None and tile.dynamic is None:
                causes.append(previous)
            origins = self._inherit_origins(plan, tile, nan, infinite, causes)
            fresh = (nan | infinite) & (origins == _FINITE)
            if (fresh & defined).any() and not core.rank.tolerated:
                origins[fresh] = self._record_birth(core, issue, number, (nan & fresh, fresh), operands)
            else:
                origins[fresh] = INTENDED
            self._set_origins(key, tile, origins)

    def ended(self, returned: Iterable[tuple[int, NkiTensor]]) -> None:
        """Append to `arrivals` the births whose values are in a returned tensor or a written argument.

        Args:
            returned: The rank and the tensor of everything that was returned.
        """
        outputs = list(returned)
        named = {(rank, tensor.storage.serial) for rank, tensor in outputs}
        outputs += [pair for pair in self._arguments if (pair[0], pair[1].storage.serial) not in named]
        for rank, tensor in outputs:
            operand = self._read_nonfinite(rank, tensor)
            if operand is None:
                continue
            marked = operand.origins[operand.nan | operand.infinite]
            for number in np.unique(marked[marked >= 0]):
                count = int((marked == number).sum())
                self.arrivals.append(Arrival(self.births[number], rank, tensor.storage.serial, count))

    def _mark_contents(self, rank: int, storage: Storage) -> None:
        """Mark NaN and infinities in an argument or a constant as intended, at the first access of a tensor."""
        key = rank, storage.serial
        if key in self._known:
            return
        self._known.add(key)
        if storage.host is not None:
            self._arguments.append((rank, NkiTensor.from_storage(storage.shape, storage.dtype, storage)))
        if storage.validity.uniform == 0 or not storage.dtype.is_float or storage.dtype.is_packed:
            return
        view = NkiTensor.from_storage(storage.shape, storage.dtype, storage)
        if not is_finite(view):
            values = read_values(view)
            self._set_origins(key, view, np.where(np.isfinite(values), _FINITE, INTENDED).astype(np.int32))

    def _read_nonfinite(self, rank: int, tile: NkiTensor) -> _Operand | None:
        """Return the values of an operand that are not finite, with their origins; None if all values are finite."""
        key = rank, tile.storage.serial
        reinterpreted = tile.dtype is not tile.storage.dtype and not tile.storage.dtype.is_float
        if (
            (key not in self._origins and not reinterpreted)
            or not has_nonfinite_values(tile)
            or is_finite(tile)
        ):
            return None
        values = read_values(tile)
        origins = self._get_origins(key, tile)
        marked = np.full(values.shape, INTENDED, np.int32) if origins is None else origins.copy()
        nonfinite = ~np.isfinite(values)
        marked[nonfinite & (marked == _FINITE)] = INTENDED
        marked[~nonfinite] = _FINITE
        return _Operand(np.isnan(values), np.isinf(values), marked)

    def _inherit_origins(
        self, plan: Plan, tile: NkiTensor, nan: np.ndarray, infinite: np.ndarray, causes: list[_Operand]
    ) -> _Origins:
        """Return the origin of each element of a result, int32 in its shape; _FINITE where no operand explains it.

        Args:
            plan: The plan of the instruction.
            tile: The result.
            nan: Which elements of the result are NaN, in its shape.
            infinite: Which elements are infinite.
            causes: The operands that are not finite.
        """
        origins = np.full(nan.shape, _FINITE, np.int32)
        if plan.rendezvous is not None:
            births = [origin for origin in self._exchanged if origin >= 0]
            origins[nan | infinite] = min(births, default=INTENDED)
            return origins
        if plan.registers is not None and plan.registers.command not in _RESETS:
            # The registers contain what earlier instructions have added to them, or were never set.
            origins[nan | infinite] = len(self.births) - 1 if self.births else INTENDED
            return origins
        for cause in causes:
            placed = _align_operand(plan, cause, tile)
            if placed is None:
                self._spread(origins, nan, infinite, cause)
                continue
            # An intended infinity explains an infinity, and no NaN: the instruction subtracts two infinities, or
            # multiplies an infinity by zero.
            explains = placed.nan | (placed.infinite & ((placed.origins >= 0) | ~nan))
            fits = explains & (nan | infinite)
            better = fits & ((origins == _FINITE) | (origins == INTENDED))
            origins[better] = placed.origins[better]
        return origins

    @staticmethod
    def _spread(origins: _Origins, nan: np.ndarray, infinite: np.ndarray, cause: _Operand) -> None:
        """Write an origin of an operand into `origins` for every element that is not finite and has no birth so far.

        Used if the instruction may combine all elements of the operand into one. An operand without NaN
        explains no NaN.
        """
        births = cause.origins[cause.origins >= 0]
        if births.size:
            unexplained = (nan | infinite) & (origins < 0)
            origins[unexplained] = births.min()
        else:
            explained = (nan | infinite) if cause.nan.any() else infinite
            origins[explained & (origins == _FINITE)] = INTENDED

    def _record_birth(
        self,
        core: NeuronCore,
        issue: Issue,
        number: int,
        fresh: tuple[np.ndarray, np.ndarray],
        operands: Sequence[Any],
    ) -> int:
        """Append a birth to `births` and return its index.

        Constants and results of instructions without operands are no births: INTENDED is returned.

        Args:
            core: The core that issues the instruction.
            issue: The plan, its reads and its writes.
            number: The index of the result among the writes.
            fresh: Which elements are NaN, and which are NaN or infinite, without an explanation.
            operands: The values of the operands.
        """
        plan, reads, writes = issue
        nan, any_new = fresh
        if not reads or (not nan.any() and _is_constant(plan, number, writes[number], operands)):
            return INTENDED
        count = int(nan.sum()) if nan.any() else int(any_new.sum())
        seen = f"{count} of {writes[number].size} results {'NaN' if nan.any() else 'infinite'}"
        function = "" if plan.argument is None else plan.argument.function.name
        stream = core.stream
        self.births.append(
            Birth(stream, len(stream), writes[number].storage.serial, bool(nan.any()), seen, function)
        )
        return len(self.births) - 1

    def _get_origins(self, key: _Key, tile: NkiTensor) -> _Origins | None:
        """Return the origins of a view's elements, int32 in its shape; None if all of its tensor is finite.

        The array is a view of the table of the tensor, so that a caller may write to it; a copy for a
        run-time address.
        """
        table = self._origins.get(key)
        if table is None:
            return None
        if tile.dynamic is None:
            _, shape, strides, offset, _ = tile.byte_view()
            return np.ndarray(shape, np.int32, table, 4 * offset, [4 * stride for stride in strides])
        elements, inside = resolve_elements(tile)
        origins = table[np.where(inside, elements, 0) * tile.dtype.storage.itemsize]
        return np.where(inside, origins, _FINITE).astype(np.int32)

    def _set_origins(self, key: _Key, tile: NkiTensor, origins: _Origins) -> None:
        if key not in self._origins:
            self._origins[key] = np.full(tile.storage.nbytes, _FINITE, np.int32)
        if tile.dynamic is None:
            view = self._get_origins(key, tile)
            assert view is not None
            view[...] = origins
        else:
            elements, inside = resolve_elements(tile)
            self._origins[key][elements[inside] * tile.dtype.storage.itemsize] = origins[inside]

    def _clear(self, key: _Key, tile: NkiTensor) -> None:
        if tile.covers_storage:
            del self._origins[key]
        else:
            self._set_origins(key, tile, np.full(tile.shape, _FINITE, np.int32))


def _align_operand(plan: Plan, cause: _Operand, tile: NkiTensor) -> _Operand | None:
    """Return an operand's NaN, infinities and origins in the result's shape, element on element.

    None if no element of the result corresponds to one element of the operand.
    """
    moves = plan.propagate in (propagation.moved, propagation.transposed) or plan.effects.transposes
    if moves and len(plan.reads) == 1:
        return _Operand(
            *(_move_elements(plan, array, tile) for array in (cause.nan, cause.infinite, cause.origins))
        )
    copies = plan.domain is Domain.bits and cause.nan.size == tile.size
    if plan.propagate is not propagation.elementwise and not plan.effects.copies and not copies:
        return None
    if cause.nan.size == tile.size:
        return _Operand(*(a.reshape(tile.shape) for a in (cause.nan, cause.infinite, cause.origins)))
    if cause.nan.size != tile.shape[0]:
        return None
    column = (tile.shape[0], *(1,) * (tile.ndim - 1))
    columns = (array.reshape(column) for array in (cause.nan, cause.infinite, cause.origins))
    return _Operand(*(np.broadcast_to(array, tile.shape) for array in columns))


def _move_elements(plan: Plan, array: np.ndarray, tile: NkiTensor) -> np.ndarray:
    """Return an array of an `_Operand`, in the result's shape, as an instruction that only moves elements would."""
    if plan.propagate is propagation.transposed:
        return flat(array).T.reshape(tile.shape)
    (result,) = plan.compute(array)
    if isinstance(result, Masked):
        fill = _FINITE if array.dtype == np.int32 else False
        result = np.where(result.chosen, result.values, fill)
    return np.asarray(result).reshape(tile.shape)


@quiet
def _is_constant(plan: Plan, number: int, tile: NkiTensor, operands: Sequence[Any]) -> bool:
    """Return whether a result has infinities whatever the operands are, such as the fill of a mask.

    The instruction is computed again on zeros and on ones. False for rendezvous, for state, and if that
    fails.
    """
    if plan.state is not None or plan.rendezvous is not None:
        return False
    try:
        for constant in (np.zeros_like, np.ones_like):
            result = plan.compute(*[constant(np.asarray(operand)) for operand in operands])[number]
            values = round_to_dtype(tile, np.asarray(getattr(result, "values", result)).reshape(tile.shape))
            if np.isfinite(values.astype(np.float32)).all():
                return False
    except (ValueError, IndexError, TypeError, AttributeError):
        return False
    return True
