"""Random operands, one view on both sides: an NkiTensor of the simulator and the oracle's byte addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.oracle.formats import FORMATS, Format
from tests.oracle.machine import Operand

if TYPE_CHECKING:
    from tests.oracle.lockstep import Lockstep

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn", "tfloat32")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
ANY = FLOATS + INTEGERS
_PSUM_BANK_BYTES = 2048


@dataclass(frozen=True)
class Tile:
    """An operand as both sides see it."""

    simulated: Any
    oracle: Operand

    @property
    def shape(self) -> tuple[int, ...]:
        return self.oracle.shape

    @property
    def dtype(self) -> str:
        return self.oracle.format.name

    @property
    def buffer(self) -> str:
        return self.oracle.memory.buffer

    @property
    def free_size(self) -> int:
        return int(np.prod(self.shape[1:]))

    def __str__(self) -> str:
        view = f"strides {self.simulated.strides}, offset {self.simulated.offset}"
        return f"{self.shape} {self.dtype} in {self.oracle.memory.name}, {view}"


@dataclass(frozen=True)
class Register:
    """A register: the simulator's object (None until it exists), the oracle's name."""

    simulated: Any
    name: str
    writable: bool = True
    is_scalar: bool = False

    def __str__(self) -> str:
        return self.name


def _by_pattern(root: Tile, keys: list[slice]) -> Any:
    """Return the slices of a fresh tensor written as an access pattern: [step, count] pairs and an offset."""
    pattern, offset, stride = [], 0, 1
    for size, key in reversed(list(zip(root.shape, keys))):
        step = key.step or 1
        pattern.insert(0, [stride * step, -(-(key.stop - key.start) // step)])
        offset += key.start * stride
        stride *= size
    return root.simulated.ap(pattern, offset=offset)


class Draw:
    """Draws operands of a stream: a few sizes and dtypes, so that later instructions meet earlier results."""

    def __init__(self, lockstep: Lockstep, random: np.random.Generator) -> None:
        self.lockstep = lockstep
        self.random = random
        self.generation = lockstep.core.generation
        self.kept: dict[tuple[int, int, str, str], list[Tile]] = {}
        large = self.chance(0.03)
        self.partitions = [self.upto(8), self.upto(8), self.pick((16, 32, 33, 64, 65, 127, 128))]
        self.frees = [self.upto(12), self.upto(40), 512 if large else self.upto(40)]
        common = [name for name in ANY if name not in ("tfloat32", "float8_e4m3fn")]
        self.dtypes = ["float32", self.pick(common), self.pick(common), self.pick(ANY)]

    # -- plain values -------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def pick(self, options: Any) -> Any:
        return options[int(self.random.integers(len(options)))]

    def upto(self, largest: int) -> int:
        return int(self.random.integers(1, largest + 1))

    def number(self) -> float:
        choice = self.random.random()
        if choice < 0.3:
            return float(self.pick((0.0, 1.0, -1.0, 2.0, 0.5, -0.0)))
        if choice < 0.95:
            return float(np.float32(self.random.standard_normal() * 3))
        return float(self.pick((float("inf"), float("-inf"), 3.0e38, 1e-40, float("nan"))))

    def size(self) -> tuple[int, int]:
        """Return partitions and free size of an instruction; large ones are rarer."""
        p = self.partitions[int(self.random.choice(3, p=(0.5, 0.38, 0.12)))]
        return p, self.frees[int(self.random.choice(3, p=(0.5, 0.35, 0.15)))]

    def dtype(self, allowed: tuple[str, ...] = ANY) -> str:
        usual = [name for name in self.dtypes if name in allowed]
        return self.pick(usual) if usual and self.chance(0.8) else self.pick(allowed)

    def buffer(self) -> str:
        return "psum" if self.chance(0.25) else "sbuf"

    # -- contents -----------------------------------------------------------------------------------------------

    def contents(self, format_: Format, count: int) -> np.ndarray:
        """Return raw bits: moderate values, small whole numbers, any bits, or moderate values with few special ones."""
        random, choice = self.random, self.random.random()
        top = 2**format_.bits
        if choice < 0.08:
            return random.integers(0, top, count, dtype=np.uint64)
        if format_.name == "bool_":
            return random.integers(0, 2, count, dtype=np.uint64)
        if format_.is_integer:
            low, high = format_.limits
            small = random.integers(max(low, -9), 10, count)
            wide = random.integers(low, high, count, endpoint=True)
            return (
                np.where(random.random(count) < (0.2 if choice < 0.6 else 0.9), wide, small) % top
            ).astype(np.uint64)
        if not format_.is_float:
            return random.integers(0, top, count, dtype=np.uint64)
        values = random.standard_normal(count) * (4 if choice < 0.8 else 0.25)
        if choice < 0.3:
            values = np.rint(values)
        bits = format_.encode(values).astype(np.uint64)
        if format_.dropped and choice > 0.5:  # as in a float32 tile viewed as tfloat32
            bits |= random.integers(0, 1 << format_.dropped, count, dtype=np.uint64)
        if choice > 0.88:
            special = random.random(count) < 2 / count
            edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45])
            bits = np.where(special, format_.encode(random.choice(edges, count)), bits).astype(np.uint64)
        return bits

    # -- operands -----------------------------------------------------------------------------------------------

    def tile(
        self,
        partitions: int,
        free: int,
        dtype: str,
        buffer: str = "sbuf",
        *,
        filled: bool = True,
        dims: int = 4,
        apart_from: tuple[Any, ...] = (),
        values: np.ndarray | None = None,
        shape: tuple[int, ...] | None = None,
        start: int | None = None,
        reuse: float = 0.75,
        keep: bool = True,
    ) -> Tile:
        """Return a view of `partitions` rows of `free` elements in at most `dims` dims.

        `values` are written into it first; `shape` fixes the shape; `apart_from` are tiles whose memory it must not
        share; `start` fixes the partition at which it starts; `keep` lets later instructions have it too.
        """
        key = (partitions, free, dtype, buffer)
        taken = {id(t.oracle.memory) for t in apart_from if isinstance(t, Tile)}
        options = [
            t
            for t in self.kept.get(key, [])
            if len(t.shape) <= dims and id(t.oracle.memory) not in taken and shape in (None, t.shape)
        ]
        if values is None and start is None and options and self.chance(reuse):
            return self.pick(options)
        tile = self._carve(partitions, free, dtype, buffer, dims, shape, start)
        if values is not None:
            self.lockstep.fill(tile, np.asarray(values))
        elif filled and not self.chance(0.01):
            self._fill(tile)
        if keep:
            self.kept.setdefault(key, []).append(tile)
        return tile

    @staticmethod
    def rows(tile: Tile, start: int, count: int) -> Tile:
        """Return some partitions of a tile."""
        operand, keys = tile.oracle, slice(start, start + count)
        return Tile(tile.simulated[keys], Operand(operand.memory, operand.format, operand.addresses[keys]))

    def _fill(self, tile: Tile) -> None:
        """Fill a tile, now and then its first partitions or columns only."""
        if self.chance(0.015):
            rows = slice(0, self.upto(tile.shape[0]))
            keys = (rows,) if self.chance(0.5) else (slice(None), slice(0, self.upto(tile.shape[1])))
            operand = tile.oracle
            tile = Tile(
                tile.simulated[keys], Operand(operand.memory, operand.format, operand.addresses[keys])
            )
        self.lockstep.fill(tile, self.contents(tile.oracle.format, tile.oracle.addresses.size))

    def result(self, partitions: int, free: int, dtype: str, buffer: str = "sbuf", **how: Any) -> Tile:
        """Return a destination: no stride-0 view, filled or fresh."""
        return self.tile(partitions, free, dtype, buffer, filled=self.chance(0.3), **how)

    def column(self, partitions: int, dtype: str = "float32", **how: Any) -> Tile:
        return self.tile(partitions, 1, dtype, how.pop("buffer", "sbuf"), **how)

    def source(self, partitions: int, free: int, dtype: str, buffer: str = "sbuf", **how: Any) -> Tile:
        """Return a source, now and then one element per partition repeated along the free dim (stride 0)."""
        if not self.chance(0.05):
            return self.tile(partitions, free, dtype, buffer, **how)
        one = self.tile(partitions, 1, dtype, buffer, shape=(partitions, 1))
        addresses = np.broadcast_to(one.oracle.addresses, (partitions, free))
        return Tile(
            one.simulated.broadcast(1, free), Operand(one.oracle.memory, one.oracle.format, addresses)
        )

    def _factors(self, free: int, most: int) -> list[int]:
        sizes = [free]
        while len(sizes) < most and self.chance(0.35):
            index = int(self.random.integers(len(sizes)))
            divisors = [d for d in range(1, sizes[index] + 1) if sizes[index] % d == 0]
            left = self.pick(divisors)
            sizes[index : index + 1] = [left, sizes[index] // left]
        return sizes

    def _slices(self, sizes: list[int], order: list[int], plain: bool) -> tuple[list[slice], list[int]]:
        """Return a slice per free dim, in `order`, and the size of the dim it is cut from."""
        keys, extents = [], []
        for axis in order:
            begin, step = (
                (0, 1) if plain or self.chance(0.7) else (int(self.random.integers(3)), self.upto(3))
            )
            end = begin + (sizes[axis] - 1) * step + 1
            keys.append(slice(begin, end, step))
            extents.append(end + (0 if plain or self.chance(0.7) else 1))
        return keys, extents

    def _carve(
        self,
        partitions: int,
        free: int,
        dtype: str,
        buffer: str,
        dims: int,
        shape: tuple[int, ...] | None,
        start: int | None,
    ) -> Tile:
        sizes = list(shape[1:]) if shape is not None else self._factors(free, dims - 1)
        plain = free * FORMATS[dtype].bytes > 512 or FORMATS[dtype].name.endswith("_x4")
        order = list(self.random.permutation(len(sizes))) if self.chance(0.25) else list(range(len(sizes)))
        on_chip = buffer in ("sbuf", "psum")
        if start is None:
            steps = 1 if partitions > 64 else 2 if partitions > 32 else 4
            start = int(self.random.integers(steps)) * (128 // steps) if self.chance(0.3) else 0
        if not on_chip:
            start = int(self.random.integers(3))
        room = 128 - start - partitions if on_chip else 3
        total = start + partitions + (min(int(self.random.integers(3)), room) if self.chance(0.3) else 0)
        keys, extents = self._slices(sizes, order, plain)
        if buffer == "psum" and int(np.prod(extents)) * FORMATS[dtype].bytes > _PSUM_BANK_BYTES:
            keys, extents = self._slices(sizes, order, True)
        keys, extents = [slice(start, start + partitions), *keys], [total, *extents]
        stored = dtype
        if self.chance(0.1) and FORMATS[dtype].is_float:
            stored = f"uint{FORMATS[dtype].bits}"
        root = self.lockstep.allocate(tuple(extents), stored, buffer)
        addresses = root.oracle.addresses[tuple(keys)]
        simulated = _by_pattern(root, keys) if self.chance(0.15) else root.simulated[tuple(keys)]
        if order != sorted(order):
            back = (0, *(1 + order.index(axis) for axis in range(len(order))))
            simulated, addresses = simulated.permute(back), addresses.transpose(back)
        if stored != dtype:
            simulated = simulated.view(dtype)
        if shape is None and simulated.is_contiguous() and len(sizes) > 1 and self.chance(0.2):
            # The same elements under fewer or more dims.
            again = (partitions, *self._factors(free, dims - 1))
            simulated, addresses = simulated.reshape(again), addresses.reshape(again)
        return Tile(simulated, Operand(root.oracle.memory, FORMATS[dtype], addresses))
