"""Documented names of Beta 1 that are not simulated: calling one raises Unsupported with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from simulate.nki.missing import not_yet

_DYNAMIC = "index with a tile, x[rows[i_p, 0], i_f], in nl.load or nl.store instead"
_REMOVED = "it was removed after Beta 1 without an equivalent"
_VENDORS = "the vendor's package ships this kernel; run its source from the nki-samples repository"
_NO_HARDWARE = "no engine has the operation"

NOT_IN_BETA1: dict[str, dict[str, str]] = {
    "neuronxcc.nki.isa": {
        "tensor_copy_dynamic_src": _DYNAMIC,
        "tensor_copy_dynamic_dst": _DYNAMIC,
        "builtin_custom_op": "it names code that only the vendor's compiler has",
    },
    "neuronxcc.nki.language": {
        **dict.fromkeys(
            ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"), _REMOVED
        ),
        **dict.fromkeys(("cos", "tan"), _NO_HARDWARE),
        "atomic_rmw": "accumulate in SBUF and nl.store",
        "random_seed": "the bit stream of Beta 1 is not documented; pass random numbers as an input",
        "while_loop": "its condition had a form of its own; use a bounded loop",
    },
    "neuronxcc.nki.kernels.attention": dict.fromkeys(
        ("flash_attn_bwd", "flash_fwd", "fused_self_attn_for_SD_small_head_size"), _VENDORS
    ),
    "neuronxcc.nki.kernels.vision": dict.fromkeys(
        ("resize_nearest_fixed_dma_kernel", "select_and_scatter_kernel"), _VENDORS
    ),
}
"""By module: each name, with the reason why it is not simulated."""


def not_in_beta1(module: str, name: str) -> Callable[..., NoReturn]:
    """Return a function that raises Unsupported, with the reason, when it is called.

    Args:
        module: The module that a kernel reads, such as "neuronxcc.nki.isa".
        name: The attribute that it does not have.

    Raises:
        AttributeError: Beta 1 does not document the name.
    """
    return not_yet(module, name, NOT_IN_BETA1)
