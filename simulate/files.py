"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from simulate.errors import InvalidArgument


@contextmanager
def complete(path: str | os.PathLike[str], what: str, code: str) -> Iterator[TextIO]:
    """A UTF-8 text file that replaces `path` when the block ends without an error.

    A symbolic link stays, and its target is replaced. Raises InvalidArgument under `code` where the file cannot be
    written; the message calls the file `what`.
    """
    target = _regular(path, what, code)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(partial, target)
    except OSError as error:
        raise InvalidArgument(
            code, f"the {what} cannot be written to {path}: {error.strerror or error}"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def claim(path: str | os.PathLike[str], what: str, code: str) -> Path:
    """Check that a file can be written, before the work that fills it begins; returns its absolute path.

    Raises InvalidArgument as `complete` does.
    """
    target = _regular(path, what, code)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        partial.open("w").close()
        partial.unlink()
    except OSError as error:
        raise InvalidArgument(
            code, f"the {what} cannot be written to {path}: {error.strerror or error}"
        ) from None
    return target


def _regular(path: str | os.PathLike[str], what: str, code: str) -> Path:
    """The path of a regular file that exists or may be made; a rename onto anything else would replace a device."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InvalidArgument(code, f"the {what} cannot be written to {path}: it is a folder")
    if os.path.lexists(target) and not target.is_file():
        raise InvalidArgument(code, f"the {what} cannot be written to {path}: it is not a regular file")
    return target
