"""The oracle's instructions by name, and those it has no second opinion on, with the reason."""

from __future__ import annotations

from collections.abc import Callable

from tests.oracle.instructions import (
    accumulating,
    elementwise,
    moving,
    random_numbers,
    selecting,
    tensor_engine,
)

_MODULES = (accumulating, elementwise, moving, random_numbers, selecting, tensor_engine)
_NAMES = (
    "memset tensor_copy tensor_tensor tensor_scalar scalar_tensor_tensor reciprocal tensor_copy_predicated "
    "nc_stream_shuffle tensor_reduce tensor_partition_reduce activation activation_reduce activate2 exponential "
    "tensor_scalar_reduce range_select select_reduce tensor_tensor_scan tensor_scalar_cumulative nc_matmul "
    "nc_transpose nc_matmul_mx quantize_mx iota affine_select max8 nc_find_index8 nc_match_replace8 nc_n_gather "
    "local_gather nonzero_with_count topk sequence_bounds bn_stats bn_aggr dma_copy dma_transpose dma_compute "
    "register_move register_load register_store scalar_load scalar_store scalar_arithmetic "
    "rng rand2 dropout set_rng_seed rand_set_state rand_get_state"
).split()

INSTRUCTIONS: dict[str, Callable[..., None]] = {
    name: next(getattr(module, name) for module in _MODULES if hasattr(module, name)) for name in _NAMES
}

WITHOUT_ORACLE = {
    "core_barrier": "needs two cores and changes no memory",
    "sendrecv": "needs two cores",
}
"""Instructions of the book that the lockstep does not try, and why."""

NOT_IN_THE_BOOK = ("scalar_load", "scalar_store", "scalar_arithmetic")
"""What `NkiScalar` (0.7) does, which the simulator has as methods."""
