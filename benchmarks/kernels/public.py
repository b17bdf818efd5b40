"""Calls of the best public kernels for the works of the table, from clones of the vendor's library and of nki-autotune.

Inputs have the layouts that each public kernel asks for; converting this project's layouts is not timed. The public
attention kernels read no rope tables, and the public output projections add no residual, while the shipped ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

import simulate
from benchmarks.fidelity.case import NotCovered, array
from benchmarks.fidelity.sources.clones import AUTOTUNE, LIBRARY, Clone
from benchmarks.fidelity.sources.forked import run_forked
from benchmarks.fidelity.sources.launches import Call, defined_in, library_module
from benchmarks.kernels.measure import READINGS, compute_launch_times, shared
from benchmarks.kernels.works import BFLOAT16, HEAD_SIZE, RankShape, Work
from nkw.process import Limits

_SECONDS, _MEMORY_BYTES = 900, 12 * 2**30
"""Of one launch: some twenty times what the largest of the table takes."""


def best_public(work: Work, target: str, clones: Mapping[str, Clone]) -> Mapping[str, float] | str:
    """Return the times in us of the public kernel for a work, by reading, or the reason why there are none.

    The launch runs in a forked process, limited to `_SECONDS` and `_MEMORY_BYTES`, because a clone replaces modules.
    """
    repo, call = _CALLS.get(work.name, ("", None))
    if call is None:
        return "no public kernel"
    if repo not in clones:
        return f"no clone of {repo}"
    limits = Limits(_SECONDS, _MEMORY_BYTES)
    times = run_forked(lambda: _times(call, work, target, clones[repo].folder), _SECONDS, limits)
    return times if times is not None else "its launch ended without a result"


def _times(
    call: Callable[[Path, Work], Call], work: Work, target: str, folder: Path
) -> dict[str, float] | str:
    """Launch a public kernel dry and return its times in us by reading, or its error as text.

    Runs in the forked process. `call` returns the kernel and its arguments for a clone's folder and a work.
    """
    try:
        kernel, arguments = call(folder, work)
        plain = getattr(kernel, "func", kernel)
        chip = shared(simulate.hardware(target))
        done = simulate.launch(plain, [((), arguments)], chip, mode=simulate.Mode.dry, has_grid=True)
    except NotCovered as reason:
        return str(reason)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    times = compute_launch_times(done).times_us
    return {reading.value: times[reading] for reading in READINGS}


def _narrow(*shape: int) -> np.ndarray:
    """Return an uninitialised bfloat16 array."""
    return array(shape, BFLOAT16)


def _shape(work: Work) -> RankShape:
    """Return the shape of a work, which must be a `RankShape`."""
    assert isinstance(work.shape, RankShape), f"{work.title} has no rank's shape"
    return work.shape


def _matmul(folder: Path, work: Work) -> Call:
    """Return the matmul of nki-autotune and its arguments. Raises NotCovered unless the size is 2048."""
    first, inner = ("lhs_T", "lhsT_rhs") if work.name.endswith("aT.b") else ("lhs", "lhs_rhs")
    if work.rows != 2048:
        raise NotCovered("its files are written for 2048^3")
    call = defined_in(
        folder / "kernel_library" / "matmul" / inner, "kernel_hand*.py", f"matmul_{inner}_nkigym"
    )
    return call, {first: _narrow(2048, 2048), "rhs": _narrow(2048, 2048)}


def _qkv(folder: Path, work: Work) -> Call:
    """Return the library's QKV projection and its arguments, with rope for a prompt."""
    shape, prompt = _shape(work), work.name.startswith("prefill")
    types = library_module(folder, "utils.common_types")
    lines = (1, work.rows) if prompt else (work.rows, 1)
    arguments = {
        "input": _narrow(*lines, shape.hidden),
        "fused_qkv_weights": _narrow(shape.hidden, (shape.heads + 2 * shape.kv_heads) * HEAD_SIZE),
        "fused_norm_type": types.NormType.RMS_NORM,
        "gamma_norm_weights": _narrow(1, shape.hidden),
        "d_head": HEAD_SIZE,
        "num_q_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
    }
    if prompt:
        arguments |= {
            "fused_rope": True,
            "cos_cache": _narrow(*lines, HEAD_SIZE),
            "sin_cache": _narrow(*lines, HEAD_SIZE),
        }
    return library_module(folder, "qkv.qkv").qkv, arguments


def _prefill_attention(folder: Path, work: Work) -> Call:
    """Return the library's attention over a prompt and its arguments."""
    shape = _shape(work)
    return library_module(folder, "attention.attention_cte").attention_cte, {
        "q": _narrow(shape.heads, HEAD_SIZE, work.rows),
        "k": _narrow(shape.kv_heads, HEAD_SIZE, work.rows),
        "v": _narrow(shape.kv_heads, work.rows, HEAD_SIZE),
        "scale": HEAD_SIZE**-0.5,
        "tp_q": False,
        "tp_out": True,
    }


