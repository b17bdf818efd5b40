"""Definedness of the bytes of views and of accumulator registers, and the errors for using undefined ones.

A byte is EMPTY (never written), WRITTEN, ACCUMULATED (written by a matmul) or POISON (computed from undefined bytes);
see `simulate.memory.validity`. The contents of accumulator registers at the start of a kernel are not documented. A
register that summed undefined elements is poisoned, as an element of a tile would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.isa.enums import ReduceCmd
from simulate.isa.plan import Plan, Registers
from simulate.isa.shapes import flat as flattened
from simulate.memory import MemoryRegion, NkiTensor
from simulate.memory.validity import EMPTY, POISON, WRITTEN, Validity
from simulate.run.execute import view_flat
from simulate.run.indirect import get_element_ids, resolve
from simulate.run.machine import NeuronCore

_MOST_RUNS = 3
"""Largest number of runs of rows or columns that a message lists."""
_MOST_ELEMENTS = 1 << 22
"""Largest number of elements of a view in which a message searches for rows and columns."""


def find_common_state(tile: NkiTensor) -> int | None:
    """Return the validity state that all elements of a static view have; None if that takes a search of a mask."""
    enclosing = tile.layout.boxes[1]
    return None if enclosing is None else tile.storage.validity.state_within(enclosing)


def read_states(tile: NkiTensor, skip_out_of_range: bool = False) -> Any:
    """Return the validity state of every element of a view: an int array in its shape, or an int if all are equal.

    Args:
        tile: The view.
        skip_out_of_range: Whether a gather skips indices that are out of range. The result is then a flat array of
            the elements in range, if an index is out of range.
    """
    validity = tile.storage.validity
    if tile.dynamic is None:
        known = find_common_state(tile)
        return validity.states(*tile.byte_view()[1:]) if known is None else known
    everywhere = validity.states(*view_flat(tile).byte_view()[1:])
    return everywhere if isinstance(everywhere, int) else everywhere[_resolve_ids(tile, skip_out_of_range)]


def build_unwritten_error(tile: NkiTensor, skip_out_of_range: bool = False) -> RuleViolation:
    """Return the error for a read of undefined bytes; the caller raises it.

    If an element read is POISON, it is the error of the earlier read of unwritten bytes that caused the poison.

    Args:
        tile: The view that is read.
        skip_out_of_range: Whether a gather skips indices that are out of range.
    """
    blame, states = tile.storage.validity.blame, read_states(tile, skip_out_of_range)
    if isinstance(blame, RuleViolation) and np.any(np.bitwise_and(states, POISON)):
        return blame
    write = "matmul or copy into it" if tile.buffer is MemoryRegion.psum else "memset or load it"
    missing = np.equal(np.bitwise_and(states, WRITTEN), 0)
    return RuleViolation(
        reads_what_was_written,
        partial(_describe_read, tile, missing, skip_out_of_range),
        hint=f"{write} before this read, or slice the read to what was written",
    )


def _describe_read(tile: NkiTensor, missing: np.ndarray, skip_out_of_range: bool) -> str:
    """Return the text that a view was read of which some elements, a mask, were never written."""
    shape = tile.storage.shape
    allocation = "" if shape == tile.shape else f" of the allocated {shape}"
    return f"a read of {tile.describe()}, of which {_describe_missing(tile, missing, skip_out_of_range, allocation)}"


def _describe_missing(tile: NkiTensor, missing: np.ndarray, skip_out_of_range: bool, allocation: str) -> str:
    """Return a text with the unwritten elements of a view: `rows 4 to 7, columns 0 to 5 were never written`.

    Rows and columns are those of the allocation.

    Args:
        tile: The view.
        missing: Mask of its elements that were never written.
        skip_out_of_range: Whether a gather skips indices that are out of range.
        allocation: Text with the allocation's shape if it differs from the view's, else empty.
    """
    if missing.all():
        return "nothing was ever written"
    if missing.size > _MOST_ELEMENTS:
        return f"{np.count_nonzero(missing)} elements{allocation} were never written"
    if tile.dynamic is None:
        ids = (get_element_ids(tile.shape, tile.strides) + tile.offset)[missing]
    else:
        ids = _resolve_ids(tile, skip_out_of_range).reshape(-1)[missing.reshape(-1)]
    shape = tile.storage.shape
    if tile.dtype.storage.itemsize != tile.storage.dtype.storage.itemsize:
        row_bytes = tile.storage.nbytes // shape[0]
        shape = (shape[0], row_bytes // tile.dtype.storage.itemsize)
    axis_indices = [np.unique(indices) for indices in np.unravel_index(np.unique(ids), shape)]
    filled = np.unique(ids).size == np.prod([indices.size for indices in axis_indices])
    count = "" if filled else f"{np.unique(ids).size} elements in "
    if len(shape) == 2:
        named = zip(("row", "column"), axis_indices)
        box = ", ".join(f"{_pluralise(name, indices)} {_format_runs(indices)}" for name, indices in named)
    else:
        box = f"[{', '.join(_format_runs(indices, ':', 1) for indices in axis_indices)}]"
    return f"{count}{box}{allocation} were never written"


def _pluralise(name: str, indices: np.ndarray) -> str:
    """Return a noun, with an s unless there is exactly one index."""
    return name if indices.size == 1 else f"{name}s"


def _format_runs(indices: np.ndarray, between: str = " to ", beyond: int = 0) -> str:
    """Return sorted numbers as text of at most three runs: `0 to 3, 8`, then the number of further runs.

    Args:
        indices: The distinct numbers, in ascending order.
        between: The text between first and last number of a run.
        beyond: 1 for slices, which end after the last number: `0:4, 8`.
    """
    starts: Sequence[np.ndarray] = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    shown = [
        f"{run[0]}{between}{run[-1] + beyond}" if run.size > 1 else f"{run[0]}" for run in starts[:_MOST_RUNS]
    ]
    return ", ".join(shown) + (
        f" and {len(starts) - _MOST_RUNS} more runs" if len(starts) > _MOST_RUNS else ""
    )


def _resolve_ids(tile: NkiTensor, skip_out_of_range: bool) -> np.ndarray:
    """Return the ids in the storage of the elements that a run-time index selects, without skipped ones."""
    where = resolve(tile, skip_out_of_range)
    return where.elements if where.inside is None else where.elements[where.inside]


@rule("NKW-UNWRITTEN")
def reads_what_was_written() -> None:
    """An instruction reads only bytes that were written before.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


