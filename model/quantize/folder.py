"""Folder of a quantised model, written aside and renamed at the end, so that it is whole or absent.

The files of weights have the names of the original ones. Their headers are written first, and each tensor when it is
ready, so that no more than one tensor is in memory.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.config.folder import check_inside
from model.errors import ModelError
from model.loading.checkpoint import INDEX
from model.quantize.containers import Described

_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
"""Names of dtypes in safetensors files."""
_ALIGNMENT = 8
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf")
_CODE = "NKW-MODEL-FOLDER"


def check_output(out: Path, folder: Path) -> None:
    """Check that a folder can be written; nothing is written yet.

    Raises:
        ModelError: `out` exists, or is inside the model's folder, or its parent is no folder that can be written.
    """
    if os.path.lexists(out):
        raise ModelError(f"--out {out} exists; give the name of a folder that does not exist", _CODE)
    parent = out.absolute().parent
    if parent.resolve().is_relative_to(folder.resolve()):
        raise ModelError(f"--out {out} is inside the model's folder {folder}; give a folder elsewhere", _CODE)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ModelError(f"--out {out} cannot be made: {parent} is no folder that can be written", _CODE)


class WeightFile:
    """safetensors file that is filled in any order.

    Args:
        path: The file, which must not exist.
        described: Shape and dtype of each tensor by name.
    """

    def __init__(self, path: Path, described: Described) -> None:
        order = sorted(described, key=lambda name: -described[name][1].itemsize)  # keeps all tensors aligned
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        self._missing = set(order)
        self._described, self._offsets = described, dict[str, int]()
        for name in order:
            shape, dtype = described[name]
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self._offsets[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._start = _ALIGNMENT + len(text)
        self._file = open(path, "xb")  # noqa: SIM115 - `close` closes it
        self._file.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a tensor, which must have the described shape; its numbers are cast to the described dtype."""
        shape, dtype = self._described[name]
        assert array.shape == shape, f"{name} has shape {array.shape}, not {shape}"
        self._file.seek(self._start + self._offsets[name])
        self._file.write(np.ascontiguousarray(array.astype(dtype, copy=False)).tobytes())
        self._missing.discard(name)

    @property
    def missing(self) -> frozenset[str]:
        """Names of the tensors that have not been written."""
        return frozenset(self._missing)

    def close(self, complete: bool) -> None:
        """Close the file, after its bytes have reached the disk if `complete`."""
        if complete:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()


class QuantisedFolder:
    """Folder that is being written; `writing` creates and completes it.

    Args:
        path: The folder, which exists and is empty.
        files: Described tensors of each file of weights, by the file's name.
    """

    def __init__(self, path: Path, files: Mapping[str, Described]) -> None:
        self._path, self._described = path, files
        self._files = {name: WeightFile(path / name, described) for name, described in files.items()}
        self._file_of = {name: file for file, described in files.items() for name in described}

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a tensor into the file that has it."""
        self._files[self._file_of[name]].write(name, array)

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that have not been written, in order."""
        return sorted(name for file in self._files.values() for name in file.missing)

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        (self._path / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def write_index(self) -> None:
        """Write the index of the tensors' files."""
        total = sum(
            prod(shape) * dtype.itemsize
            for described in self._described.values()
            for shape, dtype in described.values()
        )
        self.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": self._file_of})

    def close(self, complete: bool) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close(complete)


@contextmanager
def writing(out: Path, source: Path, files: Mapping[str, Described]) -> Iterator[QuantisedFolder]:
    """Yield a folder aside that becomes `out` when the block ends without an error, and is removed otherwise.

    The files of `source` that are no weights and no config.json are copied: tokenizer, generation config, licence.

    Args:
        out: The folder to write; it must not exist.
        source: Folder of the original model.
        files: Described tensors of each file of weights, by the file's name.

    Raises:
        ModelError: The disk has too little room, or the folder cannot be written.
    """
    needed = sum(
        prod(shape) * dtype.itemsize for described in files.values() for shape, dtype in described.values()
    )
    parent = out.absolute().parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ModelError(
            f"--out {out} takes {needed / 1e9:,.2f} GB, and {parent} has {free / 1e9:,.2f} GB left; give a folder on "
            "a disk with more room",
            _CODE,
        )
    aside = parent / f".{out.name}.{os.getpid()}.part"
    folder = None
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a process of this number that was killed
        aside.mkdir()
        folder = QuantisedFolder(aside, files)
        _copy_files(source, aside)
        yield folder
        assert not folder.missing, f"nothing was written for {folder.missing[:3]}"
        folder.close(complete=True)
        os.rename(aside, out)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise ModelError(f"--out {out} cannot be written: {reason}; nothing was left there", _CODE) from None
    finally:
        if folder is not None:
            folder.close(complete=False)
        shutil.rmtree(aside, ignore_errors=True)


def _copy_files(source: Path, target: Path) -> None:
    """Copy the regular files of a model's folder that are no weights and no config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_FILES):
            check_inside(path)
            shutil.copyfile(path, target / path.name)


def read_stored_tensors(files: Sequence[Path]) -> dict[str, dict[str, np.ndarray]]:
    """Return the tensors of safetensors files as read-only views of the mapped files, by file name and tensor name.

    The headers must have been checked before, by `open_checkpoint`.
    """
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    tensors_by_file: dict[str, dict[str, np.ndarray]] = {}
    for path in files:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(mapped[:_ALIGNMENT], "little")
        header = json.loads(mapped[_ALIGNMENT : _ALIGNMENT + length])
        header.pop("__metadata__", None)
        content = np.frombuffer(mapped, np.uint8, offset=_ALIGNMENT + length)
        tensors_by_file[path.name] = {
            name: content[slice(*entry["data_offsets"])].view(dtypes[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items()
        }
    return tensors_by_file
