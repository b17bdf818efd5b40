"""Mutation operators for host code: comparison boundaries, signs, arguments, statements, conditions."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_ANNOTATION_FIELDS = frozenset({"annotation", "returns"})


@dataclass(frozen=True)
class HostMutant:
    """One change of one source file.

    line and end_line are the lines of the changed statement or expression, counted from 1; source is the whole file
    with the change.
    """

    path: str
    operator: str
    change: str
    line: int
    end_line: int
    occurrence: int
    source: str

    @property
    def key(self) -> str:
        """Name of the mutant that stays the same if other lines of the file change."""
        return f"{self.path} {self.operator}: {self.change} #{self.occurrence}"


def draw_sample(mutants: list[HostMutant], count: int, seed: int) -> list[HostMutant]:
    """Return `count` mutants, the same number of every operator as far as `count` divides.

    Of each operator, the mutants whose keys have the smallest digests together with the seed are drawn, so that an
    edit of one line changes the draw at most among the mutants of that line.
    """

    def digest(mutant: HostMutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    by_operator: dict[str, list[HostMutant]] = {}
    for mutant in sorted(mutants, key=digest):
        by_operator.setdefault(mutant.operator, []).append(mutant)
    rounds = zip_longest(*(by_operator[operator] for operator in sorted(by_operator)))
    return [mutant for mutants_of_round in rounds for mutant in mutants_of_round if mutant is not None][
        :count
    ]


def generate_mutants(root: Path, folders: list[str]) -> list[HostMutant]:
    """Return every mutant of the Python files below the folders, in the order of the source."""
    mutants: list[HostMutant] = []
    for folder in folders:
        for file in sorted((root / folder).rglob("*.py")):
            mutants += mutate_source(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    return mutants


def mutate_source(path: str, source: str) -> list[HostMutant]:
    """Return every mutant of one file. Docstrings, annotations and decorators are left alone."""
    tree = ast.parse(source)
    occurrences: dict[tuple[str, str], int] = {}
    mutants = []
    for node, operator, changed in _changes(tree):
        change = (
            f"{_shorten(ast.unparse(node))} -> {_shorten(ast.unparse(changed)) if changed else 'deleted'}"
        )
        number = occurrences[operator, change] = occurrences.get((operator, change), 0) + 1
        mutated = _replace_lines(source, node, changed)
        if mutated is not None:
            end = node.end_lineno or node.lineno
            mutants.append(HostMutant(path, operator, change, node.lineno, end, number, mutated))
    return mutants


Located = ast.expr | ast.stmt


def _changes(node: ast.AST) -> Iterator[tuple[Located, str, ast.AST | None]]:
    """Yield (node, operator, changed node) for each mutation below a node.

    The changed node is None for a removed statement. Annotations, decorators and `if TYPE_CHECKING` blocks are left
    out.
    """
    for field, value in ast.iter_fields(node):
        if field in _ANNOTATION_FIELDS or field == "decorator_list":
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_type_checking(child):
                continue
            if isinstance(child, (ast.expr, ast.stmt)):
                yield from ((child, operator, changed) for operator, changed in _changes_of(child))
            yield from _changes(child)


def _changes_of(node: Located) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield (operator, changed copy) for each mutation of one node; the copy is None if the statement is removed."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        changed = copy.deepcopy(node)
        changed.ops[0] = _COMPARISONS[type(node.ops[0])]()
        yield "comparison", changed
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        binary = copy.deepcopy(node)
        binary.op = _ARITHMETIC[type(node.op)]()
        yield "sign", binary
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", node.operand
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        augmented = copy.deepcopy(node)
        augmented.op = _ARITHMETIC[type(node.op)]()
        yield "sign", augmented
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(map(_is_starred, node.args[:2])):
        call = copy.deepcopy(node)
        call.args[0], call.args[1] = call.args[1], call.args[0]
        if ast.dump(call) != ast.dump(node):
            yield "arguments", call
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    if isinstance(node, ast.BoolOp):
        boolean = copy.deepcopy(node)
        boolean.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "boolean", boolean
    if _is_deletable(node):
        yield "statement", None


def _is_deletable(node: Located) -> bool:
    """Return whether a statement can be removed.

    These are calls, awaits, stores to attributes or elements, augmented assignments, raise, continue, break and del.
    """
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Await))
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete))


def _is_text(node: ast.BinOp) -> bool:
    """Return whether the operation joins strings: tests compare such texts as a whole or not at all."""
    return any(
        isinstance(operand, (ast.JoinedStr, ast.Constant)) and _holds_text(operand)
        for operand in (node.left, node.right)
    )


def _holds_text(node: ast.expr) -> bool:
    """Return whether an expression is a string or an f-string."""
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_starred(node: ast.expr) -> bool:
    """Return whether an argument cannot be exchanged with another: `*args` or a bare generator."""
    return isinstance(node, (ast.Starred, ast.GeneratorExp))


def _is_type_checking(node: ast.AST) -> bool:
    """Return whether a node is an `if TYPE_CHECKING` statement."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _replace_lines(source: str, node: Located, changed: ast.AST | None) -> str | None:
    """Return the source with a node's text replaced by `changed`, or by `pass` for None.

    Returns None if the result is not valid Python, as inside an f-string in Python 3.11, or has the same syntax tree.
    """
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first][: node.col_offset]
    after = lines[last][node.end_col_offset :]
    text = "pass" if changed is None else ast.unparse(changed)
    if changed is not None and isinstance(node, ast.expr):
        text = f"({text})"
    mutated = b"".join([*lines[:first], before, text.encode(), after, *lines[last + 1 :]]).decode()
    try:
        tree = ast.parse(mutated)
    except (SyntaxError, ValueError):
        return None
    return mutated if ast.dump(tree) != _syntax(source) else None


@lru_cache(maxsize=1)
def _syntax(source: str) -> str:
    """Return a dump of the source's syntax tree, to compare with."""
    return ast.dump(ast.parse(source))


def _shorten(text: str) -> str:
    """Return text as one line of at most 90 characters, with its middle left out if it is longer."""
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:60]}...{line[-27:]}"
