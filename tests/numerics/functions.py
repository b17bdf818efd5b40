"""A stand-in for the functions of nki.language."""

from __future__ import annotations


class NlFunction:
    """What a kernel passes as an operator: a callable with the operator's name."""

    def __init__(self, name: str) -> None:
        self.nki_operator = name

    def __call__(self) -> None: ...
