"""Levels and rules of a launch: the release of NKI that a kernel is written for, and the refusals that hold.

A level is a release of NKI, 0.2 to 0.7; it decides what is accepted and what is deprecated. The table `FEATURES` has
one row for each name or behaviour that a release added, deprecated or removed; code asks a level for a feature and
compares no releases.
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
    """Release of NKI as (major, minor). Later releases are greater."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def resolve(cls, requested: Level | str | None = None) -> Level:
        """Return the requested level, else the level that NKI_LEVEL names, else the newest.

        Args:
            requested: A level, its name such as "0.6", or None or an empty text for the environment's.

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
        """Return whether this release has a feature; `feature` is a key of `FEATURES`."""
        row = FEATURES[feature]
        return row.since <= self and (row.until is None or self < row.until)

    def require(self, feature: str) -> None:
        """Raise RuleViolation (NKW-LEVEL) if this release does not have the feature, a key of `FEATURES`."""
        exists_at_level(self, feature)

    def lack_of(self, feature: str) -> str:
        """Return a sentence for messages: this release lacks the feature, and from or until which release it exists."""
        row = FEATURES[feature]
        gone = row.until is not None and row.until <= self
        exists = (
            f"until level {_find_previous(row.until)}" if gone and row.until else f"from level {row.since} on"
        )
        return f"{feature} exists {exists}; {LEVEL_VARIABLE} is {self}"

    def deprecates(self, feature: str) -> bool:
        """Return whether this release deprecates a feature; `feature` is a key of `FEATURES`."""
        deprecated = FEATURES[feature].deprecated
        return deprecated is not None and deprecated <= self

    def notice(self, feature: str) -> None:
        """Give a DeprecationWarning, at the line of the caller's caller, if this release deprecates the feature."""
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
    """Row of `FEATURES`: the releases in which a name or a behaviour of NKI exists.

    since: the first release with the feature. until: the first without it, or None. deprecated: the first that
    deprecates it, or None. instead: what to write where it is deprecated or missing.
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
    """A kernel uses what its release of NKI has; NKI_LEVEL or --level names the release.

    Raises RuleViolation if `level` does not have `feature`, a key of `FEATURES`.
    """
    if level.has(feature):
        return
    row = FEATURES[feature]
    other = _find_previous(row.until) if row.until else row.since
    raise RuleViolation(
        exists_at_level, level.lack_of(feature), hint=f"{row.instead}; or {LEVEL_VARIABLE}={other}"
    )


def _find_previous(level: Level) -> Level:
    """Return the release before a level; the level must not be the oldest."""
    return LEVELS[LEVELS.index(level) - 1]


class Rules(Enum):
    """Set of rules that end a launch which breaks them; broken rules outside the set are warnings.

    chip: all rules that the chip or its compiler enforces. simulator: those of the vendor's simulator, which checks
    no capacity and no addresses, fills fresh tensors and takes undocumented arguments. Rules of `WARNED` are warnings
    under both.
    """

    chip = "chip"
    simulator = "simulator"

    @classmethod
    def resolve(cls, requested: Rules | str | None = None) -> Rules:
        """Return the requested rules, else those that NKI_RULES names, else `Rules.chip`.

        Args:
            requested: Rules, their name "chip" or "simulator", or None or an empty text for the environment's.

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
        """Return True if breaking the rule with this code ends the launch, False if it only gives a warning."""
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
    """Set NKI_LEVEL and NKI_RULES in the environment of this process; None or an empty text leaves a variable.

    Raises InvalidArgument for an unknown level or unknown rules.
    """
    if level:
        os.environ[LEVEL_VARIABLE] = str(Level.resolve(level))
    if rules:
        os.environ[RULES_VARIABLE] = Rules.resolve(rules).value
