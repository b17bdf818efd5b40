"""Weights of a model folder: model.safetensors, or the shards that model.safetensors.index.json lists.

Components of a diffusers folder have `diffusion_pytorch_model` in these names instead of `model`.

The `safetensors` library reads and checks the headers. This module maps the tensors into memory, because the library's
NumPy interface copies every tensor and needs a recent version for bfloat16. The bytes of a tensor are read when it is
used, and their memory can be released afterwards. Quantised weights are widened each time they are used.
"""

from __future__ import annotations

import mmap
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import safetensors

from model.config import Config, read_json
from model.config.folder import check_inside, describe_other_weights
from model.errors import ModelError
from model.families import compose
from model.formats import Container, QuantisedWeight, Weight
from model.loading.quantise import PackedTensors, quantise_plain_weights
from model.network import Network
from nkw.files import opened

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COMPONENT = "diffusion_pytorch_model.safetensors"
_NAMES = (INDEX, SINGLE, f"{_COMPONENT}.index.json", _COMPONENT)
"""Names of the file that is opened; the first one in the folder counts."""
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 2**24
"""Most bytes of a header; a thousand tensors take 0.1 MB. The library allows 100 MB, which take 2 GB of memory."""
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED: dict[str, np.dtype] = {
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Further dtypes, which only the stored tensors of quantised weights have."""
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Suffix of the rotary frequencies in old checkpoints, which are not read because they follow from the config."""
_CACHE_SCALE_SUFFIXES = (".k_scale", ".v_scale", ".kv_scale", ".output_scale", ".q_scale", ".prob_scale")
"""Suffixes of the scales of keys and values, and of queries and probabilities, which kernels do not quantise."""


class Checkpoint(Mapping[str, Weight]):
    """Weights of the layers by name: read-only arrays of the mapped files, or weights made of a format's tensors."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        maps: Mapping[Path, mmap.mmap] = MappingProxyType({}),
        cache_scales: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Keep weights by their names in the layers, and the mapped files by path, without copying.

        `cache_scales` are the file's tensors that may be scales of caches, by name.
        """
        self._weights, self._maps, self.cache_scales = weights, maps, cache_scales

    @property
    def files(self) -> list[Path]:
        """Paths of the mapped .safetensors files."""
        return list(self._maps)

    def __getitem__(self, name: str) -> Weight:
        """Return the weight that layers call `name`. Raises KeyError for an unknown name."""
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the weights."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._weights)

    def release(self) -> None:
        """Release the memory of the mapped bytes in this process; a tensor that is used later is read again."""
        for weight in self._weights.values():
            if isinstance(weight, QuantisedWeight) and isinstance(weight.tensors, PackedTensors):
                weight.tensors.release()
        if hasattr(mmap, "MADV_DONTNEED"):  # not on every system; there the system decides
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)


