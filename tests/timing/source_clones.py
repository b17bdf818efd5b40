"""Clones of a few lines and a file of times, for the tests of public sources in the fidelity bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.fidelity.sources.clones import AUTOTUNE, LIBRARY

KERNEL = """
import os, sys
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def attention_cte(q, k, v, causal_mask, tp_q, tp_out):
    heads, rows, width = q.shape if tp_q else (q.shape[0], q.shape[2], q.shape[1])
    assert k.shape == (heads, width, v.shape[1]) and v.shape[2] == width, "shapes"
    if heads == 7:
        os._exit(3)
    if heads == 8:
        sys.exit("enough")
    if heads == 9:
        nisa.tensor_copy(dst=nl.ndarray((129, 8), q.dtype, buffer=nl.sbuf), src=0)
    out = nl.ndarray(v.shape, v.dtype, buffer=nl.shared_hbm)
    for head in range(heads):
        tile = nl.ndarray(v.shape[1:], v.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=v[head])
        nisa.dma_copy(dst=out[head], src=tile)
    return out
"""
TYPES = """
from enum import Enum

class NormType(Enum):
    NO_NORM, RMS_NORM, LAYER_NORM = 0, 1, 2

class QuantizationType(Enum):
    NONE, STATIC, ROW = 0, 1, 2

class ActFnType(Enum):
    SiLU = 0

class QKVOutputLayout(Enum):
    BSD = 0
"""
MLP = '''
import nki
import nki.language as nl
from ..utils.common_types import NormType, QuantizationType

@nki.jit
def mlp(hidden_tensor, gate_proj_weights_tensor, up_proj_weights_tensor, down_proj_weights_tensor,
        fused_add_tensor, store_fused_add_result, activation_fn, normalization_type, output_dtype,
        gate_proj_bias_tensor, up_proj_bias_tensor, down_proj_bias_tensor, normalization_bias_tensor,
        skip_gate_proj, use_tkg_gate_up_proj_column_tiling, use_tkg_down_proj_column_tiling,
        use_tkg_down_proj_optimized_layout,
        normalization_weights_tensor=None, quantization_type=QuantizationType.NONE,
        gate_w_scale=None, up_w_scale=None, down_w_scale=None, gate_up_in_scale=None, down_in_scale=None):
    """One sentence.

        - Standard matrix multiplication layouts
    """

        TKG mode supports:
    """
    arrays = (fused_add_tensor, normalization_weights_tensor, gate_proj_bias_tensor, down_proj_bias_tensor)
    present = "".join(str(int(array is not None)) for array in arrays)
    options = (store_fused_add_result, skip_gate_proj)
    options += (use_tkg_gate_up_proj_column_tiling, use_tkg_down_proj_column_tiling)
    flags = "".join(str(int(option)) for option in options)
    scales = [array is not None and array.shape[1] for array in (down_w_scale, down_in_scale)]
    raise ValueError(f"{hidden_tensor.shape} {gate_proj_weights_tensor.shape} {down_proj_weights_tensor.dtype} "
                     f"{normalization_type.name} {quantization_type.name} {present} {flags} {scales}")
'''
QKV = """
import nki

@nki.jit
def qkv(input, fused_qkv_weights, output_layout, bias, quantization_type, fused_residual_add, mlp_prev, attention_prev,
        fused_norm_type, gamma_norm_weights, layer_norm_bias, d_head,
        qkv_w_scale=None, qkv_in_scale=None, num_q_heads=None, num_kv_heads=None):
    arrays = (bias, mlp_prev, gamma_norm_weights, layer_norm_bias, qkv_w_scale, qkv_in_scale)
    raise ValueError(f"{input.shape} {fused_qkv_weights.shape} {fused_qkv_weights.dtype} {quantization_type.name} "
                     f"{d_head} {num_q_heads} "
                     f"{[array is not None and array.shape[1] for array in arrays]}")
"""
MATMUL = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def matmul_lhsT_rhs_nkigym(lhs_T, rhs):
    out = nl.ndarray(lhs_T.shape, lhs_T.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=rhs)
    return out
"""
ONLINE = MATMUL.replace("matmul_lhsT_rhs_nkigym", "rmsnorm_matmul_online").replace("lhs_T", "lhs")
FILES = {
    "library/src/nkilib_src/nkilib/core/attention/attention_cte.py": KERNEL,
    "library/src/nkilib_src/nkilib/core/utils/common_types.py": TYPES,
    "library/src/nkilib_src/nkilib/core/mlp/mlp.py": MLP,
    "library/src/nkilib_src/nkilib/core/qkv/qkv.py": QKV,
    "autotune/kernel_library/matmul/lhsT_rhs/kernel_hand_1mfu.py": MATMUL,
    "autotune/kernel_library/rmsnorm_matmul/kernel_hand_online.py": ONLINE,
    "autotune/kernel_library/matmul/lhs_rhs/kernel_hand_1mfu.py": MATMUL,
    "autotune/kernel_library/matmul/lhs_rhs/kernel_hand_2mfu.py": MATMUL,
}
ATTENTION: dict[str, Any] = {
    "kernel": "attention_cte", "lnc": 1, "heads": 2, "kv_len": 128, "q_len": 256, "head_dim": 64,
    "dtype": "bfloat16", "causal": True, "tp_q": False, "tp_out": False, "measured_us": 30.0,
}  # fmt: skip
DECODE: dict[str, Any] = {
    "kernel": "mlp (decode)", "lnc": 1, "batch": 1, "seq": 2, "hidden": 256, "intermediate": 128,
    "norm": "RMS_NORM", "fused_add": True, "dtype": "bfloat16", "measured_us": 30.0,
}  # fmt: skip
HEADS: dict[str, Any] = {
    "kernel": "qkv (decode)", "lnc": 1, "batch": 2, "seq": 1, "hidden": 256, "fused_qkv_dim": 256, "head_dim": 64,
    "norm": "RMS_NORM", "quantisation": "NONE", "output_layout": "BSD", "dtype": "bfloat16", "measured_us": 30.0,
}  # fmt: skip
MATRICES: dict[str, Any] = {
    "repo": AUTOTUNE, "kernel": "kernel_library matmul, hand tuned, 2048^3", "dtype": "bfloat16", "lnc": 1,
    "measured_us": 240.0, "lhs": "K x M",
}  # fmt: skip

NORMED: dict[str, Any] = {
    "repo": AUTOTUNE, "kernel": "kernel_library rmsnorm_matmul kernel_hand_online, 2048 x 2048", "dtype": "bfloat16",
    "lnc": 1, "measured_us": 240.0,
}  # fmt: skip


def make(folder: Path) -> Path:
    """Write the clones `library` and `autotune` into a folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write(path: Path, *entries: object) -> Path:
    """Write a file of times with these entries."""
    file = path / "times.json"
    file.write_text(
        json.dumps({"default_repo": f"{LIBRARY} (commit 1)", "target": "gen3", "entries": entries})
    )
    return file
