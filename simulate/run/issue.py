"""Issue of instructions: plan, check, compute, write and record; the only place where a plan takes effect.

A plan says what an instruction reads, writes, computes and costs (`simulate.isa.plan`). Its template is the plan over
stand-ins for the tensors, shared by equal calls. Poison marks elements that were computed from undefined bytes; their
first use by an instruction that does not propagate poison is an error. A rule that the launch tolerates is recorded
instead of raised (`Rank.report_violation`).
"""

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
    build_unwritten_error,
    check_registers,
    find_common_state,
    find_defined_registers,
    mark_registers,
    read_states,
)
from simulate.run.execute import accumulate_product, add_to_psum, gather_elements, view_flat, write_result
from simulate.run.location import blame_line, kernel_line
from simulate.run.machine import Issue, NeuronCore, current_core
from simulate.run.stream import Line, NkiInstruction, Stream

_IN_PART = (None, EMPTY, POISON)
"""Uniform states of an allocation some of whose bytes may be undefined."""


def issue_call(
    planner: book.Planner,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: Line | None = None,
) -> NkiInstruction:
    """Plan and issue one instruction of `nki.isa` on the running core: results are written and the event is recorded.

    Args:
        planner: The planner of the instruction, from the instruction book.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        line: The kernel line of the instruction, None for the running line.

    Returns:
        The handle that the kernel gets.

    Raises:
        NkwError: The call breaks a rule, reads undefined bytes, or is made outside of a kernel.
    """
    core = current_core()
    try:
        template, reads, writes = book.bind(planner, (core.hardware,), args, kwargs)
        where = line or kernel_line(inside=2)
        if template.plan.undocumented:
            _check_undocumented(core, template.plan, planner, (core.hardware,), args, kwargs, where)
        return _take_effect(core, template, reads, writes, where)
    except NkwError as error:
        raise _add_context(error, planner, (core.hardware,), args, kwargs, line) from None


