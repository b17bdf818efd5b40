"""Launches of public kernels: a function of a clone, and arguments of the shapes and dtypes that the entry states.

A builder takes the fields of an entry that describe its launch. A field that it does not know makes the entry not
covered, so that none is ignored silently. What an entry leaves open is taken from the library's tests of these sizes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.fidelity.case import NotCovered, Schedule, array
from benchmarks.fidelity.sources import repairs
from benchmarks.fidelity.sources.clones import AUTOTUNE, LIBRARY, Clone
from benchmarks.fidelity.sources.source import Source

Call = tuple[Callable[..., Any], dict[str, Any]]

_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
_FP8 = np.dtype(ml_dtypes.float8_e4m3)
_PARTITIONS = 128


@dataclass(frozen=True)
class Launched:
    """A kernel to launch (a plain function), its arguments by name, and what decided the measured kernel's order."""

    kernel: Callable[..., Any]
    arguments: Mapping[str, Any]
    schedule: Schedule


class Fields:
    """The fields of an entry that describe its launch. Each method removes the field that it reads.

    A value of the wrong type raises NotCovered.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._left = dict(fields)

    def size(self, name: str) -> int:
        """Take a field that is a positive integer. Raises NotCovered for any other value."""
        value = self._left.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NotCovered(f"{name} is {value!r:.40}, not a size")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Take a field that is True or False, `default` where it is absent. Raises NotCovered for any other value."""
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise NotCovered(f"{name} is {value!r:.40}, not true or false")
        return value

    def word(self, name: str, known: Mapping[str, Any], default: str | None = None) -> Any:
        """Take a field that is a key of `known`, `default` where it is absent, and return the value of the key.

        Raises NotCovered for any other value of the field, and for an absent field without a default.
        """
        value = self._left.pop(name, default)
        if not isinstance(value, str) or value not in known:
            raise NotCovered(f"{name} is {value!r:.40}, not {', '.join(known)}")
        return known[value]

    def end(self) -> None:
        """Raise NotCovered if a field is left that no method has taken."""
        if self._left:
            raise NotCovered(f"the launch does not know the field {next(iter(self._left))!r:.40}")


def build_launch(source: Source, clones: Mapping[str, Clone]) -> Launched:
    """Return the launch that a source was timed with.

    It imports modules of the clone and turns off writing of bytecode, so it is called in a process that ends
    afterwards. Raises NotCovered if the source has a flaw, its repository has no clone, or no builder or kernel fits
    it.
    """
    sys.dont_write_bytecode = True  # so that no file is added to the clone
    if source.flaw:
        raise NotCovered(source.flaw)
    clone = clones.get(source.repo)
    if clone is None:
        raise NotCovered(f"no clone of {source.repo} is named by --sources")
    for name, (builder, schedule) in _BUILDERS[clone.repo].items():
        if source.kernel.startswith(name):
            fields = Fields(source.arguments)
            kernel, arguments = builder(clone.folder, source.kernel, fields)
            fields.end()
            return Launched(getattr(kernel, "func", kernel), arguments, schedule)
    raise NotCovered(f"no builder calls {source.kernel!r:.60}")


def _attention(folder: Path, kernel: str, fields: Fields) -> Call:
    """Return `attention_cte` of the library and its arguments.

    Its schedule is explicit: the library's test harness compiles every kernel with `disable_backend_optimizations()`.
    That is in test/utils/kernel_tracer.py of the clone. According to nki-autotune it switches off the compiler's
    allocation and instruction scheduling (autotune/src/autotune/runner/types.py).
    """
    heads, keys, queries = fields.size("heads"), fields.size("kv_len"), fields.size("q_len")
    width, dtype = fields.size("head_dim"), fields.word("dtype", _DTYPES)
    transposed = fields.flag("tp_q", True)
    return library_module(folder, "attention.attention_cte").attention_cte, {
        "q": array((heads, queries, width) if transposed else (heads, width, queries), dtype),
        "k": array((heads, width, keys), dtype),
        "v": array((heads, keys, width), dtype),
        "causal_mask": fields.flag("causal", True),
        "tp_q": transposed,
        "tp_out": fields.flag("tp_out", False),
    }


