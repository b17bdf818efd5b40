"""The typed errors, by the name under which kernels and tests import them; `nkw.errors` defines them."""

from nkw.errors import (
    Deadlock,
    InvalidArgument,
    Location,
    NkiValidationError,
    NkwError,
    NoVerdict,
    OutOfBounds,
    RendezvousMismatch,
    RuleViolation,
    Unsupported,
)

__all__ = [
    "Deadlock",
    "InvalidArgument",
    "Location",
    "NkiValidationError",
    "NkwError",
    "NoVerdict",
    "OutOfBounds",
    "RendezvousMismatch",
    "RuleViolation",
    "Unsupported",
]
