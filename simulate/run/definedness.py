"""Which bytes of a view and which accumulator registers are defined, and the errors for using others.

The contents of accumulator registers at the start of a kernel are not documented. A register that summed undefined
elements holds poison, as an element of a tile would.
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
from simulate.run.execute import flat
from simulate.run.indirect import places, resolve
from simulate.run.machine import NeuronCore

_MOST_RUNS = 3
"""Runs of rows or columns that a message lists."""
_MOST_ELEMENTS = 1 << 22
"""Elements of a view among which a message looks for rows and columns."""


def known_state(tile: NkiTensor) -> int | None:
    """The common state of all elements of a view without a run-time index; None if it is not known at once."""
    enclosing = tile.layout.boxes[1]
    return None if enclosing is None else tile.storage.validity.state_within(enclosing)


def states_of(tile: NkiTensor, skip_out_of_range: bool = False) -> Any:
    """The validity state of every element of a view; of a gather that skips, those of the elements in range."""
    validity = tile.storage.validity
    if tile.dynamic is None:
        known = known_state(tile)
        return validity.states(*tile.byte_view()[1:]) if known is None else known
    everywhere = validity.states(*flat(tile).byte_view()[1:])
    return everywhere if isinstance(everywhere, int) else everywhere[_gathered(tile, skip_out_of_range)]


def unwritten(tile: NkiTensor, skip_out_of_range: bool = False) -> RuleViolation:
    """The error for a read of undefined bytes; for poison, that of the read where the poison began."""
    blame, states = tile.storage.validity.blame, states_of(tile, skip_out_of_range)
    if isinstance(blame, RuleViolation) and np.any(np.bitwise_and(states, POISON)):
        return blame
    write = "matmul or copy into it" if tile.buffer is MemoryRegion.psum else "memset or load it"
    missing = np.equal(np.bitwise_and(states, WRITTEN), 0)
    return RuleViolation(
        reads_what_was_written,
        partial(_seen, tile, missing, skip_out_of_range),
        hint=f"{write} before this read, or slice the read to what was written",
    )


def _seen(tile: NkiTensor, missing: np.ndarray, skip_out_of_range: bool) -> str:
    whole = tile.storage.shape
    of = "" if whole == tile.shape else f" of the allocated {whole}"
    return f"a read of {tile.describe()}, of which {_place(tile, missing, skip_out_of_range, of)}"


def _place(tile: NkiTensor, missing: np.ndarray, skip_out_of_range: bool, of: str) -> str:
    """Which elements of the allocation are missing: `rows 4 to 7, columns 0 to 5 were never written`."""
    if missing.all():
        return "nothing was ever written"
    if missing.size > _MOST_ELEMENTS:
        return f"{np.count_nonzero(missing)} elements{of} were never written"
    if tile.dynamic is None:
        positions = (places(tile.shape, tile.strides) + tile.offset)[missing]
    else:
        positions = _gathered(tile, skip_out_of_range).reshape(-1)[missing.reshape(-1)]
    shape = tile.storage.shape
    if tile.dtype.storage.itemsize != tile.storage.dtype.storage.itemsize:
        row_bytes = tile.storage.nbytes // shape[0]
        shape = (shape[0], row_bytes // tile.dtype.storage.itemsize)
    indices = [np.unique(each) for each in np.unravel_index(np.unique(positions), shape)]
    filled = np.unique(positions).size == np.prod([each.size for each in indices])
    count = "" if filled else f"{np.unique(positions).size} elements in "
    if len(shape) == 2:
        named = zip(("row", "column"), indices)
        box = ", ".join(f"{_counted(name, each)} {_runs(each)}" for name, each in named)
    else:
        box = f"[{', '.join(_runs(each, ':', 1) for each in indices)}]"
    return f"{count}{box}{of} were never written"


def _counted(name: str, indices: np.ndarray) -> str:
    return name if indices.size == 1 else f"{name}s"


def _runs(indices: np.ndarray, between: str = " to ", beyond: int = 0) -> str:
    """Sorted numbers as runs: `0 to 3, 8`; as slices, whose ends lie beyond the last, `0:4, 8`."""
    starts: Sequence[np.ndarray] = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    shown = [
        f"{run[0]}{between}{run[-1] + beyond}" if run.size > 1 else f"{run[0]}" for run in starts[:_MOST_RUNS]
    ]
    return ", ".join(shown) + (
        f" and {len(starts) - _MOST_RUNS} more runs" if len(starts) > _MOST_RUNS else ""
    )


def _gathered(tile: NkiTensor, skip_out_of_range: bool) -> np.ndarray:
    where = resolve(tile, skip_out_of_range)
    return where.elements if where.inside is None else where.elements[where.inside]


@rule("NKW-UNWRITTEN")
def reads_what_was_written() -> None:
    """An instruction reads only bytes that were written before."""


def use_registers(core: NeuronCore, plan: Plan, use: Registers) -> RuleViolation | None:
    """The error that registers with poison carry, if the instruction uses any; `mark_registers` follows.

    Raises RuleViolation where it adds to registers, or reads them out, that this kernel has not set, unless the rules
    of the launch tolerate it.
    """
    validity = _registers(core, plan)
    if not _uses(use) or validity.uniform == WRITTEN:
        return None
    states = _register_states(validity, use.rows)
    missing = int(np.count_nonzero(states == EMPTY))
    if missing:
        verb = "adds to" if use.command is ReduceCmd.reduce else "reads out"
        core.rank.broken(
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
    """Which of the registers that an instruction uses are defined, as an operand (P, 1); none if it uses none."""
    if not _uses(use):
        return []
    return [(_register_states(_registers(core, plan), use.rows) != POISON)[:, None]]


def mark_registers(
    core: NeuronCore, plan: Plan, use: Registers, defined: np.ndarray | None, blame: RuleViolation | None
) -> None:
    """Mark what an instruction set; `defined` tells which elements of its result are, None that all are."""
    if use.command is ReduceCmd.idle:
        return
    validity = _registers(core, plan)
    view = (use.rows,), (1,), 0, 1
    if validity.uniform != WRITTEN and not validity.mark_box(WRITTEN, ((0, use.rows),)):
        validity.mark(WRITTEN, use.rows == validity.nbytes, *view)
    if defined is not None and use.command is not ReduceCmd.reset:
        validity.mark_poison(np.logical_and.reduce(flattened(defined), axis=1), *view)
        validity.blame = blame


def _uses(use: Registers) -> bool:
    return use.command is ReduceCmd.reduce or (use.command is ReduceCmd.idle and use.read_out)


def _registers(core: NeuronCore, plan: Plan) -> Validity:
    assert plan.state is not None
    return core.registers_defined(plan.state)


def _register_states(validity: Validity, rows: int) -> np.ndarray:
    return np.broadcast_to(validity.states((rows,), (1,), 0, 1), (rows,))


@rule("NKW-REGISTERS-UNSET")
def registers_were_set() -> None:
    """Accumulator registers are reset before an instruction adds to them or reads them out."""
