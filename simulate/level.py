"""Levels: which release of NKI a kernel is written for, and what each release has. Rules: which refusals hold.

A level decides what is accepted and what is deprecated. The table `FEATURES` has one row for each name or behaviour
that a release added, deprecated or removed; code asks a level for a feature and compares no releases.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from nkw.errors import InvalidArgument, RuleViolation, rule

LEVEL_VARIABLE = "NKI_LEVEL"
RULES_VARIABLE = "NKI_RULES"


class Level(NamedTuple):
    """A release of NKI. Later releases are greater."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def resolve(cls, requested: Level | str | None = None) -> Level:
        """Return a requested level, else that of NKI_LEVEL, else the newest.

        Raises:
            InvalidArgument: The level is unknown.
        """
        if isinstance(requested, Level):
            return requested
        name = requested or os.environ.get(LEVEL_VARIABLE) or ""
        if not name:
            return NEWEST
        level = _BY_NAME.get(name)
        if level is None:
            raise InvalidArgument(
                "NKW-LEVEL-NAME", f"{LEVEL_VARIABLE} is {name!r:.40}; known are {', '.join(_BY_NAME)}"
            )
        return level

    def has(self, feature: str) -> bool:
        """Return whether this release has a feature of the table."""
        row = FEATURES[feature]
        return row.since <= self and (row.until is None or self < row.until)

    def require(self, feature: str) -> None:
        """Raise RuleViolation where this release does not have the feature."""
        exists_at_level(self, feature)

    def lack_of(self, feature: str) -> str:
        """Return the sentence that this release does not have a feature."""
        row = FEATURES[feature]
        gone = row.until is not None and row.until <= self
        exists = f"until level {_before(row.until)}" if gone and row.until else f"from level {row.since} on"
        return f"{feature} exists {exists}; {LEVEL_VARIABLE} is {self}"

    def deprecates(self, feature: str) -> bool:
        """Return whether this release deprecates a feature of the table."""
        deprecated = FEATURES[feature].deprecated
        return deprecated is not None and deprecated <= self

    def notice(self, feature: str) -> None:
        """Give a DeprecationWarning, at the line of the caller's caller, where this release deprecates the feature."""
        if self.deprecates(feature):
            row = FEATURES[feature]
            warnings.warn(
                f"{feature} is deprecated since NKI {row.deprecated}; {row.instead}",
                DeprecationWarning,
                stacklevel=3,
            )


LEVELS = tuple(Level(0, minor) for minor in range(2, 8))
NEWEST = LEVELS[-1]
_BY_NAME = {str(level): level for level in LEVELS}
_0_2, _0_3, _0_4, _0_5, _0_6, _0_7 = LEVELS


@dataclass(frozen=True, slots=True)
class Feature:
    """A name or a behaviour: the first release with it, the first without it, the first that deprecates it.

    `instead` says what to write where a release deprecates it or does not have it.
    """

    since: Level = _0_2
    until: Level | None = None
    deprecated: Level | None = None
    instead: str = ""


BROADCASTING = "broadcasting by operators of nki.language"
ASSIGNMENT = "assignment of numbers and of tiles to be repeated"
LNC_BY_ENVIRONMENT = "NEURON_LOGICAL_NC_CONFIG as the number of cores of a launch"
LNC_BY_GRID = "kernel[n](…) as the number of cores of a launch"
FULL_PYTHON = "all of Python while specialising"
RUN_TIME_SCALARS = "a scalar with arithmetic as the counter of nl.fori_loop"

OLDER_PARAMETERS = "parameters of nki.isa that 0.2 to 0.5 had"

_GRIDS = "slice an nl.ndarray"
_REGISTERS = "use nisa.register_alloc, register_load and register_store"
_HALVES = "call the collective as a whole"
_RANGE = "write range"
_CONFIG = "leave it out"

FEATURES: dict[str, Feature] = {
    # Release notes and reference of 0.7.0.
    **dict.fromkeys(
        ("nl.tiles", "nl.blocks", "nl.alloc_tiles", "nl.alloc_blocks"), Feature(_0_7, instead=_GRIDS)
    ),
    **dict.fromkeys(
        ("nisa.NkiScalar", "nisa.scalar_load", "nisa.scalar_store"), Feature(_0_7, instead=_REGISTERS)
    ),
    "nl.int64": Feature(_0_7, instead="int32 reaches 2147483647"),
    RUN_TIME_SCALARS: Feature(_0_7, instead="its counter is a register"),
    **dict.fromkeys(
        (
            f"ncc.{collective}_{half}"
            for collective in ("all_gather_v", "all_to_all_v")
            for half in ("prepare", "trigger")
        ),
        Feature(_0_7, instead=_HALVES),
    ),
    **dict.fromkeys(
        ("nki.compiler.CompileConfig", "nki.compiler.SpecializationConfig"), Feature(_0_7, instead=_CONFIG)
    ),
    **dict.fromkeys(
        ("nki.jit(compile_config=…)", "nki.jit(specialization_config=…)"), Feature(_0_7, instead=_CONFIG)
    ),
    LNC_BY_ENVIRONMENT: Feature(_0_7, instead="write kernel[2](…)"),
    # The page of the compiler's error EVRF066 calls the bracket deprecated; a matching one keeps working.
    LNC_BY_GRID: Feature(deprecated=_0_7, instead="set NEURON_LOGICAL_NC_CONFIG"),
    FULL_PYTHON: Feature(_0_7, instead="keep to the language subset"),
    **dict.fromkeys(
        ("nl.affine_range", "nl.sequential_range", "nl.static_range"),
        Feature(deprecated=_0_7, instead=_RANGE),
    ),
    # 0.7 removed it from the compiler; its simulator is not documented to refuse it, and public kernels still use it.
    "nl.dynamic_range": Feature(deprecated=_0_6, instead="use nl.fori_loop"),
    # Reference of nl.tile_size in 0.7.0.
    **{
        f"nisa.{name}_engine": Feature(deprecated=_0_2, instead=f"use nisa.engine.{name}")
        for name in ("tensor", "vector", "scalar", "gpsimd", "unknown")
    },
    "nl.tile_size.psum_fmax": Feature(deprecated=_0_4, instead="use nl.tile_size.psum_bank_fmax"),
    "nl.tile_size.total_available_sbuf_size": Feature(
        deprecated=_0_4, instead="use nl.tile_size.sbuf_fmax_bytes, or sbuf_size_bytes for all partitions"
    ),
    OLDER_PARAMETERS: Feature(deprecated=_0_6, instead="see the reference of the instruction"),
    # No release says when these ended. Public kernels of 0.3 rely on them; the known issues of later ones exclude them.
    BROADCASTING: Feature(until=_0_4, instead="nisa.tensor_scalar for a (P, 1) operand, or .broadcast"),
    ASSIGNMENT: Feature(until=_0_4, instead="nisa.memset for a number, nisa.tensor_copy for a tile"),
}
"""Every difference between releases that the simulator knows."""


