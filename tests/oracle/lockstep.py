"""Random instruction streams on the simulator and on the oracle, with all state compared after every instruction."""

from __future__ import annotations

import operator
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nkw.errors import NkwError
from simulate.hardware import hardware
from simulate.isa.plan import State
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import current_core
from simulate.world import launch
from tests.oracle.definedness import poisoned, use_of
from tests.oracle.draw import Draw, Register, Tile
from tests.oracle.formats import FORMATS
from tests.oracle.instructions import INSTRUCTIONS
from tests.oracle.known import is_known
from tests.oracle.machine import POISON, Core, Memory, Offsets, Operand, OutOfRange, Range, Rows, Unwritten
from tests.oracle.streams import DRAWS, drawn, loop

TARGETS = ("trn1", "trn2", "trn3")
PER_KERNEL = 60
_GENERATION = {"trn1": 2, "trn2": 3, "trn3": 4}
_BUFFERS = {"sbuf": nl.sbuf, "psum": nl.psum, "hbm": nl.private_hbm}
_FEED_BYTES = 136 * 512 * 4  # the largest table that is drawn: a few rows more than partitions
_OPERATORS = frozenset("op op0 op1 cmp_op comp_op0 comp_op1 reduce_op".split())
_TENSOR_ENGINE = frozenset({"nc_matmul", "nc_matmul_mx"})
_UNDEFINED = ("NKW-UNWRITTEN", "NKW-REGISTERS-UNSET")
_ENUMS = {name: getattr(nisa, name) for name in ("engine", "reduce_cmd", "oob_mode", "dge_mode")}
_ACCUMULATORS = {"scalar": State.scalar_accumulator, "vector": State.vector_accumulator}


class Difference(AssertionError):
    """The simulator and the oracle disagree."""


@dataclass
class Tally:
    """The counts of a run: instructions that agreed, calls that both sides refused, and `.indirect` operands."""

    compared: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    gathered: Counter[str] = field(default_factory=Counter)
    scattered: Counter[str] = field(default_factory=Counter)
    fills: int = 0

    @property
    def instructions(self) -> int:
        return sum(self.compared.values()) + sum(self.refused.values())


