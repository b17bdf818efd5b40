"""The error of this package for input that cannot be used, and checks that raise it."""

from __future__ import annotations

from pathlib import Path

from nkw.errors import NkwError, shown
from nkw.files import MOST_TEXT_BYTES, read_text
from nkw.process import memory_bytes


class ModelError(NkwError):
    """File, field or option that cannot be used. The message has a single line, with the value.

    `code` names the input: NKW-MODEL-CONFIG, -WEIGHTS, -TOKENIZER, -CHAT, -FOLDER, -MEMORY, or -OPTION.
    """

    def __init__(self, message: str, code: str = "NKW-MODEL-OPTION") -> None:
        super().__init__(code, shown(" ".join(message.split())))

    def __str__(self) -> str:
        return self.message


class ContextFull(ModelError):
    """Prompt that leaves no room for a new token in the longest sequence."""


def check_memory(needed_bytes: int, subject: str) -> None:
    """Raise ModelError with code NKW-MODEL-MEMORY if `needed_bytes` exceed the total memory of this machine.

    `subject` begins the message, as in "<subject> takes 9.0 GB".
    """
    if needed_bytes > memory_bytes():
        raise ModelError(
            f"{subject} takes {needed_bytes / 1e9:,.1f} GB; this machine has {memory_bytes() / 1e9:,.1f} GB",
            "NKW-MODEL-MEMORY",
        )


def read_text_file(path: Path | str, code: str, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the text of a regular UTF-8 file; errors have the code `code`.

    Raises:
        ModelError: the file is missing, cannot be read, is longer than `most_bytes`, or is not UTF-8.
    """
    try:
        return read_text(path, most_bytes)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing", code) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", code) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text: {error}", code) from None