@rule("NKW-LEVEL")
def exists_at_level(level: Level, feature: str) -> None:
    """A kernel uses what its release of NKI has; NKI_LEVEL or --level names the release."""
    if level.has(feature):
        return
    row = FEATURES[feature]
    other = _before(row.until) if row.until else row.since
    raise RuleViolation(
        exists_at_level, level.lack_of(feature), hint=f"{row.instead}; or {LEVEL_VARIABLE}={other}"
    )


def _before(level: Level) -> Level:
    return LEVELS[LEVELS.index(level) - 1]


class Rules(Enum):
    """Which rules refuse a launch.

    chip: all that the chip or its compiler would refuse. simulator: those of the vendor's simulator, which checks no
    capacity and no addresses, fills fresh tensors and takes undocumented arguments; the others become warnings of the
    launch. Rules of `WARNED` are warnings under both.
    """

    chip = "chip"
    simulator = "simulator"

    @classmethod
    def resolve(cls, requested: Rules | str | None = None) -> Rules:
        """Return the requested rules, else those of NKI_RULES, else chip.

        Raises:
            InvalidArgument: The rules are unknown.
        """
        if isinstance(requested, Rules):
            return requested
        name = requested or os.environ.get(RULES_VARIABLE) or cls.chip.value
        try:
            return cls(name)
        except ValueError:
            raise InvalidArgument(
                "NKW-RULES-NAME",
                f"{RULES_VARIABLE} is {name!r:.40}; known are {', '.join(rules.value for rules in cls)}",
            ) from None

    def refuse(self, code: str) -> bool:
        """Return whether breaking the rule with this code ends the launch."""
        if code in WARNED:
            return False
        return self is Rules.chip or code not in CHIP_ONLY | UNDOCUMENTED


CHIP_ONLY = frozenset(
    {
        "NKW-ADDRESS",
        "NKW-CAPACITY",
        "NKW-OUTPUT-UNWRITTEN",
        "NKW-PSUM-UNSTARTED",
        "NKW-REGISTERS-UNSET",
        "NKW-TILE-SIZE",
        "NKW-UNWRITTEN",
    }
)
"""The rules that the vendor's simulator does not have: it has no SBUF or PSUM capacity, no addresses and no overlap
between tensors; fresh tensors hold NaN or 4; accumulate=True on unwritten PSUM is a warning there."""

UNDOCUMENTED = frozenset(
    {
        "NKW-ADDRESS-HBM",
        "NKW-CONSTANT-DTYPE",
        "NKW-CONSTANT-SHARED",
        "NKW-DEVICE-PRINT",
        "NKW-DMA-COMPUTE-ADDRESS",
        "NKW-DMA-ENGINE",
        "NKW-DMA-ROWS",
        "NKW-FLAG",
        "NKW-MATMUL-ONEZERO",
        "NKW-METADATA-DISPLACEMENTS",
        "NKW-NAME-TEXT",
        "NKW-NL-MATMUL-COLUMNS",
        "NKW-NL-MEMORY",
        "NKW-RANDOM-ENGINE",
        "NKW-REDUCE-AXIS-NEGATIVE",
        "NKW-REGISTER-SHAPE",
        "NKW-RING-CHANNEL",
        "NKW-SEARCH-MATRIX",
        "NKW-SEARCH-VALUES",
        "NKW-TENSOR-SCALAR-INDIRECT",
    }
)
"""Rules about arguments that the NKI reference does not document and that the vendor's simulator computes with. Their
sentences are in `tests/contract/documented`."""

WARNED = frozenset(
    {
        "NKW-BARRIER-DATA",
        "NKW-DMA-TRANSPOSE-NONE",
        "NKW-MATMUL-PERF-MODE-NAME",
        "NKW-REGISTER-INITIAL",
        "NKW-TENSOR-SCALAR-COLUMN",
        "NKW-WHERE-TILES",
    }
)
"""Rules whose documented sentence public kernels break although they compile; a launch that breaks one gets a warning.
`tests/contract/documented/README.md` lists the kernels."""


def choose(level: str | None = None, rules: str | None = None) -> None:
    """Set level and rules of this process, in its environment. Raises InvalidArgument for unknown ones."""
    if level:
        os.environ[LEVEL_VARIABLE] = str(Level.resolve(level))
    if rules:
        os.environ[RULES_VARIABLE] = Rules.resolve(rules).value
