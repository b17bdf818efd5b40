"""Writing of a bundle's folder: all files or none."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from simulate.bundle import run, run_chain, run_model, run_weights
from simulate.bundle.manifest import MANIFEST, Bundle
from simulate.bundle.reading import get_storage_dtype, make_error
from simulate.bundle.readme import make_readme

MOST_BYTES = 10_000_000
"""Most bytes of a bundle, for each kernel in it."""


def collect_files(
    bundle: Bundle, sources: Mapping[str, str], arrays: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
    """Return the contents of a bundle's files by name, without its manifest.

    These are sources, arrays as .npy, `run.py` with the modules that this bundle needs, and the README.

    Args:
        sources: Texts by path below `sources/`.
        arrays: Arrays by file name.
    """
    files = {f"sources/{name}": text.encode() for name, text in sources.items()}
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array.view(get_storage_dtype(array.dtype)), allow_pickle=False)
        files[name] = buffer.getvalue()
    files["run.py"] = Path(run.__file__).read_bytes()
    modules = [run_weights] if bundle.weights is not None else []
    for module in [*modules, run_chain, run_model] if bundle.generated is not None else modules:
        path = Path(str(module.__file__))
        files[path.name] = path.read_bytes()
    files["README.md"] = make_readme(bundle).encode()
    return files


def check_free(folder: Path) -> None:
    """Raise InvalidArgument unless the folder is absent or an empty folder."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise make_error(f"{folder} exists already; give a new or empty folder")
    except OSError as error:
        raise make_error(f"{folder} cannot be written: {error.strerror or error}") from None


def write_folder(folder: Path, bundle: Bundle, files: Mapping[str, bytes]) -> Bundle:
    """Write the folder of a bundle, whole or not at all, and return the bundle with its digest.

    Args:
        files: Contents by name, as `collect_files` returns them; the manifest is added.

    Raises:
        InvalidArgument: If the folder is not empty or cannot be written, or if the bundle exceeds 10 MB per
            case.
    """
    check_free(folder)
    size, max_bytes = sum(map(len, files.values())), MOST_BYTES * max(1, len(bundle.cases))
    if size > max_bytes:
        raise make_error(
            f"the bundle would have {size:,} bytes, and it may have {max_bytes:,}; give smaller shapes"
        )
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            written = _fill_folder(partial, bundle, files)
            partial.chmod(0o755)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise make_error(f"{folder} cannot be written: {error.strerror or error}") from None
    return written


def _fill_folder(folder: Path, bundle: Bundle, files: Mapping[str, bytes]) -> Bundle:
    """Write the files and the manifest to an existing folder, and return the bundle with its digest."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    bundle = replace(bundle, digest="")
    # Digest of the JSON types: lists instead of tuples.
    json_fields = json.loads(json.dumps(bundle.as_json(), allow_nan=False))
    bundle = replace(bundle, digest=run.compute_digest(folder, json_fields))
    text = json.dumps({**json_fields, "digest": bundle.digest}, indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return bundle


def number_names(kernels: Sequence[str]) -> list[str]:
    """Return a name for each kernel: its own, with `-1`, `-2`, … in order if several kernels have the same name."""
    return [
        name if kernels.count(name) == 1 else f"{name}-{kernels[: index + 1].count(name)}"
        for index, name in enumerate(kernels)
    ]