def _mlp(folder: Path, kernel: str, fields: Fields) -> Call:
    """Return `mlp` of the library and its arguments; the schedule is explicit, by the same harness as attention.

    Arguments, their shapes and their dtypes follow `build_fused_norm_mlp` of the library's tests. Entries do not state
    whether the sum of a fused addition is stored; the tests store it in all decode kernels that have one.
    """
    types = library_module(folder, "utils.common_types")
    batch, seq = fields.size("batch"), fields.size("seq")
    hidden, inner = fields.size("hidden"), fields.size("intermediate")
    dtype = fields.word("dtype", _DTYPES)
    norm = _norm(types, fields)
    added = fields.flag("fused_add", False)
    default = "ROW" if "fp8 row-quantised" in kernel else "NONE"
    quantisation = fields.word("quantisation", {name: name for name in ("NONE", "STATIC", "ROW")}, default)
    weights = fields.word(
        "weight_dtype",
        {"None": dtype, "float8_e4m3": _FP8},
        "None" if quantisation == "NONE" else "float8_e4m3",
    )
    biases = [
        array((1, size), dtype) if fields.flag(f"{name}_bias", False) else None
        for name, size in (("gate", inner), ("up", inner), ("down", hidden), ("norm", hidden))
    ]
    arguments = {
        "hidden_tensor": array((batch, seq, hidden), dtype),
        "gate_proj_weights_tensor": array((hidden, inner), weights),
        "up_proj_weights_tensor": array((hidden, inner), weights),
        "down_proj_weights_tensor": array((inner, hidden), weights),
        "fused_add_tensor": array((batch, seq, hidden), dtype) if added else None,
        "store_fused_add_result": fields.flag("store_add", added and kernel.startswith("mlp (decode)")),
        "activation_fn": fields.word("activation", {"SiLU": types.ActFnType.SiLU}, "SiLU"),
        "normalization_type": norm,
        "quantization_type": types.QuantizationType[quantisation],
        "output_dtype": np.dtype(ml_dtypes.bfloat16),
        "skip_gate_proj": fields.flag("skip_gate", False),
        "use_tkg_gate_up_proj_column_tiling": fields.flag("gate_up_column_tiling", True),
        "use_tkg_down_proj_column_tiling": fields.flag("down_column_tiling", True),
        "use_tkg_down_proj_optimized_layout": fields.flag("down_optimized_layout", False),
    }
    names = ("gate_proj_bias", "up_proj_bias", "down_proj_bias", "normalization_bias")
    arguments |= {f"{name}_tensor": bias for name, bias in zip(names, biases)}
    if norm is not types.NormType.NO_NORM:
        arguments["normalization_weights_tensor"] = array((1, hidden), dtype)
    if quantisation != "NONE":
        sizes = {"gate_w_scale": inner, "up_w_scale": inner, "down_w_scale": hidden}
        if quantisation == "STATIC":
            sizes = dict.fromkeys((*sizes, "gate_up_in_scale", "down_in_scale"), 1)
        arguments |= {name: array((_PARTITIONS, size)) for name, size in sizes.items()}
    return library_module(folder, "mlp.mlp").mlp, arguments


def _qkv(folder: Path, kernel: str, fields: Fields) -> Call:
    """Return `qkv` of the library and its arguments; the schedule is explicit, by the same harness as attention.

    Arguments, their shapes and their dtypes follow `build_qkv_input` of the library's tests. STATIC has scales for q,
    k and v, so it needs the numbers of heads. Entries do not state them: one key/value head is assumed.
    """
    types = library_module(folder, "utils.common_types")
    batch, seq, hidden = fields.size("batch"), fields.size("seq"), fields.size("hidden")
    columns, head = fields.size("fused_qkv_dim"), fields.size("head_dim")
    dtype = fields.word("dtype", _DTYPES)
    norm = _norm(types, fields)
    quantisation = fields.word("quantisation", {name: name for name in ("NONE", "STATIC", "ROW")}, "NONE")
    added = fields.flag("fused_add", False)
    rows = array((batch, seq, hidden), dtype)
    arguments = {
        "input": rows,
        "fused_qkv_weights": array((hidden, columns), dtype if quantisation == "NONE" else _FP8),
        "output_layout": fields.word("output_layout", {"BSD": types.QKVOutputLayout.BSD}),
        "bias": array((1, columns), dtype) if fields.flag("qkv_bias", False) else None,
        "quantization_type": types.QuantizationType[quantisation],
        "fused_residual_add": added,
        "mlp_prev": rows if added else None,
        "attention_prev": rows if added else None,
        "fused_norm_type": norm,
        "gamma_norm_weights": None if norm is types.NormType.NO_NORM else array((1, hidden), dtype),
        "layer_norm_bias": array((1, hidden), dtype) if fields.flag("norm_bias", False) else None,
        "d_head": head,
    }
    if quantisation == "STATIC":
        arguments |= {"qkv_w_scale": array((_PARTITIONS, 3)), "qkv_in_scale": array((_PARTITIONS, 1))}
        arguments |= {"num_q_heads": columns // head - 2, "num_kv_heads": 1}
    elif quantisation == "ROW":
        arguments["qkv_w_scale"] = array((_PARTITIONS, columns))
    return library_module(folder, "qkv.qkv").qkv, arguments


def _norm(types: Any, fields: Fields) -> Any:
    """Take the field `norm` and return the library's constant of that name."""
    return fields.word("norm", {name: types.NormType[name] for name in ("NO_NORM", "RMS_NORM", "LAYER_NORM")})


def _matmul(folder: Path, kernel: str, fields: Fields) -> Call:
    """Return one of the hand-tuned 2048 x 2048 products of nki-autotune and its arguments.

    Its schedule is explicit: kernel_library/README.md requires `enable-instruction-scheduling=false` for both
    products.
    """
    dtype = fields.word("dtype", _DTYPES)
    first, inner = fields.word(
        "lhs", {"K x M": ("lhs_T", "matmul/lhsT_rhs"), "M x K": ("lhs", "matmul/lhs_rhs")}
    )
    call = defined_in(
        folder / "kernel_library" / inner, "kernel_hand*.py", f"matmul_{inner.split('/')[1]}_nkigym"
    )
    return call, {first: array((2048, 2048), dtype), "rhs": array((2048, 2048), dtype)}


def _rmsnorm_matmul(folder: Path, kernel: str, fields: Fields) -> Call:
    """Return the RMSNorm and matmul kernel of nki-autotune and its arguments.

    Its schedule is the compiler's: no file of the repository asks for flags with this kernel. The flags of the runner
    are empty unless a job gives some (`neuronx_cc_args` in autotune/src/autotune/runner/types.py), and without flags
    the compiler schedules.
    """
    dtype = fields.word("dtype", _DTYPES)
    call = defined_in(
        folder / "kernel_library" / "rmsnorm_matmul", "kernel_hand_online.py", "rmsnorm_matmul_online"
    )
    return call, {"lhs": array((2048, 2048), dtype), "rhs": array((2048, 2048), dtype)}


_Builder = tuple[Callable[[Path, str, Fields], Call], Schedule]

_BUILDERS: Mapping[str, Mapping[str, _Builder]] = MappingProxyType(
    {
        LIBRARY: {
            "attention_cte": (_attention, Schedule.explicit),
            "mlp (": (_mlp, Schedule.explicit),
            "qkv (decode)": (_qkv, Schedule.explicit),
        },
        AUTOTUNE: {
            "kernel_library matmul, hand tuned, 2048^3": (_matmul, Schedule.explicit),
            "kernel_library rmsnorm_matmul kernel_hand_online, 2048 x 2048": (
                _rmsnorm_matmul,
                Schedule.compiler,
            ),
        },
    }
)
"""By repository and by the beginning of a kernel's description; the builder's docstring has the evidence for
what decided the order of instructions."""


def library_module(folder: Path, name: str, package: str = "core") -> Any:
    """Import and return the module `nkilib_src.nkilib.PACKAGE.NAME` of a clone in `folder`.

    The first call adds the clone to `sys.path` and installs the repairs of its files.
    """
    folder_name = str(folder / "src")
    if folder_name not in sys.path:
        sys.path.insert(0, folder_name)
        repairs.install(repairs.LIBRARY)
    return importlib.import_module(f"nkilib_src.nkilib.{package}.{name}")


def defined_in(folder: Path, pattern: str, function: str) -> Callable[..., Any]:
    """Return a function from the only file in a folder whose name matches the glob `pattern`.

    A pattern is needed because file names contain figures that change. Raises NotCovered unless exactly one file
    matches.
    """
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise NotCovered(f"{folder.parent.name}/{folder.name} has {len(files)} files {pattern}, not one")
    spec = importlib.util.spec_from_file_location(function, files[0])
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call: Callable[..., Any] = getattr(module, function)
    return call