def open_checkpoint(folder: Path | str, config: Config) -> Checkpoint:
    """Map the weights of a folder into memory and check names, shapes and dtypes against a config.

    The checkpoint has the weights under the names that layers use. Tensors that no layer reads are left out, such as
    `lm_head.weight` of a tied embedding, which may be absent.

    Raises:
        ModelError: a file is missing or refused by the safetensors library, an index disagrees with its shards, a shard
            is a link out of the folder, or a tensor is missing, surplus, or has a wrong shape or dtype.
    """
    folder = Path(folder)
    maps: dict[Path, mmap.mmap] = {}
    # Any file with the name of the index is read as an index, also a pipe or a broken link.
    source = folder / next((name for name in _NAMES if os.path.lexists(folder / name)), SINGLE)
    if source.suffix == ".json":
        tensors = _map_shards(source, maps)
    else:
        tensors, maps[source] = _map_tensors(source)
    network = compose(config)
    shapes = network.list_layer_tensor_shapes()
    prefix = network.bare_prefix
    if prefix and not any(name.startswith(prefix) for name in tensors):
        heads = {name for name in shapes if not name.startswith(prefix)} | set(network.unread)
        tensors = {name if name in heads else prefix + name: tensor for name, tensor in tensors.items()}
    _divide_stacks(source, tensors, network.stacks)
    weights = _take_quantised_weights(source, tensors, network, config)
    for name, shape in shapes.items():
        weight = weights.get(name, tensors.get(name))
        if weight is None:
            raise _error(
                f"{source}: tensor {_drop_indices(name)} is missing; a {config.architecture} has it: download the "
                "checkpoint again"
            )
        if weight.shape != shape:
            raise _error(f"{source}: {name} has shape {weight.shape}; config.json asks for {shape}")
        for quantised, dtype in _QUANTISED.items():
            if weight.dtype == dtype:
                raise _error(f"{source}: {name} has dtype {quantised!r}; known are {', '.join(_DTYPES)}")
        weights[name] = weight
    if config.is_quantised_on_load:
        weights = quantise_plain_weights(weights, network, config)
    cache_scales = {
        name: tensors.pop(name)
        for name in [*tensors]
        if name.endswith(_CACHE_SCALE_SUFFIXES) and name not in shapes
    }
    for name, tensor in tensors.items():
        has_no_effect = config.weight_format is not None and name.endswith(".bias") and not tensor.any()
        if has_no_effect:  # writers of GPTQ add biases of zeros to layers without biases
            continue
        if name not in shapes and not network.is_unread(name) and not name.endswith(_IGNORED_SUFFIX):
            raise _error(f"{source}: {_drop_indices(name)} is not a tensor of {config.architecture}")
    return Checkpoint({name: weights[name] for name in shapes}, maps, cache_scales)


def _take_quantised_weights(
    source: Path, tensors: dict[str, np.ndarray], network: Network, config: Config
) -> dict[str, Weight]:
    """Remove the stored tensors of quantised weights from `tensors`, and return these weights by name.

    The result is empty without `quantization_config`. Widened numbers have the dtype of the first plain weight,
    bfloat16 if there is none, or float32 for weights that the network keeps exact.

    Raises:
        ModelError: A stored tensor is missing, or has a wrong shape or dtype, or a weight is quantised or plain against
            config.json.
    """
    if config.weight_format is None:
        return {}
    shapes = network.list_layer_tensor_shapes()
    plain = (tensors[name].dtype for name in shapes if name in tensors and name not in network.exact)
    dtype = next((dtype for dtype in plain if dtype in _DTYPES.values()), np.dtype(ml_dtypes.bfloat16))
    weights: dict[str, Weight] = {}
    for name, shape in shapes.items():
        try:
            weight = config.weight_format.from_checkpoint(name, tensors, shape, dtype)
        except ModelError as error:
            raise _error(f"{source}: {_drop_indices(error.message)}") from None
        if weight is not None:
            weights[name] = weight.astype(np.float32) if name in network.exact else weight
    try:
        config.weight_format.check_weights(weights, [name for name in shapes if name not in weights])
    except ModelError as error:
        raise _error(f"{source}: {_drop_indices(error.message)}") from None
    _warn_of_notes(config.weight_format, weights.values())
    return weights


def _warn_of_notes(container: Container, weights: Iterable[Weight]) -> None:
    """Warn once of each thing that kernels compute otherwise than a container, or a weight's format, describes it."""
    notes = dict.fromkeys(container.notes)
    for weight in weights:
        notes |= dict.fromkeys(weight.format.notes if isinstance(weight, QuantisedWeight) else ())
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=4)


