"""The error for profiles that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nkw.errors import InvalidArgument, shown
from nkw.files import Named

_LONGEST_REASON = 200


class Broken(ValueError):
    """Defect of a profile's file; the message is the end of the sentence that `refuse_broken_profile` makes."""


def make_pyarrow_error() -> InvalidArgument:
    """Return, without raising it, the error for reading Parquet without pyarrow."""
    return InvalidArgument(
        "NKW-PROFILE-EXTRA",
        "profiles in Parquet need pyarrow, which is not installed; pip install 'nki-workbench[profiles]'",
    )


@contextmanager
def refuse_broken_profile(path: Named) -> Iterator[None]:
    """Turn errors of reading inside the context into InvalidArgument (NKW-PROFILE-FILE) that names the profile.

    These are Broken, OSError, MemoryError, RecursionError, ValueError, TypeError, LookupError and
    ArithmeticError. InvalidArgument passes through unchanged.
    """
    try:
        yield
    except InvalidArgument:
        raise
    except RecursionError:
        reason = "it is nested too deeply"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except MemoryError:
        reason = "it does not fit into memory"
    except OSError as error:
        reason = error.strerror or str(error)
    except Broken as error:
        reason = str(error)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = f"it is damaged: {error}"
    else:
        return
    first_line = shown(reason.strip().split("\n")[0], _LONGEST_REASON)
    hint = "" if ";" in first_line else "; give its folder of Parquet tables or its summary-json"
    raise InvalidArgument(
        "NKW-PROFILE-FILE",
        f"{shown(str(path))} is no profile of neuron-explorer or neuron-profile: {first_line}{hint}",
    ) from None
