"""Reductions of `nki.language`, and functions composed of them: sum, mean, var, softmax, rms_norm and the like.

Each allocates its result in SBUF and issues the instructions for it. `axis` names trailing free dims, as in
tensor_reduce; the names are those of NKI and hide Python's own in this module.
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
    """Sum over trailing free dims, in float32."""
    return _reduce(x, "add", axis, dtype, keepdims)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the maximum over trailing free dims; also an operator argument."""
    return _reduce(x, "maximum", axis, dtype, keepdims)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the minimum over trailing free dims; also an operator argument."""
    return _reduce(x, "minimum", axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Multiply over trailing free dims, in float32."""
    return _reduce(x, "multiply", axis, dtype, keepdims)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """Return 1 where every element over trailing free dims is not zero, else 0."""
    return _reduce(x, "logical_and", axis, dtype, False)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Compute the mean over trailing free dims: the float32 sum times 1 / n."""
    total = _reduce(x, "add", axis, "float32", keepdims)
    return apply_scalar(total, "multiply", 1 / (x.size // total.size), resolve_dtype(x, dtype))


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Compute the population variance over trailing free dims, in float32; dims are kept, whatever `keepdims` says."""
    center = mean(x, axis, "float32", True)
    deviation = _with(x, center, "subtract", "float32")
    return mean(apply_pair(deviation, deviation, "multiply", "float32"), axis, resolve_dtype(x, dtype), True)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Compute exp(x - max) over its sum along trailing free dims, in float32."""
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
    """Compute x / sqrt(sum(x^2) / n + epsilon) * w; intermediates have compute_dtype, by default float32.

    Where epsilon goes is not documented; it is added under the root, as in the models that use this norm.
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
    """Return the free dims that `axis` names; tensor_reduce refuses what is no list of trailing ones."""
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
    """Return axis with negative numbers, which nki.language takes, counted from the front, as nki.isa asks."""
    if isinstance(axis, (tuple, list)):
        return tuple(_from_front(x, dim) for dim in axis)
    return axis + x.ndim if isinstance(axis, int) and axis < 0 else axis


def _with(x: NkiTensor, reduced: NkiTensor, operator: str, dtype: Any) -> NkiTensor:
    """Apply an operator to x and a reduction of it with kept dims, repeated over the dims that were reduced."""
    if product(reduced.shape[1:]) == 1:
        return apply_scalar(x, operator, reduced, dtype)
    repeated = reduced
    for dim, extent in enumerate(x.shape):
        if reduced.shape[dim] != extent:
            repeated = repeated.broadcast(dim, extent)
    return apply_pair(x, repeated, operator, dtype)


for _function in (max, min):
    _function.nki_operator = _function.__name__  # type: ignore[attr-defined]