def _divide_stacks(source: Path, tensors: dict[str, np.ndarray], stacks: Mapping[str, Sequence[str]]) -> None:
    """Replace each stacked tensor in `tensors` by one view for each of its members, such as experts.

    Args:
        source: File that messages name.
        tensors: Tensors of the checkpoint by name, changed in place.
        stacks: Names of the members of each stack. A stacked tensor [members, ...] has the name of its stack, or this
            name with a suffix of a format's stored tensor.

    Raises:
        ModelError: A stack is missing, or its first axis does not have the number of members.
    """
    stack_tensors: dict[str, list[str]] = {stack: [] for stack in stacks}
    for name in tensors:
        ends = (len(name), *(match.start() for match in re.finditer("_", name)))
        stack = next((name[:end] for end in ends if name[:end] in stacks), None)
        if stack is not None:
            stack_tensors[stack].append(name)
    for stack, names in stack_tensors.items():
        if not names:
            raise _error(
                f"{source}: tensor {stack} is missing, which config.json asks for: download the checkpoint again"
            )
        members = stacks[stack]
        for name in names:
            tensor = tensors.pop(name)
            if tensor.shape[:1] != (len(members),):
                raise _error(
                    f"{source}: {name} has shape {tensor.shape}; config.json asks for {len(members)} experts"
                )
            suffix = name.removeprefix(stack)
            tensors |= {member + suffix: tensor[index] for index, member in enumerate(members)}


def _map_shards(index: Path, maps: dict[Path, mmap.mmap]) -> dict[str, np.ndarray]:
    """Map the shards that the file `index` lists, add the maps to `maps` by path, and return the tensors by name.

    Raises:
        ModelError: the index is damaged, names a file that is missing or outside the folder, or assigns a tensor to
            another file than the one that has it.
    """
    folder = index.parent
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _error(f"{index}: weight_map is not an object from tensor names to file names")
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(files.values())):
        if file != Path(file).name:
            raise _error(f"{index}: weight_map names {file!r}, which is not a file of the same folder")
        if not os.path.lexists(folder / file):
            raise _error(f"{index}: weight_map names {file}, which is missing")
        check_inside(folder / file)
        shard, maps[folder / file] = _map_tensors(folder / file)
        for name in shard:
            if files.get(name) != file:
                raise _error(
                    f"{folder / file}: holds {name}; the index assigns it to {files.get(name, 'no file')}"
                )
        tensors |= shard
    for name, file in files.items():
        if name not in tensors:
            raise _error(f"{folder / file}: tensor {name} is missing; {index.name} assigns it to this file")
    return tensors


def _map_tensors(path: Path) -> tuple[dict[str, np.ndarray], mmap.mmap]:
    """Map a .safetensors file; return its tensors by name, as read-only views of the map, and the map.

    The library checks the header: the tensors follow each other without a gap, so their shapes determine their offsets.

    Raises:
        ModelError: the file is missing, cannot be read, is not a safetensors file, or has an unknown dtype.
    """
    try:
        with opened(path) as file:  # the library would wait for the writer of a pipe
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MOST_HEADER_BYTES:
                raise _error(
                    f"{path} is not a safetensors file: its header takes {length:,} bytes; at most "
                    f"{_MOST_HEADER_BYTES:,}"
                )
            with safetensors.safe_open(path, framework="np") as header:
                slices = [(name, header.get_slice(name)) for name in header.offset_keys()]
                described = [(name, tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices]
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        description = describe_other_weights(os.listdir(path.parent))
        problem = f"{path.parent} {description}" if description else f"{path} is missing, and so is {INDEX}"
        raise _error(problem) from None
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise _error(f"{path} is not a safetensors file: {reason}") from None
    content = np.frombuffer(mapped, np.uint8)
    end = _LENGTH_BYTES + length
    tensors: dict[str, np.ndarray] = {}
    dtypes = _DTYPES | _QUANTISED
    for name, dtype_name, shape in described:
        if dtype_name not in dtypes:
            raise _error(f"{path}: {name} has dtype {dtype_name!r}; known are {', '.join(_DTYPES)}")
        dtype = dtypes[dtype_name]
        begin, end = end, end + prod(shape) * dtype.itemsize
        try:
            tensors[name] = content[begin:end].view(dtype).reshape(shape)
        except ValueError:
            raise _error(f"{path}: {name} has shape {shape}; NumPy has no arrays of so many axes") from None
    return tensors, mapped


def _drop_indices(text: str) -> str:
    """Return a text without "[3]" and the like, so that members of stacks have their stacks' names in the files."""
    return re.sub(r"\[\d+\]", "", text)


def _error(message: str) -> ModelError:
    """Return, without raising it, an error with the code for weights."""
    return ModelError(message, "NKW-MODEL-WEIGHTS")
