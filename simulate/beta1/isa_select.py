"""Instructions that fill, count or select by position, in Beta 1's form, which returns the result as a tile."""

from __future__ import annotations

from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.beta1.arithmetic import bring_to_sbuf
from simulate.beta1.elementwise import is_tile
from simulate.beta1.indices import Index
from simulate.beta1.masks import Box, Mask
from simulate.beta1.program import current, encode_affine, issue, select
from simulate.beta1.region import Region
from simulate.beta1.tile import Tile, defer_masked
from simulate.isa.enums import Engine


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
    """Return a tile of `shape` with `value` in every element that the mask selects; in SBUF unless it is assigned."""

    def fill(region: Region, box: Box) -> None:
        issue("memset", dst=region.view(), value=value, engine=engine, name=name)

    return defer_masked(tuple(shape), dtype, fill, mask, dtype_given=dtype)


def iota(expr: Index, dtype: Any, *, mask: Any = None, name: str | None = None, **_: Any) -> Tile:
    """Return a tile with the values of an index expression at every position; in SBUF unless it is assigned.

    Raises RuleViolation unless `expr` is an index of two or more axes.
    """
    is_index(expr)

    def emit(region: Region, box: Box) -> None:
        issue("iota", dst=region.view(), name=name, **encode_affine(expr.steps, expr.offset, box))

    return defer_masked(expr.shape, dtype, emit, mask, dtype_given=dtype)


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
    """Return a tile with on_true_tile where the comparison `pred` holds, else on_false_value.

    `pred` compares index expressions, such as i_p >= i_f. GpSimd, which runs the instruction, does not reach PSUM: a
    tile there is copied to SBUF before. Raises RuleViolation unless `pred` is one comparison.
    """
    is_comparison(pred)
    is_tile("on_true_tile", on_true_tile)
    kept = bring_to_sbuf(on_true_tile)

    def emit(region: Region, box: Box) -> None:
        source = current().readable(kept.region.cut(box))
        select(pred.conditions[0], box, region.view(), source, on_false_value, name)

    return defer_masked(on_true_tile.shape, on_true_tile.dtype, emit, mask, dtype_given=dtype)


@rule("NKW-BETA1-IOTA")
def is_index(expr: Any) -> None:
    """iota takes an index expression with a partition axis and free axes.

    Raises RuleViolation for anything but an Index of two or more axes.
    """
    if not isinstance(expr, Index) or len(expr.shape) < 2:
        raise RuleViolation(is_index, f"{expr!r:.60}", hint="nisa.iota(nl.arange(512)[None, :], nl.int32)")


@rule("NKW-BETA1-PREDICATE")
def is_comparison(pred: Any) -> None:
    """affine_select takes one comparison of index expressions.

    Raises RuleViolation for anything but a Mask of one condition.
    """
    if not isinstance(pred, Mask) or len(pred.conditions) != 1:
        raise RuleViolation(
            is_comparison, f"{pred!r:.60}", hint="pred=(i_p >= i_f); use two for two conditions"
        )
