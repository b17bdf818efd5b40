"""Clones of the repositories that hold the measured kernels."""

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
    """A folder with the files of a repository; `commit` as git describes it, "" where git does not know."""

    repo: str
    folder: Path
    commit: str

    def files(self) -> Iterator[Path]:
        """Iterate over the Python files that a launch may read."""
        return (self.folder / _FOLDERS[self.repo]).rglob("*.py")


def recognised(folders: Sequence[str]) -> dict[str, Clone]:
    """Return the clones by repository. Raises InvalidArgument for a folder that is no clone of one with kernels."""
    clones: dict[str, Clone] = {}
    for name in folders:
        folder = Path(name).resolve()
        repo = next((repo for repo, inner in _FOLDERS.items() if (folder / inner).is_dir()), None)
        if repo is None:
            known = " and ".join(f"{repo} ({inner})" for repo, inner in _FOLDERS.items())
            raise InvalidArgument("NKW-FIDELITY-CLONE", f"{name} is no clone with measured kernels: {known}")
        if repo in clones:
            raise InvalidArgument("NKW-FIDELITY-CLONE", f"{name} is a second clone of {repo}: name one")
        clones[repo] = Clone(repo, folder, _commit(folder))
    return clones


def _commit(folder: Path) -> str:
    """Return the commit of a clone, with `-dirty` where its files differ from it, or "" where git tells none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
