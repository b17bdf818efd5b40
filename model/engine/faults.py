"""Faults: which exceptions end only one request, and which end the engine."""

from __future__ import annotations

from nkw.errors import NkwError

_OF_NO_REQUEST = (MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit)


class EngineFailed(NkwError):
    """Error raised by an engine that computes no more steps.

    `__cause__` is the exception that made it fail: a fault of the device, the model or the memory.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(
            "NKW-ENGINE-FAILED",
            f"the engine has failed and computes nothing more: {describe_fault(cause)}; start a new one",
        )
        self.__cause__ = cause


def contain(error: BaseException) -> BaseException:
    """Return an exception if it should end only the request whose host work raised it; raise it otherwise.

    A panic of a library, which is a BaseException but no Exception, ends only its request as well.

    Raises:
        BaseException: The exception itself, if memory is short or the process ends.
    """
    if isinstance(error, _OF_NO_REQUEST):
        raise error
    return error


def describe_fault(error: BaseException) -> str:
    """Return the type name of an exception and the first line of its message, such as "ValueError: bad value"."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
