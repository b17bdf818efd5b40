"""Definedness of the bytes of views and of accumulator registers, and the errors for using undefined ones.

The contents of accumulator registers at the start of a kernel are not documented. A register that summed undefined
elements is poisoned, as an element of a tile would be.
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
from simulate.run.execute import flat_view
from simulate.run.indirect import cached_element_ids, resolve
from simulate.run.machine import NeuronCore

_MOST_RUNS = 3
"""Largest number of runs of rows or columns that a message lists."""
_MOST_ELEMENTS = 1 << 22
"""Largest number of elements of a view in which a message searches for rows and columns."""


def known_state(tile: NkiTensor) -> int | None:
    """Return the common validity state of all elements of a static view; None if it takes a search."""
    enclosing = tile.layout.boxes[1]
    return None if enclosing is None else tile.storage.validity.state_within(enclosing)


def states_of(tile: NkiTensor, skip_out_of_range: bool = False) -> Any:
    """Return the validity state of every element of a view: an array, or an int if all are equal.

    Args:
        tile: The view.
        skip_out_of_range: Whether a gather skips indices that are out of range; their elements do not count.
    """
    validity = tile.storage.validity
    if tile.dynamic is None:
        known = known_state(tile)
        return validity.states(*tile.byte_view()[1:]) if known is None else known
    everywhere = validity.states(*flat_view(tile).byte_view()[1:])
    return everywhere if isinstance(everywhere, int) else everywhere[_gathered_ids(tile, skip_out_of_range)]


def unwritten_error(tile: NkiTensor, skip_out_of_range: bool = False) -> RuleViolation:
    """Return the error for a read of undefined bytes.

    For poison it is the error of the read that began the poison.
    """
    blame, states = tile.storage.validity.blame, states_of(tile, skip_out_of_range)
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
    shape = tile.storage.shape
    allocation = "" if shape == tile.shape else f" of the allocated {shape}"
    return f"a read of {tile.describe()}, of which {_describe_missing(tile, missing, skip_out_of_range, allocation)}"


def _describe_missing(tile: NkiTensor, missing: np.ndarray, skip_out_of_range: bool, allocation: str) -> str:
    """Return a text with the unwritten elements: `rows 4 to 7, columns 0 to 5 were never written`."""
    if missing.all():
        return "nothing was ever written"
    if missing.size > _MOST_ELEMENTS:
        return f"{np.count_nonzero(missing)} elements{allocation} were never written"
    if tile.dynamic is None:
        ids = (cached_element_ids(tile.shape, tile.strides) + tile.offset)[missing]
    else:
        ids = _gathered_ids(tile, skip_out_of_range).reshape(-1)[missing.reshape(-1)]
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
    return name if indices.size == 1 else f"{name}s"


def _format_runs(indices: np.ndarray, between: str = " to ", beyond: int = 0) -> str:
    """Return sorted numbers as text of runs: `0 to 3, 8`.

    Args:
        indices: The numbers.
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


def _gathered_ids(tile: NkiTensor, skip_out_of_range: bool) -> np.ndarray:
    where = resolve(tile, skip_out_of_range)
    return where.elements if where.inside is None else where.elements[where.inside]


@rule("NKW-UNWRITTEN")
def reads_what_was_written() -> None:
    """An instruction reads only bytes that were written before."""


def check_registers(core: NeuronCore, plan: Plan, use: Registers) -> RuleViolation | None:
    """Check the accumulator registers that an instruction uses; the caller calls `mark_registers` afterwards.

    Returns:
        The error that poisoned registers carry, None if no used register is poisoned.

    Raises:
        RuleViolation: The instruction adds to registers, or reads them out, that this kernel has not set, and the rules
            of the launch do not tolerate it.
    """
    validity = _registers(core, plan)
    if not _uses_registers(use) or validity.uniform == WRITTEN:
        return None
    states = _register_states(validity, use.rows)
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


def defined_registers(core: NeuronCore, plan: Plan, use: Registers) -> list[np.ndarray]:
    """Return which registers that an instruction uses are defined: a bool array [P, 1]; none if it uses none."""
    if not _uses_registers(use):
        return []
    return [(_register_states(_registers(core, plan), use.rows) != POISON)[:, None]]


def mark_registers(
    core: NeuronCore, plan: Plan, use: Registers, defined: np.ndarray | None, blame: RuleViolation | None
) -> None:
    """Mark the registers that an instruction set.

    Args:
        core: The core.
        plan: The plan of the instruction.
        use: Its use of the registers.
        defined: Which elements of its result are defined; None if all are.
        blame: The error that poisoned registers carry.
    """
    if use.command is ReduceCmd.idle:
        return
    validity = _registers(core, plan)
    view = (use.rows,), (1,), 0, 1
    if validity.uniform != WRITTEN and not validity.mark_box(WRITTEN, ((0, use.rows),)):
        validity.mark(WRITTEN, use.rows == validity.nbytes, *view)
    if defined is not None and use.command is not ReduceCmd.reset:
        validity.mark_poison(np.logical_and.reduce(flattened(defined), axis=1), *view)
        validity.blame = blame


def _uses_registers(use: Registers) -> bool:
    return use.command is ReduceCmd.reduce or (use.command is ReduceCmd.idle and use.read_out)


def _registers(core: NeuronCore, plan: Plan) -> Validity:
    assert plan.state is not None
    return core.registers_defined(plan.state)


def _register_states(validity: Validity, rows: int) -> np.ndarray:
    return np.broadcast_to(validity.states((rows,), (1,), 0, 1), (rows,))


@rule("NKW-REGISTERS-UNSET")
def registers_were_set() -> None:
    """Accumulator registers are reset before an instruction adds to them or reads them out."""
