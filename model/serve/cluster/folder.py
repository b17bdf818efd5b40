"""Digest of a model's folder, by which the machines of a cluster compare their copies."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

_READ_BYTES = 2**22


def hash_folder(folder: str | Path) -> str | None:
    """Return a digest of the names, sizes and bytes of all files in a folder, subfolders included.

    Hidden files are skipped, because tools write their own there.

    Returns:
        32 hexadecimal digits, or None if `folder` is not a folder.
    """
    root = Path(folder)
    if not root.is_dir():
        return None
    digest = blake2b(digest_size=16)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root)
        if any(component.startswith(".") for component in name.parts):
            continue
        digest.update(f"{name.as_posix()}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()
