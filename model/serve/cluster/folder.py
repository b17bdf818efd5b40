"""A model's folder, compared between machines."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

_PIECE_BYTES = 2**22


def folder_digest(folder: str | Path) -> str | None:
    """Return a digest of the names and bytes of all files of a folder; None where there is no such folder.

    Hidden files count for nothing: tools leave marks of their own there.
    """
    root = Path(folder)
    if not root.is_dir():
        return None
    digest = blake2b(digest_size=16)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = path.relative_to(root)
        if any(part.startswith(".") for part in name.parts):
            continue
        digest.update(f"{name.as_posix()}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()