class Lockstep:
    """One stream inside one kernel; `oracle` maps instruction names to their second implementation."""

    def __init__(
        self,
        target: str,
        seed: int,
        feed: Any,
        host: np.ndarray,
        oracle: Mapping[str, Callable[..., None]],
        tally: Tally,
    ) -> None:
        self.target, self.seed = target, seed
        self.core = Core(_GENERATION[target])
        self.oracle = oracle
        self.tally = tally
        self.memories: list[tuple[Any, Memory]] = []
        self.registers: dict[str, Register] = {}
        self._feed, self._host = feed, host
        memory = Memory("feed", "hbm", host.copy(), np.ones(host.size, np.uint8))
        self._feed_memory = memory
        self.memories.append((feed.storage, memory))
        self._step = self._named = 0

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(self, shape: tuple[int, ...], dtype: str, buffer: str) -> Tile:
        """Allocate on both sides."""
        tensor = nl.ndarray(shape, dtype, _BUFFERS[buffer])
        storage = tensor.storage
        name = f"{buffer}{len(self.memories)}"
        # Bytes that nothing has written are compared as well, so both sides begin with the same ones.
        memory = Memory(name, buffer, storage.array.copy(), np.zeros(storage.nbytes, np.uint8))
        self.memories.append((storage, memory))
        format_ = FORMATS[dtype]
        addresses = format_.bytes * np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        return Tile(tensor, Operand(memory, format_, addresses))

    def fill(self, tile: Tile, bits: np.ndarray) -> None:
        """Bring raw bits into a tile: host array to SBUF or HBM by DMA, on to PSUM by a copy."""
        format_ = tile.oracle.format
        raw = np.ascontiguousarray(bits.reshape(-1).astype(format_.unsigned)).view(np.uint8)
        for memory in (self._host, self._feed_memory.bytes):
            memory[: raw.size] = raw
        addresses = format_.bytes * np.arange(bits.size, dtype=np.int64).reshape(tile.shape)
        source = Tile(
            self._feed[: raw.size].view(format_.name).reshape(tile.shape),
            Operand(self._feed_memory, format_, addresses),
        )
        self.tally.fills += 1
        if tile.oracle.memory.buffer != "psum":
            self.step("dma_copy", {"dst": tile, "src": source}, counted=False)
            return
        between = self.allocate(tile.shape, format_.name, "sbuf")
        self.step("dma_copy", {"dst": between, "src": source}, counted=False)
        self.step("tensor_copy", {"dst": tile, "src": between}, counted=False)

    def register(self, value: int) -> Register:
        """Make a register with a value."""
        register = replace(self.new_register(), simulated=nisa.register_alloc())
        self.registers[register.name] = register
        self.step("register_move", {"dst": register, "src": value}, counted=False)
        return register

    def new_register(self) -> Register:
        """Return the name of a scalar that the next instruction makes."""
        self._named += 1
        return Register(None, f"register{self._named}")

    def scalar(self, value: int) -> Register:
        """Make a scalar with a value, loaded from memory."""
        tile, register = self.allocate((1, 1), "int32", "sbuf"), self.new_register()
        self.fill(tile, np.array([[value % 2**32]], np.uint64))
        self.step("scalar_load", {"dst": register, "src": tile}, counted=False)
        return self.registers[register.name]

    def hold(self, counter: Any, value: int) -> Register:
        """Hold a loop's counter, which has to have `value` until it is released."""
        register = replace(self.new_register(), simulated=counter, writable=False)
        self.registers[register.name] = register
        self.core.registers[register.name] = value
        return register

    def release(self, register: Register) -> None:
        """Forget a loop's counter."""
        del self.registers[register.name]

    def expect(self, loop: str, seen: list[int], expected: list[int]) -> None:
        """Count a loop, whose counter has to have gone through these values."""
        self.tally.compared[loop] += 1
        if seen != expected:
            raise Difference(self._report(loop, {}, f"its counter was {seen}, not {expected}"))

    def rows_of(self, tensor: Tile, index: Tile, count: int | None = None) -> Tile:
        """Return `count` rows (default: one a partition) of an HBM matrix, named by an index tile column by column."""
        width, rows = tensor.shape[1], count or index.shape[0]
        simulated = tensor.simulated.ap([[width, rows], [1, width]], vector_offset=index.simulated)
        bytes_per_row = width * tensor.oracle.format.bytes
        listed = index.oracle.addresses.T.reshape(-1)[:rows]
        addresses = tensor.oracle.addresses[:1] + np.zeros((rows, 1), np.int64)
        named = Rows(
            Operand(index.oracle.memory, index.oracle.format, listed), bytes_per_row, tensor.shape[0]
        )
        return Tile(simulated, Operand(tensor.oracle.memory, tensor.oracle.format, addresses, named))

    def listed(self, base: Tile, index: Tile, count: int) -> Tile:
        """Return `count` elements of every partition of a tile, whose offsets an index lists group by group."""
        first = base.oracle.addresses.reshape(base.shape[0], -1)[:, :1]
        addresses = np.broadcast_to(first, (base.shape[0], count))
        offsets = Offsets(index.oracle, base.free_size)
        simulated = base.simulated.indirect(index.simulated, count)
        return Tile(simulated, Operand(base.oracle.memory, base.oracle.format, addresses, offsets=offsets))

    def rows_from(self, tensor: Tile, index: Tile | Register, count: int = 1) -> Tile:
        """Return so many rows of an HBM matrix, of which a register or a (1, 1) tile names the first."""
        width = tensor.shape[1]
        simulated = tensor.simulated.ap([[width, count], [1, width]], scalar_offset=index.simulated)
        number = index.name if isinstance(index, Register) else index.oracle
        rows = Rows(number, width * tensor.oracle.format.bytes, tensor.shape[0])
        addresses = tensor.oracle.addresses[:count]
        return Tile(simulated, Operand(tensor.oracle.memory, tensor.oracle.format, addresses, rows))

    # -- one instruction ----------------------------------------------------------------------------------------

    def step(self, name: str, arguments: Mapping[str, Any], counted: bool = True) -> None:
        """Carry out one instruction on both sides and compare everything."""
        self._step += 1
        refusal = expected = None
        try:
            self._simulate(name, arguments)
        except NkwError as error:
            refusal = error
        except Exception as error:
            raise Difference(self._report(name, arguments, f"it raised {error!r}")) from error
        self.core.ranges.clear()
        call = {key: _oracle(value) for key, value in arguments.items()}
        for key, value in call.items():
            if isinstance(value, Operand) and value.offsets is not None:
                (self.tally.scattered if key == "dst" else self.tally.gathered)[name] += 1
        undefined = use = None
        try:
            use = use_of(name, self.core, call)
            undefined = poisoned(name, self.core, call, use)
            self.core.reads_anything = undefined is not None
            with np.errstate(all="ignore"):
                group = 32 if name in _TENSOR_ENGINE else 16
                if name != "dma_copy":  # which skips offsets out of range by itself
                    call = {
                        key: self.core.resolved(argument, group)
                        if isinstance(argument, Operand)
                        else argument
                        for key, argument in call.items()
                    }
                self.oracle[name](self.core, **call)
            if use is not None:
                use.mark(undefined)
        except (Unwritten, OutOfRange) as error:
            expected = self._out_of_range(name, call) or error  # either may be refused first
        for operand, whole_elements in undefined or ():
            operand.memory.state[operand.every_byte()[~whole_elements]] = POISON
        if counted:
            (self.tally.compared if refusal is None else self.tally.refused)[name] += 1
        wanted = (
            refusal is None
            if expected is None
            else refusal is not None and (isinstance(expected, OutOfRange) or refusal.code in _UNDEFINED)
        )
        difference = f"it answered {refusal}, the oracle {expected!r}" if not wanted else ""
        # The instruction that a fill is for compares the bytes of the fill.
        if not difference and (counted or self.core.ranges):
            difference = self._compare()
        if difference:
            raise Difference(self._report(name, arguments, difference))

    def _out_of_range(self, name: str, call: Mapping[str, Any]) -> OutOfRange | None:
        """Return the error of an offset beyond its tensor, if the call has one."""
        try:
            for argument in call.values() if name != "dma_copy" else ():
                if isinstance(argument, Operand):
                    self.core.resolved(argument, 32 if name in _TENSOR_ENGINE else 16)
        except OutOfRange as error:
            return error
        except Unwritten:
            pass
        return None

    def _simulate(self, name: str, arguments: Mapping[str, Any]) -> None:
        operands = {key: _simulated(key, value) for key, value in arguments.items()}
        if name == "scalar_load":
            made = nisa.scalar_load(operands["src"])
        elif name == "scalar_arithmetic":
            made = getattr(operator, operands["operator"])(operands["left"], operands["right"])
        else:
            getattr(nisa, name)(**operands)
            return
        dst: Register = arguments["dst"]
        self.registers[dst.name] = replace(dst, simulated=made, is_scalar=True)

    def _report(self, name: str, arguments: Mapping[str, Any], difference: str) -> str:
        head = f"{name} on {self.target}, stream {self.seed}, step {self._step}: {difference}"
        return "\n".join([head, *(f"  {key} = {_shown(value)}" for key, value in arguments.items())])

    def _compare(self) -> str:
        for known_range in self.core.ranges:
            if difference := self._settle(known_range):
                return difference
        for storage, memory in self.memories:
            # Comparing bytes objects is several times faster than comparing small arrays.
            if storage.array.tobytes() != memory.bytes.tobytes():
                position = int(np.flatnonzero(storage.array != memory.bytes)[0])
                return f"byte {position} of {memory.name} is {storage.array[position]}, not {memory.bytes[position]}"
            if difference := _compare_states(storage.validity, memory):
                return difference
        for name, register in self.registers.items():
            value = register.simulated.value
            if value != self.core.registers[name]:
                return f"{name} is {value}, not {self.core.registers[name]}"
        return self._compare_accumulators()

    def _settle(self, known_range: Range) -> str:
        """Check the elements that are known up to rounding, and take over the simulator's bits for them."""
        operand = known_range.operand
        storage = next(storage for storage, memory in self.memories if memory is operand.memory)
        addresses = operand.every_byte()
        raw = np.ascontiguousarray(storage.array[addresses])
        seen = operand.format.decode(raw.view(operand.format.unsigned)[..., 0])
        wrong = ~known_range.free & np.where(
            known_range.nan | np.isnan(seen),
            np.isnan(seen) != (known_range.nan | known_range.perhaps),
            ~_within(seen, known_range.low, known_range.high),
        )
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            return (
                f"element {first} written is {seen[first]!r}, "
                f"not within {known_range.low[first]!r} to {known_range.high[first]!r} "
                f"({int(wrong.sum())} of {wrong.size} differ)"
            )
        operand.memory.bytes[addresses] = raw
        return ""

    def _compare_accumulators(self) -> str:
        for name, state in _ACCUMULATORS.items():
            registers = getattr(self.core, name)
            seen = current_core().state(state)[:, 0].astype(np.float64)
            known = ~np.isinf(registers.slack)
            slack = np.where(known, registers.slack, 0.0)
            low = np.float32(registers.values - slack).astype(np.float64)
            high = np.float32(registers.values + slack).astype(np.float64)
            nan = np.isnan(registers.values)
            wrong = known & np.where(nan, ~np.isnan(seen), ~_within(seen, low, high))
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                return f"{name} accumulator {row} is {seen[row]!r}, not within {low[row]!r} to {high[row]!r}"
            registers.values[known] = seen[known]
            registers.slack[known] = 0.0
        return ""


