"""Fusion of attention and MLP in decode steps: one launch of `decoder_layer_decode` replaces two launches.

Layers list their launches independently. `join_launches` goes through the launches of one decoder layer and replaces
each pair that the joint kernel computes. The joint kernel starts once, and it loads the weights of the MLP while
attention still runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from model.layers.launch import Launch

_NORM = "norm_weight"
_MLP_PARAMETERS = {
    _NORM: "mlp_norm_weight",
    **{name: name for name in ("w_gate", "w_up", "w_down", "activation", "b_gate", "b_up", "b_down")},
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

    `fused` of a joint launch has the two launches that it replaces. Attention and MLP stay apart where `lnc` physical
    cores of a rank divide the work of the two launches and not the work of the joint one.
    """
    if lnc > 1:
        from model.device import divides_among  # takes as long to import as the rest of the model

        if not divides_among("decoder_layer_decode", lnc):
            return list(launches)
    result: list[Launch] = []
    for launch in launches:
        if result and _can_join(result[-1], launch):
            result[-1] = _join(result[-1], launch)
        else:
            result.append(launch)
    return result


def _can_join(attention: Launch, mlp: Launch) -> bool:
    """Return whether the joint kernel computes an attention block and an MLP over the same rows.

    Both need a norm with the same eps, and the MLP must have the values of `_MLP_FIXED`.
    """
    if (attention.kernel, mlp.kernel) != ("attention_block_decode", "mlp") or attention.rows != mlp.rows:
        return False
    if not mlp.arguments.keys() <= {*_SHARED_PARAMETERS, *_MLP_PARAMETERS, *_MLP_FIXED}:
        return (
            False  # an argument without a parameter in the joint kernel, such as scales of a quantised weight
        )
    return (
        mlp.arguments.get(_NORM) is not None
        and all(mlp.arguments.get(name) == attention.arguments[name] for name in _SHARED_PARAMETERS)
        and all(mlp.arguments.get(name, value) == value for name, value in _MLP_FIXED.items())
    )


def _join(attention: Launch, mlp: Launch) -> Launch:
    """Return one launch with the arguments of the attention block and, renamed, of the MLP."""
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
