"""Templates: what all events of equal calls have in common. A stream refers to one template for each event."""

from __future__ import annotations

from simulate.isa.plan import Accumulate, Plan
from simulate.memory import NkiTensor

READ, WRITE, ACCUMULATE = 0, 1, 2


class Template:
    """Instruction apart from its tensors: its name, its plan over stand-ins (tensors without bytes), a box per operand.

    A box is (mode, first row, end row, first byte, end byte) of the operand's view in its own allocation, not an
    address: it holds for all tensors of that layout. Rows are partitions on chip. Mode ACCUMULATE is a matmul's write
    that may add to what it finds; WRITE does not read it.

    Operands have the order of the plan, reads first. The index of a run-time address follows its operand, whose box is
    its whole tensor, because where the address leads is not known before the run.

    Attributes:
        op: Name of the instruction.
        plan: The plan over stand-ins.
        operands: Stand-ins of all operands.
        boxes: Box of each operand.
        reads: Indices of the plan's reads in `operands`.
        writes: Indices of the plan's writes in `operands`.
        direct: Whether no operand has a run-time address.
    """

    __slots__ = ("boxes", "direct", "op", "operands", "plan", "reads", "writes")

    def __init__(self, op: str, plan: Plan) -> None:
        """Create a template of a plan over stand-ins, because the template outlives the launch that made it."""
        self.op = op
        self.plan = plan
        self.operands: list[NkiTensor] = []
        self.boxes: list[
            tuple[int, int, int, int, int]
        ] = []  # kind, first row, end row, first byte, end byte
        self.reads: list[int] = []
        self.writes: list[int] = []
        adds = plan.accumulate is not None and plan.accumulate is not Accumulate.overwrite
        for mode, tensors, indices in (
            (READ, plan.reads, self.reads),
            (ACCUMULATE if adds else WRITE, plan.writes, self.writes),
        ):
            for tensor in tensors:
                indices.append(len(self.operands))
                self._add(mode, tensor)
        self.direct = len(self.operands) == len(self.reads) + len(self.writes)

    def _add(self, mode: int, tensor: NkiTensor) -> None:
        self.operands.append(tensor)
        if tensor.dynamic is None:
            self.boxes.append((mode, *tensor.layout.rows))
            return
        form, index = tensor.layout.form, tensor.dynamic.index
        rows = form.size * form.dtype.itemsize // form.row_bytes
        self.boxes.append((mode, 0, rows, 0, form.row_bytes))
        self.operands.append(index)
        self.boxes.append((READ, *index.layout.rows))
