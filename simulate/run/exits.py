"""Conversion of exceptions that end a program or an import, such as SystemExit, into errors without a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nkw.errors import NkwError, NoVerdict, one_line
from simulate.run.location import blame_traceback

CODE = "NKW-EXIT"
_PASSED_ON = ("_pytest.", "simulate.")
"""Modules whose exceptions keep their type, such as pytest.skip, pytest.fail, and the abort of a core's thread."""


class UserExit(NoVerdict):
    """Error for an exception that ends a program, such as SystemExit, in a kernel, reference or kernel file."""


@contextmanager
def convert_exits(subject: str) -> Iterator[None]:
    """Raise UserExit if the `with` block raises SystemExit or another exception that ends a program.

    Subclasses of Exception, KeyboardInterrupt, and exceptions of pytest and of the simulator pass unchanged.

    Args:
        subject: The function or file that runs in the block, for the message.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as end:
        typed = convert_exit(subject, end)
        if typed is None:
            raise
        raise typed from None


def convert_exit(subject: str, end: BaseException) -> UserExit | None:
    """Return a UserExit, with kernel line and traceback, for an exception that ends a program.

    Returns None for exceptions of pytest and of the simulator, which keep their types.

    Args:
        subject: The function or file that raised it, for the message.
        end: The exception.
    """
    if any(base.__module__.startswith(_PASSED_ON) for base in type(end).__mro__):
        return None
    if isinstance(end, SystemExit):
        action = f"called sys.exit({end.code!r:.80})"
    else:
        action = f"raised {type(end).__name__}, which ends a program,"
    error = UserExit(CODE, f"{subject} {action} before it returned: return from it, or raise an Exception")
    error.__traceback__ = end.__traceback__
    blame_traceback(error)
    return error


class FailedImport(NoVerdict):
    """Error for an exception that a file with kernels raised while it was imported."""


@contextmanager
def convert_import_errors(module: str) -> Iterator[None]:
    """Raise UserExit or FailedImport if the `with` block, an import, ends the program or fails; an NkwError passes.

    Args:
        module: The file or module, for the message.
    """
    try:
        with convert_exits(module):
            yield
    except NkwError:
        raise
    except Exception as error:
        failure = FailedImport(
            "NKW-KERNEL-IMPORT", f"{module} failed while it was imported: {one_line(error)}"
        )
        failure.__traceback__ = error.__traceback__
        blame_traceback(failure)
        raise failure from error
