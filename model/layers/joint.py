"""Fusion of attention and MLP in decode steps: one launch of `decoder_layer_decode` replaces two launches.

Layers list their launches independently. `join_launches` goes through the launches of one decoder layer and replaces
each pair that the joint kernel computes. The joint kernel starts once, and it loads the weights of the MLP while
attention still runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from model.layers.launch import Launch

_NORM = "norm_weight"
_MATRICES = ("w_gate", "w_up", "w_down")
_MLP_PARAMETERS = {
    _NORM: "mlp_norm_weight",
    **{name: name for name in (*_MATRICES, "activation", "b_gate", "b_up", "b_down")},
    **{f"{name}_{stored}": f"{name}_{stored}" for name in _MATRICES for stored in ("scales", "zeros")},
}
"""Names of `decoder_layer_decode` for the parameters of `mlp` that both kernels have."""

_SHARED_PARAMETERS = ("x", "eps", "replica_group")
"""Parameters that attention and MLP have in common; a joint launch has one argument for both."""

_MLP_FIXED = {
    "norm_offset": 0.0,
    "residual": True,
    "sequence_ranks": 1,
    **dict.fromkeys(("norm_bias", "row_gate")),
}
"""Values of the parameters of `mlp` that `decoder_layer_decode` lacks and fixes."""


def join_launches(launches: Iterable[Launch], lnc: int = 1) -> list[Launch]:
    """Return the launches of a decoder layer with attention and MLP joined where `decoder_layer_decode` takes both.

    A launch of `attention_block_decode` with a launch of `mlp` right after it becomes one launch, if `_can_join` allows
    it; `fused` of the joint launch has the two. All other launches are returned as they are.

    With `lnc` > 1, a rank has `lnc` physical cores. Nothing is joined if they do not divide the joint kernel's work,
    because they divide the work of the separate kernels.
    """
    if lnc > 1:
        from model.device import can_divide_among  # takes as long to import as the rest of the model

        if not can_divide_among("decoder_layer_decode", lnc):
            return list(launches)
    result: list[Launch] = []
    for launch in launches:
        if result and _can_join(result[-1], launch):
            result[-1] = _join(result[-1], launch)
        else:
            result.append(launch)
    return result


def _can_join(attention: Launch, mlp: Launch) -> bool:
    """Return whether the joint kernel computes these two launches.

    They must be `attention_block_decode` and `mlp` over the same number of rows, with the same x, eps and replica
    group. The MLP needs a norm, the values of `_MLP_FIXED`, and no argument without a parameter in the joint kernel.
    """
    if (attention.kernel, mlp.kernel) != ("attention_block_decode", "mlp") or attention.rows != mlp.rows:
        return False
    if not mlp.arguments.keys() <= {*_SHARED_PARAMETERS, *_MLP_PARAMETERS, *_MLP_FIXED}:
        return False  # an argument without a parameter in the joint kernel
    return (
        mlp.arguments.get(_NORM) is not None
        and all(mlp.arguments.get(name) == attention.arguments[name] for name in _SHARED_PARAMETERS)
        and all(mlp.arguments.get(name, value) == value for name, value in _MLP_FIXED.items())
    )


def _join(attention: Launch, mlp: Launch) -> Launch:
    """Return one launch of `decoder_layer_decode` for both, with the results of attention and the sum of the work.

    Its arguments are those of the attention block and, renamed by `_MLP_PARAMETERS`, of the MLP.
    """
    mlp_arguments = {
        parameter: mlp.arguments[name] for name, parameter in _MLP_PARAMETERS.items() if name in mlp.arguments
    }
    return Launch(
        "decoder_layer_decode",
        {**attention.arguments, **mlp_arguments},
        attention.results,
        attention.work + mlp.work,
        attention.rows,
        fused=(attention, mlp),
    )
