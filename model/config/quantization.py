"""The option `--quantization`: the format in which the weights of a config are planned and loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from model.config.record import Config
from model.errors import ModelError
from model.formats import SCHEMES

C = TypeVar("C", bound=Config)


def quantise_config(config: C, scheme: str | None) -> C:
    """Return the config with plain weights quantised by a scheme; unchanged for None or its own `quant_method`.

    The weights of the decoder layers that kernels read in the scheme's format are then planned in this format. When
    plain weights are loaded, they are rounded to the nearest number of the format.

    Args:
        config: The config of a folder.
        scheme: A name in `SCHEMES`, the `quant_method` of the config, or None.

    Raises:
        ModelError: The scheme is unknown, or the weights are quantised by another method.
    """
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
            f"{' or '.join(SCHEMES)}"
        )
    return replace(config, weight_format=SCHEMES[scheme], quant_method=scheme, is_quantised_on_load=True)
