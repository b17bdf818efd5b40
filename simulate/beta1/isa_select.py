"""Fills, positions and selections in the returning form."""

from __future__ import annotations

from typing import Any

from simulate.beta1.arithmetic import in_sbuf
from simulate.beta1.elementwise import elementwise, is_tile
from simulate.beta1.indices import Index
from simulate.beta1.masks import Box, Mask, normalised
from simulate.beta1.operators import operator
from simulate.beta1.program import current, issue, select
from simulate.beta1.region import Region
from simulate.beta1.tile import Tile, defer, nki_tensor
from simulate.errors import RuleViolation, rule
from simulate.isa.enums import Engine, ReduceCmd
from simulate.isa.instructions.range_select import FLOAT32_MIN
from simulate.memory import NkiTensor
from simulate.numerics import ALU_OPERATORS


def memset(
    shape: Any,
    value: Any,
    dtype: Any,
    *,
    mask: Any = None,
    engine: Engine = Engine.unknown,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """A tile filled with a value."""
    program, selected = current(), normalised(mask)

    def fill(part: Region, box: Box) -> None:
        issue("memset", dst=part.view(), value=value, engine=engine, name=name)

    return defer(
        tuple(shape), dtype, lambda dst: program.divide(selected, dst, fill), dtype_given=dtype, mask=selected
    )


def iota(expr: Index, dtype: Any, *, mask: Any = None, name: str | None = None, **_: Any) -> Tile:
    """The values of an index expression as a tile."""
    is_index(expr)
    program, selected = current(), normalised(mask)

    def emit(part: Region, box: Box) -> None:
        starts = sum(start * step for (start, _), step in zip(box, expr.steps))
        issue(
            "iota",
            dst=part.view(),
            pattern=[[step, end - start] for step, (start, end) in zip(expr.steps[1:], box[1:])],
            offset=expr.offset + starts,
            channel_multiplier=expr.steps[0],
            name=name,
        )

    return defer(
        expr.shape, dtype, lambda dst: program.divide(selected, dst, emit), dtype_given=dtype, mask=selected
    )


def affine_select(
    pred: Mask,
    on_true_tile: Tile,
    on_false_value: float,
    *,
    mask: Any = None,
    dtype: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """on_true_tile where the comparison of an index expression holds, else on_false_value.

    GpSimd, which does this, does not reach PSUM: a tile there is copied to SBUF before.
    """
    is_comparison(pred)
    is_tile("on_true_tile", on_true_tile)
    program, selected = current(), normalised(mask)
    kept = in_sbuf(on_true_tile)

    def emit(part: Region, box: Box) -> None:
        source = program.readable(kept.region.cut(box))
        select(pred.conditions[0], box, part.view(), source, on_false_value, name)

    return defer(
        on_true_tile.shape,
        on_true_tile.dtype,
        lambda dst: program.divide(selected, dst, emit),
        dtype_given=dtype,
        mask=selected,
    )


def range_select(
    *,
    on_true_tile: Tile,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Tile,
    bound1: Tile,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_res: Tile | None = None,
    reduce_op: Any = ALU_OPERATORS["maximum"],
    range_start: int = 0,
    on_false_value: Any = FLOAT32_MIN,
    mask: Any = None,
    dtype: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """on_true_tile where the position lies in a range of each partition, else on_false_value.

    Beta 1's reduce_cmd was idle by default, whatever its tests expect; as in 0.6 it is reset_reduce here,
    which differs only in what reduce_res gets.
    """
    columns = {"bound0": bound0, "bound1": bound1, "reduce_res": reduce_res}
    attributes = {
        "comp_op0": operator(comp_op0),
        "comp_op1": operator(comp_op1),
        "reduce_cmd": reduce_cmd,
        "reduce_op": operator(reduce_op),
        "range_start": range_start,
        "on_false_value": on_false_value,
        "name": name,
    }
    return elementwise("range_select", {"on_true_tile": on_true_tile}, columns, attributes, dtype, mask)


def tensor_copy_predicated(
    *,
    src: Any,
    dst: Tile,
    predicate: Tile,
    mask: Any = None,
    reverse_pred: bool = False,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """Write src to those elements of dst that the predicate selects; returns dst."""
    current().settle()
    no_mask("tensor_copy_predicated", mask)
    issue(
        "tensor_copy_predicated",
        dst=dst.tensor,
        src=nki_tensor(src),
        predicate=_flags(predicate),
        reverse_pred=reverse_pred,
        name=name,
    )
    return dst


def select_reduce(
    *,
    dst: Tile,
    predicate: Tile,
    on_true: Tile,
    on_false: Any,
    reduce_res: Tile | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_op: Any = ALU_OPERATORS["maximum"],
    reverse_pred: bool = False,
    mask: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """dst = on_true where the predicate is set, else on_false; returns dst."""
    current().settle()
    no_mask("select_reduce", mask)
    issue(
        "select_reduce",
        dst=dst.tensor,
        predicate=_flags(predicate),
        on_true=on_true.operand,
        on_false=nki_tensor(on_false),
        reduce_res=None if reduce_res is None else reduce_res.tensor,
        reduce_cmd=reduce_cmd,
        reduce_op=operator(reduce_op),
        reverse_pred=reverse_pred,
        name=name,
    )
    return dst


def _flags(predicate: Tile) -> NkiTensor:
    """A predicate as 0.6 takes it: the bytes of a boolean tile are its numbers."""
    tensor = predicate.operand
    return tensor.view("uint8") if tensor.dtype == "bool_" else tensor


@rule("NKW-BETA1-NO-MASK")
def no_mask(instruction: str, mask: Any) -> None:
    """This instruction takes no mask here; slice its operands."""
    if normalised(mask) is not None:
        raise RuleViolation(no_mask, f"{instruction} with mask=")


@rule("NKW-BETA1-IOTA")
def is_index(expr: Any) -> None:
    """iota takes an index expression with a partition axis and free axes."""
    if not isinstance(expr, Index) or len(expr.shape) < 2:
        raise RuleViolation(is_index, f"{expr!r:.60}", hint="nisa.iota(nl.arange(512)[None, :], nl.int32)")


@rule("NKW-BETA1-PREDICATE")
def is_comparison(pred: Any) -> None:
    """affine_select takes one comparison of index expressions."""
    if not isinstance(pred, Mask) or len(pred.conditions) != 1:
        raise RuleViolation(
            is_comparison, f"{pred!r:.60}", hint="pred=(i_p >= i_f); use two for two conditions"
        )
