"""The one error of this package: input from outside that cannot be used."""

from __future__ import annotations


class ModelError(Exception):
    """A file, a field or an option that cannot be used; the message is one line and says which value was seen."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
