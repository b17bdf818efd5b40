"""`Plan`: the result of planning one instruction, and the only thing that `simulate.run.issue` acts upon."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa.enums import Engine, ReduceCmd
from simulate.memory import NkiTensor, Storage
from simulate.numerics import ActivationFunction, random


class Domain(Enum):
    """How operands reach `compute` and results leave it.

    float32: operands are converted to float32, results are float32 and rounded once into the destination's dtype.
    bits: operands come in their storage dtype, and results already are in the destination's.
    """

    float32 = "float32"
    bits = "bits"


class Accumulate(Enum):
    """Way in which a matmul writes PSUM.

    overwrite: the product replaces the content. add: the product is added to it. first_write_overwrites: added only to
    elements that a matmul wrote before.
    """

    overwrite = "overwrite"
    add = "add"
    first_write_overwrites = "first_write_overwrites"


class State(Enum):
    """State of a core that survives between instructions, outside SBUF and PSUM; one row per partition."""

    scalar_accumulator = "scalar_accumulator"
    vector_accumulator = "vector_accumulator"
    vector_lfsr = "vector_lfsr"
    vector_xorwow = "vector_xorwow"
    gpsimd_xorwow = "gpsimd_xorwow"

    def initial(self, partitions: int) -> np.ndarray:
        """Return the state that a kernel finds before it has set it, one row per partition.

        Nothing is documented. The Scalar accumulators are zero; the Vector ones count as undefined (NaN), as they do
        after every instruction that leaves them idle; generators are seeded with 0, so that runs repeat.
        """
        if self is State.scalar_accumulator:
            return np.zeros((partitions, 1), np.float32)
        if self is State.vector_accumulator:
            return np.full((partitions, 1), np.nan, np.float32)
        words = {
            State.vector_lfsr: 1,
            State.vector_xorwow: 4 * random.XORWOW_WORDS,
            State.gpsimd_xorwow: random.XORWOW_WORDS,
        }
        return random.spread_seed(0, partitions, words[self])


class Phase(Enum):
    """A stage of an event, while a launch waits for it.

    issue: it holds its engine, for a DMA the stream that triggers it. pipeline: its result is on the way after
    the engine is free. first_byte: a triggered DMA has not begun to move data. data: it moves data.
    completion: the waiting engine has not restarted. Two phases are no part of an instruction's cost: table_load,
    before it, and semaphore, when another engine is told.
    """

    table_load = "table load"
    issue = "issue"
    pipeline = "pipeline"
    first_byte = "first byte"
    data = "data"
    completion = "completion"
    semaphore = "semaphore"


class Term(NamedTuple):
    """Part of one phase of a cost.

    The terms of a phase stand in the order in which they pass; the last one also accounts for what a schedule adds to
    the phase: a throttled clock, shared ports, other DMAs.

    Attributes:
        phase: The phase.
        numbers: Fields of the hardware record that decide the term.
        ns: How long it is.
        grows: Whether it grows with the operands, or is fixed.
    """

    phase: Phase
    numbers: tuple[str, ...]
    ns: float
    grows: bool


@dataclass(frozen=True, slots=True)
class DmaCost:
    """Phases of one DMA; see `simulate.isa.dma_costs` for their sources."""

    bytes: int
    descriptors: int
    trigger_ns: float  # on the stream that triggers it
    first_byte_ns: float  # from the trigger to the first descriptor
    busy_ns: float  # share of the 16 DMA engines' time, all engines together
    transfer_ns: float  # from the first descriptor to the last one's end
    completion_ns: float  # until a waiting engine restarts
    gpsimd_ns: float  # descriptor generation in software
    hbm_bound: bool  # whether `busy_ns` is the time of its bytes in HBM, else that of its descriptors


@dataclass(frozen=True, slots=True)
class Cost:
    """Time on the instruction's engine, in that engine's cycles.

    Attributes:
        interval_cycles: Start to start of independent instructions on the engine.
        latency_cycles: Issue to usable result.
        flops: Floating-point operations; multiply and add count as two.
        table: Set of activation tables that the instruction needs, or None.
        dma: Phases of a DMA, or None.
        rendezvous_ns: Time from when all members of a rendezvous wait.
        streamed_cycles: How long columns stream through the array at its full clock: what the activity throttle sees,
            no time of its own.
        fast_mode: Whether the Vector engine handles several elements per cycle.
        stationary: How a stationary tile is read and where in the array it lies. None if that is not known before the
            run, and for transposes, whose tile is data.
        kept_cycles: How much shorter the interval is if the array holds the stationary tile already.
        clears: Whether it writes zeros and nothing else.
        cells: Cells of the array that a matmul in a tile of the array takes; empty for the whole array. A cell is as
            large as the chip's smallest tile of the array: 64 rows and columns on gen2, 32 on later ones.
        explain: Function that returns the terms, which no launch needs and a profile asks for.
        again: Function that computes the cost by another record of the chip.
    """

    interval_cycles: float
    latency_cycles: float
    flops: int = 0
    table: str | None = None
    dma: DmaCost | None = None
    rendezvous_ns: float = 0.0
    streamed_cycles: float = 0.0
    fast_mode: bool = False
    stationary: tuple[int, ...] | None = None
    kept_cycles: float = 0.0
    clears: bool = False
    cells: tuple[int, ...] = ()
    explain: Callable[[], tuple[Term, ...]] | None = field(default=None, compare=False, repr=False)
    again: Callable[[Hardware], Cost] | None = field(default=None, compare=False, repr=False)

    @property
    def terms(self) -> tuple[Term, ...]:
        """Parts of the times: terms of the phase `issue` add up to the interval, all terms to the latency."""
        assert self.explain is not None, "the cost of an instruction says what it is made of"
        return self.explain()

    def on(self, hardware: Hardware) -> Cost:
        """Return the cost of the same instruction by another record of the chip, whose times may differ."""
        assert self.again is not None, "the cost of an instruction comes from a cost function"
        return self.again(hardware)


@dataclass(frozen=True, slots=True)
class Masked:
    """Result of which only the elements that the bool array `chosen` selects are written."""

    values: np.ndarray
    chosen: np.ndarray


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Instruction that several cores carry out together.

    Members are the cores or ranks that enter with the same `key`. They must agree on `terms`; then `exchange` turns the
    operands of all members, in member order, into the results of each.
    """

    key: Hashable
    by_rank: bool  # members are ranks of the world, else cores of one rank
    members: tuple[int, ...]
    terms: dict[str, Any]
    exchange: Callable[[list[list[np.ndarray]]], list[list[Any]]]
    admits: Callable[[int], None] | None = None
    """Refuses the member that may not call it; which one calls is known only when the instruction runs."""


