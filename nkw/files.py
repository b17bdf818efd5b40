"""Files from outside, and files that commands write: complete or absent, never in the place of one that was read."""

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

from nkw.child import is_child, keep_file
from nkw.errors import InvalidArgument, NoVerdict, one_line
from nkw.targets import HARDWARE_VARIABLE

MOST_TEXT_BYTES = 100_000_000
"""The longest text that is read: the safetensors library's limit of a header, three times Gemma's tokenizer.json."""
MOST_SOURCE_BYTES = 4_000_000
"""The longest Python file that is read; its syntax tree takes some hundred times as much memory."""

_OPEN_FILES = "/proc/self/fd"
"""Where Linux shows the open files of a process, so that one without a name can be given one."""

SCHEMA = 1
"""Of the documents of commands; it grows when a key changes its meaning or goes."""
RUNNING = ("run", "time", "memory", "check", "verify", "tune", "bundle", "calibrate")
"""Commands that execute code of the user; their documents say whether that code ran to its end."""
STDOUT = "-"
"""The name of a document that is written to stdout."""

Named = str | os.PathLike[str]


def opened(path: Named) -> BinaryIO:
    """A regular file, open for reading.

    Raises OSError for anything else: a reader waits for the writer of a pipe, and a device may have no end.
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
    """Return whether a path names a regular file; False also for a name that the system refuses as too long."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


def is_folder(path: Named) -> bool:
    """Return whether a path names a folder; False also for a name that the system refuses as too long."""
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def read_text(path: Named, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The text of a regular UTF-8 file. Raises OSError, also for a longer file, and UnicodeDecodeError."""
    with opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it holds more than {most_bytes:,} bytes", str(path))
    return content.decode()


class Outputs:
    """The files that one command writes.

    `inputs` gives the files that the command reads, as far as it has come. No output takes the place of one of them,
    whatever name it has there (another path, a symbolic or a hard link), nor of another output.
    """

    def __init__(self, inputs: Callable[[], Iterable[Named]]) -> None:
        self._inputs = inputs
        self._claimed: dict[Path, str] = {}

    def claim(self, path: Named | None, label: str, code: str) -> OutputFile | None:
        """Return the output file that messages call `label`, before the work that fills it begins; None without a path.

        Raises InvalidArgument under `code` where it cannot be written.
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
    """A dict that becomes the JSON document of a command when the block ends, unless nothing was put into it.

    It is written after an error in the block too, not after an interrupt. The number of the schema and the command's
    name come first, then the outcome of a command of `RUNNING`, then the overlay that is in use, if any. The outcome is
    "complete" unless the block sets another one. After an error it is "partial" if there are contents. Without contents
    it is "none" if code of the user failed, and nothing is written after an InvalidArgument, a usage error.

    The document is a file of `outputs`, complete or absent. With `-` it is printed on stdout, and whatever else the
    block prints goes to stderr. Without a path it is dropped. Raises InvalidArgument under `code`, which calls it
    `label`, where it cannot be written.
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
    """A UTF-8 text file that is complete or absent: until then it has no name, or another one in the same folder.

    A file without a name, which Linux has, goes with its process, however that ends. A symbolic link stays, and its
    target is replaced. Raises InvalidArgument under `code`, which calls the file `label`, where it cannot be written;
    this is tried at once.
    """

    def __init__(
        self, path: Named, label: str, code: str, inputs: Callable[[], Iterable[Named]] = tuple
    ) -> None:
        self._named = path
        self._label = label
        self._code = code
        self._inputs = inputs
        self.path = Path(os.path.realpath(path))
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        with self._open():
            pass

    def __fspath__(self) -> str:
        return str(self.path)

    @contextmanager
    def writing(self) -> Iterator[TextIO]:
        """The file, which takes its place when the block ends without an error.

        In the child process of a command the text becomes part of the record, and the parent writes the file.
        """
        if is_child():
            text = StringIO()
            yield text
            self._check()
            keep_file(os.fspath(self._named), self._label, self._code, text.getvalue())
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
        """The error that says why this file cannot be written."""
        return InvalidArgument(
            self._code, f"the {self._label} cannot be written to {os.fspath(self._named)}: {why}"
        )

    def _take_place(self, file: TextIO) -> None:
        """Give the file that `_open` opened, complete by now, its own name."""
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
        """The file before it has its own name; what is left of it is gone when the block ends."""
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
        """A new file in the folder, without a name where the system and the file system can do that."""
        if hasattr(os, "O_TMPFILE") and os.path.isdir(_OPEN_FILES):
            with suppress(OSError):
                return os.open(self.path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
        return os.open(self._partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)

    def _check(self) -> None:
        """Refuse what a rename must not replace: a folder, a device, a protected file, a file that is read."""
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
    except (OSError, ValueError):  # a file that is not there cannot be lost
        return False


def complete(path: Named, label: str, code: str) -> AbstractContextManager[TextIO]:
    """A text file that replaces `path` when the block ends without an error; an OutputFile keeps its own rules."""
    return (path if isinstance(path, OutputFile) else OutputFile(path, label, code)).writing()


def imported_files() -> list[str]:
    """The files of the modules that this process has imported."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [file for file in files if isinstance(file, str)]
