"""Faults: the exceptions of one request, and the exceptions that end the engine."""

from __future__ import annotations

from nkw.errors import NkwError

_OF_NO_REQUEST = (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


class EngineFailed(NkwError):
    """The error of an engine that computes no more steps; `__cause__` is the fault of its device, model or memory."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            "NKW-ENGINE-FAILED",
            f"the engine has failed and computes nothing more: {describe_fault(cause)}; start a new one",
        )
        self.__cause__ = cause


def contain(error: BaseException) -> BaseException:
    """Return an exception of one request's host work, which ends only this request.

    A panic of a library, which is no Exception, is such an exception as well.

    Raises:
        BaseException: No request is at fault, because memory is short or the process ends.
    """
    if isinstance(error, _OF_NO_REQUEST):
        raise error
    return error


def describe_fault(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
