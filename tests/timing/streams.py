"""Streams made by hand or at random, event by event, on a chip whose arithmetic is exact.

All clocks of `EXACT` are 1 GHz and all costs are multiples of 1/4 ns, so every moment of a schedule is a float without
rounding and tests compare with ==.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulate.hardware import guessed, hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Accumulate, Cost, DmaCost, Domain, Phase, Plan, State, Term
from simulate.isa.template import Template
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.numerics import DTYPES
from simulate.run.stream import Stream, TensorTable
from simulate.timing import Dependences

_CLOCKS = ("tensor", "vector", "scalar", "gpsimd", "sync")
EXACT = hardware("trn2").with_numbers(
    **{f"{name}_clock_ghz": guessed(1.0, "tests", "cycles are nanoseconds") for name in _CLOCKS},
    tensor_throttled_clock_ghz=guessed(0.5, "tests", "half of it"),
    activity_throttle_window_ns=guessed(512.0, "tests", "a power of two, and short for short streams"),
    hbm_gb_per_s_per_core=guessed(256.0, "tests", "a power of two"),
)
COMPUTE = (Engine.tensor, Engine.vector, Engine.scalar, Engine.gpsimd)
TRIGGERS = (Engine.sync, Engine.gpsimd, Engine.scalar)

_LINE = 100
_TERMS = (Term(Phase.issue, ("vector_clock_ghz",), 0.0, True),)
"""Of costs whose basis does not matter."""


_BUFFERS = dict.fromkeys("abc", MemoryRegion.sbuf) | {
    "d": MemoryRegion.private_hbm,
    "e": MemoryRegion.psum,
}


@dataclass
class Builder:
    """One core's stream under construction."""

    rank: int = 0
    core: int = 0
    table: TensorTable | None = None

    def __post_init__(self) -> None:
        self.table = self.table or TensorTable()
        self.stream = Stream(self.rank, self.core, self.table)

    def tensor(
        self, name: str, rows: int = 128, row_bytes: int = 64, buffer: MemoryRegion = MemoryRegion.sbuf
    ) -> NkiTensor:
        """Make a tensor of bytes."""
        dtype = DTYPES["uint8"]
        storage = Storage((rows, row_bytes), dtype, buffer, name, array=np.empty(0, np.uint8), fresh=True)
        self.table.add(storage)
        return NkiTensor((rows, row_bytes), dtype, storage)

    def event(
        self,
        engine: Engine,
        reads: tuple[NkiTensor, ...] = (),
        writes: tuple[NkiTensor, ...] = (),
        cost: Cost = Cost(1.0, 1.0),  # noqa: B008
        trigger: Engine | None = None,
        accumulate: bool = False,
        rendezvous: int | None = None,
        op: str = "op",
        state: State | None = None,
        iteration_of: int | None = None,
    ) -> int:
        """Append an event; returns its index. `iteration_of`: it begins an iteration of the loop of that number."""
        if iteration_of is not None:
            self.stream.iterations[len(self.stream)] = iteration_of
        plan = Plan(
            engine=engine,
            reads=reads,
            writes=writes,
            domain=Domain.bits,
            compute=lambda *operands: operands,
            cost=replace(
                cost, explain=cost.explain or (lambda: _TERMS)
            ),  # a record of its own: its cost can be changed alone
            name=None,
            accumulate=Accumulate.add if accumulate else None,
            trigger=trigger,
            state=state,
        )
        line = (Builder.event.__code__, _LINE + len(self.stream))
        return self.stream.append(Template(op, plan.template()), reads, writes, line, rendezvous).index

    def dma(
        self, reads: tuple[NkiTensor, ...], writes: tuple[NkiTensor, ...], cost: Cost, trigger: Engine
    ) -> int:
        """Append a DMA."""
        return self.event(Engine.dma, reads, writes, cost, trigger, op="dma_copy")


def box(tensor: NkiTensor, rows: tuple[int, int], columns: tuple[int, int]) -> NkiTensor:
    """Return a box of rows by bytes in a whole tensor of bytes."""
    width = tensor.shape[1]
    shape = (rows[1] - rows[0], columns[1] - columns[0])
    return NkiTensor.from_storage(
        shape, tensor.dtype, tensor.storage, (width, 1), rows[0] * width + columns[0]
    )


def dma_cost(
    busy: float, transfer: float = 0.0, trigger: float = 8.0, first: float = 100.0, completion: float = 64.0,
    gpsimd: float = 0.0,
) -> Cost:  # fmt: skip
    """Return the cost of a DMA from its phases."""
    phases = DmaCost(4096, 16, trigger, first, busy, max(transfer, busy), completion, gpsimd, False)
    latency = trigger + gpsimd + first + phases.transfer_ns + completion
    return Cost(trigger + gpsimd, latency, dma=phases)


def tile_cells(row: int, column: int, rows: int, columns: int) -> tuple[int, ...]:
    """Return the cells of a tile of the array, four rows of four, of 32 rows and 32 columns each."""
    return tuple(
        cell
        for cell in range(16)
        if row <= cell // 4 * 32 < row + rows and column <= cell % 4 * 32 < column + columns
    )


