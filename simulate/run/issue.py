"""Issue: plan, check, compute, write and record an instruction; the only place where a plan takes effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nkw.errors import NkwError, RuleViolation, rule
from simulate.isa import book, costs, propagation
from simulate.isa.enums import Engine
from simulate.isa.plan import Accumulate, Domain, Masked, Plan, Rendezvous
from simulate.isa.template import Template
from simulate.lines import location
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.objects import VALUE_READS
from simulate.memory.validity import ACCUMULATED, EMPTY, POISON, WRITTEN
from simulate.run.definedness import (
    defined_registers,
    known_state,
    mark_registers,
    states_of,
    unwritten,
    use_registers,
)
from simulate.run.execute import accumulated, add, flat, gather, put
from simulate.run.location import blame_line, kernel_line
from simulate.run.machine import Issue, NeuronCore, current_core
from simulate.run.stream import Line, NkiInstruction, Stream

_IN_PART = (None, EMPTY, POISON)
"""The uniform states of an allocation of which some bytes may be undefined."""


def call(
    planner: book.Planner,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: Line | None = None,
) -> NkiInstruction:
    """Plan and issue one instruction of `nki.isa` on the running core.

    `line` is the kernel line of the instruction, if that is not the running one.
    """
    core = current_core()
    try:
        template, reads, writes = book.bind(planner, (core.hardware,), args, kwargs)
        where = line or kernel_line(inside=2)
        if template.plan.undocumented:
            _judge_undocumented(core, template.plan, planner, (core.hardware,), args, kwargs, where)
        return _issue(core, template, reads, writes, where)
    except NkwError as error:
        raise _explained(error, planner, (core.hardware,), args, kwargs, line) from None


def call_collective(planner: book.Planner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NkiInstruction:
    """Plan and issue one instruction of `nki.collectives` on the running core."""
    core = current_core()
    try:
        template, reads, writes = book.bind(planner, (core.hardware, core.rank.number), args, kwargs)
        where = kernel_line(inside=2)
        if template.plan.undocumented:
            _judge_undocumented(
                core, template.plan, planner, (core.hardware, core.rank.number), args, kwargs, where
            )
        return _issue(core, template, reads, writes, where)
    except NkwError as error:
        raise _explained(error, planner, (core.hardware, core.rank.number), args, kwargs) from None


def prepare_collective(
    planner: book.Planner, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NkiInstruction:
    """Check the arguments of a collective and read its metadata, ahead of the collective itself.

    Its rules are applied, and unwritten metadata is refused. The duration of the setup is not published; the cost is
    one semaphore between engines.
    """
    core = current_core()
    try:
        context = (core.hardware, core.rank.number)
        whole = book.plan(planner, context, args, kwargs)
        if whole.undocumented:
            _judge_undocumented(core, whole, planner, context, args, kwargs, kernel_line(inside=2))
        setup = Plan(
            engine=Engine.sync,
            reads=whole.reads[1:],
            writes=(),
            domain=Domain.bits,
            compute=lambda *_: (),
            cost=costs.fixed(core.hardware, Engine.sync, "semaphore_ns"),
            name=kwargs.get("name"),
        )
        return issue(core, f"{planner.__name__}_prepare", setup)
    except NkwError as error:
        raise _explained(error, planner, (core.hardware, core.rank.number), args, kwargs) from None


def _judge_undocumented(
    core: NeuronCore,
    plan: Plan,
    planner: book.Planner,
    context: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: Line,
) -> None:
    """Apply the launch's rules to the undocumented uses of a call, once per rule and line of the kernel.

    `plan` is that of stand-ins, whose violations name no tensors. Raises the first RuleViolation that the rules refuse.
    """
    judged = (line, tuple(violation.code for violation in plan.undocumented))
    if judged in core.rank.judged:
        return
    core.rank.judged.add(judged)
    for violation in book.undocumented(planner, context, args, kwargs):
        blame_line(violation, line)
        core.rank.broken(violation)


def _judge_values(core: NeuronCore, plan: Plan, op: str, operands: Sequence[Any]) -> None:
    assert plan.value_rule is not None
    try:
        plan.value_rule(*operands)
    except RuleViolation as violation:
        core.rank.broken(violation, op)


def _explained(
    error: NkwError,
    planner: book.Planner,
    context: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: Line | None = None,
) -> NkwError:
    """The error with its kernel line, its instruction and its operands, unless it has them."""
    running = line or kernel_line()
    # Another line is that of an earlier instruction, which read the undefined bytes first.
    is_own = error.where is None or error.where == location(running)
    blame_line(error, running)
    if isinstance(error, RuleViolation) and is_own:
        book.name_operands(error, planner, len(context), args, kwargs)
    return error


def issue(core: NeuronCore, op: str, plan: Plan, line: Line | None = None) -> NkiInstruction:
    """Issue a plan that is not in the instruction book; raises what `call` raises."""
    # A register of the simulator's own loops is too small for a stand-in to pay.
    in_registers = all(each.buffer is MemoryRegion.register for each in (*plan.reads, *plan.writes))
    template = Template(op, plan if in_registers else plan.template())
    return _issue(core, template, plan.reads, plan.writes, line or kernel_line(inside=2))


def _issue(
    core: NeuronCore,
    template: Template,
    reads: tuple[NkiTensor, ...],
    writes: tuple[NkiTensor, ...],
    line: Line,
) -> NkiInstruction:
    """Check every read, compute, round once into the destination, update validity, record the event.

    `reads` and `writes` are the tensors of this call. Raises RuleViolation for a read of undefined bytes. If the plan
    propagates poison, the instruction that uses the poison raises it instead.
    """
    if core.scheduler.is_random:
        core.scheduler.preempt(core.index)
    plan = template.plan
    as_float = plan.domain is Domain.float32
    dry = core.dry
    operands: list[Any] = []
    blame: RuleViolation | None = None
    for tile in reads:
        if tile.dynamic is not None:
            if not dry:
                _check_gathered(core, tile, plan.skip_out_of_range)
                operands.append(gather(tile, as_float, plan.skip_out_of_range))
            continue
        validity = tile.storage.validity
        if validity.uniform != WRITTEN and validity.uniform != ACCUMULATED and not _written(tile):
            try:
                blame = _excused(plan, reads, writes, tile, template.op, line)
            except RuleViolation as error:
                core.rank.broken(error, template.op)
        if not dry:
            operands.append(tile.uncounted_float32() if as_float else tile.uncounted_array)
    registers = plan.registers
    if registers is not None:
        poison = use_registers(core, plan, registers)
        if poison is not None:
            if _carries_poison(plan, reads, writes):
                blame = poison
            else:
                core.rank.broken(poison)
    for observer in core.observers:
        values_read = VALUE_READS.count
        observer.issuing(core, Issue(plan, reads, writes), operands)
        VALUE_READS.count = values_read  # the kernel has not read what an observer reads
    poisoned = _poisoned(core, plan, reads, writes, blame, operands) if blame is not None else []
    stream = core.stream
    rendezvous_serial: int | None = None
    results: Sequence[Any] = ()
    if plan.rendezvous is not None:
        member = core.rank.number if plan.rendezvous.by_rank else core.number
        if plan.rendezvous.admits is not None:
            plan.rendezvous.admits(member)
        results, rendezvous_serial = core.scheduler.join(
            core.index, member, _of_this_core(core, plan.rendezvous), operands, location(line), dry
        )
    elif dry:
        pass
    elif plan.state is not None:
        *results, state = plan.compute(core.state(plan.state), *operands)
        core.set_state(plan.state, state)
    else:
        if plan.value_rule is not None:
            _judge_values(core, plan, template.op, operands)
        results = plan.compute(*operands)
    if dry:
        core.rank.values.update(plan, reads, writes)
        for tile in writes:
            # A dry launch has no indices, so the whole tensor of a dynamic view counts as written.
            place = tile if tile.dynamic is None else flat(tile)
            _mark(place, None, ACCUMULATED if plan.accumulate else WRITTEN)
    elif plan.accumulate is not None:
        stream.accumulated[len(stream)] = _accumulate(core, writes[0], results[0], plan.accumulate, as_float)
    else:
        for tile, result in zip(writes, results):
            if tile.dynamic is not None:
                _check_written(core, tile.dynamic.index)
            touched = put(tile, result, as_float, plan.skip_out_of_range)
            _mark(tile, touched, WRITTEN)
            if plan.rendezvous is not None and plan.propagate is not None and isinstance(result, Masked):
                tile.storage.validity.mark_poison(result.chosen, *tile.byte_view()[1:])
            if touched is not None:
                _note_partial_write(stream, tile, isinstance(result, Masked))
    for tile, defined in poisoned:
        tile.storage.validity.mark_poison(defined, *tile.byte_view()[1:])
        tile.storage.validity.blame = blame
    if registers is not None:
        mark_registers(core, plan, registers, poisoned[0][1] if poisoned else None, blame)
    if not (dry or stream.depends_on_data):
        _note_dependence_on_data(stream, reads, writes)
    for observer in core.observers:
        values_read = VALUE_READS.count
        observer.issued(core, Issue(plan, reads, writes), operands)
        VALUE_READS.count = values_read
    return stream.append(template, reads, writes, line, rendezvous_serial)


def _note_partial_write(stream: Stream, tile: NkiTensor, masked: bool) -> None:
    """Record that a result left elements of its destination unwritten; which ones may depend on data."""
    if masked:
        stream.masked.add(len(stream))
    if tile.storage.validity.uniform in _IN_PART:
        stream.depends_on_data = (
            stream.depends_on_data or "which bytes of a tensor are written depends on data"
        )


def _note_dependence_on_data(
    stream: Stream, reads: tuple[NkiTensor, ...], writes: tuple[NkiTensor, ...]
) -> None:
    """Record the reason, if any, why this instruction may have another effect with other data."""
    if stream.constants and any(tile.storage.serial in stream.constants for tile in writes):
        stream.depends_on_data = "a constant is written"
    for tile in reads:
        if tile.dynamic is not None and tile.storage.validity.uniform in _IN_PART:
            stream.depends_on_data = "a run-time index reads a tensor that is written in part"


def _of_this_core(core: NeuronCore, rendezvous: Rendezvous) -> Rendezvous:
    """The rendezvous at a place of its own: one per rank for its cores, or one per core number for all ranks."""
    apart = core.number if rendezvous.by_rank else core.rank.number
    return replace(rendezvous, place=(rendezvous.by_rank, apart, rendezvous.place))


def _written(tile: NkiTensor) -> bool:
    validity = tile.storage.validity
    if tile.dynamic is None:
        state = known_state(tile)
        if state is not None:
            return bool(state & WRITTEN)
    return validity.written(*tile.byte_view())


def _check_written(core: NeuronCore, tile: NkiTensor) -> None:
    if not _written(tile):
        core.rank.broken(unwritten(tile))


def _excused(
    plan: Plan,
    reads: tuple[NkiTensor, ...],
    writes: tuple[NkiTensor, ...],
    tile: NkiTensor,
    op: str,
    line: Line,
) -> RuleViolation:
    """The error for a read of undefined bytes that become poison. Raises it where they may not become poison.

    They may if the plan propagates poison, stays on chip, and the operand has defined bytes as well.
    """
    error = unwritten(tile)
    if not _carries_poison(plan, reads, writes):
        raise error
    together = reads if plan.propagate is propagation.by_row else (tile,)
    if not any(np.any(each.storage.validity.states(*each.byte_view()[1:])) for each in together):
        raise error
    if error.where is None:
        blame_line(error, line)
        error.instruction = op
    return error


def _carries_poison(plan: Plan, reads: tuple[NkiTensor, ...], writes: tuple[NkiTensor, ...]) -> bool:
    """Whether undefined elements may become poison: the plan says which, and results stay on chip at known places."""
    stays_on_chip = all(each.buffer.on_chip and each.dynamic is None for each in writes)
    return plan.propagate is not None and stays_on_chip and all(each.dynamic is None for each in reads)


def _poisoned(
    core: NeuronCore,
    plan: Plan,
    reads: tuple[NkiTensor, ...],
    writes: tuple[NkiTensor, ...],
    blame: RuleViolation,
    operands: list[Any],
) -> list[tuple[NkiTensor, np.ndarray]]:
    """The results with poison, with a mask of their defined elements; a rendezvous exchanges the masks itself.

    Called before a result overwrites an operand. Raises `blame` where the plan uses undefined elements.
    """
    assert plan.propagate is not None
    states = (each.storage.validity.states(*each.byte_view()[1:]) for each in reads)
    defined = [
        np.broadcast_to(np.bitwise_and(state, WRITTEN) != 0, each.shape) for state, each in zip(states, reads)
    ]
    if plan.registers is not None:
        defined += defined_registers(core, plan, plan.registers)
    results = plan.propagate(plan, defined)
    if results is None:
        core.rank.broken(blame)
        return []
    if plan.rendezvous is not None:
        operands[:] = [Masked(values, rest) for values, rest in zip(operands, defined)]
        return []
    return [(tile, result) for tile, result in zip(writes, results) if not result.all()]


def _check_gathered(core: NeuronCore, tile: NkiTensor, skip_out_of_range: bool) -> None:
    """Raise RuleViolation for a gather of elements that were never written."""
    assert tile.dynamic is not None
    _check_written(core, tile.dynamic.index)
    validity = tile.storage.validity
    if validity.uniform in (WRITTEN, ACCUMULATED):
        return
    if not np.all(np.bitwise_and(states_of(tile, skip_out_of_range), WRITTEN)):
        core.rank.broken(unwritten(tile, skip_out_of_range))


def _mark(tile: NkiTensor, touched: Any, state: int) -> None:
    """Mark the elements that `put` wrote in the validity map."""
    validity = tile.storage.validity
    if validity.uniform == state:
        return
    if tile.dynamic is None and touched is None:
        exact = tile.layout.boxes[0]
        if exact is None or not validity.mark_box(state, exact):
            validity.mark(state, *tile.byte_view())
    elif tile.dynamic is None:
        validity.mark_where(state, touched, *tile.byte_view()[1:])
    elif touched is not None:
        whole = flat(tile)
        chosen = np.zeros(whole.shape, bool)
        chosen[touched] = True
        validity.mark_where(state, chosen, *whole.byte_view()[1:])


def _accumulate(
    core: NeuronCore, tile: NkiTensor, product: np.ndarray, how: Accumulate, as_float: bool
) -> Any:
    """Write a matmul's product into PSUM, or add it to elements of earlier matmuls; returns the mask of those."""
    accumulate_mask: Any = False
    states: Any = EMPTY
    if tile.dynamic is None:
        known = EMPTY if how is Accumulate.overwrite else known_state(tile)
        if known in (EMPTY, ACCUMULATED) and (how is not Accumulate.add or known == ACCUMULATED):
            accumulate_mask = known == ACCUMULATED
            add(tile, product, accumulate_mask, as_float)
            _mark(tile, None, ACCUMULATED)
            return accumulate_mask
    else:
        _check_written(core, tile.dynamic.index)
        core.stream.depends_on_data = (
            core.stream.depends_on_data or "where a matmul adds in PSUM depends on data"
        )
    if how is not Accumulate.overwrite:
        states = states_of(tile)
        accumulate_mask = states != EMPTY
        if how is Accumulate.add and not np.all(accumulate_mask):
            core.rank.broken(
                RuleViolation(
                    accumulation_was_started,
                    f"accumulate=True on {tile.describe()}, which no matmul has written",
                    hint="accumulate=(k > 0), or accumulate=None",
                )
            )
            accumulate_mask = True
        if not core.hardware.psum_accumulate_after_other_write and np.any(np.equal(states, WRITTEN)):
            core.warn(
                f"[NKW-PSUM-INIT] matmul accumulates onto {tile.describe()}, which another instruction "
                f"initialised: undefined on {core.hardware.name}"
            )
    undefined = np.bitwise_and(states, POISON)
    if tile.dynamic is not None and np.any(undefined):
        core.rank.broken(unwritten(tile))
    touched = put(tile, accumulated(tile, product, accumulate_mask), as_float, False)
    _mark(tile, touched, ACCUMULATED)
    if np.any(undefined):
        tile.storage.validity.mark_poison(np.broadcast_to(undefined == 0, tile.shape), *tile.byte_view()[1:])
    return accumulate_mask


@rule("NKW-PSUM-UNSTARTED")
def accumulation_was_started() -> None:
    """accumulate=True adds to what an earlier matmul wrote; on a location never written it is undefined."""
