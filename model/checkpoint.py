"""The weights of a model folder: model.safetensors, or the shards that model.safetensors.index.json lists.

The `safetensors` library reads and checks the headers. The tensors are mapped into memory here, because its numpy side
copies every one, and knows bfloat16 only in newer versions and only where ml_dtypes has been imported. A tensor's bytes
are read when it is used, and can be let go of afterwards. Quantised ones are widened each time they are used.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np
import safetensors

from model import fp8, mxfp4
from model.config import ModelConfig, read_json
from model.decoder import Decoder
from model.errors import ModelError
from model.families import compose
from model.folder import check_inside
from simulate.files import opened

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
_QUANTISED: dict[str, np.dtype] = {"U8": np.dtype(np.uint8), "F8_E4M3": fp8.ELEMENT}
"""The dtypes of what quantised weights are made of: bytes in MXFP4, and elements of eight bits."""
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies as a buffer; they follow from the config and are left unread."""


class Checkpoint(Mapping[str, np.ndarray]):
    """Every tensor of the layers by name, as a read-only array on the mapped file, or as what is widened from there."""

    def __init__(
        self, tensors: Mapping[str, Held], maps: Mapping[Path, mmap.mmap] = MappingProxyType({})
    ) -> None:
        self._tensors = tensors
        self._maps = maps

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return list(self._maps)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name].array()

    def sliced(self, name: str) -> np.ndarray | fp8.Scaled:
        """A tensor; one of eight bits before it is widened, so that a cut reads its own part."""
        held = self._tensors[name]
        return held if isinstance(held, fp8.Scaled) else held.array()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def let_go(self) -> None:
        """Give back the memory that the file's bytes take in this process; tensors that are used are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on every system; there the system decides
            for each in self._maps.values():
                each.madvise(mmap.MADV_DONTNEED)


def open_checkpoint(folder: Path | str, config: ModelConfig) -> Checkpoint:
    """Map a folder's weights and hold them against the config.

    Raises ModelError for a missing file, for one that the safetensors library refuses, an index that does not agree
    with its shards, a tensor that is missing, surplus or of another shape or dtype, scales that do not fit their
    tensor, and a shard that is a link out of the folder. `lm_head.weight` may be absent, or present and ignored, where
    the embedding is tied.
    """
    folder = Path(folder)
    maps: dict[Path, mmap.mmap] = {}
    # Anything under the index's name is meant to be one, also a pipe or a link to nowhere.
    source = folder / (INDEX if os.path.lexists(folder / INDEX) else SINGLE)
    if source.name == INDEX:
        held = _shards(source, maps)
    else:
        held, maps[source] = _tensors_of(source)
    decoder = compose(config)
    shapes = decoder.layer_tensor_shapes()
    prefix = decoder.bare_prefix
    if prefix and not any(name.startswith(prefix) for name in held):
        heads = {name for name in shapes if not name.startswith(prefix)} | set(decoder.unread)
        held = {name if name in heads else prefix + name: tensor for name, tensor in held.items()}
    for name, parts in decoder.stacks.items():
        held |= _parts(source, name, parts, held)
    _scale(source, held, decoder, config)
    for name, shape in shapes.items():
        if name not in held:
            raise _error(f"{source}: tensor {name} is missing")
        if held[name].shape != shape:
            raise _error(f"{source}: {name} has shape {held[name].shape}; config.json asks for {shape}")
        for quantised, dtype in _QUANTISED.items():
            if held[name].dtype == dtype:
                raise _error(f"{source}: {name} has dtype {quantised!r}; known are {', '.join(_DTYPES)}")
    dtypes = {held[name].dtype for name in shapes.keys() - decoder.exact}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise _error(
            f"{source}: the tensors have several dtypes ({names}); kernels take weights of one dtype"
        )
    for name in held:
        if name not in shapes and not decoder.leaves_out(name) and not name.endswith(_IGNORED_SUFFIX):
            raise _error(f"{source}: {name} is not a tensor of {config.architecture}")
    return Checkpoint({name: held[name] for name in shapes}, maps)


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file, before anyone asks for it: its bytes are those of a mapped file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    content: np.ndarray

    def array(self) -> np.ndarray:
        """The tensor."""
        return self.content.view(self.dtype).reshape(self.shape)


Held = _Stored | mxfp4.Packed | fp8.Scaled
"""A tensor of a checkpoint before anyone asks for it."""


def _scale(source: Path, held: dict[str, Held], decoder: Decoder, config: ModelConfig) -> None:
    """Put tensors of eight bits with their scales in the place of both. They are widened to the dtype of the others."""
    block = None if config.quantisation is None else config.quantisation.block
    if block is None:
        return
    shapes = decoder.layer_tensor_shapes()
    there = {name: held[name] for name in shapes if name in held}
    dtypes = (each.dtype for name, each in there.items() if name not in decoder.exact)
    widened = next((each for each in dtypes if each != fp8.ELEMENT), np.dtype(ml_dtypes.bfloat16))
    for name, each in there.items():
        # Other shapes and dtypes are refused later, as those of a tensor without scales are.
        if (
            isinstance(each, _Stored)
            and each.dtype == fp8.ELEMENT
            and each.shape == shapes[name]
            and len(each.shape) == 2
        ):
            held[name] = _scaled(source, name, each, held, block, widened)


def _scaled(
    source: Path, name: str, elements: _Stored, held: dict[str, Held], block: fp8.Block, widened: np.dtype
) -> fp8.Scaled:
    """A tensor of eight bits with its scales, which it takes out of `held`; those of activations are dropped."""
    for suffix in fp8.OF_ACTIVATIONS:
        held.pop(name.rpartition(".")[0] + suffix, None)
    found = [name + suffix for suffix in fp8.SCALES if name + suffix in held]
    if not found:
        raise _error(
            f"{source}: {name} has eight bits and no scales; tensor {name}{fp8.SCALES[0]} is missing"
        )
    scales = held.pop(found[0])
    wanted = block.scales(elements.shape)
    if scales.shape != wanted and not (1 in wanted and prod(scales.shape) == prod(wanted)):
        sizes = " by ".join(map(str, block.sizes(elements.shape)))
        asked = f"blocks of {sizes} in {elements.shape} have {wanted}"
        raise _error(f"{source}: {found[0]} has shape {scales.shape}; {asked}")
    if not isinstance(scales, _Stored) or scales.dtype not in _DTYPES.values():
        raise _error(f"{source}: {found[0]} has dtype {scales.dtype}; known are {', '.join(_DTYPES)}")
    return fp8.Scaled(elements.array(), scales.array().reshape(wanted), block.sizes(elements.shape), widened)


def _parts(source: Path, name: str, parts: Sequence[str], held: dict[str, Held]) -> dict[str, Held]:
    """The parts of a stack in place of the stack, which `held` holds as one tensor, or as two in MXFP4."""
    stack = held.pop(name, None)
    if isinstance(stack, _Stored):
        if stack.shape[:1] != (len(parts),):
            asked = f"config.json asks for {len(parts)} experts"
            raise _error(f"{source}: {name} has shape {stack.shape}; {asked}")
        pieces = stack.content.reshape(len(parts), -1)
        return {part: _Stored(stack.shape[1:], stack.dtype, piece) for part, piece in zip(parts, pieces)}
    blocks, scales = (held.pop(name + suffix, None) for suffix in (mxfp4.BLOCKS, mxfp4.SCALES))
    if not isinstance(blocks, _Stored) or not isinstance(scales, _Stored):
        raise _error(f"{source}: tensor {name} is missing")
    if not mxfp4.fit(blocks.shape, scales.shape) or scales.shape[0] != len(parts):
        shapes = f"blocks {blocks.shape} and scales {scales.shape}"
        raise _error(f"{source}: {name} has {shapes} for {len(parts)} experts")
    if not blocks.dtype == scales.dtype == np.uint8:
        dtypes = f"{blocks.dtype} and {scales.dtype}"
        raise _error(f"{source}: {name} has blocks and scales of {dtypes}, not of bytes")
    return {part: mxfp4.Packed(*each) for part, *each in zip(parts, blocks.array(), scales.array())}


def _shards(index: Path, maps: dict[Path, mmap.mmap]) -> dict[str, Held]:
    folder = index.parent
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise _error(f"{index}: weight_map is not an object from tensor names to file names")
    held: dict[str, Held] = {}
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
            held[name] = tensor
    for name, file in where.items():
        if name not in held:
            raise _error(f"{folder / file}: tensor {name} is missing; {INDEX} assigns it to this file")
    return held


def _tensors_of(path: Path) -> tuple[dict[str, Held], mmap.mmap]:
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
    held: dict[str, Held] = {}
    for name, dtype, shape in described:
        if dtype not in (*_DTYPES, *_QUANTISED):
            raise _error(f"{path}: {name} has dtype {dtype!r}; known are {', '.join(_DTYPES)}")
        held_in = (_DTYPES | _QUANTISED)[dtype]
        begin, end = end, end + prod(shape) * held_in.itemsize
        held[name] = _Stored(shape, held_in, content[begin:end])
    return held, mapped


def _error(message: str) -> ModelError:
    return ModelError(message, "NKW-MODEL-WEIGHTS")
