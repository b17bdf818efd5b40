"""A toy core: memories as bytes with a written and an accumulated map, and operands as lists of byte addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracle.formats import Format, single

LANES = 128
EMPTY, WRITTEN, ACCUMULATED, POISON = 0, 1, 3, 4
"""The state of a byte; the lowest bit tells whether it is defined. POISON: computed from unwritten bytes."""


class Unwritten(Exception):
    """An instruction reads unwritten bytes."""


class OutOfRange(Exception):
    """A run-time index lies outside the dim it addresses."""


@dataclass
class Memory:
    """One allocation: its bytes, and of each byte whether it was written, and whether by a matmul."""

    name: str
    buffer: str
    bytes: np.ndarray
    state: np.ndarray


@dataclass(frozen=True)
class Rows:
    """The run-time part of an address: row numbers, the bytes from row to row, and how many rows there are.

    `index` is a tile with one number per row of the operand, or a register with one for all.
    """

    index: Operand | str
    bytes_per_row: int
    extent: int


@dataclass(frozen=True)
class Offsets:
    """The run-time part of an `.indirect` address: each group of partitions lists element offsets for all of them.

    `index` has a row per partition; offset i of a group lies in its row i modulo the group's size, column i divided by
    it. `extent` is how many elements a partition of the tile has.
    """

    index: Operand
    extent: int


@dataclass(frozen=True)
class Operand:
    """Elements of one format: the byte address of each, in the shape the instruction sees.

    With `offsets` the addresses are those of each partition's first element, repeated.
    """

    memory: Memory
    format: Format
    addresses: np.ndarray
    rows: Rows | None = None
    offsets: Offsets | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.addresses.shape

    @property
    def is_dynamic(self) -> bool:
        """Whether an index that is read at run time is part of the address."""
        return self.rows is not None or self.offsets is not None

    def flat(self) -> Operand:
        """Return one row per partition, elements in streaming order."""
        return Operand(self.memory, self.format, self.addresses.reshape(self.shape[0], -1), self.rows)

    def every_byte(self) -> np.ndarray:
        return self.addresses[..., None] + np.arange(self.format.bytes)


@dataclass
class Range:
    """Elements of which the written value is known up to rounding errors: any value from low to high is right.

    `nan` elements must be NaN, `perhaps` elements may be, and `free` ones may be anything.
    """

    operand: Operand
    low: np.ndarray
    high: np.ndarray
    nan: np.ndarray
    perhaps: np.ndarray
    free: np.ndarray


@dataclass
class Accumulators:
    """128 float32 registers with the error that each may have; an infinite error marks an unknown value.

    `states` tells which of them are EMPTY, WRITTEN or POISON (see `definedness`).
    """

    values: np.ndarray
    slack: np.ndarray
    states: np.ndarray

    @classmethod
    def holding(cls, value: float, slack: float) -> Accumulators:
        return cls(np.full(LANES, value), np.full(LANES, slack), np.full(LANES, EMPTY))


@dataclass
class Core:
    """The state that instructions change. `generation` is 2, 3 or 4."""

    generation: int
    scalar: Accumulators = field(default_factory=lambda: Accumulators.holding(0.0, 0.0))
    vector: Accumulators = field(default_factory=lambda: Accumulators.holding(np.nan, np.inf))
    registers: dict[str, int] = field(default_factory=dict)
    generators: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """State words of the generators of an engine's lanes, where they are known."""
    ranges: list[Range] = field(default_factory=list)
    reads_anything: bool = False
    """Whether the current instruction may read unwritten bytes (see `definedness`)."""

    # -- reading ------------------------------------------------------------------------------------------------

    def bits(self, operand: Operand) -> np.ndarray:
        """Return the raw bits of every element."""
        addresses = operand.every_byte()
        if not self.reads_anything and not (operand.memory.state[addresses] & WRITTEN).all():
            raise Unwritten(operand.memory.name)
        raw = np.ascontiguousarray(operand.memory.bytes[addresses])
        return raw.view(operand.format.unsigned)[..., 0]

    def values(self, operand: Operand) -> np.ndarray:
        """Return every element as the float32 an engine computes with."""
        return single(operand.format.decode(self.bits(operand)))

    def matrix(self, operand: Operand) -> np.ndarray:
        """Return float32 values, one row per partition."""
        return self.values(operand.flat())

    def column(self, operand: Any) -> np.ndarray:
        """Return a (P, 1) operand or a number, to stand beside rows."""
        if isinstance(operand, Operand):
            return self.matrix(operand)
        return single(np.array([[float(operand)]]))

    def resolved(self, operand: Operand, group: int) -> Operand:
        """Return an `.indirect` operand with its offsets put in, for an engine with groups of so many partitions."""
        if operand.offsets is None:
            return operand
        placed, inside = self.listed(operand, operand.offsets, group)
        if not inside.all():
            raise OutOfRange
        return placed

    def listed(self, operand: Operand, offsets: Offsets, group: int) -> tuple[Operand, np.ndarray]:
        """Return an `.indirect` operand with its offsets put in, and which of its elements lie inside of the tile."""
        index = offsets.index.flat()
        rows = index.format.decode(self.bits(index)).astype(np.int64)
        partitions, count = operand.shape
        indices = np.zeros((partitions, count), np.int64)
        for partition in range(partitions):
            first = partition - partition % group
            for i in range(count):
                indices[partition, i] = rows[first + i % group, i // group]
        inside = (indices >= 0) & (indices < offsets.extent)
        addresses = operand.addresses + np.where(inside, indices, 0) * operand.format.bytes
        return Operand(operand.memory, operand.format, addresses), inside

    # -- writing ------------------------------------------------------------------------------------------------

    def write_bits(
        self,
        operand: Operand,
        bits: np.ndarray,
        chosen: np.ndarray | None = None,
        accumulated: bool = False,
    ) -> None:
        """Put raw bits into the elements (or the chosen ones)."""
        element = operand.format.unsigned
        raw = np.ascontiguousarray(bits.reshape(operand.shape).astype(element))[..., None].view(np.uint8)
        addresses = operand.every_byte()
        if chosen is not None:
            chosen = chosen.reshape(operand.shape)
            addresses, raw = addresses[chosen], raw[chosen]
        operand.memory.bytes[addresses] = raw
        operand.memory.state[addresses] = ACCUMULATED if accumulated else WRITTEN

    def write(
        self,
        operand: Operand,
        values: np.ndarray,
        slack: np.ndarray | None = None,
        chosen: np.ndarray | None = None,
        accumulated: bool = False,
    ) -> None:
        """Round float32 values once into the operand's format.

        `slack` is the absolute error that values may have before that rounding, infinite where nothing is known;
        None means none and also fixes the sign of zeros. NaN is compared by being NaN.
        """
        values = np.asarray(values, np.float64).reshape(operand.shape)
        self.write_bits(operand, operand.format.encode(values), chosen, accumulated)
        nan = np.isnan(values) if operand.format.is_float else np.zeros(values.shape, np.bool_)
        overflows_to_nan = operand.format.is_float and not operand.format.infinite
        if slack is None and not nan.any() and not overflows_to_nan:
            return
        width = np.reshape(slack, operand.shape) if slack is not None else np.zeros(operand.shape)
        free = np.isinf(width)
        if chosen is not None:
            free = free & chosen.reshape(operand.shape)
        finite = np.where(free, 0.0, width)
        # The sum itself must not round inward: one float64 step outward each.
        low = np.where(finite == 0, values, np.nextafter(values - finite, -np.inf))
        high = np.where(finite == 0, values, np.nextafter(values + finite, np.inf))
        low, high = operand.format.rounded(low), operand.format.rounded(high)
        # A format without infinity overflows to NaN, so a bound beyond it allows NaN.
        perhaps = np.isnan(low) | np.isnan(high)
        low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
        nan = np.isnan(operand.format.rounded(values)) & (finite == 0)
        bounds = [low, high, nan, perhaps, free]
        if chosen is not None:
            kept = chosen.reshape(operand.shape)
            operand = Operand(operand.memory, operand.format, operand.addresses[kept])
            bounds = [bound[kept] for bound in bounds]
        self.ranges.append(Range(operand, *bounds))
