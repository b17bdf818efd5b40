"""Weights of a bundle on the instance: read from a folder with known digests, or random; operands by recipes.

`run.py` imports this module for bundles with weights by reference. It needs only Python's standard library
and numpy.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

STORED = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
}
"""Dtypes of .safetensors files."""
BITS = {
    "float32": "uint32",
    "float16": "uint16",
    "bfloat16": "uint16",
    "int8": "uint8",
    "float8_e4m3": "uint8",
    "float8_e4m3fn": "uint8",
}
Json = dict[str, Any]


def check_weights(folder: str | None, files: list[Json]) -> str:
    """Return what is wrong with a folder of weights as a sentence, or an empty string if nothing is.

    Every file of the bundle must be in the folder, with its size in bytes and its SHA-256.
    """
    if not files:
        return ""
    if folder is None:
        return f"the weights are missing: give --weights FOLDER, the folder that holds {files[0]['name']}"
    root = Path(folder)
    if not root.is_dir():
        return f"--weights {folder} is no folder; give the folder that holds {files[0]['name']}"
    for file in files:
        path, digest = root / file["name"], hashlib.sha256()
        try:
            if path.stat().st_size != file["nbytes"]:
                sizes = f"{path.stat().st_size:,} bytes, that of the bundle {file['nbytes']:,}"
                return f"{path} is not the file that the bundle was made with: it has {sizes}"
            with open(path, "rb") as content:
                while block := content.read(1 << 22):
                    digest.update(block)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if digest.hexdigest() != file["sha256"]:
            digests = f"its SHA-256 is {digest.hexdigest()}, that of the bundle {file['sha256']}"
            return f"{path} is not the file that the bundle was made with: {digests}"
    return ""


def map_tensors(path: Path) -> dict[str, tuple[Any, str]]:
    """Return the tensors of a .safetensors file by name, as (memory-mapped bits, dtype).

    The bits are a flat array of unsigned integers in row-major order, None for an empty tensor. Tensors of
    other dtypes than STORED are left out. The file begins with the length of a JSON header, 8 bytes, and the
    header; the tensors follow it.
    """
    import numpy as np

    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__" and about["dtype"] in STORED:
            dtype = STORED[about["dtype"]]
            begin, end = about["data_offsets"]
            count = (end - begin) // np.dtype(BITS[dtype]).itemsize
            bits = np.memmap(path, BITS[dtype], "r", 8 + length + begin, (count,)) if count else None
            tensors[name] = bits, dtype
    return tensors


def round_bits(bits: Any, dtype: str, into: str) -> Any:
    """Return the bits of floats in another dtype, as unsigned integers of its width.

    bfloat16 is rounded to nearest, ties to even, and NaN stays NaN. float32 is exact. float8_e4m3 has half of
    each float8_e4m3fn number, because its numbers end at 240 instead of 448.

    Args:
        bits: Array of unsigned integers of any shape.
        dtype: Dtype of these numbers, one of STORED.
        into: Dtype of the returned numbers: the same one; float32 or bfloat16 for floats of 16 and 32 bits;
            float8_e4m3 for float8_e4m3fn.

    Raises:
        ValueError: If no such conversion exists.
    """
    import numpy as np

    if dtype == into:
        return bits
    if (dtype, into) == ("float8_e4m3fn", "float8_e4m3"):
        return halve_e4m3fn(bits)
    if into not in ("float32", "bfloat16") or BITS[dtype] == "uint8":
        raise ValueError(f"{dtype} cannot be converted to {into}; wider floats become float32 or bfloat16")
    if dtype == "bfloat16":
        return bits.astype(np.uint32) << np.uint32(16)
    wide = bits if dtype == "float32" else bits.view(np.float16).astype(np.float32).view(np.uint32)
    if into == "float32":
        return wide
    nearest = (wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, wide >> np.uint32(16) | np.uint32(0x40), nearest).astype(np.uint16)


def halve_e4m3fn(bits: Any) -> Any:
    """Return the bits in float8_e4m3 of half of each float8_e4m3fn number, as uint8.

    Both have a bias of 7. Half of a number from 2**-5 on has an exponent less by 1. Smaller ones are multiples
    of 2**-9, whose halves are rounded to nearest, ties to even. NaN stays NaN.
    """
    import numpy as np

    sign, magnitude = bits & np.uint8(0x80), bits & np.uint8(0x7F)
    rounded = (magnitude >> np.uint8(1)) + (magnitude & (magnitude >> np.uint8(1)) & np.uint8(1))
    halves = np.where(magnitude >= 16, magnitude - np.uint8(8), rounded)
    return (sign | np.where(magnitude == 0x7F, magnitude, halves)).astype(np.uint8)


def draw_tensor(tensor: Json) -> tuple[Any, str]:
    """Return (bits, dtype) of a random tensor, uniform in [`shift` - `scale`, `shift` + `scale`].

    The bits are a flat array of unsigned integers with `count` elements. numpy's PCG64 with the tensor's seed
    yields 64 bits for each element, a stream that numpy guarantees. Its first 24 bits are an integer multiple
    of 2**-23. That number less 1, times the scale (a power of two), plus the shift, is computed in float32.
    bfloat16 is rounded to nearest, ties to even.
    """
    import numpy as np

    words = np.random.PCG64(tensor["seed"]).random_raw(tensor["count"])
    steps = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    floats = steps * np.float32(tensor["scale"]) + np.float32(tensor["shift"])
    return round_bits(floats.view(np.uint32), "float32", tensor["dtype"]), tensor["dtype"]


def assemble_operand(operand: Json, tensors: dict[str, tuple[Any, str]]) -> Any:
    """Return the bits of an operand, assembled from pieces of tensors; elements that no piece covers are 0.

    Args:
        operand: Record of the manifest: name, dtype, shape, SHA-256, and pieces, each a box of the operand
            with its position in a tensor. A float32 operand may have a `factor` that multiplies its elements.
        tensors: (bits, dtype) of tensors by name.

    Raises:
        ValueError: If a tensor is missing or too short, or if the SHA-256 of the operand differs.
    """
    import numpy as np

    name, dtype = operand["name"], operand["dtype"]
    operand_bits = np.zeros(operand["shape"], BITS[dtype])
    for piece in operand["pieces"]:
        tensor, stored = tensors.get(piece["tensor"], (None, ""))
        steps = list(zip(piece["shape"], piece["strides"]))
        last = piece["start"] + sum((size - 1) * stride for size, stride in steps)
        if tensor is None or last >= tensor.size:
            raise ValueError(
                f"the weight {name} needs more elements of tensor {piece['tensor']} than the files have; give the "
                "files that the bundle was made with"
            )
        strides = [stride * tensor.itemsize for stride in piece["strides"]]
        box = np.lib.stride_tricks.as_strided(
            tensor[piece["start"] :], piece["shape"], strides, writeable=False
        )
        operand_bits[
            tuple(slice(origin, origin + size) for origin, size in zip(piece["at"], piece["shape"]))
        ] = round_bits(box, stored, dtype)
    if operand.get("factor", 1) != 1:
        factor = np.float32(operand["factor"])
        operand_bits = (operand_bits.view(np.float32) * factor).view(np.uint32)
    digest = hashlib.sha256(operand_bits.tobytes()).hexdigest()
    if digest != operand["sha256"]:
        raise ValueError(
            f"the weight {name} has SHA-256 {digest} as it is made here, not {operand['sha256']}; give the "
            "files that the bundle was made with"
        )
    return operand_bits


class Weights:
    """Operands of a bundle's weights by name, each made at its first use and kept.

    `folder` is the folder with the .safetensors files, or None if the bundle needs none. `weights` is the
    manifest's record of files, random tensors and operands.
    """

    def __init__(self, folder: str | None, weights: Json) -> None:
        self._tensors: dict[str, tuple[Any, str]] = {}
        for file in weights["files"]:
            self._tensors.update(map_tensors(Path(folder or ".") / file["name"]))
        self._drawn = {tensor["name"]: tensor for tensor in weights["drawn"]}
        self._operands = {operand["name"]: operand for operand in weights["operands"]}
        self._made: Json = {}

    def __getitem__(self, name: str) -> Any:
        """Return the bits of the operand with a name, in its shape; callers must not write to the array.

        Raises:
            KeyError: If there is no such operand.
            ValueError: If the operand cannot be made, or if its SHA-256 differs.
        """
        if name not in self._made:
            operand = self._operands[name]
            tensor_names = {piece["tensor"] for piece in operand["pieces"]}
            random_tensors = {
                tensor_name: draw_tensor(self._drawn[tensor_name])
                for tensor_name in tensor_names
                if tensor_name in self._drawn
            }
            self._made[name] = assemble_operand(operand, self._tensors | random_tensors)
        return self._made[name]
