"""Lint rules: their register, and the findings of all rules of a level about a file."""

from __future__ import annotations

import ast
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nkw.errors import InvalidArgument, Location
from nkw.files import MOST_SOURCE_BYTES, read_text
from simulate.check.findings import Finding, FindingKind, Severity, make_finding, register_kind, sort_findings
from simulate.check.lint.source import Scope, Source
from simulate.level import FEATURES, FULL_PYTHON, LEVELS, Level

TRACER = FEATURES[FULL_PYTHON].since
"""First level at which kernels are traced, not parsed, so that all of Python is available while specialising."""
PARSER = LEVELS[LEVELS.index(TRACER) - 1]
FRONTEND_VARIABLE = "NKI_COMPILER_FRONTEND"


@dataclass(frozen=True, slots=True)
class Spot:
    """Fault that a rule has found: the node of the source, what is wrong with it, and what to write instead.

    `severity` replaces that of the rule; None keeps it.
    """

    node: ast.AST
    message: str
    hint: str = ""
    severity: Severity | None = None


FindSpots = Callable[[Source, Scope], Iterator[Spot]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Lint rule: kind of its findings, function that finds them, and the levels from `since` to before `until`."""

    finding_kind: FindingKind
    find_spots: FindSpots
    since: Level
    until: Level | None

    def holds(self, level: Level) -> bool:
        """Return whether the rule applies at a level, which is a release of NKI.

        NKI_COMPILER_FRONTEND=custom keeps the parser of the release before, and its rules, at 0.7.
        """
        if TRACER in (self.since, self.until) and os.environ.get(FRONTEND_VARIABLE) == "custom":
            level = min(level, PARSER)
        return self.since <= level and (self.until is None or level < self.until)


RULES: list[Rule] = []


def lint_rule(
    code: str, severity: Severity, since: Level = LEVELS[0], until: Level | None = None
) -> Callable[[FindSpots], FindSpots]:
    """Return a decorator that registers a function as a lint rule; its docstring starts with the rule's sentence.

    The function gets a Source and a Scope of it, and yields a Spot for each fault in that function of the
    source.

    Args:
        code: The stable id of the rule.
        severity: The severity of its findings where a spot states none.
        since: The first level of NKI at which the rule applies.
        until: The first level at which it no longer applies, None for all later levels.
    """

    def register(find_spots: FindSpots) -> FindSpots:
        assert find_spots.__doc__, f"rule {find_spots.__name__} states no sentence"
        sentence = find_spots.__doc__.strip().splitlines()[0]
        RULES.append(Rule(register_kind(code, severity, sentence), find_spots, since, until))
        return find_spots

    return register


def load_rules() -> None:
    """Import the modules of the rules, which fills `RULES`; later calls change nothing."""
    for name in ("calls", "interface", "loops", "names", "overflow", "python", "state", "tiles", "values"):
        importlib.import_module(f"simulate.check.lint.{name}")


def lint_source(
    text: str, file: str, level: Level | None = None, called: frozenset[str] = frozenset()
) -> list[Finding]:
    """Return the findings about a source text, errors first, then by line.

    A text in the older dialect compiles with the compiler that it was written for, so its findings are
    warnings.

    Args:
        text: The source.
        file: The file name that the findings show.
        level: The release of NKI that the text is written for; None for NKI_LEVEL, else the newest.
        called: Names of functions that other files call; kernels among them may return tiles.

    Raises:
        InvalidArgument: The text is not Python, or is nested too deeply.
    """
    source = _parse_source(text, file, level)
    source.called |= called
    return findings_in(source, file)


def lint_file(path: Path, level: Level | None = None) -> list[Finding]:
    """Return the findings about a file, errors first, then by line.

    Args:
        path: The file.
        level: The release of NKI that it is written for; None for NKI_LEVEL, else the newest.

    Raises:
        InvalidArgument: The file cannot be read, is not Python, or is nested too deeply.
    """
    return findings_in(source_of(path, level), str(path))


def source_of(path: Path, level: Level | None = None) -> Source:
    """Read and parse a file for `findings_in`.

    Raises:
        InvalidArgument: The file cannot be read, is not Python, or is nested too deeply.
    """
    return _parse_source(_read_source_text(path), str(path), level)


def findings_in(source: Source, file: str) -> list[Finding]:
    """Return the findings about a parsed file, errors first, then by line.

    Args:
        source: The parsed file.
        file: The file name that the findings show.

    Raises:
        InvalidArgument: The file is nested too deeply.
    """
    load_rules()
    findings = []
    with _convert_depth_errors(file):
        for rule in RULES:
            if not rule.holds(source.level):
                continue
            for scope in source.scopes:
                for spot in rule.find_spots(source, scope):
                    line = getattr(spot.node, "lineno", scope.node.lineno)
                    where = Location(file, line, scope.node.name)
                    severity = Severity.warning if source.older else spot.severity
                    findings.append(
                        make_finding(
                            rule.finding_kind,
                            f"{spot.message}. Rule: {rule.finding_kind.sentence}",
                            where,
                            (),
                            spot.hint,
                            severity,
                        )
                    )
    return sort_findings(findings)


def _parse_source(text: str, file: str, level: Level | None) -> Source:
    level = Level.resolve(level)
    with _convert_depth_errors(file):
        return Source(_parse_text(text, file), level)


def _parse_text(text: str, file: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Python about the text are no findings
            return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument(
            "NKW-LINT-SYNTAX", f"{file} is not Python: {error}; mend this line, or leave the file out"
        ) from None


@contextmanager
def _convert_depth_errors(file: str) -> Iterator[None]:
    """Convert Python's errors about too deep nesting inside a `with` block into InvalidArgument.

    They come from Python's parser or from a walk over the tree; `file` is named in the message.
    """
    try:
        yield
    except (RecursionError, MemoryError):
        raise InvalidArgument(
            "NKW-LINT-DEPTH",
            f"{file} has an expression that is too long or too deeply nested for Python's parser; split it",
        ) from None


def _read_source_text(path: Path) -> str:
    try:
        return read_text(path, MOST_SOURCE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("NKW-LINT-FILE", f"{path} cannot be read: {error}") from None