def _output_projection(folder: Path, work: Work) -> Call:
    """Return the library's output projection for a prompt or a decode step, and its arguments."""
    shape = _shape(work)
    weight = _narrow(shape.heads * HEAD_SIZE, shape.hidden)
    if work.name.startswith("prefill"):
        module = library_module(folder, "output_projection.output_projection_cte.output_projection_cte")
        attention = _narrow(1, shape.heads, HEAD_SIZE, work.rows)
        return module.output_projection_cte, {"attention": attention, "weight": weight}
    module = library_module(folder, "output_projection.output_projection_tkg")
    attention = _narrow(HEAD_SIZE, work.rows, shape.heads, 1)
    return module.output_projection_tkg, {"attention": attention, "weight": weight}


def _mlp(folder: Path, work: Work) -> Call:
    """Return the library's MLP with RMSNorm and its arguments."""
    shape = _shape(work)
    types = library_module(folder, "utils.common_types")
    lines = (1, work.rows) if work.name.startswith("prefill") else (work.rows, 1)
    return library_module(folder, "mlp.mlp").mlp, {
        "hidden_tensor": _narrow(*lines, shape.hidden),
        "gate_proj_weights_tensor": _narrow(shape.hidden, shape.width),
        "up_proj_weights_tensor": _narrow(shape.hidden, shape.width),
        "down_proj_weights_tensor": _narrow(shape.width, shape.hidden),
        "normalization_type": types.NormType.RMS_NORM,
        "normalization_weights_tensor": _narrow(1, shape.hidden),
        "output_dtype": BFLOAT16,
    }


def _attention_block(folder: Path, work: Work) -> Call:
    """Return the library's attention block of a decode step and its arguments."""
    shape, rows = _shape(work), work.rows
    none = library_module(folder, "utils.common_types").QuantizationType.NONE
    queries = shape.heads * HEAD_SIZE
    absent = (
        "bias_qkv weight_dequant_scale_qkv input_dequant_scale_qkv rmsnorm_QK_pre_rope_W_Q rmsnorm_QK_pre_rope_W_K "
        "rmsnorm_QK_post_rope_W_Q rmsnorm_QK_post_rope_W_K active_blocks_table sink bias_out "
        "weight_dequant_scale_out input_dequant_scale_out"
    ).split()
    module = library_module(folder, "transformer.attention_block_tkg", package="experimental")
    return module.attention_block_tkg, dict.fromkeys(absent) | {
        "X": _narrow(rows, 1, shape.hidden),
        "X_hidden_dim_actual": shape.hidden,
        "rmsnorm_X_enabled": True,
        "rmsnorm_X_eps": 1e-5,
        "rmsnorm_X_gamma": _narrow(1, shape.hidden),
        "W_qkv": _narrow(shape.hidden, queries + 2 * HEAD_SIZE),
        "quantization_type_qkv": none,
        "rmsnorm_QK_pre_rope_enabled": False,
        "rmsnorm_QK_pre_rope_eps": 1e-5,
        "cos": _narrow(HEAD_SIZE // 2, rows, 1),
        "sin": _narrow(HEAD_SIZE // 2, rows, 1),
        "rope_contiguous_layout": True,
        "rmsnorm_QK_post_rope_enabled": False,
        "rmsnorm_QK_post_rope_eps": 1e-5,
        "K_cache_transposed": True,
        "K_cache": _narrow(rows, HEAD_SIZE, work.positions),
        "V_cache": _narrow(rows, work.positions, HEAD_SIZE),
        "attention_mask": array((work.positions, rows, shape.heads, 1), np.uint8),
        "update_cache": True,
        "kv_cache_update_idx": array((rows, 1), np.uint32),
        "W_out": _narrow(queries, shape.hidden),
        "quantization_type_out": none,
        "transposed_out": False,
        "out_in_sb": False,
    }


_CALLS: Mapping[str, tuple[str, Callable[[Path, Work], Call]]] = MappingProxyType(
    {
        "matmul aT.b": (AUTOTUNE, _matmul),
        "matmul a.b": (AUTOTUNE, _matmul),
        "prefill norm + qkv + rope": (LIBRARY, _qkv),
        "prefill attention": (LIBRARY, _prefill_attention),
        "prefill output projection": (LIBRARY, _output_projection),
        "prefill norm + MLP": (LIBRARY, _mlp),
        "decode norm + qkv": (LIBRARY, _qkv),
        "decode output projection": (LIBRARY, _output_projection),
        "decode norm + MLP": (LIBRARY, _mlp),
        "decode attention block": (LIBRARY, _attention_block),
    }
)
