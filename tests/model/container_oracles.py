"""Stored weights of compressed-tensors and bitsandbytes, and the numbers that these packages make of them.

`python -m tests.model.container_oracles` writes `container_oracles.npz` with the packages that are installed. Tests
read this file where the packages are missing, such as on Python 3.10.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

STORED = Path(__file__).with_suffix(".npz")
SHAPE = (24, 64)
BLOCK = (16, 24)
MODULE = "model.layers.0.mlp.up_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}

_GROUP = {"strategy": "group", "group_size": 32}
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 tensor": ("naive-quantized", dict(num_bits=8, type="float", strategy="tensor")),
    "fp8 channel": ("float-quantized", dict(num_bits=8, type="float", strategy="channel")),
    "fp8 block": (
        "float-quantized",
        dict(num_bits=8, type="float", strategy="block", block_structure=[*BLOCK]),
    ),
    "fp8 group": ("naive-quantized", dict(num_bits=8, type="float", **_GROUP)),
    "int8 channel": ("int-quantized", dict(num_bits=8, type="int", strategy="channel")),
    "int8 packed": ("pack-quantized", dict(num_bits=8, type="int", strategy="channel")),
    "int8 packed in groups": ("pack-quantized", dict(num_bits=8, type="int", **_GROUP)),
    "int4 channel": ("pack-quantized", dict(num_bits=4, type="int", strategy="channel")),
    "int4 in groups": ("pack-quantized", dict(num_bits=4, type="int", **_GROUP)),
    "int4 with zero points": ("pack-quantized", dict(num_bits=4, type="int", symmetric=False, **_GROUP)),
    "mxfp4": (
        "mxfp4-pack-quantized",
        dict(num_bits=4, type="float", scale_dtype="torch.uint8", **_GROUP),
    ),
    "mxfp8": ("mxfp8-quantized", dict(num_bits=8, type="float", scale_dtype="torch.uint8", **_GROUP)),
}
"""Storage format and fields `weights` of a group of compressed-tensors, by name."""

CONFIGS: dict[str, dict[str, Any]] = {
    name: {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    for name, (storage, weights) in WEIGHTS.items()
} | {"awq": AWQ, "llm.int8": LLM_INT8}
"""`quantization_config` of every case."""

Case = tuple[dict[str, np.ndarray], np.ndarray]
"""Tensors of the module `MODULE` by name, and the numbers float32 of its weight."""


def draw_weight() -> np.ndarray:
    """Return the plain weight, float32 [24, 64], with rows of very different magnitudes."""
    random = np.random.default_rng(36)
    return (random.normal(size=SHAPE) * np.exp2(random.integers(-4, 5, (SHAPE[0], 1)))).astype(np.float32)


def compress(name: str) -> Case:
    """Return what compressed-tensors stores for the drawn weight in a case of `WEIGHTS`, and what it makes of it."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    storage, fields = WEIGHTS[name]
    args = QuantizationArgs(**fields)
    weight = torch.from_numpy(draw_weight())
    grouped = weight
    if args.strategy == "group":
        grouped = weight.reshape(SHAPE[0], -1, 32)
    elif args.strategy == "block":
        (rows, columns), (height, width) = SHAPE, BLOCK
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        grouped = padded.reshape(-(-rows // height), height, -1, width).transpose(1, 2).flatten(2)
    if args.strategy == "tensor":
        lowest, highest = weight.min().reshape(1), weight.max().reshape(1)
    else:
        lowest, highest = grouped.amin(-1), grouped.amax(-1)
    if args.strategy == "channel":
        lowest, highest = lowest[:, None], highest[:, None]
    scale, zero = calculate_qparams(lowest, highest, args)
    compressor = BaseCompressor.get_value_from_registry(storage)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    numbers = compressor.decompress(stored, scheme)["weight"]
    tensors = {f"{MODULE}.{key}": to_numpy(tensor) for key, tensor in stored.items()}
    return tensors, numbers.float().numpy()


def convert_awq() -> Case:
    """Return random tensors of AWQ, and the numbers that compressed-tensors makes of them after its conversion."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    random = np.random.default_rng(37)
    words = np.iinfo(np.int32)
    tensors = {
        f"{MODULE}.qweight": random.integers(words.min, words.max, (SHAPE[1], SHAPE[0] // 8), np.int32),
        f"{MODULE}.qzeros": random.integers(words.min, words.max, (SHAPE[1] // 32, SHAPE[0] // 8), np.int32),
        f"{MODULE}.scales": random.uniform(0.01, 0.1, (SHAPE[1] // 32, SHAPE[0])).astype(np.float16),
    }
    stored = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    stored[f"{MODULE}.scales"] = stored[f"{MODULE}.scales"].float()
    converted = AutoAWQConverter(group_size=32).process(stored)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    local = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in converted.items()}
    numbers = BaseCompressor.get_value_from_registry("pack-quantized").decompress(local, scheme)["weight"]
    return tensors, numbers.numpy()


def quantise_llm_int8() -> Case:
    """Return what bitsandbytes stores for the drawn weight in LLM.int8, and what it makes of it on the CPU."""
    import bitsandbytes.functional
    import torch

    elements, largest, _ = bitsandbytes.functional.int8_vectorwise_quant(
        torch.from_numpy(draw_weight()).to(torch.float16)
    )
    numbers = bitsandbytes.functional.int8_vectorwise_dequant(elements, largest)
    tensors = {"weight": elements.numpy(), "SCB": largest.float().numpy()}
    return {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}, numbers.float().numpy()


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a tensor of torch as an array; fp8 as float8_e4m3fn."""
    import ml_dtypes
    import torch

    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()


def make_case(name: str) -> Case:
    """Return the case of a name in `CONFIGS`, made with the installed packages."""
    return convert_awq() if name == "awq" else quantise_llm_int8() if name == "llm.int8" else compress(name)


def read_cases() -> dict[str, Case]:
    """Return the stored cases by name."""
    import ml_dtypes

    cases: dict[str, Case] = {}
    with np.load(STORED) as file:
        for name, keys in json.loads(str(file["index"])).items():
            tensors = {
                key: file[f"{name}/{key}"].view(np.dtype(getattr(ml_dtypes, dtype, dtype)))
                for key, dtype in keys.items()
            }
            cases[name] = tensors, file[f"{name}/numbers"]
    return cases


def write_cases() -> None:
    """Write all cases to `STORED`."""
    arrays: dict[str, np.ndarray] = {}
    index: dict[str, dict[str, str]] = {}
    for name in CONFIGS:
        tensors, numbers = make_case(name)
        index[name] = {key: tensor.dtype.name for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            is_fp8 = tensor.dtype.name.startswith("float8")
            arrays[f"{name}/{key}"] = tensor.view(np.uint8) if is_fp8 else tensor
        arrays[f"{name}/numbers"] = numbers
    np.savez_compressed(STORED, index=json.dumps(index), **arrays)


if __name__ == "__main__":
    write_cases()