def _compare_states(validity: Any, memory: Memory) -> str:
    """Return whether both sides agree on which bytes were written, and by a matmul."""
    expected = memory.state.tobytes()
    if validity.uniform is not None:
        seen = bytes((validity.uniform,)) * len(expected)
    else:
        seen = validity.mask.tobytes()
    if seen == expected:
        return ""
    position = next(i for i, (one, other) in enumerate(zip(seen, expected)) if one != other)
    return f"byte {position} of {memory.name} has state {seen[position]}, not {expected[position]}"


def _within(seen: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (seen >= low) & (seen <= high)


def _simulated(key: str, value: Any) -> Any:
    if isinstance(value, (Tile, Register)):
        return value.simulated
    if isinstance(value, list) and value and isinstance(value[0], Tile):
        return [tile.simulated for tile in value]
    if key in _OPERATORS and isinstance(value, str):
        return getattr(nl, value)
    if key in _ENUMS and isinstance(value, str):
        return _ENUMS[key][value]
    return value


def _oracle(value: Any) -> Any:
    if isinstance(value, Tile):
        return value.oracle
    if isinstance(value, Register):
        return value.name
    if isinstance(value, list) and value and isinstance(value[0], Tile):
        return [tile.oracle for tile in value]
    return value


def _shown(value: Any) -> str:
    return "; ".join(str(v) for v in value) if isinstance(value, list) else str(value)


def run(
    instructions: int,
    seed: int,
    targets: tuple[str, ...] = TARGETS,
    oracle: Mapping[str, Callable[..., None]] = INSTRUCTIONS,
    only: frozenset[str] | None = None,
) -> Tally:
    """Compare `instructions` random instructions, streams of PER_KERNEL each, on the targets in turn.

    Raises Difference at the first disagreement. `only` restricts what is drawn; ValueError if no target has any of it.
    """
    tally, number = Tally(), 0
    while tally.instructions < instructions:
        if number >= len(targets) and not tally.instructions:
            raise ValueError(f"{', '.join(targets)} can draw none of {', '.join(sorted(only or ()))}")
        target = targets[number % len(targets)]
        stream(target, zlib.crc32(f"{seed}/{number}".encode()), oracle, tally, only)
        number += 1
    return tally


def stream(
    target: str,
    seed: int,
    oracle: Mapping[str, Callable[..., None]] = INSTRUCTIONS,
    tally: Tally | None = None,
    only: frozenset[str] | None = None,
) -> Tally:
    """Run one kernel of PER_KERNEL random instructions."""
    tally = tally if tally is not None else Tally()
    host = np.zeros(_FEED_BYTES, np.uint8)

    def kernel(feed: Any) -> None:
        lockstep = Lockstep(target, seed, feed, host, oracle, tally)
        draw = Draw(lockstep, np.random.default_rng(seed))
        names = [name for name in DRAWS if only is None or name in only]

        def one() -> None:
            name = draw.pick(names)
            arguments = drawn(draw, name)
            if arguments is not None and not is_known(name, arguments):
                lockstep.step(name, arguments)

        for _ in range(PER_KERNEL):
            if only is None and draw.chance(0.01):
                loop(draw, one)
            else:
                one()

    launch(kernel, [((host,), {})], hardware(target))
    return tally
