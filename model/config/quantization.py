"""Where the quantisation of a model is described: the file of modelopt, and the option `--quantization`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from model.config.fields import Fields
from model.config.folder import check_inside
from model.config.record import Config
from model.errors import ModelError
from model.formats import SCHEMES

C = TypeVar("C", bound=Config)

RANK, GLOBAL = ROW_SCALES = ("rank", "global")
"""Names of `--row-scales`: a row has the scale of the columns of a rank, or of the columns of all ranks."""

_MODELOPT_FILE = "hf_quant_config.json"


def read_config_fields(path: Path) -> Fields:
    """Return the fields of a config.json, with `quantization_config` of hf_quant_config.json if it has none.

    modelopt writes hf_quant_config.json beside config.json; it may be absent.

    Raises:
        ModelError: A file is damaged or a link out of the folder, or config.json is missing.
    """
    fields = Fields(path)
    quantised = path.with_name(_MODELOPT_FILE)
    check_inside(quantised)
    described = Fields(quantised, optional=True)
    if "quantization" in described and "quantization_config" not in fields:
        quantization = described.table("quantization")
        values = {name: quantization.get(name, None) for name in quantization.names}
        fields.add_table("quantization_config", {"quant_method": "modelopt", **values})
    return fields


def adapt_to_chip(config: C, target: str) -> C:
    """Return the config whose formats say what kernels read on a chip; unchanged where that is the same on all chips.

    target: The name of a chip or of an instance.

    Raises:
        ModelError: No chip or instance has the name `target`.
    """
    container = config.weight_format
    if container is None or not any(format.depends_on_chip for format in container.formats):
        return config
    from model.device import chip  # loads the simulator

    return replace(config, weight_format=container.adapt_to_chip(chip(target)))


def quantise_config(config: C, scheme: str | None, row_scales: str = RANK) -> C:
    """Return the config with plain weights quantised by a scheme, and rows as `row_scales` says.

    Weights stay as they are for None and for the config's own `quant_method`.

    The weights of the decoder layers that kernels read in the scheme's format are then planned in this format. When
    plain weights are loaded, they are rounded to the nearest number of the format.

    Args:
        config: The config of a folder.
        scheme: A name in `SCHEMES`, the `quant_method` of the config, or None.
        row_scales: `RANK` or `GLOBAL`: whether a row whose columns ranks divide has the scale of a rank's columns, or
            of all columns.

    Raises:
        ModelError: The scheme or `row_scales` is unknown, the weights are quantised by another method, or `row_scales`
            is `GLOBAL` and no rows have scales that are computed.
    """
    if row_scales not in ROW_SCALES:
        raise ModelError(f"row_scales is {row_scales!r:.40}; it is {' or '.join(ROW_SCALES)}")
    config = _quantise_weights(config, scheme)
    if row_scales == RANK:
        return config
    shared = None if config.weight_format is None else config.weight_format.share_row_maxima()
    if shared is None or not any(format.shares_row_maxima for format in shared.formats):
        method = config.quant_method
        weights = (
            "the weights are not quantised" if method is None else f"{method} computes no scales of rows here"
        )
        raise ModelError(
            f"row_scales is '{GLOBAL}', which is for rows with a scale computed from each row, and {weights}: quantise "
            "by fp8-dynamic or w8a8, or leave the option out"
        )
    return replace(config, weight_format=shared)


def _quantise_weights(config: C, scheme: str | None) -> C:
    """Return the config with plain weights quantised by a scheme, as `quantise_config` does."""
    if scheme is None or scheme == config.quant_method:
        return config
    if config.quant_method is not None:
        raise ModelError(
            f"quantization is {scheme!r:.40}, and the weights are quantised by {config.quant_method}; leave the option "
            "out, or give a model whose weights are not quantised"
        )
    if scheme not in SCHEMES:
        raise ModelError(
            f"quantization is {scheme!r:.40}, and the weights are not quantised; weights are quantised on loading by "
            f"one of {', '.join(SCHEMES)}"
        )
    return replace(config, weight_format=SCHEMES[scheme], quant_method=scheme, is_quantised_on_load=True)