@dataclass(frozen=True, slots=True)
class Registers:
    """Use of the engine's accumulator registers of the first `rows` partitions by an instruction.

    Attributes:
        command: reduce_cmd of the instruction.
        operator: Name of the operator that accumulates.
        rows: Number of partitions.
        read_out: Whether the instruction writes the registers to reduce_res.
    """

    command: ReduceCmd
    operator: str
    rows: int
    read_out: bool
    in_result: bool = False
    """Whether the last element of each row of the result is the register: a scan."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Argument of a table function: `compute` returns it from the operands of the plan's `reads`."""

    function: ActivationFunction
    compute: Callable[..., np.ndarray]


class RandomUse(Enum):
    """An instruction's use of the random generator in its `state`, besides reading it out."""

    seeds = "seeds"
    draws = "draws"


class Synchronization(Enum):
    """How an instruction with a rendezvous orders its members.

    barrier: two cores wait for each other; it orders accesses of the tensor it names, and moves nothing. exchange: two
    cores exchange tiles; it orders every access of both. collective: ranks exchange tensors.
    """

    barrier = "barrier"
    exchange = "exchange"
    collective = "collective"


class Contraction(Enum):
    """Which elements of an operand one element of the result joins.

    rows: those of all partitions. products: those of all partitions, each times an element of the other operand, whose
    zeros exclude it. columns: those of one partition.
    """

    rows = "rows"
    products = "products"
    columns = "columns"


@dataclass(frozen=True, slots=True)
class Effects:
    """Facts of an instruction for detectors and reports, beyond its operands, its cost and its engine's state."""

    random: RandomUse | None = None
    synchronization: Synchronization | None = None
    contraction: Contraction | None = None
    sums_products: bool = False
    """Whether it writes sums of products to PSUM, which later matmuls may go on adding to."""
    copies: bool = False
    """Whether it is a DMA that brings elements over in their order; one onto itself orders accesses of its tensor."""
    transposes: bool = False
    """Whether it is a DMA that transposes its elements."""
    unique_rows: bool = False
    """Whether the caller promises that no run-time row number repeats."""
    is_idle_exponential: bool = False
    """Whether it is an exponential of the Vector engine that leaves the accumulator registers undefined."""
    rearranges: bool = False
    """Whether every element of the result has the value of an element of the operand; -0 may become 0."""
    permutes_bits: bool = False
    """Whether every bit of the result is a certain bit of the operand, its inverse, or a constant."""
    is_scalar_arithmetic: bool = False
    """Whether it computes one scalar of an instruction stream from others."""


PLAIN = Effects()
"""The effects of most instructions: none."""

JOINS_COLUMNS = Effects(contraction=Contraction.columns)
"""The effects of reductions, scans and searches along the free dims."""

SUMS_PRODUCTS = Effects(contraction=Contraction.products, sums_products=True)
"""The effects of a matmul."""

REARRANGES, PERMUTES_BITS = Effects(rearranges=True), Effects(permutes_bits=True)
"""The effects of transposes on chip, and of operators on bits with constants."""

