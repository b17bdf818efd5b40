"""Linear weights of a network that a scheme quantises, and the patterns of modules that stay plain.

Quantised are the matrices [out, in] of decoder layers that are checkpoint tensors of their own: projections of
attention, of feed-forward blocks, of experts and of recurrent mixers. The embedding, the head, routers, gates of one
output, matrices stored as [in, out], and experts that share one tensor stay plain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from model.errors import ModelError
from model.layers.layer import Layer
from model.layers.weight import Weight, Zeros
from model.network import Network
from nkw.suggestions import did_you_mean

HEAD = "lm_head"
_COMPONENTS = ("attention", "mlp", "experts", "mixer")
_PLAIN_WEIGHTS = ("w_router", "w_row_gate")
_SUFFIX = ".weight"
_REGEX = "re:"


@dataclass(frozen=True)
class Linear:
    """Linear weight of a layer: its name in the layers, its shape [out, in], and the index of its layer."""

    name: str
    shape: tuple[int, int]
    layer: int

    @property
    def module(self) -> str:
        """Name of the module, such as "model.layers.0.mlp.up_proj"."""
        return self.name.removesuffix(_SUFFIX)


@dataclass(frozen=True)
class Selection:
    """Linear weights to quantise, in the order of layers, and the modules of decoder layers that stay plain."""

    linears: tuple[Linear, ...]
    plain: tuple[str, ...]


def select_linears(network: Network, patterns: Sequence[str] = ()) -> Selection:
    """Return the linear weights of a network that no pattern ignores.

    Args:
        network: The layers.
        patterns: Names of modules, or regular expressions after `re:` that match the beginning of a name.

    Raises:
        ModelError: The network has no such weight, a pattern matches none or is no regular expression, or nothing is
            left.
    """
    linears, plain = _list_linears(network)
    if not linears:
        raise ModelError(
            "this model has no linear weights that are tensors [out, in] of their own, so nothing can be quantised"
        )
    modules = [linear.module for linear in linears]
    ignored: set[str] = set()
    for pattern in patterns:
        matched = [module for module in (*modules, *plain, HEAD) if _matches(pattern, module)]
        if not matched:
            advice = did_you_mean(pattern, modules) or f"; modules have names such as {modules[0]}"
            raise ModelError(f"--ignore {pattern} matches no linear module of the model{advice}")
        ignored.update(matched)
    kept = tuple(linear for linear in linears if linear.module not in ignored)
    if not kept:
        raise ModelError(
            "--ignore matches all linear modules, so nothing would be quantised; leave a pattern out"
        )
    return Selection(
        kept, tuple(dict.fromkeys([*plain, *(module for module in modules if module in ignored)]))
    )


def _list_linears(network: Network) -> tuple[list[Linear], list[str]]:
    """Return the linear weights of the decoder layers, each once, and the modules of other matrices there."""
    linears: dict[str, Linear] = {}
    plain: dict[str, None] = {}
    for index, layer in enumerate(network.layers):
        for weight in layer.weights:
            for tensor in weight.tensors:
                if isinstance(tensor, Zeros) or len(tensor.shape) != 2 or not tensor.name.endswith(_SUFFIX):
                    continue
                if _is_quantised(layer, weight) and not tensor.transposed and tensor.shape[0] > 1:
                    rows, columns = tensor.shape
                    linears.setdefault(tensor.name, Linear(tensor.name, (rows, columns), index))
                elif (weight.component or layer.component) in _COMPONENTS:
                    plain.setdefault(tensor.name.removesuffix(_SUFFIX))
    return list(linears.values()), list(plain)


def _is_quantised(layer: Layer, weight: Weight) -> bool:
    return (weight.component or layer.component) in _COMPONENTS and not weight.name.endswith(_PLAIN_WEIGHTS)


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern of --ignore matches a module, by the rules of compressed-tensors.

    Raises:
        ModelError: The pattern is no regular expression.
    """
    if not pattern.startswith(_REGEX):
        return pattern == module
    try:
        return re.match(pattern.removeprefix(_REGEX), module) is not None
    except re.error as error:
        raise ModelError(f"--ignore {pattern} is no regular expression: {error}") from None


def group_by_layer(linears: Iterable[Linear]) -> dict[int, list[Linear]]:
    """Return the linear weights of each layer, by the layer's index."""
    groups: dict[int, list[Linear]] = {}
    for linear in linears:
        groups.setdefault(linear.layer, []).append(linear)
    return groups
