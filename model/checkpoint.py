"""The weights of a model folder: model.safetensors, or the shards that model.safetensors.index.json lists.

The file format is documented and small: eight bytes with the header's length, a JSON header with dtype, shape and byte
range of every tensor, then the bytes. It is mapped into memory here and not through the `safetensors` library, whose
numpy side copies every tensor, knows bfloat16 only in newer versions and only where ml_dtypes has been imported, and
whose errors name neither file nor tensor. A tensor's bytes are read when it is used, and can be let go of afterwards.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from model.config import ModelConfig, read_json
from model.errors import ModelError
from model.families import compose

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 100_000_000  # the limit that the safetensors library sets
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies as a buffer; they follow from the config and are left unread."""


class Checkpoint(Mapping[str, np.ndarray]):
    """Every tensor that a config asks for, by name, as a read-only array on the mapped file."""

    def __init__(self, tensors: dict[str, np.ndarray], maps: Sequence[mmap.mmap] = ()) -> None:
        self._tensors = tensors
        self._maps = maps

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def let_go(self) -> None:
        """Give back the memory that the file's bytes take in this process; tensors that are used are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on every system; there the system decides
            for each in self._maps:
                each.madvise(mmap.MADV_DONTNEED)


def open_checkpoint(folder: Path | str, config: ModelConfig) -> Checkpoint:
    """Map a folder's weights and hold them against the config.

    Raises ModelError for a missing, truncated or malformed file, an index that does not agree with its shards, a
    tensor that is missing, surplus or of another shape or dtype. `lm_head.weight` may be absent, or present and
    ignored, where the embedding is tied.
    """
    folder = Path(folder)
    maps: list[mmap.mmap] = []
    if (folder / INDEX).is_file():
        held = _shards(folder, maps)
    else:
        held = _SafetensorsFile(folder / SINGLE).tensors(maps)
    source = folder / (INDEX if (folder / INDEX).is_file() else SINGLE)
    decoder = compose(config)
    shapes = decoder.tensor_shapes()
    for name, shape in shapes.items():
        if name not in held:
            raise ModelError(f"{source}: tensor {name} is missing")
        if held[name].shape != shape:
            raise ModelError(f"{source}: {name} has shape {held[name].shape}; config.json asks for {shape}")
    dtypes = {held[name].dtype for name in shapes}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ModelError(
            f"{source}: the tensors have several dtypes ({names}); kernels take weights of one dtype"
        )
    for name in held:
        if name not in shapes and name not in decoder.unread and not name.endswith(_IGNORED_SUFFIX):
            raise ModelError(f"{source}: {name} is not a tensor of {config.architecture}")
    return Checkpoint({name: held[name] for name in shapes}, maps)


def _shards(folder: Path, maps: list[mmap.mmap]) -> dict[str, np.ndarray]:
    index = folder / INDEX
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ModelError(f"{index}: weight_map is not an object from tensor names to file names")
    held: dict[str, np.ndarray] = {}
    for file in sorted(set(where.values())):
        if file != Path(file).name:
            raise ModelError(f"{index}: weight_map names {file!r}, which is not a file of the same folder")
        if not (folder / file).is_file():
            raise ModelError(f"{index}: weight_map names {file}, which is missing")
        inside = _SafetensorsFile(folder / file).tensors(maps)
        for name, tensor in inside.items():
            if where.get(name) != file:
                raise ModelError(
                    f"{folder / file}: holds {name}; the index assigns it to {where.get(name, 'no file')}"
                )
            held[name] = tensor
    for name, file in where.items():
        if name not in held:
            raise ModelError(f"{folder / file}: tensor {name} is missing; {INDEX} assigns it to this file")
    return held


@dataclass(frozen=True)
class _SafetensorsFile:
    """One .safetensors file."""

    path: Path

    def tensors(self, maps: list[mmap.mmap]) -> dict[str, np.ndarray]:
        """Every tensor of the file as an array on its mapped bytes; the map is added to `maps`."""
        size = self._size_bytes()
        if size < _LENGTH_BYTES:
            raise ModelError(f"{self.path} is truncated: {size} bytes, the header's length alone takes 8")
        with self.path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        data = np.frombuffer(maps[-1], np.uint8)
        header_bytes = int(data[:_LENGTH_BYTES].view("<u8")[0])
        if header_bytes > _LARGEST_HEADER_BYTES:
            raise ModelError(
                f"{self.path} is not a safetensors file: it states a header of {header_bytes} bytes"
            )
        start = _LENGTH_BYTES + header_bytes
        if start > size:
            raise ModelError(f"{self.path} is truncated: {size} bytes, the header ends at {start}")
        try:
            header = json.loads(data[_LENGTH_BYTES:start].tobytes())
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{self.path} is not a safetensors file: the header is not JSON ({error})"
            ) from None
        if not isinstance(header, dict):
            raise ModelError(f"{self.path} is not a safetensors file: the header is not a JSON object")
        content = data[start:]
        return {
            name: self._tensor(content, name, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def _tensor(self, content: np.ndarray, name: str, entry: Any) -> np.ndarray:
        if not isinstance(entry, dict):
            raise ModelError(f"{self.path}: the header's entry of {name} is not a JSON object")
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
            raise ModelError(f"{self.path}: {name} has shape {shape!r} and data_offsets {offsets!r}")
        dtype = _DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            known = ", ".join(_DTYPES)
            raise ModelError(f"{self.path}: {name} has dtype {entry.get('dtype')!r}; known are {known}")
        begin, end = offsets
        if end > content.size:
            raise ModelError(
                f"{self.path} is truncated: {name} ends at byte {end} of {content.size} bytes of data"
            )
        needed = prod(shape) * dtype.itemsize
        if end - begin != needed:
            raise ModelError(
                f"{self.path}: {name} has {end - begin} bytes; {tuple(shape)} of {dtype} takes {needed}"
            )
        return content[begin:end].view(dtype).reshape(shape)

    def _size_bytes(self) -> int:
        try:
            with self.path.open("rb") as file:
                return file.seek(0, 2)
        except FileNotFoundError:
            raise ModelError(f"{self.path} is missing, and so is {INDEX}") from None
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from None


def _counts(value: object) -> TypeGuard[list[int]]:
    """Whether a value from JSON is a list of numbers that count something."""
    return isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value
    )
