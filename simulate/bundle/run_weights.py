"""The weights of a bundle on the instance: from a folder that is known by its digests, or drawn; operands by recipes.

`run.py` imports this file where a bundle has weights by reference. Python's standard library and numpy only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of .safetensors files."""
BITS = {"float32": "uint32", "float16": "uint16", "bfloat16": "uint16"}
Json = dict[str, Any]


def check_weights(folder: str | None, files: list[Json]) -> str:
    """What is wrong with a folder of weights, in one sentence; empty where the files are those of the bundle."""
    if not files:
        return ""
    if folder is None:
        return f"the weights are missing: give --weights FOLDER, the folder that holds {files[0]['name']}"
    root = Path(folder)
    if not root.is_dir():
        return f"--weights {folder} is no folder"
    for file in files:
        path, seen = root / file["name"], hashlib.sha256()
        try:
            if path.stat().st_size != file["nbytes"]:
                sizes = f"{path.stat().st_size:,} bytes, that of the bundle {file['nbytes']:,}"
                return f"{path} is not the file that the bundle was made with: it has {sizes}"
            with open(path, "rb") as content:
                while part := content.read(1 << 22):
                    seen.update(part)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if seen.hexdigest() != file["sha256"]:
            digests = f"its SHA-256 is {seen.hexdigest()}, that of the bundle {file['sha256']}"
            return f"{path} is not the file that the bundle was made with: {digests}"
    return ""


def tensors_of(path: Path) -> dict[str, tuple[Any, str]]:
    """The tensors of a .safetensors file by name: their bits in the order of the file, mapped, and their dtype.

    The file begins with the length of a JSON header, 8 bytes, and the header; the tensors follow it.
    """
    import numpy as np

    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, about in header.items():
        if name != "__metadata__" and about["dtype"] in STORED:
            dtype = STORED[about["dtype"]]
            begin, end = about["data_offsets"]
            count = (end - begin) // np.dtype(BITS[dtype]).itemsize
            bits = np.memmap(path, BITS[dtype], "r", 8 + length + begin, (count,)) if count else None
            found[name] = bits, dtype
    return found


def rounded(bits: Any, dtype: str, into: str) -> Any:
    """The bits of floats of one dtype in another: float32 holds all exactly, bfloat16 the nearest, of two the even one.

    Raises ValueError for another dtype.
    """
    import numpy as np

    if dtype == into:
        return bits
    if into not in ("float32", "bfloat16"):
        raise ValueError(f"{dtype} is not turned into {into}")
    if dtype == "bfloat16":
        return bits.astype(np.uint32) << np.uint32(16)
    wide = bits if dtype == "float32" else bits.view(np.float16).astype(np.float32).view(np.uint32)
    if into == "float32":
        return wide
    nearest = (wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, wide >> np.uint32(16) | np.uint32(0x40), nearest).astype(np.uint16)


def drawn(tensor: Json) -> tuple[Any, str]:
    """The bits and the dtype of a tensor that no file holds: even chances from `shift` - `scale` to `shift` + `scale`.

    PCG64 of numpy with a seed gives 64 bits for each element, whose stream numpy promises to keep. The first 24 of them
    are a whole number of 2**-23; less 1, times the scale, which is a power of two, plus the shift, all in float32. In
    bfloat16 that is rounded to the nearest value and then to even.
    """
    import numpy as np

    words = np.random.PCG64(tensor["seed"]).random_raw(tensor["count"])
    steps = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    values = steps * np.float32(tensor["scale"]) + np.float32(tensor["shift"])
    return rounded(values.view(np.uint32), "float32", tensor["dtype"]), tensor["dtype"]


def prepared(operand: Json, tensors: dict[str, tuple[Any, str]]) -> Any:
    """The bits of an operand, put together from pieces of tensors.

    Raises ValueError with a sentence where a tensor is missing or too short, or the result has another SHA-256.
    """
    import numpy as np

    name, dtype = operand["name"], operand["dtype"]
    found = np.zeros(operand["shape"], BITS[dtype])
    for piece in operand["pieces"]:
        tensor, stored = tensors.get(piece["tensor"], (None, ""))
        steps = list(zip(piece["shape"], piece["strides"]))
        last = piece["start"] + sum((size - 1) * stride for size, stride in steps)
        if tensor is None or last >= tensor.size:
            raise ValueError(f"the weight {name} needs more of tensor {piece['tensor']} than there is")
        strides = [stride * tensor.itemsize for stride in piece["strides"]]
        box = np.lib.stride_tricks.as_strided(
            tensor[piece["start"] :], piece["shape"], strides, writeable=False
        )
        found[tuple(slice(at, at + size) for at, size in zip(piece["at"], piece["shape"]))] = rounded(
            box, stored, dtype
        )
    digest = hashlib.sha256(found.tobytes()).hexdigest()
    if digest != operand["sha256"]:
        raise ValueError(
            f"the weight {name} has SHA-256 {digest} as it is made here, not {operand['sha256']}"
        )
    return found


class Weights:
    """The operands of a bundle, each made when it is asked for the first time; `folder` has the files, if any."""

    def __init__(self, folder: str | None, weights: Json) -> None:
        self._tensors: dict[str, tuple[Any, str]] = {}
        for file in weights["files"]:
            self._tensors.update(tensors_of(Path(folder or ".") / file["name"]))
        self._drawn = {each["name"]: each for each in weights["drawn"]}
        self._operands = {each["name"]: each for each in weights["operands"]}
        self._made: Json = {}

    def __getitem__(self, name: str) -> Any:
        """The bits of an operand."""
        if name not in self._made:
            operand = self._operands[name]
            named = {each["tensor"] for each in operand["pieces"]}
            own = {each: drawn(self._drawn[each]) for each in named if each in self._drawn}
            self._made[name] = prepared(operand, self._tensors | own)
        return self._made[name]
