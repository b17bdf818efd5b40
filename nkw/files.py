"""Files that commands read and write; output files are complete or absent and never replace input files."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from nkw.child import is_child, record_file
from nkw.errors import InvalidArgument, NoVerdict, one_line
from nkw.targets import HARDWARE_VARIABLE

MOST_TEXT_BYTES = 100_000_000
"""Largest text file that is read: the safetensors library's limit of a header, three times Gemma's tokenizer.json."""
MOST_SOURCE_BYTES = 4_000_000
"""Largest Python file that is read; its syntax tree takes about a hundred times as much memory."""

_OPEN_FILES = "/proc/self/fd"
"""Folder of a process's open files on Linux, through which a file without a name gets a name."""

SCHEMA = 1
"""Version of the commands' JSON documents; it increases when a key changes its meaning or is removed."""
RUNNING = ("run", "time", "memory", "check", "verify", "tune", "bundle", "calibrate")
"""Commands that execute code of the user; their documents have the outcome of that code."""
STDOUT = "-"
"""Path that means stdout."""

Named = str | os.PathLike[str]


def opened(path: Named) -> BinaryIO:
    """Open a regular file for reading bytes, and return the file object.

    Raises:
        OSError: The path cannot be opened, or it is no regular file. Pipes may block, and devices may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a null character", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def is_file(path: Named) -> bool:
    """Return whether a path names a regular file.

    False also for a name that the system refuses as too long.
    """
    try:
        return Path(path).is_file()
    except OSError:
        return False


def is_folder(path: Named) -> bool:
    """Return whether a path names a folder.

    False also for a name that the system refuses as too long.
    """
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def read_text(path: Named, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the text of a regular UTF-8 file.

    Raises:
        OSError: The file cannot be read, or it has more than `most_bytes` bytes.
        UnicodeDecodeError: The file is not UTF-8.
    """
    with opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it holds more than {most_bytes:,} bytes", str(path))
    return content.decode()


class Outputs:
    """Output files of one command, which never replace its input files or each other.

    Args:
        inputs: Returns the files that the command has read so far. An output never replaces one of them, also not under
        another path or through a symbolic or hard link.
    """

    def __init__(self, inputs: Callable[[], Iterable[Named]]) -> None:
        self._inputs = inputs
        self._claimed: dict[Path, str] = {}

    def claim(self, path: Named | None, label: str, code: str) -> OutputFile | None:
        """Check that a file can be written, before the work that fills it, and return it; None if `path` is None.

        Nothing is written yet.

        Args:
            path: Path of the file.
            label: Name of the file in messages.
            code: Error code if the file cannot be written.

        Raises:
            InvalidArgument: The file cannot be written, or another output of the command has the same path.
        """
        if path is None:
            return None
        output = OutputFile(path, label, code, self._inputs)
        claimant = self._claimed.setdefault(output.path, label)
        if claimant != label:
            raise output.refused(f"it is the file of the {claimant}")
        return output


