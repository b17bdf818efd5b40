"""What a quantised folder will contain: tensors of each file, ignored modules, sizes, and the memory to make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from model.config import ModelConfig
from model.errors import ModelError
from model.formats import Weight
from model.network import Network
from model.quantize.calibration import LONGEST_TEXT
from model.quantize.containers import Described, choose_scale_dtype, describe_stored
from model.quantize.layer_weights import KEPT_BYTES
from model.quantize.linears import HEAD, Linear, Selection
from model.quantize.schemes import Method, Scheme

_SUFFIX = ".weight"
_MOST_VARIANTS = 5
"""Variants of held-out sequences that are computed together."""
BASE_BYTES = 200 * 2**20
"""Memory of the interpreter and its libraries."""
_GPTQ_BYTES, _OTHER_BYTES = 36, 20
"""Bytes for each element of a weight while it is rounded: copies in float64 and float32, and temporary ones."""


@dataclass(frozen=True)
class Output:
    """Tensors of a quantised folder.

    files    described tensors of each file of weights, by the file's name
    stored   name in the files of each quantised or readable weight, by its name in the layers
    ignored  modules that stay plain
    before   bytes of all tensors of the original
    after    bytes of all tensors of the folder
    """

    files: Mapping[str, Described]
    stored: Mapping[str, str]
    ignored: tuple[str, ...]
    before: int
    after: int


def check_shapes(linears: Sequence[Linear], scheme: Scheme) -> None:
    """Raise ModelError if the columns of a weight are not whole groups of the scheme."""
    for linear in linears:
        if scheme.group is not None and linear.shape[1] % scheme.group:
            raise ModelError(
                f"{linear.name} has {linear.shape[1]} columns, which are no whole groups of {scheme.group}: add "
                f"--ignore {linear.module}, or take a scheme with a scale for each row, such as int4"
            )


def describe_output(
    files: Mapping[str, Mapping[str, np.ndarray]],
    network: Network,
    weights: Mapping[str, Weight],
    selection: Selection,
    scheme: Scheme,
) -> Output:
    """Return the tensors of the folder that a scheme makes of a checkpoint.

    Args:
        files: Tensors of each file of the checkpoint.
        network: Layers of the model.
        weights: The checkpoint by names of layers, for the dtypes.
        selection: The weights that are quantised.
        scheme: The scheme.
    """
    names = {name for tensors in files.values() for name in tensors}
    stored = {name: _find_stored_name(name, names, network.bare_prefix) for name in weights}
    linears = {stored[linear.name]: linear for linear in selection.linears}
    described: dict[str, Described] = {}
    for file, tensors in files.items():
        described[file] = {}
        for name, tensor in tensors.items():
            if name in linears:
                scale_dtype = choose_scale_dtype(scheme, tensor.dtype)
                described[file] |= describe_stored(name, linears[name].shape, scheme, scale_dtype)
            else:
                described[file][name] = (tensor.shape, tensor.dtype)
    return Output(
        described,
        stored,
        list_ignored(files, selection, stored),
        sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values()),
        sum(count_bytes(tensors) for tensors in described.values()),
    )


def list_ignored(
    files: Mapping[str, Mapping[str, np.ndarray]], selection: Selection, stored: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the modules of all matrices of a checkpoint that stay plain, the head included, the embedding not."""
    quantised = {stored[linear.name] for linear in selection.linears}
    matrices = (
        name.removesuffix(_SUFFIX)
        for tensors in files.values()
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and name.endswith(_SUFFIX) and name not in quantised and "embed" not in name
    )
    return tuple(dict.fromkeys([HEAD, *matrices]))


def count_bytes(described: Described) -> int:
    """Return the bytes of described tensors."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in described.values())


def _find_stored_name(name: str, stored: set[str], prefix: str) -> str:
    """Return the name in the files of a tensor that layers call `name`; files may omit the prefix."""
    bare = name.removeprefix(prefix) if prefix else name
    return name if name in stored else bare


@dataclass(frozen=True)
class PlannedSizes:
    """Bytes of a model without a checkpoint: all its tensors plain, and with the selected weights quantised."""

    before: int
    after: int


def plan_sizes(network: Network, selection: Selection, scheme: Scheme, dtype: np.dtype) -> PlannedSizes:
    """Return the bytes of a model whose plain tensors have a dtype; a head that is the embedding counts once."""
    shapes = network.list_layer_tensor_shapes()
    before = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
    scale_dtype = choose_scale_dtype(scheme, dtype)
    plain = sum(prod(linear.shape) for linear in selection.linears) * dtype.itemsize
    quantised = sum(
        count_bytes(describe_stored(linear.name, linear.shape, scheme, scale_dtype))
        for linear in selection.linears
    )
    return PlannedSizes(before, before - plain + quantised)


def estimate_memory(
    config: ModelConfig,
    network: Network,
    selection: Selection,
    scheme: Scheme,
    calibration_tokens: int,
    held_out_tokens: int,
) -> int:
    """Return an upper bound of the bytes of memory that a quantisation takes, without mapped files.

    It counts hidden states of all texts, the copies and statistics of one layer, the rounding of the largest weight,
    and the logits and attention weights of one text.

    Args:
        config: The model.
        network: Its layers.
        selection: The weights that are quantised.
        scheme: The scheme.
        calibration_tokens: Tokens of the calibration texts.
        held_out_tokens: Tokens of the held-out texts.
    """
    per_layer: dict[int, dict[int, int]] = {}
    for linear in selection.linears:
        widths = per_layer.setdefault(linear.layer, {})
        widths[linear.shape[1]] = widths.get(linear.shape[1], 0) + 1
    products = 0
    if scheme.needs_products and calibration_tokens:
        products = max(
            sum(count * 4 * width**2 for width, count in widths.items()) for widths in per_layer.values()
        )
        products += 3 * 8 * max(linear.shape[1] for linear in selection.linears) ** 2
    element_bytes = _GPTQ_BYTES if scheme.method is Method.gptq else _OTHER_BYTES
    rounding = element_bytes * max(prod(linear.shape) for linear in selection.linears)
    states = 4 * config.hidden_size * (calibration_tokens + _MOST_VARIANTS * held_out_tokens)
    tensors = sum(prod(shape) for shape in network.list_layer_tensor_shapes().values())
    copies = min(2 * KEPT_BYTES, 8 * tensors)
    longest = min(
        LONGEST_TEXT, config.max_position_embeddings or LONGEST_TEXT, max(calibration_tokens, held_out_tokens)
    )
    heads = max((getattr(block.mixer, "heads", 1) for block in config.blocks), default=1)
    text = 4 * longest * (4 * config.vocab_size + 4 * heads * longest) if longest else 0
    return BASE_BYTES + products + rounding + 2 * states + copies + text


def choose_plain_dtype(config: ModelConfig) -> np.dtype:
    """Return the dtype that config.json names for weights; bfloat16 without a name."""
    name = config.dtype or "bfloat16"
    return np.dtype(getattr(ml_dtypes, name, name))