DRAWS, SEEDS = Effects(random=RandomUse.draws), Effects(random=RandomUse.seeds)
"""The effects of instructions that use a random generator."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one instruction: engine, what it reads and writes, how to compute it, and what it costs.

    Engine, footprint, meaning and cost have no defaults, so none can be forgotten. `compute` takes the operands of
    `reads` in order (after the core's state, if `state` is set) and returns one array per entry of `writes` (and then
    the new state).
    """

    engine: Engine
    reads: tuple[NkiTensor, ...]
    writes: tuple[NkiTensor, ...]
    domain: Domain
    compute: Callable[..., Any]
    cost: Cost
    name: str | None
    accumulate: Accumulate | None = None
    state: State | None = None
    rendezvous: Rendezvous | None = None
    trigger: Engine | None = None
    """The stream that triggers a DMA or a collective, whose own engine is `dma`."""
    skip_out_of_range: bool = False
    """Whether run-time indices out of range leave their elements untouched instead of being refused."""
    registers: Registers | None = None
    """For instructions that may use the accumulator registers, what they do with them."""
    argument: Argument | None = None
    """For functions that the hardware computes from a table, what they are applied to."""
    propagate: Callable[[Plan, list[np.ndarray]], list[np.ndarray] | None] | None = None
    """Which elements of the results are defined where some of an operand's are not (`simulate.isa.propagation`).
    Without it, operands that were not fully written are refused."""
    undocumented: tuple[RuleViolation, ...] = ()
    """Documented sentences that the call breaks. The launch's rules decide whether they refuse the instruction."""
    value_rule: Callable[..., None] | None = None
    """A rule about the operands' values, applied before `compute`; like `undocumented`, it need not refuse."""
    effects: Effects = PLAIN
    """Facts for detectors and reports. Equal effects are one object, so that a stream keeps each once."""

    def over(self, reads: tuple[NkiTensor, ...], writes: tuple[NkiTensor, ...]) -> Plan:
        """Return the plan of the same instruction on other tensors, of the same layouts as this plan's."""
        return Plan(self.engine, reads, writes, *_facts(self))

    def template(self) -> Plan:
        """Return the plan of the same instruction on stand-ins, tensors without bytes, which outlive the launch."""
        storages: dict[int, Storage] = {}
        made = {id(tensor): stand_in(tensor, storages) for tensor in (*self.reads, *self.writes)}
        return self.over(
            *(tuple([made[id(tensor)] for tensor in side]) for side in (self.reads, self.writes))
        )


def complete(plan: Plan) -> Plan:
    """Apply the rules of every instruction to a plan; return it, with a name that is no string added to `undocumented`.

    Raises:
        RuleViolation: The plan cannot be carried out, because an engine would compute with 64-bit integers.
    """
    sixty_four_bits_are_moved(plan)
    try:
        name_is_text(plan.name)
    except RuleViolation as violation:
        return replace(plan, undocumented=(*plan.undocumented, violation.with_traceback(None)))
    return plan


@rule("NKW-NAME-TEXT", hint='name="scores", or leave it out')
def name_is_text(name: object) -> None:
    """The name of an instruction is a string or None.

    Raises RuleViolation otherwise.
    """
    if name is not None and not isinstance(name, str):
        raise RuleViolation(name_is_text, f"name={name!r:.40}")


@rule("NKW-INT64")
def sixty_four_bits_are_moved(plan: Plan) -> None:
    """64-bit integers are moved by DMAs between equal dtypes and held by scalars; no engine computes with them.

    Raises RuleViolation if an int64 tensor is an operand of a plan that is no such move.
    """
    if plan.domain is Domain.bits and plan.engine in (Engine.dma, Engine.sync):
        return
    for operand in (*plan.reads, *plan.writes):
        if operand.dtype == "int64":
            raise RuleViolation(
                sixty_four_bits_are_moved, operand.describe(), hint="convert the array to int32 on the host"
            )


_facts = attrgetter(*[field.name for field in fields(Plan)][len(("engine", "reads", "writes")) :])
_NO_BYTES = np.empty(0, np.uint8)


def stand_in(tensor: NkiTensor, storages: dict[int, Storage]) -> NkiTensor:
    """Return a tensor of the same layout, over an allocation that has no bytes.

    Tensors that share an allocation share its stand-in, because rules may ask whether they do. The index of a run-time
    address is replaced too.

    Args:
        tensor: The tensor.
        storages: Allocations without bytes so far, by the id of the allocation that each stands for; extended.
    """
    storage, dynamic = storages.get(id(tensor.storage)), tensor.dynamic
    if storage is None:
        form = tensor.layout.form
        storage = Storage(form.shape, form.dtype, form.buffer, "", array=_NO_BYTES, fresh=True)
        storages[id(tensor.storage)] = storage
    if dynamic is not None:
        dynamic = replace(dynamic, index=stand_in(dynamic.index, storages))
    return NkiTensor.from_storage(tensor.shape, tensor.dtype, storage, tensor.strides, tensor.offset, dynamic)