@contextmanager
def json_document(
    path: Named | None, outputs: Outputs, command: str, code: str = "NKW-JSON-PATH", label: str = "document"
) -> Iterator[dict[str, Any]]:
    """Yield a dict that is written as the JSON document of a command when the block ends, unless it is empty.

    The document is also written after an error in the block, but not after an interrupt. It begins with the schema's
    version, the command's name, the outcome for commands in `RUNNING`, and the hardware overlay, if any. The outcome is
    "complete" unless the block sets it. After an error it is "partial" if the dict has contents, otherwise "none".
    After an InvalidArgument or OSError with an empty dict, which are usage errors, nothing is written.

    Args:
        path: Path of the file. With `-` the document goes to stdout, and all other output of the block to stderr. With
            None it is dropped.
        outputs: Output files of the command.
        command: Name of the command.
        code: Error code if the file cannot be written.
        label: Name of the file in messages.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    contents: dict[str, Any] = {}
    to_stdout = path is not None and os.fspath(path) == STDOUT
    output = None if to_stdout else outputs.claim(path, label, code)
    try:
        with redirect_stdout(sys.stderr) if to_stdout else nullcontext():
            yield contents
    except KeyboardInterrupt:
        contents.clear()
        raise
    except BaseException as error:
        if command in RUNNING and (
            contents or isinstance(error, NoVerdict) or not isinstance(error, (InvalidArgument, OSError))
        ):
            contents.setdefault("outcome", "partial" if contents else "none")
            contents.setdefault("reason", one_line(error))
        raise
    finally:
        overlay = os.environ.get(HARDWARE_VARIABLE)
        named = {"hardware": overlay} if overlay else {}
        outcome = {"outcome": "complete"} if command in RUNNING else {}
        document = {"schema": SCHEMA, "command": command, **outcome, **named, **contents}
        if contents and to_stdout:
            print(json.dumps(document, indent=2, allow_nan=False))
        elif contents and output is not None:
            with output.writing() as file:
                json.dump(document, file, indent=2, ensure_ascii=False, allow_nan=False)
                file.write("\n")


class OutputFile(os.PathLike[str]):
    """UTF-8 text file that is complete or absent.

    Until it is complete, the file has no name (on Linux) or a temporary name in the same folder. A file without a name
    disappears if its process is killed. A symbolic link stays, and its target is replaced. The constructor tries to
    open the file.

    Args:
        path: Path of the file.
        label: Name of the file in messages.
        code: Code of the InvalidArgument that is raised if the file cannot be written.
        inputs: Returns files that must not be replaced.
    """

    def __init__(
        self, path: Named, label: str, code: str, inputs: Callable[[], Iterable[Named]] = tuple
    ) -> None:
        self._named = path
        self._label = label
        self._code = code
        self._inputs = inputs
        self.path = Path(os.path.realpath(path))
        self._partial = self.path.parent / f".{self.path.name}.{os.getpid()}.part"  # "/" has no name
        with self._open():
            pass

    def __fspath__(self) -> str:
        return str(self.path)

    @contextmanager
    def writing(self) -> Iterator[TextIO]:
        """Yield the open text file; it replaces the file at the path when the block ends without an error.

        In the child process of a command the text becomes part of the record, and the parent writes the file.

        Raises:
            InvalidArgument: The file cannot be written.
        """
        if is_child():
            text = StringIO()
            yield text
            self._check()
            record_file(os.fspath(self._named), self._label, self._code, text.getvalue())
            return
        with self._open() as file:
            yield file
            try:
                file.flush()
                self._check()
                self._take_place(file)
            except OSError as error:
                raise self.refused(error.strerror or str(error)) from None

    def refused(self, why: str) -> InvalidArgument:
        """Return the error of a file that cannot be written, for the reason `why`; it is not raised."""
        return InvalidArgument(
            self._code, f"the {self._label} cannot be written to {os.fspath(self._named)}: {why}"
        )

    def _take_place(self, file: TextIO) -> None:
        """Give the complete file from `_open` its path, in place of an older file there."""
        if not self._partial.exists():
            descriptor = file.fileno()
            unnamed = f"{_OPEN_FILES}/{descriptor}"
            try:  # `link` follows the link in /proc only where it is given a folder, which an absolute path ignores
                os.link(unnamed, self.path, src_dir_fd=descriptor)
                return
            except FileExistsError:  # only a rename replaces it
                os.link(unnamed, self._partial, src_dir_fd=descriptor)
        file.close()
        os.replace(self._partial, self.path)

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        """Yield a new file that does not have its path yet; a temporary file that still exists is removed afterwards.

        Raises:
            InvalidArgument: The path must not be replaced, or no file can be made in its folder.
        """
        self._check()
        try:
            with suppress(FileNotFoundError):
                self._partial.unlink()  # of a process of this number that was killed
            # A path that is not UTF-8 holds lone surrogates, whose backslash form is an escape of JSON as well.
            with open(
                self._descriptor(), "w", encoding="utf-8", errors="backslashreplace", newline="\n"
            ) as file:
                yield file
        except OSError as error:
            raise self.refused(error.strerror or str(error)) from None
        finally:
            with suppress(OSError):
                self._partial.unlink()

    def _descriptor(self) -> int:
        """Open a new file in the folder of the path, and return its file descriptor.

        The file has no name if the system and the file system support that, and otherwise a temporary name.
        """
        if hasattr(os, "O_TMPFILE") and os.path.isdir(_OPEN_FILES):
            with suppress(OSError):
                return os.open(self.path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
        return os.open(self._partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)

    def _check(self) -> None:
        """Check that the path may be replaced; a path without a file may.

        Raises:
            InvalidArgument: The path is a folder, a device, a protected file, or an input of the command.
        """
        if os.path.isdir(self.path):
            raise self.refused("it is a folder")
        if not os.path.lexists(self.path):
            return
        if not os.path.isfile(self.path):
            raise self.refused("it is not a regular file")
        if not os.access(self.path, os.W_OK):
            raise self.refused(os.strerror(errno.EACCES))
        if any(_is_same(path, self.path) for path in self._inputs()):
            raise self.refused("this command reads that file")


def _is_same(one: Named, other: Named) -> bool:
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # a missing file cannot be overwritten
        return False


def complete(path: Named, label: str, code: str) -> AbstractContextManager[TextIO]:
    """Return a context with a text file that replaces `path` when the block ends without an error.

    Args:
        path: Path of the file, or an OutputFile, whose own label, code and inputs then apply.
        label: Name of the file in messages.
        code: Error code if the file cannot be written.

    Raises:
        InvalidArgument: The file cannot be written.
    """
    return (path if isinstance(path, OutputFile) else OutputFile(path, label, code)).writing()


def list_imported_files() -> list[str]:
    """Return the paths of the source files of all modules that this process has imported so far."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [file for file in files if isinstance(file, str)]
