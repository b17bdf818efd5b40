"""Files a command writes: claimed before the work begins, complete or absent when it ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from model.errors import ModelError


class OutputFile:
    """A file under a temporary name in its own folder, which takes its place with `commit`.

    Creating one finds out at once whether the folder can be written to. Leaving a `with` block without `commit`
    removes the temporary file and leaves what was there before.
    """

    def __init__(self, path: Path | str) -> None:
        named = Path(path)
        self.path = Path(os.path.realpath(named))  # through a link, the file it stands for is replaced
        there = os.path.lexists(self.path)
        if there and not os.path.isfile(self.path):
            raise ModelError(f"{named} cannot be written: it is not a regular file")
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            if there and not os.access(self.path, os.W_OK):
                raise PermissionError(13, "Permission denied")
            self.temporary.open("xb").close()
        except OSError as error:
            raise ModelError(f"{named} cannot be written: {error.strerror}") from None

    def commit(self) -> None:
        """Give the file its name."""
        os.replace(self.temporary, self.path)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.temporary.unlink()
