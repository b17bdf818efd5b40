"""Faults: which exceptions are errors of one request, and which end the engine."""

from __future__ import annotations

from nkw.errors import NkwError

_OF_NO_REQUEST = (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


class EngineFailed(NkwError):
    """The engine computes no more steps, because its device, its draft model or memory failed; see `__cause__`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            "NKW-ENGINE-FAILED",
            f"the engine has failed and computes nothing more: {describe_fault(cause)}; start a new one",
        )
        self.__cause__ = cause


def contain(error: BaseException) -> BaseException:
    """Return an exception that the host work of one request raised, so that it ends this request only.

    A panic of a library is no Exception and counts as well. Raises the exception again where no request is to blame:
    memory is short, or the process is to end.
    """
    if isinstance(error, _OF_NO_REQUEST):
        raise error
    return error


def describe_fault(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
