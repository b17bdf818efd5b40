"""Documented names that the simulator does not carry out yet: calling one raises Unsupported with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from simulate.errors import Unsupported

_REASON = "its semantics are not in the instruction book yet"

NOT_YET: dict[str, dict[str, str]] = {
    "nki.isa": dict.fromkeys(
        (
            "get_nc_sub_version tensor_copy_predicated nc_matmul_mx dma_transpose tensor_partition_reduce "
            "tensor_scalar_cumulative activate2 local_gather nc_n_gather bn_stats bn_aggr tensor_tensor_scan "
            "nc_stream_shuffle rng dropout set_rng_seed rand_set_state rand_get_state rand2 exponential "
            "sequence_bounds tensor_scalar_reduce dma_compute quantize_mx range_select select_reduce sendrecv "
            "nonzero_with_count topk"
        ).split(),
        _REASON,
    ),
    "nki.language": dict.fromkeys(
        (
            "sum max min mean prod var all softmax rms_norm where dropout random_seed broadcast_to transpose matmul "
            "no_reorder load_transpose2d gather_flattened shared_constant rand "
            "ceil floor trunc cos tan fmod mod divide negative logical_not prelu bypass average"
        ).split(),
        _REASON,
    ),
    "nki.collectives": dict.fromkeys(
        (
            "all_gather_v all_to_all all_to_all_v collective_permute collective_permute_implicit "
            "collective_permute_implicit_reduce collective_permute_implicit_current_processing_rank_id rank_id"
        ).split(),
        _REASON,
    ),
}
"""By module: the name and why it cannot be had."""


def not_yet(module: str, name: str) -> Callable[..., NoReturn]:
    """A function that raises Unsupported when it is called; AttributeError for a name nobody documents."""
    reason = NOT_YET[module].get(name)
    if reason is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def unsupported(*_: Any, **__: Any) -> NoReturn:
        raise Unsupported("NKW-UNSUPPORTED", f"{module}.{name} cannot be simulated: {reason}")

    unsupported.__name__ = unsupported.__qualname__ = name
    unsupported.nki_operator = name  # type: ignore[attr-defined]
    return unsupported
