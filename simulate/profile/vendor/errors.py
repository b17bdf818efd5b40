"""The one error for profiles that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nkw.errors import InvalidArgument, shown
from nkw.files import Named

_LONGEST_REASON = 200


class Broken(ValueError):
    """What is wrong with the file at hand, as a part of a sentence."""


def pyarrow_missing() -> InvalidArgument:
    """The error where Parquet cannot be read for want of its library."""
    return InvalidArgument(
        "NKW-PROFILE-EXTRA", "profiles in Parquet need pyarrow; pip install 'nki-workbench[profiles]'"
    )


@contextmanager
def refusing(path: Named) -> Iterator[None]:
    """Raise InvalidArgument for all that goes wrong inside with the profile at `path`."""
    try:
        yield
    except InvalidArgument:
        raise
    except RecursionError:
        why = "it is nested too deeply"
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    except MemoryError:
        why = "it does not fit into memory"
    except OSError as error:
        why = error.strerror or str(error)
    except Broken as error:
        why = str(error)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        why = f"it is damaged: {error}"
    else:
        return
    first = why.strip().split("\n")[0]
    raise InvalidArgument(
        "NKW-PROFILE-FILE",
        f"{shown(str(path))} is no profile of neuron-explorer or neuron-profile: {shown(first, _LONGEST_REASON)}",
    ) from None
