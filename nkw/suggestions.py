"""Suggestions in messages about unknown names: the closest known name, and what NKI has for names of other libraries.

The other libraries are NumPy, PyTorch, Triton and CUDA. The hints name instructions of `nki.isa` as `nisa` and
functions of `nki.language` as `nl`, as kernels import them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SIMILARITY = 0.7
"""Least ratio of `difflib` at which a known name is suggested: one wrong letter in a name of four passes."""

_TRANSPOSE = (
    "nisa.nc_transpose(dst=..., data=tile) for a tile, nisa.dma_transpose(dst=tile, src=x) for an HBM tensor"
)
_BROADCAST = (
    ".broadcast(dim, size) repeats a dim of size 1; for all partitions load src=row.broadcast(0, 128)"
)
_CAST = "nisa.tensor_copy(dst=tile_of_the_new_dtype, src=tile) casts; .view(dtype) reinterprets the bytes"
_COPY = "nisa.tensor_copy(dst=..., src=tile) copies a tile, nisa.dma_copy copies from or to HBM"
_DEVICE = "a tile has no values on the host; nl.device_print prints them, and the kernel's results are arrays"
_FLATTEN = ".flatten_dims(start_dim, end_dim) joins dims; .reshape((rows, columns)) takes a tuple"
_SQUEEZE = ".squeeze_dim(dim) drops a dim of size 1, .expand_dim(dim) adds one"
_EXPAND = ".expand_dim(dim) adds a dim of size 1, .squeeze_dim(dim) drops one"
_FILL = "nisa.memset(dst=tile, value=number)"
_SPLIT = "slice the tile: tile[:, start:stop]"
_JOIN = "allocate the result with nl.ndarray and copy the operands into slices of it"
_MATMUL = "nisa.nc_matmul(dst=psum_tile, stationary=a_transposed, moving=b) with stationary [K, M] and moving [K, N]"
_STATISTICS = "nisa.bn_stats and nisa.bn_aggr compute mean and variance"
_INDEX = "nisa.max8 and nisa.nc_find_index8 find the largest values and their indices"
_RANGE = "slice the tensor: x[start:stop]; nisa.iota writes index values into a tile"
_CLIP = "nisa.tensor_scalar with op0=nl.maximum, operand0=low, op1=nl.minimum, operand1=high"
_BARRIER = (
    "no call is needed: the compiler orders instructions by their operands; nisa.core_barrier joins two cores"
)
_PROGRAM = "nl.program_id(0) is the physical core; a loop over tiles takes the place of a grid of blocks"
_GRID = f"a kernel runs once on each core and not once for each block: {_PROGRAM}"
_POINTER = "slice the HBM tensor, x[start:stop, :]; there are no pointers and no masks"
_CEIL = "plain Python: (a + b - 1) // b"
_ATOMIC = "accumulate in an SBUF or PSUM tile; nisa.dma_compute adds in HBM"
_CONSTEXPR = "leave it out: numbers, strings and tuples among the arguments are compile-time constants"
_EINSUM = "transpose, slice and reduce explicitly; the product is " + _MATMUL


_SYNONYMS = (
    {"axis", "dim", "axes", "dims"},
    {"dst", "out", "output", "dest"},
    {"src", "data", "input", "x", "tensor"},
    {"value", "fill_value"},
    {"op", "op0", "operator", "func"},
    {"lhs", "lhsT", "stationary"},
    {"rhs", "moving"},
)
"""Parameter names that other libraries use for the same argument."""


def _index_hints(*rows: tuple[str, str]) -> dict[str, str]:
    """Return a dict from each name to its hint.

    Args:
        *rows: Pairs of names, separated by blanks, and the hint of these names.
    """
    return {name: hint for names, hint in rows for name in names.split()}


TILE_HINTS = _index_hints(
    ("T mT H t transpose swapaxes transpose_ moveaxis trans", _TRANSPOSE),
    ("broadcast_to expand expand_as repeat tile broadcast_in_dim", _BROADCAST),
    ("astype to type cast half bfloat16 double type_as", _CAST),
    ("copy clone contiguous detach", _COPY),
    ("load store copy_ assign", "nisa.dma_copy(dst=..., src=...) copies between HBM and SBUF"),
    ("numpy cpu item tolist cuda device print", _DEVICE),
    ("flatten ravel", _FLATTEN),
    ("squeeze", _SQUEEZE),
    ("unsqueeze expand_dims", _EXPAND),
    ("fill fill_ zero_ zero", _FILL),
    ("split chunk", _SPLIT),
    ("dot matmul mm bmm", _MATMUL),
    ("sum", "nisa.tensor_reduce(dst=..., op=nl.add, data=tile, axis=1) adds along a free dim"),
    ("max amax", "nisa.tensor_reduce(dst=..., op=nl.maximum, data=tile, axis=1) reduces a free dim"),
    ("min amin", "nisa.tensor_reduce(dst=..., op=nl.minimum, data=tile, axis=1) reduces a free dim"),
    ("mean var std", _STATISTICS),
    ("argmax argmin sort argsort topk", _INDEX),
    ("clip clamp", _CLIP),
    ("itemsize nbytes element_size", "dtypes have no size here; 4 bytes are one nl.float32"),
    ("len numel", ".size is the number of elements, .shape has the sizes of the dims"),
    ("dim", ".ndim is the number of dims"),
    ("view_as reshape_as", ".reshape(other.shape)"),
    ("permute_dims", ".permute(dims)"),
    ("data_ptr ptr ctypes", _POINTER),
)
"""What to write instead of an attribute that tensors have in NumPy, PyTorch or Triton."""

FUNCTION_HINTS = _index_hints(
    ("dot dot_scaled mm bmm gemm tensordot inner mma_sync", _MATMUL),
    ("einsum", _EINSUM),
    ("swish", "nl.silu"),
    ("swish_dx", "nl.silu_dx"),
    ("gelu_new gelu_tanh", "nl.gelu_apprx_tanh"),
    ("quick_gelu", "nl.gelu_apprx_sigmoid"),
    ("pow", "nl.power"),
    ("mul", "nl.multiply"),
    ("sub", "nl.subtract"),
    ("div true_divide", "nl.divide"),
    ("neg", "nl.negative"),
    ("atan", "nl.arctan"),
    ("eq", "nl.equal"),
    ("ne", "nl.not_equal"),
    ("ge", "nl.greater_equal"),
    ("gt", "nl.greater"),
    ("le", "nl.less_equal"),
    ("lt", "nl.less"),
    ("lshift", "nl.left_shift"),
    ("rshift", "nl.right_shift"),
    ("absolute fabs", "nl.abs"),
    ("amax", "nl.max, or nisa.tensor_reduce(op=nl.maximum)"),
    ("amin", "nl.min, or nisa.tensor_reduce(op=nl.minimum)"),
    ("std", _STATISTICS),
    ("argmax argmin sort argsort", _INDEX),
    ("clip clamp", _CLIP),
    ("cdiv ceil_div", _CEIL),
    ("arange linspace make_range", _RANGE),
    ("concatenate concat cat stack hstack vstack join", _JOIN),
    ("split chunk", _SPLIT),
    ("reshape", "the method .reshape((rows, columns)) of a tensor"),
    ("permute trans swapaxes", _TRANSPOSE),
    ("repeat tile expand broadcast", _BROADCAST),
    ("squeeze", _SQUEEZE),
    ("unsqueeze", _EXPAND),
    ("astype cast cast_to", _CAST),
    ("empty", "nl.ndarray(shape, dtype=..., buffer=nl.sbuf)"),
    ("tensor array asarray constant", "nl.ndarray(shape, dtype=...) and an instruction that writes to it"),
    ("debug_barrier barrier syncthreads synchronize __syncthreads __syncwarp", _BARRIER),
    ("atomic_add atomic_max atomic_cas atomicAdd", _ATOMIC),
    ("constexpr", _CONSTEXPR),
    ("make_block_ptr make_tensor_descriptor advance", _POINTER),
    ("device_assert static_assert", "the assert statement, on values that are known at compile time"),
    ("static_print", "print"),
    ("num_warps num_stages", _CONSTEXPR),
    ("bool8 bool1 bool_t int1", "nl.bool_"),
    ("float float_ f32 fp32 single", "nl.float32"),
    ("half f16 fp16", "nl.float16"),
    ("bf16", "nl.bfloat16"),
    ("tf32", "nl.tfloat32"),
    ("fp8 fp8e4m3 float8e4 float8e4nv float8_e4m3fnuz", "nl.float8_e4m3"),
    ("fp8e5m2 float8e5", "nl.float8_e5m2"),
    ("long", "nl.int64"),
    ("int int_ i32", "nl.int32"),
    ("uint", "nl.uint32"),
    ("SBUF", "nl.sbuf"),
    ("PSUM", "nl.psum"),
    ("HBM dram global_memory", "nl.shared_hbm"),
    ("copy_ dma dma_start memcpy memcpy_async", "nisa.dma_copy(dst=..., src=...)"),
    ("loadstore load_tile store_tile", "nisa.dma_copy(dst=..., src=...)"),
)
"""What to write instead of a function or dtype of NumPy, Triton, CUDA or PyTorch."""

ISA_HINTS = _index_hints(
    ("matmul matmult", _MATMUL),
    ("transpose", _TRANSPOSE),
    ("copy", _COPY),
    ("tensor_scalar_op", "nisa.tensor_scalar"),
    ("activate act", "nisa.activation(dst=..., op=nl.exp, data=tile)"),
    ("reduce", "nisa.tensor_reduce(dst=..., op=nl.add, data=tile, axis=1)"),
    ("memzero zeros fill", _FILL),
    ("select", "nisa.tensor_copy_predicated, or nisa.affine_select for a mask of indices"),
)
"""What to write instead of a name in `nki.isa`; the tables of `nki.language` and the free names follow it."""

NAME_HINTS = _index_hints(
    ("__syncthreads __syncwarp syncthreads", _BARRIER),
    ("threadIdx blockIdx blockDim gridDim warpSize tid bid pid", _GRID),
    ("__shared__ shared_memory", "nl.ndarray(shape, dtype=..., buffer=nl.sbuf)"),
    ("tl triton cuda cupy cp", "kernels use nki.language as nl and nki.isa as nisa"),
    ("torch jnp jax F", "kernels use nki.language as nl, nki.isa as nisa and numpy on host values alone"),
    ("nl", "import nki.language as nl"),
    ("nisa isa", "import nki.isa as nisa"),
    ("ncc", "import nki.collectives as ncc"),
    ("nki", "import nki"),
    ("np numpy", "import numpy as np"),
    ("math", "import math"),
    ("ceil_div cdiv ceildiv", _CEIL),
    ("constexpr", _CONSTEXPR),
    ("float32 float16 bfloat16 int32 uint32 int8 uint8", "dtypes are attributes of nki.language: nl.float32"),
    ("sbuf psum hbm shared_hbm", "memories are attributes of nki.language: nl.sbuf"),
    ("ds", "nl.ds(start, size)"),
)
"""What to write instead of an undefined variable."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name most similar to `name`, or an empty string if none is similar enough.

    A synonym, such as axis and dim, comes before similar names, and so does a name that differs in case or underscores
    alone. Of equally similar names the first in the alphabet is returned.
    """
    names = sorted(set(known) - {name})
    plain = name.lower().replace("_", "")
    synonyms = next((group for group in _SYNONYMS if name in group), ())
    for candidate in names:
        if candidate in synonyms or candidate.lower().replace("_", "") == plain:
            return candidate
    similar = sorted(difflib.get_close_matches(name, names, cutoff=_SIMILARITY))
    return max(
        similar, key=lambda candidate: difflib.SequenceMatcher(None, candidate, name).ratio(), default=""
    )


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Return the end of a message that suggests the known name closest to `name`.

    Args:
        name: The unknown name.
        known: The known names.
        prefix: Text before the suggested name.
        suffix: Text after it.

    Returns:
        Text such as "; did you mean nl.add?", or an empty string if no known name is similar.
    """
    suggestion = closest(name, known)
    return f"; did you mean {prefix}{suggestion}{suffix}?" if suggestion else ""


def format_nki_hint(hint: str) -> str:
    """Return the end of a message that gives a hint, "; in NKI: HINT", or an empty string for an empty hint."""
    return f"; in NKI: {hint}" if hint else ""