def issue_collective(planner: book.Planner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NkiInstruction:
    """Plan and issue one instruction of `nki.collectives` on the running core, and return its handle.

    Waits until all members of its rendezvous have arrived.

    Args:
        planner: The planner of the instruction, which gets the chip and the rank before the arguments of the call.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.

    Raises:
        NkwError: The call breaks a rule, reads undefined bytes, or is made outside of a kernel; or the members of the
            rendezvous disagree or never arrive.
    """
    core = current_core()
    try:
        template, reads, writes = book.bind(planner, (core.hardware, core.rank.number), args, kwargs)
        where = kernel_line(inside=2)
        if template.plan.undocumented:
            _check_undocumented(
                core, template.plan, planner, (core.hardware, core.rank.number), args, kwargs, where
            )
        return _take_effect(core, template, reads, writes, where)
    except NkwError as error:
        raise _add_context(error, planner, (core.hardware, core.rank.number), args, kwargs) from None


def prepare_collective(
    planner: book.Planner, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NkiInstruction:
    """Check the arguments of a collective and issue the read of its metadata, ahead of the collective itself.

    The collective's rules are applied; its data are not moved. The duration of the setup is not published, so its
    cost is one semaphore between engines.

    Args:
        planner: The planner of the collective.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.

    Returns:
        The handle of the setup, an instruction of the Sync engine.

    Raises:
        NkwError: The call breaks a rule, or the metadata have unwritten bytes.
    """
    core = current_core()
    try:
        context = (core.hardware, core.rank.number)
        collective = book.plan(planner, context, args, kwargs)
        if collective.undocumented:
            _check_undocumented(core, collective, planner, context, args, kwargs, kernel_line(inside=2))
        setup = Plan(
            engine=Engine.sync,
            reads=collective.reads[1:],
            writes=(),
            domain=Domain.bits,
            compute=lambda *_: (),
            cost=costs.fixed(core.hardware, Engine.sync, "semaphore_ns"),
            name=kwargs.get("name"),
        )
        return issue_plan(core, f"{planner.__name__}_prepare", setup)
    except NkwError as error:
        raise _add_context(error, planner, (core.hardware, core.rank.number), args, kwargs) from None


def _check_undocumented(
    core: NeuronCore,
    plan: Plan,
    planner: book.Planner,
    context: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: Line,
) -> None:
    """Apply the launch's rules to the undocumented arguments of a call, once for each rule and kernel line.

    Args:
        core: The core.
        plan: The plan over stand-ins, whose violations name no tensors.
        planner: The planner of the instruction, which is applied again to name the tensors.
        context: What the planner gets before the arguments of the call.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        line: The kernel line.

    Raises:
        RuleViolation: The rules of the launch refuse an argument; tolerated ones are recorded.
    """
    key = (line, tuple(violation.code for violation in plan.undocumented))
    if key in core.rank.judged:
        return
    core.rank.judged.add(key)
    for violation in book.undocumented(planner, context, args, kwargs):
        blame_line(violation, line)
        core.rank.report_violation(violation)


def _check_values(core: NeuronCore, plan: Plan, op: str, operands: Sequence[Any]) -> None:
    """Apply a plan's rule about the values of its operands; a broken rule is raised, or recorded if tolerated."""
    assert plan.value_rule is not None
    try:
        plan.value_rule(*operands)
    except RuleViolation as violation:
        core.rank.report_violation(violation, op)


def _add_context(
    error: NkwError,
    planner: book.Planner,
    context: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: Line | None = None,
) -> NkwError:
    """Return the error after setting its kernel line and, if it is about this call, the names of the operands.

    A line that the error already has stays; another line than this call's is that of an earlier instruction.
    """
    running = line or kernel_line()
    # An error with another line is about an earlier instruction, which read the undefined bytes first.
    is_of_this_call = error.where is None or error.where == location(running)
    blame_line(error, running)
    if isinstance(error, RuleViolation) and is_of_this_call:
        book.name_operands(error, planner, len(context), args, kwargs)
    return error


def issue_plan(core: NeuronCore, op: str, plan: Plan, line: Line | None = None) -> NkiInstruction:
    """Issue a plan that was made outside of the instruction book, and return the handle.

    Args:
        core: The core.
        op: The name of the instruction in reports.
        plan: The plan over the tensors of this call.
        line: The kernel line, None for the running line.

    Raises:
        NkwError: The instruction breaks a rule about values or reads undefined bytes.
    """
    # A stand-in would take longer than the whole instruction on a register of the simulator's own loops.
    in_registers = all(tensor.buffer is MemoryRegion.register for tensor in (*plan.reads, *plan.writes))
    template = Template(op, plan if in_registers else plan.template())
    return _take_effect(core, template, plan.reads, plan.writes, line or kernel_line(inside=2))


def _take_effect(
    core: NeuronCore,
    template: Template,
    reads: tuple[NkiTensor, ...],
    writes: tuple[NkiTensor, ...],
    line: Line,
) -> NkiInstruction:
    """Check every read, compute, write the results rounded once, mark what is defined, and record the event.

    Observers are told before and after. A dry launch computes and writes no values, but marks whole results as
    written.

    Args:
        core: The core that issues the instruction.
        template: The planned instruction.
        reads: The tensors that this call reads.
        writes: The tensors that this call writes.
        line: The kernel line.

    Returns:
        The handle that the kernel gets.

    Raises:
        RuleViolation: An operand has undefined bytes. If the plan propagates poison, a later instruction that uses
            the poison raises the error instead.
    """
    if core.scheduler.is_random:
        core.scheduler.preempt(core.index)
    plan, stream = template.plan, core.stream
    operands, blame = _read_checked(core, template, reads, writes, line)
    if plan.registers is not None:
        blame = _check_register_poison(core, plan, reads, writes) or blame
    for observer in core.observers:
        values_read = VALUE_READS.count
        observer.issuing(core, Issue(plan, reads, writes), operands)
        VALUE_READS.count = values_read  # the kernel has not read what an observer reads
    poisoned = _find_poisoned(core, plan, reads, writes, blame, operands) if blame is not None else []
    results, rendezvous_serial = _compute(core, template, operands, line)
    if core.dry:
        core.rank.values.update(plan, reads, writes)
        for tile in writes:
            # A dry launch has no indices, so the whole tensor of a dynamic view counts as written.
            _mark(
                tile if tile.dynamic is None else view_flat(tile),
                None,
                ACCUMULATED if plan.accumulate else WRITTEN,
            )
    elif plan.accumulate is not None:
        as_float = plan.domain is Domain.float32
        stream.accumulated[len(stream)] = _accumulate(core, writes[0], results[0], plan.accumulate, as_float)
    else:
        _write_results(core, plan, writes, results)
    for tile, defined in poisoned:
        tile.storage.validity.mark_poison(defined, *tile.byte_view()[1:])
        tile.storage.validity.blame = blame
    if plan.registers is not None:
        mark_registers(core, plan, plan.registers, poisoned[0][1] if poisoned else None, blame)
    if not (core.dry or stream.depends_on_data):
        _note_dependence_on_data(stream, reads, writes)
    for observer in core.observers:
        values_read = VALUE_READS.count
        observer.issued(core, Issue(plan, reads, writes), operands)
        VALUE_READS.count = values_read
    return stream.append(template, reads, writes, line, rendezvous_serial)


def _read_checked(
    core: NeuronCore,
    template: Template,
    reads: tuple[NkiTensor, ...],
    writes: tuple[NkiTensor, ...],
    line: Line,
) -> tuple[list[Any], RuleViolation | None]:
    """Return the values of an instruction's operands after checking that every byte is defined.

    Returns:
        The values of the operands, none in a dry launch; and the error of an undefined read that becomes poison, or
        None.

    Raises:
        RuleViolation: A read of undefined bytes that may not become poison.
    """
    plan = template.plan
    as_float = plan.domain is Domain.float32
    operands: list[Any] = []
    blame: RuleViolation | None = None
    for tile in reads:
        if tile.dynamic is not None:
            if not core.dry:
                _check_gathered(core, tile, plan.skip_out_of_range)
                operands.append(gather_elements(tile, as_float, plan.skip_out_of_range))
            continue
        validity = tile.storage.validity
        if validity.uniform != WRITTEN and validity.uniform != ACCUMULATED and not _is_written(tile):
            try:
                blame = _poison_error(plan, reads, writes, tile, template.op, line)
            except RuleViolation as error:
                core.rank.report_violation(error, template.op)
        if not core.dry:
            operands.append(tile.uncounted_float32() if as_float else tile.uncounted_array)
    return operands, blame


def _check_register_poison(
    core: NeuronCore, plan: Plan, reads: tuple[NkiTensor, ...], writes: tuple[NkiTensor, ...]
) -> RuleViolation | None:
    """Return the error of poisoned accumulator registers whose poison goes into an instruction's results, or None.

    Raises:
        RuleViolation: The registers are not set, or their poison may not become poison of the results.
    """
    assert plan.registers is not None
    poison = check_registers(core, plan, plan.registers)
    if poison is not None and not _carries_poison(plan, reads, writes):
        core.rank.report_violation(poison)
        return None
    return poison


def _compute(
    core: NeuronCore, template: Template, operands: list[Any], line: Line
) -> tuple[Sequence[Any], int | None]:
    """Compute an instruction, or exchange its operands with the other members of its rendezvous; writes no tensor.

    A plan that uses state of the core, such as a random generator, updates that state.

    Returns:
        The results, none in a dry launch; and the serial number of the rendezvous, or None.
    """
    plan = template.plan
    if plan.rendezvous is not None:
        member = core.rank.number if plan.rendezvous.by_rank else core.number
        if plan.rendezvous.admits is not None:
            plan.rendezvous.admits(member)
        rendezvous = _qualify_rendezvous(core, plan.rendezvous)
        return core.scheduler.join(core.index, member, rendezvous, operands, location(line), core.dry)
    if core.dry:
        return (), None
    if plan.state is not None:
        *results, state = plan.compute(core.state(plan.state), *operands)
        core.set_state(plan.state, state)
        return results, None
    if plan.value_rule is not None:
        _check_values(core, plan, template.op, operands)
    return plan.compute(*operands), None


def _write_results(
    core: NeuronCore, plan: Plan, writes: tuple[NkiTensor, ...], results: Sequence[Any]
) -> None:
    """Write results into their destinations, rounded once to their dtypes, and mark the written bytes as defined."""
    as_float = plan.domain is Domain.float32
    for tile, result in zip(writes, results):
        if tile.dynamic is not None:
            _check_written(core, tile.dynamic.index)
        touched = write_result(tile, result, as_float, plan.skip_out_of_range)
        _mark(tile, touched, WRITTEN)
        if plan.rendezvous is not None and plan.propagate is not None and isinstance(result, Masked):
            tile.storage.validity.mark_poison(result.chosen, *tile.byte_view()[1:])
        if touched is not None:
            _note_partial_write(core.stream, tile, isinstance(result, Masked))


def _note_partial_write(stream: Stream, tile: NkiTensor, masked: bool) -> None:
    """Record in the stream that the current event may leave elements of a destination unchanged.

    If the destination is not fully written, the stream depends on data from now on, and cannot be replayed.

    Args:
        stream: The stream, whose next event is the instruction.
        tile: The destination.
        masked: Whether a mask selected the written elements; otherwise a run-time index did.
    """
    if masked:
        stream.masked.add(len(stream))
    if tile.storage.validity.uniform in _IN_PART:
        stream.depends_on_data = (
            stream.depends_on_data or "which bytes of a tensor are written depends on data"
        )


def _note_dependence_on_data(
    stream: Stream, reads: tuple[NkiTensor, ...], writes: tuple[NkiTensor, ...]
) -> None:
    """Set `stream.depends_on_data` if this instruction may have another effect in a launch with other data.

    This is so if it writes a constant, or gathers from a tensor that is not fully written.
    """
    if stream.constants and any(tile.storage.serial in stream.constants for tile in writes):
        stream.depends_on_data = "a constant is written"
    for tile in reads:
        if tile.dynamic is not None and tile.storage.validity.uniform in _IN_PART:
            stream.depends_on_data = "a run-time index reads a tensor that is written in part"


def _qualify_rendezvous(core: NeuronCore, rendezvous: Rendezvous) -> Rendezvous:
    """Return the rendezvous with a key that differs between groups of members.

    Members that are cores form one group per rank; members that are ranks form one group per core number.
    """
    group = core.number if rendezvous.by_rank else core.rank.number
    return replace(rendezvous, key=(rendezvous.by_rank, group, rendezvous.key))


def _is_written(tile: NkiTensor) -> bool:
    """Return whether all bytes of a view are defined; for a run-time index, of the entire extent that it may select."""
    validity = tile.storage.validity
    if tile.dynamic is None:
        state = find_common_state(tile)
        if state is not None:
            return bool(state & WRITTEN)
    return validity.written(*tile.byte_view())


def _check_written(core: NeuronCore, tile: NkiTensor) -> None:
    """Raise the error for undefined bytes if a view has any, or record it if the launch tolerates it."""
    if not _is_written(tile):
        core.rank.report_violation(build_unwritten_error(tile))


def _poison_error(
    plan: Plan,
    reads: tuple[NkiTensor, ...],
    writes: tuple[NkiTensor, ...],
    tile: NkiTensor,
    op: str,
    line: Line,
) -> RuleViolation:
    """Return the error for a read of undefined bytes whose results become poison; it is raised if poison is used later.

    The bytes may become poison if the plan propagates it, nothing has a run-time address, all results are on chip,
    and the operand also has defined bytes (any operand, if the plan propagates by row).

    Raises:
        RuleViolation: The bytes may not become poison.
    """
    error = build_unwritten_error(tile)
    if not _carries_poison(plan, reads, writes):
        raise error
    operands = reads if plan.propagate is propagation.by_row else (tile,)
    if not any(np.any(read.storage.validity.states(*read.byte_view()[1:])) for read in operands):
        raise error
    if error.where is None:
        blame_line(error, line)
        error.instruction = op
    return error


def _carries_poison(plan: Plan, reads: tuple[NkiTensor, ...], writes: tuple[NkiTensor, ...]) -> bool:
    """Return whether results of an instruction may be marked as poison.

    The plan must propagate poison, no tensor may have a run-time address, and all results must be on chip.
    """
    stays_on_chip = all(write.buffer.on_chip and write.dynamic is None for write in writes)
    return plan.propagate is not None and stays_on_chip and all(read.dynamic is None for read in reads)


def _find_poisoned(
    core: NeuronCore,
    plan: Plan,
    reads: tuple[NkiTensor, ...],
    writes: tuple[NkiTensor, ...],
    blame: RuleViolation,
    operands: list[Any],
) -> list[tuple[NkiTensor, np.ndarray]]:
    """Return the destinations that get poison, each with a mask of its defined elements.

    The caller marks the poison after writing the results. For a rendezvous the list is empty, and `operands` are
    replaced by Masked values, which carry the masks to the other members.

    Args:
        core: The core.
        plan: The plan, which propagates poison.
        reads: The tensors that this call reads.
        writes: The tensors that this call writes.
        blame: The error of the read that caused the poison.
        operands: The values of the operands; changed for a rendezvous.

    Raises:
        RuleViolation: The plan uses undefined elements in a way that is refused; the error is `blame`.
    """
    assert plan.propagate is not None
    states = (read.storage.validity.states(*read.byte_view()[1:]) for read in reads)
    defined = [
        np.broadcast_to(np.bitwise_and(state, WRITTEN) != 0, read.shape) for state, read in zip(states, reads)
    ]
    if plan.registers is not None:
        defined += find_defined_registers(core, plan, plan.registers)
    results = plan.propagate(plan, defined)
    if results is None:
        core.rank.report_violation(blame)
        return []
    if plan.rendezvous is not None:
        operands[:] = [Masked(values, mask) for values, mask in zip(operands, defined)]
        return []
    return [(tile, result) for tile, result in zip(writes, results) if not result.all()]


def _check_gathered(core: NeuronCore, tile: NkiTensor, skip_out_of_range: bool) -> None:
    """Raise RuleViolation if a gather selects elements that are not defined, or if its index is not.

    If the launch tolerates the rule, the error is recorded instead.
    """
    assert tile.dynamic is not None
    _check_written(core, tile.dynamic.index)
    validity = tile.storage.validity
    if validity.uniform in (WRITTEN, ACCUMULATED):
        return
    if not np.all(np.bitwise_and(read_states(tile, skip_out_of_range), WRITTEN)):
        core.rank.report_violation(build_unwritten_error(tile, skip_out_of_range))


def _mark(tile: NkiTensor, touched: Any, state: int) -> None:
    """Mark the elements that `write_result` wrote in the allocation's validity.

    Args:
        tile: The destination.
        touched: What `write_result` returned: None for all elements, a mask of the view, or element ids in the
            storage.
        state: The validity state of the written bytes.
    """
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
        storage_view = view_flat(tile)
        chosen = np.zeros(storage_view.shape, bool)
        chosen[touched] = True
        validity.mark_where(state, chosen, *storage_view.byte_view()[1:])


def _accumulate(
    core: NeuronCore, tile: NkiTensor, product: np.ndarray, mode: Accumulate, as_float: bool
) -> Any:
    """Write a matmul's product to PSUM, adding it to elements that earlier matmuls wrote as `mode` demands.

    The written elements are marked ACCUMULATED. Accumulation onto the write of another engine gives a warning of the
    launch on chips where that is undefined.

    Args:
        core: The core.
        tile: The destination in PSUM.
        product: The product, in any shape of the same size.
        mode: Whether the matmul overwrites, adds, or decides for each element by whether it was written.
        as_float: Whether the product is float32 and has to be rounded to the destination's dtype.

    Returns:
        The elements to which the product was added: True for all, False for none, or a mask.

    Raises:
        RuleViolation: The mode is add and an element was never written, or a run-time index selects poisoned
            elements.
    """
    accumulate_mask: Any = False
    states: Any = EMPTY
    if tile.dynamic is None:
        known = EMPTY if mode is Accumulate.overwrite else find_common_state(tile)
        if known in (EMPTY, ACCUMULATED) and (mode is not Accumulate.add or known == ACCUMULATED):
            accumulate_mask = known == ACCUMULATED
            accumulate_product(tile, product, accumulate_mask, as_float)
            _mark(tile, None, ACCUMULATED)
            return accumulate_mask
    else:
        _check_written(core, tile.dynamic.index)
        core.stream.depends_on_data = (
            core.stream.depends_on_data or "where a matmul adds in PSUM depends on data"
        )
    if mode is not Accumulate.overwrite:
        states = read_states(tile)
        accumulate_mask = states != EMPTY
        if mode is Accumulate.add and not np.all(accumulate_mask):
            core.rank.report_violation(
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
        core.rank.report_violation(build_unwritten_error(tile))
    touched = write_result(tile, add_to_psum(tile, product, accumulate_mask), as_float, False)
    _mark(tile, touched, ACCUMULATED)
    if np.any(undefined):
        tile.storage.validity.mark_poison(np.broadcast_to(undefined == 0, tile.shape), *tile.byte_view()[1:])
    return accumulate_mask


@rule("NKW-PSUM-UNSTARTED")
def accumulation_was_started() -> None:
    """accumulate=True adds to what an earlier matmul wrote; on a location never written it is undefined.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """
