"""Tensors of quantised weights in a checkpoint, and the `quantization_config` that describes them.

compressed-tensors stores a scale for each row or group as `<name>_scale`. Elements are `<name>` in `float-quantized`,
`int-quantized` and `mxfp8-quantized`. In `pack-quantized`, `<name>_packed` has elements of 4 or 8 bits, plus 8 or 128,
the first in the lowest bits of an int32; `<name>_shape` is the shape of the weight. In `mxfp4-pack-quantized`,
`<name>_packed` has two elements in a byte, the first in the lower bits. Scales of MX are exponents plus 127.
bitsandbytes stores int8 in `<name>`, and the largest magnitude of each row, float32 [out], as `SCB` of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from model.formats.format import ELEMENTS, SCALES
from model.formats.mx import Mx
from model.quantize.rounding import Rounded
from model.quantize.schemes import BITSANDBYTES, PACKED, Method, Numbers, Scheme

Described = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and dtype of stored tensors by name."""

OUTLIER_THRESHOLD = 6.0
"""Largest magnitude of an input that LLM.int8 rounds to 8 bits; the default of bitsandbytes."""
_UINT8, _INT32, _INT64 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)
_BIAS = 127
_ELEMENTS = {
    Numbers.fp8: np.dtype(ml_dtypes.float8_e4m3fn),
    Numbers.mxfp8: np.dtype(ml_dtypes.float8_e4m3fn),
    Numbers.int8: np.dtype(np.int8),
}


def choose_scale_dtype(scheme: Scheme, weight_dtype: np.dtype) -> np.dtype:
    """Return the dtype of stored scales for weights of a dtype: bfloat16 beside bfloat16 weights, else float32.

    transformers gives scales the dtype of the model, which must therefore have them exactly. float16 has too few
    exponents for scales. bitsandbytes has float32.
    """
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    return bfloat16 if weight_dtype == bfloat16 and scheme.container != BITSANDBYTES else _FLOAT32


def describe_stored(name: str, shape: tuple[int, int], scheme: Scheme, scale_dtype: np.dtype) -> Described:
    """Return shape and dtype of the tensors that store a weight `name` [out, in]."""
    rows, columns = shape
    groups = -(-columns // (scheme.group or columns))
    if scheme.container == BITSANDBYTES:
        module = name.removesuffix("weight")
        return {
            name: (shape, np.dtype(np.int8)),
            f"{module}SCB": ((rows,), _FLOAT32),
            f"{module}weight_format": ((), _UINT8),
        }
    scales: Described = {f"{name}_scale": ((rows, groups), scale_dtype)}
    if scheme.numbers is Numbers.mxfp4:
        return {f"{name}_packed": ((rows, columns // 2), _UINT8), f"{name}_scale": ((rows, groups), _UINT8)}
    if scheme.numbers is Numbers.mxfp8:
        return {name: (shape, _ELEMENTS[scheme.numbers]), f"{name}_scale": ((rows, groups), _UINT8)}
    if scheme.container == PACKED:
        words = -(-columns * scheme.numbers.bits // 32)
        packed: Described = {f"{name}_packed": ((rows, words), _INT32), f"{name}_shape": ((2,), _INT64)}
        return {**packed, **scales}
    return {name: (shape, _ELEMENTS[scheme.numbers]), **scales}


def store(name: str, rounded: Rounded, scheme: Scheme, scale_dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return the tensors of `describe_stored` for a rounded weight."""
    elements, scales = rounded.elements, rounded.scales
    if scheme.container == BITSANDBYTES:
        module = name.removesuffix("weight")
        largest = (scales[:, 0] * np.float32(127)).astype(np.float32)
        return {name: elements, f"{module}SCB": largest, f"{module}weight_format": np.zeros((), np.uint8)}
    if scheme.numbers is Numbers.mxfp4:
        packed = Mx().pack(rounded.widen())
        return {f"{name}_packed": packed[ELEMENTS].reshape(len(scales), -1), f"{name}_scale": packed[SCALES]}
    if scheme.numbers is Numbers.mxfp8:
        return {name: elements, f"{name}_scale": (np.frexp(scales)[1] - 1 + _BIAS).astype(np.uint8)}
    stored = {f"{name}_scale": scales.astype(scale_dtype)}
    if scheme.container == PACKED:
        words = pack_integers(elements, scheme.numbers.bits)
        return {f"{name}_packed": words, f"{name}_shape": np.array(elements.shape, np.int64), **stored}
    return {name: elements, **stored}


def pack_integers(elements: np.ndarray, bits: int) -> np.ndarray:
    """Return int8 elements [out, in] of 4 or 8 bits as int32 [out, words], the last word filled up with zero bits."""
    unsigned: np.ndarray = (elements.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    padded: np.ndarray = np.pad(unsigned, ((0, 0), (0, -elements.shape[1] % (32 // bits))))
    if bits == 4:
        padded = padded[:, 0::2] | padded[:, 1::2] << 4
    return np.ascontiguousarray(padded).view(np.dtype("<i4"))


def build_quantization_config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """Return the object `quantization_config` of config.json.

    Args:
        scheme: The scheme of all quantised weights.
        ignored: Modules that stay plain.
    """
    if scheme.container == BITSANDBYTES:
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_threshold": OUTLIER_THRESHOLD,
            "llm_int8_skip_modules": list(ignored),
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }
    weights = _describe_numbers(scheme.numbers)
    weights |= {"strategy": "channel" if scheme.group is None else "group", "dynamic": False}
    if scheme.group is not None:
        weights["group_size"] = scheme.group
    if scheme.numbers in (Numbers.mxfp4, Numbers.mxfp8):
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    if scheme.method is Method.gptq:
        weights["observer"] = "mse"
    activations = None
    if scheme.activations is not None:
        activations = {**_describe_numbers(scheme.activations), "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": scheme.container,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.container,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _describe_numbers(numbers: Numbers) -> dict[str, Any]:
    """Return the fields of compressed-tensors that name a number format."""
    is_integer = numbers in (Numbers.int8, Numbers.int4)
    return {"num_bits": numbers.bits, "type": "int" if is_integer else "float", "symmetric": True}
