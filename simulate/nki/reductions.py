"""Reductions of `nki.language`, and functions composed of them: sum, mean, var, softmax, rms_norm and the like.

Each allocates its result in SBUF, issues the instructions for it and returns it. `axis` names trailing free dims, as in
tensor_reduce, and may count from the end; `dtype` is the result's, by default x's. A result keeps at least two dims.
The names are those of NKI and hide Python's own in this module.
"""

from __future__ import annotations

from math import prod as product
from typing import Any

from simulate.isa.rules import is_tensor
from simulate.memory import NkiTensor
from simulate.nki import isa
from simulate.nki.arguments import norm_counts_values, resolve_dtype
from simulate.nki.operators import apply_pair, apply_scalar, new_tile
from simulate.numerics import ACTIVATION_FUNCTIONS, ALU_OPERATORS, as_dtype


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the sum of x over trailing free dims, taken in float32, as a new SBUF tile."""
    return _reduce(x, "add", axis, dtype, keepdims)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the maximum of x over trailing free dims, as a new SBUF tile; also an operator argument."""
    return _reduce(x, "maximum", axis, dtype, keepdims)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the minimum of x over trailing free dims, as a new SBUF tile; also an operator argument."""
    return _reduce(x, "minimum", axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the product of x over trailing free dims, taken in float32, as a new SBUF tile."""
    return _reduce(x, "multiply", axis, dtype, keepdims)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """Return 1 if every element of x over trailing free dims is not zero, else 0, as a new SBUF tile of x's dtype."""
    return _reduce(x, "logical_and", axis, dtype, False)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the mean of x over trailing free dims, the float32 sum times 1 / n, as a new SBUF tile."""
    total = _reduce(x, "add", axis, "float32", keepdims)
    return apply_scalar(total, "multiply", 1 / (x.size // total.size), resolve_dtype(x, dtype))


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the population variance of x over trailing free dims, taken in float32, as a new SBUF tile.

    Reduced dims are kept with size 1, also if `keepdims` is False.
    """
    center = mean(x, axis, "float32", True)
    deviation = _with(x, center, "subtract", "float32")
    return mean(apply_pair(deviation, deviation, "multiply", "float32"), axis, resolve_dtype(x, dtype), True)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Return exp(x - max) / sum along trailing free dims, taken in float32, as a new SBUF tile of x's shape."""
    shifted = _with(x, _reduce(x, "maximum", axis, "float32", True), "subtract", "float32")
    exponentials = new_tile(x, "float32")
    isa.activation(dst=exponentials, op=ACTIVATION_FUNCTIONS["exp"], data=shifted)
    total = _reduce(exponentials, "add", axis, "float32", True)
    isa.reciprocal(dst=total, data=total)
    return _with(exponentials, total, "multiply", resolve_dtype(x, dtype))


def rms_norm(
    x: NkiTensor,
    w: NkiTensor,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """Return x / sqrt(sum(x^2) / n + epsilon) * w as a new SBUF tile of x's shape.

    Where epsilon goes is not documented; it is added under the root, as in the models that use this norm.

    Args:
        x: The tile.
        w: Weights, a tile of x's shape.
        axis: Trailing free dims of the sum.
        n: Number of values by which the sum is divided.
        epsilon: Added under the root.
        dtype: Dtype of the result, by default x's.
        compute_dtype: Dtype of intermediate tiles, by default float32.
    """
    norm_counts_values(n)
    is_tensor("w", w)
    wide = "float32" if compute_dtype is None else as_dtype(compute_dtype)
    scale = _reduce(apply_pair(x, x, "multiply", wide), "add", axis, wide, True)
    multiply, add = ALU_OPERATORS["multiply"], ALU_OPERATORS["add"]
    isa.tensor_scalar(dst=scale, data=scale, op0=multiply, operand0=1 / n, op1=add, operand1=epsilon)
    isa.activation(dst=scale, op=ACTIVATION_FUNCTIONS["rsqrt"], data=scale)
    return apply_pair(_with(x, scale, "multiply", wide), w, "multiply", resolve_dtype(x, dtype))


def _axes(x: NkiTensor, axis: Any) -> set[int]:
    """Return the free dims that `axis` names as a set, counted from the front.

    Entries that are no ints, and the partition dim, are left out; tensor_reduce refuses them afterwards.
    """
    named = axis if isinstance(axis, (tuple, list)) else (axis,)
    return {dim % x.ndim for dim in named if isinstance(dim, int)} - {0}


def _reduce(x: NkiTensor, operator: str, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    is_tensor("x", x)
    axes = _axes(x, axis)
    kept = [1 if dim in axes else extent for dim, extent in enumerate(x.shape)]
    if not keepdims:
        kept = [extent for dim, extent in enumerate(kept) if dim not in axes]
        kept += [1] * (2 - len(kept))  # a tile keeps two dims
    result = new_tile(x, dtype, tuple(kept))
    isa.tensor_reduce(
        dst=result, op=ALU_OPERATORS[operator], data=x, axis=_from_front(x, axis), keepdims=keepdims
    )
    return result


def _from_front(x: NkiTensor, axis: Any) -> Any:
    """Return `axis` with negative dims, which nki.language takes, counted from the front as tensor_reduce expects."""
    if isinstance(axis, (tuple, list)):
        return tuple(_from_front(x, dim) for dim in axis)
    return axis + x.ndim if isinstance(axis, int) and axis < 0 else axis


def _with(x: NkiTensor, reduced: NkiTensor, operator: str, dtype: Any) -> NkiTensor:
    """Return operator(x, reduced) as a new SBUF tile; `reduced` is repeated along the dims in which it has size 1."""
    if product(reduced.shape[1:]) == 1:
        return apply_scalar(x, operator, reduced, dtype)
    repeated = reduced
    for dim, extent in enumerate(x.shape):
        if reduced.shape[dim] != extent:
            repeated = repeated.broadcast(dim, extent)
    return apply_pair(x, repeated, operator, dtype)


for _function in (max, min):
    _function.nki_operator = _function.__name__  # type: ignore[attr-defined]