def random_streams(
    seed: int, events: int = 24, ranks: int = 1, queues: int = 3, moving: float = 0.4
) -> tuple[Stream, ...]:
    """Return streams of events on few tensors, with boxes that often meet.

    `queues` DMA queues per core; the part `moving` of the events are DMAs. Among the others are memsets of zero in
    PSUM, onto which matmuls accumulate, matmuls in tiles of the array, and steps of device loops.
    """
    generator = np.random.default_rng(seed)
    builders = [Builder(rank=rank) for rank in range(ranks)]
    rendezvous = 0
    for builder in builders:
        for name, buffer in _BUFFERS.items():
            builder.tensor(name, 8, 8, buffer)
    tensors = [_tensors(builder) for builder in builders]
    for _ in range(events):
        if ranks > 1 and generator.random() < 0.15:
            cost = Cost(_quarters(generator, 40), _quarters(generator, 400), rendezvous_ns=100.0)
            for builder, core_tensors in zip(builders, tensors):
                reads, writes = (_box(generator, core_tensors),), (_box(generator, core_tensors),)
                builder.event(
                    Engine.dma, reads, writes, cost, Engine.sync, rendezvous=rendezvous, op="all_reduce"
                )
            rendezvous += 1
            continue
        rank = int(generator.integers(ranks))
        _random_event(generator, builders[rank], tensors[rank], queues, moving)
    return tuple(builder.stream for builder in builders)


def halved(stream: Stream, generator: np.random.Generator) -> Stream:
    """Return the same stream with one number of one event's cost halved."""
    costs = list(stream.costs)
    number = int(generator.integers(len(stream.costs)))
    cost = stream.costs[number]
    record = cost if cost.dma is None else cost.dma
    names = ["interval_cycles", "latency_cycles"]
    if cost.dma is not None:
        names = ["trigger_ns", "first_byte_ns", "busy_ns", "transfer_ns", "completion_ns", "gpsimd_ns"]
    name = names[int(generator.integers(len(names)))]
    cheaper = replace(record, **{name: getattr(record, name) / 2})
    costs[number] = cheaper if cost.dma is None else replace(cost, dma=cheaper)
    return stream.with_costs(costs)


def without(waits: Dependences, dropped: Sequence[int]) -> Dependences:
    """Return the same dependences except for some, given by their places in `packed`."""
    kept = np.ones(len(waits.packed), bool)
    kept[dropped] = False
    return replace(waits, packed=waits.packed[kept], ends=np.append(0, np.cumsum(kept))[waits.ends])


def _random_event(
    generator: np.random.Generator, builder: Builder, tensors: list[NkiTensor], queues: int, moving: float
) -> None:
    if generator.random() < 0.05:
        builder.event(
            Engine.sync, cost=Cost(*[_quarters(generator, 200)] * 2), op="loop_iteration", iteration_of=0
        )
        return
    reads = tuple(_box(generator, tensors) for _ in range(int(generator.integers(0, 3))))
    writes = (_box(generator, tensors),)
    if generator.random() < moving:
        cost = dma_cost(
            busy=_quarters(generator, 300),
            transfer=_quarters(generator, 600),
            trigger=_quarters(generator, 60),
            first=_quarters(generator, 300),
            completion=EXACT.semaphore_ns + _quarters(generator, 100),
            gpsimd=_quarters(generator, 100) * float(generator.random() < 0.3),
        )
        builder.dma(reads, writes, cost, TRIGGERS[int(generator.integers(queues))])
        return
    if generator.random() < 0.15:
        cost = Cost(_quarters(generator, 200), _quarters(generator, 400), clears=True)
        builder.event(COMPUTE[1 + 2 * int(generator.integers(2))], (), (_box(generator, tensors[-1:]),), cost)
        return
    engine = COMPUTE[int(generator.integers(len(COMPUTE)))]
    table = (None, "copy", "exp", "silu")[int(generator.integers(4))] if engine is Engine.scalar else None
    cost = Cost(_quarters(generator, 200), _quarters(generator, 400), table=table)
    if engine is Engine.tensor:
        cost = replace(cost, streamed_cycles=_quarters(generator, 200))
        if generator.random() < 0.5:
            cost = replace(cost, stationary=(1,), kept_cycles=cost.interval_cycles / 4)
        if generator.random() < 0.5:
            cost = replace(cost, cells=_random_tile(generator))
        if generator.random() < 0.6:
            writes = (_box(generator, tensors[-1:]),)
            reads = tuple(_box(generator, tensors[:-1]) for _ in reads)  # its operands lie in SBUF
    adds = engine is Engine.tensor and generator.random() < 0.6
    index = builder.event(engine, reads, writes, cost, accumulate=adds)
    if index and generator.random() < 0.1:
        builder.stream.requested.append((int(generator.integers(index)), index))


def _random_tile(generator: np.random.Generator) -> tuple[int, ...]:
    rows, columns = (int(generator.choice((32, 64))) for _ in range(2))
    row, column = (size * int(generator.integers(128 // size)) for size in (rows, columns))
    return tile_cells(row, column, rows, columns)


def _quarters(generator: np.random.Generator, most: int) -> float:
    return float(generator.integers(4, 4 * most)) / 4


def _tensors(builder: Builder) -> list[NkiTensor]:
    dtype = DTYPES["uint8"]
    out = []
    for record in builder.table.records:
        storage = Storage(
            record.shape, dtype, record.buffer, record.name, array=np.empty(0, np.uint8), fresh=True
        )
        storage.serial = record.serial
        out.append(NkiTensor(record.shape, dtype, storage))
    return out


def _box(generator: np.random.Generator, tensors: list[NkiTensor]) -> NkiTensor:
    tensor = tensors[int(generator.integers(len(tensors)))]
    if generator.random() < 0.4:
        return tensor
    rows, columns = (tuple(sorted(generator.choice(9, 2, replace=False).tolist())) for _ in range(2))
    return box(tensor, rows, columns)