def check_registers(core: NeuronCore, plan: Plan, use: Registers) -> RuleViolation | None:
    """Check that the accumulator registers that an instruction reads are set; `mark_registers` follows after the write.

    Args:
        core: The core.
        plan: The plan of the instruction.
        use: The instruction's use of the registers.

    Returns:
        The error that explains the poison of a used register; None if no used register is poisoned, or none is used.

    Raises:
        RuleViolation: The instruction adds to registers, or reads them out, that this kernel has not set, and the
            rules of the launch do not tolerate it.
    """
    validity = _get_register_validity(core, plan)
    if not _uses_registers(use) or validity.uniform == WRITTEN:
        return None
    states = _read_register_states(validity, use.rows)
    missing = int(np.count_nonzero(states == EMPTY))
    if missing:
        verb = "adds to" if use.command is ReduceCmd.reduce else "reads out"
        core.rank.report_violation(
            RuleViolation(
                registers_were_set,
                f"reduce_cmd={use.command.name} {verb} the {plan.engine.name} accumulator registers of {use.rows} "
                f"partitions, of which this kernel never reset {missing}",
                hint="reduce_cmd=nisa.reduce_cmd.reset_reduce for the first instruction of the sum",
            )
        )
    blame = validity.blame
    return blame if isinstance(blame, RuleViolation) and (states == POISON).any() else None


def find_defined_registers(core: NeuronCore, plan: Plan, use: Registers) -> list[np.ndarray]:
    """Return whether each register that an instruction reads is not poisoned: a list with one bool array [P, 1].

    The list is empty if the instruction neither adds to registers nor reads them out.
    """
    if not _uses_registers(use):
        return []
    return [(_read_register_states(_get_register_validity(core, plan), use.rows) != POISON)[:, None]]


def mark_registers(
    core: NeuronCore, plan: Plan, use: Registers, defined: np.ndarray | None, blame: RuleViolation | None
) -> None:
    """Mark the registers that an instruction set as written, or as poisoned if undefined elements went into them.

    Does nothing for the command `idle`.

    Args:
        core: The core.
        plan: The plan of the instruction.
        use: The instruction's use of the registers.
        defined: Mask of the defined elements of the instruction's result; None if all are.
        blame: The error that poisoned registers carry.
    """
    if use.command is ReduceCmd.idle:
        return
    validity = _get_register_validity(core, plan)
    view = (use.rows,), (1,), 0, 1
    if validity.uniform != WRITTEN and not validity.mark_box(WRITTEN, ((0, use.rows),)):
        validity.mark(WRITTEN, use.rows == validity.nbytes, *view)
    if defined is not None and use.command is not ReduceCmd.reset:
        validity.mark_poison(np.logical_and.reduce(flattened(defined), axis=1), *view)
        validity.blame = blame


def _uses_registers(use: Registers) -> bool:
    """Return whether an instruction adds to registers or reads them out without setting them."""
    return use.command is ReduceCmd.reduce or (use.command is ReduceCmd.idle and use.read_out)


def _get_register_validity(core: NeuronCore, plan: Plan) -> Validity:
    """Return the validity of the register file that a plan uses, one byte per partition."""
    assert plan.state is not None
    return core.registers_defined(plan.state)


def _read_register_states(validity: Validity, rows: int) -> np.ndarray:
    """Return the validity states of the registers of the first `rows` partitions, an int array [rows]."""
    return np.broadcast_to(validity.states((rows,), (1,), 0, 1), (rows,))


@rule("NKW-REGISTERS-UNSET")
def registers_were_set() -> None:
    """Accumulator registers are reset before an instruction adds to them or reads them out.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """
