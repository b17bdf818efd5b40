"""Running the lint rules over a file: the rules of a level, and the lines of their findings."""

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
from simulate.check.findings import Finding, FindingKind, Severity, found, in_order, kind
from simulate.check.lint.source import Scope, Source
from simulate.level import FEATURES, FULL_PYTHON, LEVELS, Level

TRACER = FEATURES[FULL_PYTHON].since
"""From this level on kernels are traced, not parsed, so that all of Python is available while specialising."""
PARSER = LEVELS[LEVELS.index(TRACER) - 1]
FRONTEND_VARIABLE = "NKI_COMPILER_FRONTEND"


@dataclass(frozen=True, slots=True)
class Spot:
    """What a rule reports: a node, what is wrong there, what to write instead."""

    node: ast.AST
    message: str
    hint: str = ""
    severity: Severity | None = None


Look = Callable[[Source, Scope], Iterator[Spot]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A lint rule and the levels at which it holds."""

    kind: FindingKind
    look: Look
    since: Level
    until: Level | None

    def holds(self, level: Level) -> bool:
        """Whether a level has this rule; NKI_COMPILER_FRONTEND=custom keeps the parser, and its rules, at 0.7."""
        if TRACER in (self.since, self.until) and os.environ.get(FRONTEND_VARIABLE) == "custom":
            level = min(level, PARSER)
        return self.since <= level and (self.until is None or level < self.until)


RULES: list[Rule] = []


def lint_rule(
    code: str, severity: Severity, since: Level = LEVELS[0], until: Level | None = None
) -> Callable[[Look], Look]:
    """Register a rule under its id, for the levels `since` up to but without `until`."""

    def register(look: Look) -> Look:
        assert look.__doc__, f"rule {look.__name__} states no sentence"
        RULES.append(Rule(kind(code, severity, look.__doc__.strip().splitlines()[0]), look, since, until))
        return look

    return register


def load_rules() -> None:
    """Import the rule files, which register themselves."""
    for name in ("calls", "interface", "loops", "names", "overflow", "python", "state", "tiles", "values"):
        importlib.import_module(f"simulate.check.lint.{name}")


def lint_source(
    text: str, file: str, level: Level | None = None, called: frozenset[str] = frozenset()
) -> list[Finding]:
    """The findings in one source text; `called` names functions that other files call.

    `level` is the release of NKI that the text is written for; the default is NKI_LEVEL, else the newest.

    A file of the older dialect compiles with the compiler it was written for: what it has to change is a warning.
    Raises InvalidArgument for a text that is no Python, and for one that is nested too deeply to be looked at.
    """
    source = _source(text, file, level)
    source.called |= called
    return findings_in(source, file)


def lint_file(path: Path, level: Level | None = None) -> list[Finding]:
    """The findings in one file."""
    return findings_in(source_of(path, level), str(path))


def source_of(path: Path, level: Level | None = None) -> Source:
    """A file for `findings_in`. Raises InvalidArgument for what is no Python."""
    return _source(_text(path), str(path), level)


def findings_in(source: Source, file: str) -> list[Finding]:
    """The findings in a file that was read."""
    load_rules()
    findings = []
    with _readable(file):
        for rule in RULES:
            if not rule.holds(source.level):
                continue
            for scope in source.scopes:
                for spot in rule.look(source, scope):
                    line = getattr(spot.node, "lineno", scope.node.lineno)
                    where = Location(file, line, scope.node.name)
                    severity = Severity.warning if source.older else spot.severity
                    findings.append(found(rule.kind, spot.message, where, (), spot.hint, severity))
    return in_order(findings)


def _source(text: str, file: str, level: Level | None) -> Source:
    level = Level.of(level)
    with _readable(file):
        return Source(_parsed(text, file), level)


def _parsed(text: str, file: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own remarks on the text are not ours
            return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument("NKW-LINT-SYNTAX", f"{file} is not Python: {error}") from None


@contextmanager
def _readable(file: str) -> Iterator[None]:
    """Refuse a file whose expressions Python's parser or a walk over its syntax tree gives up on."""
    try:
        yield
    except (RecursionError, MemoryError):
        raise InvalidArgument(
            "NKW-LINT-DEPTH",
            f"{file} has an expression too long or too deeply nested to be looked at; split it",
        ) from None


def _text(path: Path) -> str:
    try:
        return read_text(path, MOST_SOURCE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("NKW-LINT-FILE", f"{path} cannot be read: {error}") from None
