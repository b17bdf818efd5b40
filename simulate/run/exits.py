"""Exceptions that end a program or the import of a file, such as SystemExit, as typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nkw.errors import NkwError, NoVerdict, one_line
from simulate.run.location import blame_traceback

CODE = "NKW-EXIT"
_PASSED_ON = ("_pytest.", "simulate.")
"""Modules whose exceptions keep their type: pytest.skip and pytest.fail, and the abort of a core's thread."""


class UserExit(NoVerdict):
    """An exception that ends a program (SystemExit, GeneratorExit) in a kernel, a reference or a file with kernels."""


@contextmanager
def typed_exits(what: str) -> Iterator[None]:
    """Raise UserExit where code in the block raises an exception that is neither an Exception nor an interrupt."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as end:
        typed = typed_exit(what, end)
        if typed is None:
            raise
        raise typed from None


def typed_exit(what: str, end: BaseException) -> UserExit | None:
    """Return the typed error for an exception that ends a program; None for one that is passed on."""
    if any(base.__module__.startswith(_PASSED_ON) for base in type(end).__mro__):
        return None
    if isinstance(end, SystemExit):
        said = f"called sys.exit({end.code!r:.80})"
    else:
        said = f"raised {type(end).__name__}, which ends a program,"
    made = UserExit(CODE, f"{what} {said} before it returned: return from it, or raise an Exception")
    made.__traceback__ = end.__traceback__
    blame_traceback(made)
    return made


class FailedImport(NoVerdict):
    """An exception that a file with kernels raised while it was imported."""


@contextmanager
def typed_import(place: str) -> Iterator[None]:
    """Raise UserExit or FailedImport where the file or module, which the block imports, ends or fails."""
    try:
        with typed_exits(place):
            yield
    except NkwError:
        raise
    except Exception as error:
        made = FailedImport("NKW-KERNEL-IMPORT", f"{place} failed while it was imported: {one_line(error)}")
        made.__traceback__ = error.__traceback__
        blame_traceback(made)
        raise made from error
