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
from simulate.nki.arguments import dtype_or_that_of, norm_counts_values
from simulate.nki.operators import new_tile, pair, scalar
from simulate.numerics import ACTIVATION_FUNCTIONS, ALU_OPERATORS, as_dtype


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The sum over trailing free dims, in float32."""
    return _reduce(x, "add", axis, dtype, keepdims)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The maximum over trailing free dims; also an operator argument."""
    return _reduce(x, "maximum", axis, dtype, keepdims)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The minimum over trailing free dims; also an operator argument."""
    return _reduce(x, "minimum", axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The product over trailing free dims, in float32."""
    return _reduce(x, "multiply", axis, dtype, keepdims)


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """1 where every element over trailing free dims is not zero, else 0."""
    return _reduce(x, "logical_and", axis, dtype, False)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The mean over trailing free dims: the float32 sum times 1 / n."""
    total = _reduce(x, "add", axis, "float32", keepdims)
    return scalar(total, "multiply", 1 / (x.size // total.size), dtype_or_that_of(x, dtype))


def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The population variance over trailing free dims, in float32; dims are kept, whatever `keepdims` says."""
    center = mean(x, axis, "float32", True)
    away = _with(x, center, "subtract", "float32")
    return mean(pair(away, away, "multiply", "float32"), axis, dtype_or_that_of(x, dtype), True)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """exp(x - max) over its sum along trailing free dims, in float32."""
    away = _with(x, _reduce(x, "maximum", axis, "float32", True), "subtract", "float32")
    powers = new_tile(x, "float32")
    isa.activation(dst=powers, op=ACTIVATION_FUNCTIONS["exp"], data=away)
    total = _reduce(powers, "add", axis, "float32", True)
    isa.reciprocal(dst=total, data=total)
    return _with(powers, total, "multiply", dtype_or_that_of(x, dtype))


def rms_norm(
    x: NkiTensor,
    w: NkiTensor,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """x / sqrt(sum(x^2) / n + epsilon) * w; intermediate results in compute_dtype, by default float32.

    Where epsilon goes is not documented; it is added under the root, as in the models that use this norm.
    """
    norm_counts_values(n)
    is_tensor("w", w)
    wide = "float32" if compute_dtype is None else as_dtype(compute_dtype)
    scale = _reduce(pair(x, x, "multiply", wide), "add", axis, wide, True)
    multiply, add = ALU_OPERATORS["multiply"], ALU_OPERATORS["add"]
    isa.tensor_scalar(dst=scale, data=scale, op0=multiply, operand0=1 / n, op1=add, operand1=epsilon)
    isa.activation(dst=scale, op=ACTIVATION_FUNCTIONS["rsqrt"], data=scale)
    return pair(_with(x, scale, "multiply", wide), w, "multiply", dtype_or_that_of(x, dtype))


def _axes(x: NkiTensor, axis: Any) -> set[int]:
    """The free dims that `axis` names; tensor_reduce refuses what is no list of trailing ones."""
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
    """x and a reduction of it with kept dims, repeated over the dims that were reduced."""
    if product(reduced.shape[1:]) == 1:
        return scalar(x, operator, reduced, dtype)
    repeated = reduced
    for dim, extent in enumerate(x.shape):
        if reduced.shape[dim] != extent:
            repeated = repeated.broadcast(dim, extent)
    return pair(x, repeated, operator, dtype)


for _function in (max, min):
    _function.nki_operator = _function.__name__  # type: ignore[attr-defined]
