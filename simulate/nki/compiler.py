"""`nki.compiler` (0.7): configurations of a kernel that `nki.jit` takes.

They tune the vendor's compiler. A simulated launch computes the same values for all of them. Their types, their
combinations and the agreement of nested kernels are checked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from enum import Enum

from nkw.errors import InvalidArgument
from simulate.run import running_level

_RING_VARIABLE = "NKI_PREFETCH_RING_SIZE"


class AddressRotation(Enum):
    """Setting of whether the compiler may move an allocation to another address; AUTO: only those without an address.

    The reference names the members without their values.
    """

    AUTO = "auto"
    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True)
class CompileConfig:
    """Options of the vendor's compiler for one kernel; None leaves the choice to the compiler.

    nki_alloc_fallback: fall back to the compiler's own allocation if NKI's fails. The simulator has one allocation and
    always reports what does not fit. prefetch_auto: a ring of DMA prefetches in SBUF, which excludes
    NKI_PREFETCH_RING_SIZE.

    Raises:
        InvalidArgument: A value has another type, or prefetch_auto and NKI_PREFETCH_RING_SIZE are both set.
    """

    address_rotation: AddressRotation = AddressRotation.AUTO
    non_ssa_legalization: bool | None = None
    dead_code_elim: bool | None = None
    barrier_check: bool | None = None
    prefetch_auto: bool = False
    nki_alloc_fallback: bool = True

    def __post_init__(self) -> None:
        _check_types(self)
        if self.prefetch_auto and os.environ.get(_RING_VARIABLE):
            raise InvalidArgument(
                "NKW-COMPILE-CONFIG",
                f"prefetch_auto=True and {_RING_VARIABLE}={os.environ[_RING_VARIABLE]} exclude each other; unset one",
            )


@dataclass(frozen=True)
class SpecializationConfig:
    """Options of specialisation for one kernel.

    allow_nested_config_override: when this kernel is launched, a nested kernel with another configuration gives a
    warning instead of an error, and runs under this kernel's configuration.

    Raises:
        InvalidArgument: The value is no bool.
    """

    allow_nested_config_override: bool = False

    def __post_init__(self) -> None:
        _check_types(self)


def _check_types(config: CompileConfig | SpecializationConfig) -> None:
    name = type(config).__name__
    running_level().require(f"nki.compiler.{name}")
    for field in fields(config):
        value = getattr(config, field.name)
        expected = AddressRotation if field.name == "address_rotation" else bool
        if not isinstance(value, expected) and not (value is None and field.default is None):
            raise InvalidArgument(
                "NKW-COMPILE-CONFIG", f"{name}({field.name}={value!r:.40}); it takes a {expected.__name__}"
            )


__all__ = ["AddressRotation", "CompileConfig", "SpecializationConfig"]
