"""Writing a bundle: all of its folder or nothing."""

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
from simulate.bundle.reading import bits_of, refused
from simulate.bundle.readme import readme

MOST_BYTES = 10_000_000
"""The largest bundle of one kernel; one of several may have as much for each."""


def contents(
    bundle: Bundle, sources: Mapping[str, str], arrays: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
    """The files of a bundle but its manifest, by their names."""
    files = {f"sources/{name}": text.encode() for name, text in sources.items()}
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.save(buffer, array.view(bits_of(array.dtype)), allow_pickle=False)
        files[name] = buffer.getvalue()
    files["run.py"] = Path(run.__file__).read_bytes()
    further = [run_weights] if bundle.weights is not None else []
    for module in [*further, run_chain, run_model] if bundle.generated is not None else further:
        path = Path(str(module.__file__))
        files[path.name] = path.read_bytes()
    files["README.md"] = readme(bundle).encode()
    return files


def check_free(folder: Path) -> None:
    """Raise InvalidArgument where a bundle cannot be written: the folder has to be absent or empty."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise refused(f"{folder} is there already; a bundle is written into a new folder")
    except OSError as error:
        raise refused(f"{folder} cannot be written: {error.strerror or error}") from None


def write(folder: Path, bundle: Bundle, files: Mapping[str, bytes]) -> Bundle:
    """Write the folder of a bundle; returns the bundle with its digest.

    Raises InvalidArgument where the folder holds something, cannot be written, or would be larger than 10 MB a kernel.
    """
    check_free(folder)
    size, most = sum(map(len, files.values())), MOST_BYTES * max(1, len(bundle.cases))
    if size > most:
        raise refused(f"the bundle would have {size:,} bytes, and it may have {most:,}; give smaller shapes")
    folder = folder.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            done = _fill(partial, bundle, files)
            partial.chmod(0o755)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise refused(f"{folder} cannot be written: {error.strerror or error}") from None
    return done


def _fill(folder: Path, bundle: Bundle, files: Mapping[str, bytes]) -> Bundle:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    bundle = replace(bundle, digest="")
    # As it will be read: JSON has lists in the place of tuples.
    values = json.loads(json.dumps(bundle.as_json(), allow_nan=False))
    bundle = replace(bundle, digest=run.digest_of(folder, values))
    text = json.dumps({**values, "digest": bundle.digest}, indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return bundle


def names_of(kernels: Sequence[str]) -> list[str]:
    """Names of cases: the kernels', with a number where one occurs again."""
    return [
        name if kernels.count(name) == 1 else f"{name}-{kernels[: place + 1].count(name)}"
        for place, name in enumerate(kernels)
    ]
