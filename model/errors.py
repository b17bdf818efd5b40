"""The one error of this package: input from outside that cannot be used."""

from __future__ import annotations

from nkw.errors import NkwError, shown
from nkw.process import memory_bytes


class ModelError(NkwError):
    """A file, a field or an option that cannot be used; the message is one line and says which value was seen.

    `code` says what cannot be used: NKW-MODEL-CONFIG, -WEIGHTS, -TOKENIZER, -MEMORY, or an option, NKW-MODEL-OPTION.
    """

    def __init__(self, message: str, code: str = "NKW-MODEL-OPTION") -> None:
        super().__init__(code, shown(" ".join(message.split())))

    def __str__(self) -> str:
        return self.message


def check_memory(needed_bytes: int, what: str) -> None:
    """Raise ModelError where `what` takes more memory than this machine has, before any of it is allocated."""
    if needed_bytes > memory_bytes():
        raise ModelError(
            f"{what} takes {needed_bytes / 1e9:,.1f} GB; this machine has {memory_bytes() / 1e9:,.1f} GB",
            "NKW-MODEL-MEMORY",
        )
