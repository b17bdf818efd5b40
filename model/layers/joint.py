"""The join of a decode step's attention with the MLP after it: one launch of `decoder_layer_decode` for the two.

Each layer lists its own launches and knows nothing of its neighbours. `joined` goes through the launches of one
decoder layer and replaces a pair that one kernel can compute. The joint kernel starts once, and it loads the weights
of the MLP while attention still runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from model.layers.launch import Launch

_NORM = "norm_weight"
_MLP_PARAMETERS = {
    _NORM: "mlp_norm_weight",
    **{name: name for name in ("w_gate", "w_up", "w_down", "activation", "b_gate", "b_up", "b_down")},
}
"""The parameters of `mlp` that `decoder_layer_decode` has too, and their names there."""

_SHARED_PARAMETERS = ("x", "eps", "replica_group")
"""The parameters that attention and MLP have in common; a joint launch has one argument for both."""

_MLP_FIXED = {
    "norm_offset": 0.0,
    "residual": True,
    "sequence_ranks": 1,
    **dict.fromkeys(("norm_bias", "row_gate")),
}
"""The parameters of `mlp` that `decoder_layer_decode` lacks, and the argument that it computes with."""


def joined(launches: Iterable[Launch]) -> list[Launch]:
    """The launches of a decoder layer, with attention and MLP joined where `decoder_layer_decode` takes both.

    A joint launch keeps the two launches that it replaces as `fused`.
    """
    result: list[Launch] = []
    for launch in launches:
        if result and _can_join(result[-1], launch):
            result[-1] = _join(result[-1], launch)
        else:
            result.append(launch)
    return result


def _can_join(attention: Launch, mlp: Launch) -> bool:
    """Whether the two are an attention block and an MLP over the same rows that the joint kernel computes.

    It takes a norm before each of the two, with one eps for both. It takes nothing else that `_MLP_FIXED` excludes.
    """
    if (attention.kernel, mlp.kernel) != ("attention_block_decode", "mlp") or attention.rows != mlp.rows:
        return False
    if not mlp.arguments.keys() <= {*_SHARED_PARAMETERS, *_MLP_PARAMETERS, *_MLP_FIXED}:
        return False  # the joint kernel has no parameter for it, such as the scales of a quantised weight
    return (
        mlp.arguments.get(_NORM) is not None
        and all(mlp.arguments.get(name) == attention.arguments[name] for name in _SHARED_PARAMETERS)
        and all(mlp.arguments.get(name, value) == value for name, value in _MLP_FIXED.items())
    )


def _join(attention: Launch, mlp: Launch) -> Launch:
    """One launch with all arguments of the attention block, and those of the MLP under their names in the kernel."""
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
