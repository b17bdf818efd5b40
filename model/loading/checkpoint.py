"""The weights of a model folder: model.safetensors, or the shards that model.safetensors.index.json lists.

The `safetensors` library reads and checks the headers. The tensors are mapped into memory here, because its numpy side
copies every one, and knows bfloat16 only in newer versions and only where ml_dtypes has been imported. A tensor's bytes
are read when it is used, and can be let go of afterwards. Quantised weights are widened each time they are used.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import safetensors

from model.config import Config, read_json
from model.config.folder import check_inside
from model.errors import ModelError
from model.families import compose
from model.formats import Weight
from model.network import Network
from nkw.files import opened

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 2**24
"""Of a header; that of a thousand tensors takes a tenth of a megabyte. The library takes 100 MB, as 2 GB of memory."""
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The dtypes of stored tensors of quantised weights, beside those of plain weights."""
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies as a buffer; they follow from the config and are left unread."""


class Checkpoint(Mapping[str, Weight]):
    """The weights of the layers by name: read-only arrays on the mapped files, or weights in a format's tensors."""

    def __init__(
        self, weights: Mapping[str, Weight], maps: Mapping[Path, mmap.mmap] = MappingProxyType({})
    ) -> None:
        self._weights = weights
        self._maps = maps

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return list(self._maps)

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def let_go(self) -> None:
        """Give back the memory that the file's bytes take in this process; tensors that are used are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on every system; there the system decides
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)


def open_checkpoint(folder: Path | str, config: Config) -> Checkpoint:
    """Map a folder's weights and hold them against the config.

    Raises ModelError for a missing file, for one that the safetensors library refuses, an index that does not agree
    with its shards, a tensor that is missing, surplus or of another shape or dtype, quantised weights whose tensors do
    not fit together, and a shard that is a link out of the folder. `lm_head.weight` may be absent, or present and
    ignored, where the embedding is tied.
    """
    folder = Path(folder)
    maps: dict[Path, mmap.mmap] = {}
    # Anything under the index's name is meant to be one, also a pipe or a link to nowhere.
    source = folder / (INDEX if os.path.lexists(folder / INDEX) else SINGLE)
    if source.name == INDEX:
        tensors = _shards(source, maps)
    else:
        tensors, maps[source] = _tensors_of(source)
    network = compose(config)
    shapes = network.layer_tensor_shapes()
    prefix = network.bare_prefix
    if prefix and not any(name.startswith(prefix) for name in tensors):
        heads = {name for name in shapes if not name.startswith(prefix)} | set(network.unread)
        tensors = {name if name in heads else prefix + name: tensor for name, tensor in tensors.items()}
    _divide_stacks(source, tensors, network.stacks)
    weights = _quantised_weights(source, tensors, network, config)
    for name, shape in shapes.items():
        weight = weights.get(name, tensors.get(name))
        if weight is None:
            raise _error(f"{source}: tensor {_in_file(name)} is missing")
        if weight.shape != shape:
            raise _error(f"{source}: {name} has shape {weight.shape}; config.json asks for {shape}")
        for quantised, dtype in _QUANTISED.items():
            if weight.dtype == dtype:
                raise _error(f"{source}: {name} has dtype {quantised!r}; known are {', '.join(_DTYPES)}")
        weights[name] = weight
    for name in tensors:
        if name not in shapes and not network.leaves_out(name) and not name.endswith(_IGNORED_SUFFIX):
            raise _error(f"{source}: {_in_file(name)} is not a tensor of {config.architecture}")
    return Checkpoint({name: weights[name] for name in shapes}, maps)


def _quantised_weights(
    source: Path, tensors: dict[str, np.ndarray], network: Network, config: Config
) -> dict[str, Weight]:
    """Take the tensors of the quantised weights out of `tensors` and return the weights by their names."""
    if config.weight_format is None:
        return {}
    shapes = network.layer_tensor_shapes()
    plain = (tensors[name].dtype for name in shapes if name in tensors and name not in network.exact)
    dtype = next((dtype for dtype in plain if dtype in _DTYPES.values()), np.dtype(ml_dtypes.bfloat16))
    weights: dict[str, Weight] = {}
    for name, shape in shapes.items():
        try:
            weight = config.weight_format.from_checkpoint(name, tensors, shape, dtype)
        except ModelError as error:
            raise _error(f"{source}: {_in_file(error.message)}") from None
        if weight is not None:
            weights[name] = weight.astype(np.float32) if name in network.exact else weight
    return weights


def _divide_stacks(source: Path, tensors: dict[str, np.ndarray], stacks: Mapping[str, Sequence[str]]) -> None:
    """Replace every stack by its parts: a tensor [parts, ...] of its name, and those of a format, named behind it."""
    stack_tensors: dict[str, list[str]] = {stack: [] for stack in stacks}
    for name in tensors:
        ends = (len(name), *(match.start() for match in re.finditer("_", name)))
        stack = next((name[:end] for end in ends if name[:end] in stacks), None)
        if stack is not None:
            stack_tensors[stack].append(name)
    for stack, names in stack_tensors.items():
        if not names:
            raise _error(f"{source}: tensor {stack} is missing")
        parts = stacks[stack]
        for name in names:
            tensor = tensors.pop(name)
            if tensor.shape[:1] != (len(parts),):
                raise _error(
                    f"{source}: {name} has shape {tensor.shape}; config.json asks for {len(parts)} experts"
                )
            suffix = name.removeprefix(stack)
            tensors |= {part + suffix: tensor[index] for index, part in enumerate(parts)}


def _shards(index: Path, maps: dict[Path, mmap.mmap]) -> dict[str, np.ndarray]:
    folder = index.parent
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise _error(f"{index}: weight_map is not an object from tensor names to file names")
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(where.values())):
        if file != Path(file).name:
            raise _error(f"{index}: weight_map names {file!r}, which is not a file of the same folder")
        if not os.path.lexists(folder / file):
            raise _error(f"{index}: weight_map names {file}, which is missing")
        check_inside(folder / file)
        inside, maps[folder / file] = _tensors_of(folder / file)
        for name, tensor in inside.items():
            if where.get(name) != file:
                raise _error(
                    f"{folder / file}: holds {name}; the index assigns it to {where.get(name, 'no file')}"
                )
            tensors[name] = tensor
    for name, file in where.items():
        if name not in tensors:
            raise _error(f"{folder / file}: tensor {name} is missing; {INDEX} assigns it to this file")
    return tensors


def _tensors_of(path: Path) -> tuple[dict[str, np.ndarray], mmap.mmap]:
    """Every tensor of a .safetensors file, and the map that they lie in.

    The library holds the header against its rules, which leave no byte between tensors; its shapes give their places.
    """
    try:
        with opened(path) as file:  # the library would wait for the writer of a pipe
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MOST_HEADER_BYTES:
                what = f"its header takes {length:,} bytes; at most {_MOST_HEADER_BYTES:,}"
                raise _error(f"{path} is not a safetensors file: {what}")
            with safetensors.safe_open(path, framework="np") as header:
                slices = [(name, header.get_slice(name)) for name in header.offset_keys()]
                described = [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in slices]
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise _error(f"{path} is missing, and so is {INDEX}") from None
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise _error(f"{path} is not a safetensors file: {why}") from None
    content = np.frombuffer(mapped, np.uint8)
    end = _LENGTH_BYTES + length
    tensors: dict[str, np.ndarray] = {}
    for name, dtype_name, shape in described:
        if dtype_name not in (*_DTYPES, *_QUANTISED):
            raise _error(f"{path}: {name} has dtype {dtype_name!r}; known are {', '.join(_DTYPES)}")
        dtype = (_DTYPES | _QUANTISED)[dtype_name]
        begin, end = end, end + prod(shape) * dtype.itemsize
        try:
            tensors[name] = content[begin:end].view(dtype).reshape(shape)
        except ValueError:
            raise _error(f"{path}: {name} has shape {shape}; NumPy has no arrays of so many axes") from None
    return tensors, mapped


def _in_file(text: str) -> str:
    """Return a text in which parts of stacks have the names of their stacks, as the files have them."""
    return re.sub(r"\[\d+\]", "", text)


def _error(message: str) -> ModelError:
    return ModelError(message, "NKW-MODEL-WEIGHTS")
