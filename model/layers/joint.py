"""Launches of neighbouring layers that one kernel does in less time than two.

A layer lists its own launches. `joined` goes through those of a decoder layer and puts one in the place of two where a
kernel takes both: it starts once, and the weights of the second part arrive while the first one runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from model.layers.launch import Launch, LeastWork

_REQUIRED = 11
"""Arguments of attention_block_decode up to w_o; the MLP's weights follow them in decoder_layer_decode."""

_OPTIONAL = 12
"""Arguments of decoder_layer_decode between the weights of the MLP and what else it takes: from num_kv_heads on."""


def joined(launches: Iterable[Launch]) -> list[Launch]:
    """The launches of a decoder layer: a decode step's attention and the MLP behind it are one where that is possible.

    The joint launch keeps the two as its parts.
    """
    result: list[Launch] = []
    for launch in launches:
        if result and _are_a_layer(result[-1], launch):
            result[-1] = _layer(result[-1], launch)
        else:
            result.append(launch)
    return result


def _are_a_layer(first: Launch, second: Launch) -> bool:
    """Whether decoder_layer_decode takes both: the same rows, plain RMSNorms with one eps before them, none after."""
    if (first.kernel, second.kernel) != ("attention_block_decode", "mlp"):
        return False
    norm, eps = second.arguments[1], second.arguments[5]
    norm_bias, norm_offset, residual = second.arguments[11:14]
    is_plain = norm is not None and norm_bias is None and norm_offset == 0.0 and residual is True
    return is_plain and eps == first.arguments[3] and first.rows == second.rows


def _layer(first: Launch, second: Launch) -> Launch:
    optional = first.arguments[_REQUIRED:]
    optional += (None,) * (_OPTIONAL - len(optional))
    return Launch(
        "decoder_layer_decode",
        (*first.arguments[:_REQUIRED], *second.arguments[1:5], *optional, *second.arguments[7:11]),
        first.results,
        LeastWork(first.work.operations + second.work.operations, first.work.bytes + second.work.bytes),
        first.rows,
        parts=(first, second),
    )
