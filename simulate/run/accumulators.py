"""Which accumulator registers of an engine are defined: instructions set them, and may not use them before.

Contents at the start of a kernel are not documented. A register that summed undefined elements holds poison, as an
element of a tile would.
"""

from __future__ import annotations

import numpy as np

from simulate.errors import RuleViolation, rule
from simulate.isa.enums import ReduceCmd
from simulate.isa.plan import Plan, Registers
from simulate.isa.shapes import flat
from simulate.memory.validity import EMPTY, POISON, WRITTEN, Validity
from simulate.run.machine import NeuronCore


def use_registers(core: NeuronCore, plan: Plan, use: Registers) -> RuleViolation | None:
    """The error that registers with poison carry, if the instruction uses any; `mark_registers` follows.

    Raises RuleViolation where it adds to registers, or reads them out, that this kernel has not set, unless the rules
    of the launch tolerate it.
    """
    validity = _validity(core, plan)
    if not _uses(use) or validity.uniform == WRITTEN:
        return None
    states = _states(validity, use.rows)
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
    return [(_states(_validity(core, plan), use.rows) != POISON)[:, None]]


def mark_registers(
    core: NeuronCore, plan: Plan, use: Registers, defined: np.ndarray | None, blame: RuleViolation | None
) -> None:
    """Mark what an instruction set; `defined` tells which elements of its result are, None that all are."""
    if use.command is ReduceCmd.idle:
        return
    validity = _validity(core, plan)
    view = (use.rows,), (1,), 0, 1
    if validity.uniform != WRITTEN and not validity.mark_box(WRITTEN, ((0, use.rows),)):
        validity.mark(WRITTEN, use.rows == validity.nbytes, *view)
    if defined is not None and use.command is not ReduceCmd.reset:
        validity.mark_poison(np.logical_and.reduce(flat(defined), axis=1), *view)
        validity.blame = blame


def _uses(use: Registers) -> bool:
    return use.command is ReduceCmd.reduce or (use.command is ReduceCmd.idle and use.read_out)


def _validity(core: NeuronCore, plan: Plan) -> Validity:
    assert plan.state is not None
    return core.registers_defined(plan.state)


def _states(validity: Validity, rows: int) -> np.ndarray:
    return np.broadcast_to(validity.states((rows,), (1,), 0, 1), (rows,))


@rule("NKW-REGISTERS-UNSET")
def registers_were_set() -> None:
    """Accumulator registers are reset before an instruction adds to them or reads them out."""
