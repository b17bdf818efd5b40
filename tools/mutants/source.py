"""The source of the shipped kernels as syntax trees, and a mutant as one change of a tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "nki_kernels"
MODULES = tuple(
    sorted(
        ".".join(file.relative_to(FOLDER).with_suffix("").parts)
        for file in FOLDER.rglob("*.py")
        if file.stem not in ("__init__", "precision")
        and file.relative_to(FOLDER).parts[0] not in ("ladder", "probes")
    )
)
"""The modules that are mutated; precision.py serves the references only, ladder and probes have tests of their own."""

WITH_METHODS = (
    "cache.",
    "delta.",
    "recurrent.",
    "attention_prefill",
    "prefill.cores",
    "prefill.keys",
    "prefill.load_ahead",
    "prefill.masks",
    "prefill.order",
    "prefill.slopes",
    "prefill.spans",
    "decode.attend",
    "decode.group_loads",
    "decode.launch",
    "decode.output",
    "decode.tokens",
    "latent.decode_items",
    "latent.expansion",
    "latent.prompt_pieces",
)
"""The packages and modules whose methods are mutated as functions are."""

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a module's syntax tree.

    function: name of the changed function, "" for a constant of the module. operator: kind of the change. change:
    description, part of the key. path: fields and indices from the module's root to the changed node. new: source
    that replaces it. count: number of statements that are replaced, 0 if it is an expression. moved: instead of
    `new`, indices into the replaced statements in their new order. number: distinguishes mutants with equal
    descriptions.
    """

    module: str
    function: str
    operator: str
    change: str
    line: int
    path: Path_
    new: str = ""
    count: int = 0
    moved: tuple[int, ...] = ()
    number: int = 0

    @property
    def key(self) -> str:
        """Name of the mutant, which does not depend on line numbers."""
        return f"{self.module}.{self.function or 'constants'} {self.operator}: {self.change}" + (
            f" #{self.number}" if self.number else ""
        )


@cache
def tree(module: str) -> ast.Module:
    """Return a module's syntax tree, which is cached and must not be changed."""
    return _parsed(module)


def _refuses(node: ast.stmt) -> bool:
    """Return whether a function only refuses bad arguments: its name says so, and it returns nothing."""
    return (
        isinstance(node, ast.FunctionDef)
        and (node.name == "check" or node.name.startswith(("check_", "expect_")))
        and not any(
            isinstance(descendant, ast.Return) and descendant.value is not None
            for descendant in ast.walk(node)
        )
    )


@cache
def guards() -> frozenset[str]:
    """Return the names of all functions that only refuse bad arguments; the kernels' tests try these."""
    return frozenset(node.name for module in MODULES for node in tree(module).body if _refuses(node))  # type: ignore[attr-defined]


@cache
def list_imports(module: str) -> frozenset[str]:
    """Return the names of a module and of all modules of nki_kernels that it imports, directly or indirectly."""
    names = {module}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    siblings = {name.removeprefix("nki_kernels.") for name in names} & set(MODULES) - {module}
    return frozenset({module}.union(*map(list_imports, siblings)))


def file_of(module: str) -> Path:
    """Return the file of a module of nki_kernels."""
    return FOLDER.joinpath(*module.split(".")).with_suffix(".py")


def _parsed(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def apply_mutant(mutant: Mutant) -> ast.Module:
    """Return a new syntax tree of a module with one change; unchanged nodes keep their line numbers."""
    changed = _parsed(mutant.module)
    *way, last = mutant.path
    node: object = changed
    for step in way:
        node = node[step] if isinstance(step, int) else getattr(node, step)  # type: ignore[index]
    if mutant.count:
        assert isinstance(node, list) and isinstance(last, int)
        old = node[last : last + mutant.count]
        new = [copy.deepcopy(old[index]) for index in mutant.moved] or ast.parse(mutant.new).body
        if not mutant.moved:
            new = [_copy_locations(statement, old[0]) for statement in new]
        node[last : last + mutant.count] = new
    else:
        replacement = ast.parse(mutant.new, mode="eval").body
        old = node[last] if isinstance(last, int) else getattr(node, last)  # type: ignore[index]
        _copy_locations(replacement, old)
        if isinstance(last, int):
            node[last] = replacement  # type: ignore[index]
        else:
            setattr(node, last, replacement)
    return ast.fix_missing_locations(changed)


def _copy_locations(node: ast.AST, origin: ast.AST) -> ast.AST:
    """Give all nodes below a node the line of `origin`, and return the node."""
    for descendant in ast.walk(node):
        if hasattr(descendant, "lineno"):
            ast.copy_location(descendant, origin)
    return node


def kernels(module: str) -> Iterator[tuple[ast.FunctionDef, Path_]]:
    """Yield (function, path) for each function of a module that is mutated: all but guards and references.

    Methods are included in the modules of `WITH_METHODS` only; elsewhere classes only have sizes.
    """
    for number, node in enumerate(tree(module).body):
        if isinstance(node, ast.FunctionDef):
            if node.name not in guards() and not node.name.endswith("_reference"):
                yield node, ("body", number)
        elif isinstance(node, ast.ClassDef) and module.startswith(WITH_METHODS):
            for method_index, method in enumerate(node.body):
                if isinstance(method, ast.FunctionDef) and not _refuses(method):
                    yield method, ("body", number, "body", method_index)
