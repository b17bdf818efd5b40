"""Clones of the repositories whose kernels were measured, recognised by a folder that each repository has."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nkw.errors import InvalidArgument

LIBRARY, AUTOTUNE = "aws-neuron/nki-library", "awslabs/nki-autotune"

_FOLDERS = {LIBRARY: "src/nkilib_src/nkilib", AUTOTUNE: "kernel_library"}
"""By repository: the folder by which a clone of it is known, whatever its own folder is called."""


@dataclass(frozen=True)
class Clone:
    """A folder with the files of a repository; `commit` is the output of `git describe`, "" if git does not know it."""

    repo: str
    folder: Path
    commit: str

    def files(self) -> Iterator[Path]:
        """Yield the Python files that a launch may import, those below the repository's folder in `_FOLDERS`."""
        return (self.folder / _FOLDERS[self.repo]).rglob("*.py")


def recognise_clones(folders: Sequence[str]) -> dict[str, Clone]:
    """Return the clones in some folders, by repository.

    Raises:
        InvalidArgument: if a folder is not a clone of a known repository, or two folders are clones of the same one.
    """
    clones: dict[str, Clone] = {}
    for name in folders:
        folder = Path(name).resolve()
        repo = next((repo for repo, inner in _FOLDERS.items() if (folder / inner).is_dir()), None)
        if repo is None:
            known = " or ".join(f"{repo} ({inner})" for repo, inner in _FOLDERS.items())
            raise InvalidArgument(
                "NKW-FIDELITY-CLONE",
                f"{name} is not a clone of a repository with measured kernels: give one of {known}",
            )
        if repo in clones:
            raise InvalidArgument(
                "NKW-FIDELITY-CLONE", f"{name} is a second clone of {repo}: name only one of them"
            )
        clones[repo] = Clone(repo, folder, _commit(folder))
    return clones


def _commit(folder: Path) -> str:
    """Return the abbreviated commit of a clone, with `-dirty` if its files differ from it, or "" if git fails."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
