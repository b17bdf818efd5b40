"""The source of the shipped kernels, and one change of it."""

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
        if file.stem not in ("__init__", "precision") and file.relative_to(FOLDER).parts[0] != "ladder"
    )
)
"""The modules that are mutated; precision.py serves the references only, the ladder has tests of its own."""

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
    """One change: `count` statements, or one expression, at `path` of a module's tree become `new` source.

    moved: the order in which the statements that were there follow each other now, instead of new source. `function`
    is "" for a constant of the module.
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
        """Its name, which does not depend on line numbers."""
        return f"{self.module}.{self.function or 'constants'} {self.operator}: {self.change}" + (
            f" #{self.number}" if self.number else ""
        )


@cache
def tree(module: str) -> ast.Module:
    """Return a module's tree; not to be changed."""
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
    """Return names of the functions that refuse bad arguments and issue nothing; the tests of the kernels try them."""
    return frozenset(node.name for module in MODULES for node in tree(module).body if _refuses(node))  # type: ignore[attr-defined]


@cache
def imported(module: str) -> frozenset[str]:
    """Return a module and the modules of nki_kernels that it imports, directly or not."""
    names = {module}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    siblings = {name.removeprefix("nki_kernels.") for name in names} & set(MODULES) - {module}
    return frozenset({module}.union(*map(imported, siblings)))


def file_of(module: str) -> Path:
    """Return the file of a module of nki_kernels."""
    return FOLDER.joinpath(*module.split(".")).with_suffix(".py")


def _parsed(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def mutated(mutant: Mutant) -> ast.Module:
    """Return a module's tree with one change; every node keeps its line."""
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
    for descendant in ast.walk(node):
        if hasattr(descendant, "lineno"):
            ast.copy_location(descendant, origin)
    return node


def kernels(module: str) -> Iterator[tuple[ast.FunctionDef, Path_]]:
    """Yield the functions of a module that issue instructions or lead to them, with their paths.

    Methods count in the modules of `WITH_METHODS`, not in those where classes hold sizes alone.
    """
    for number, node in enumerate(tree(module).body):
        if isinstance(node, ast.FunctionDef):
            if node.name not in guards() and not node.name.endswith("_reference"):
                yield node, ("body", number)
        elif isinstance(node, ast.ClassDef) and module.startswith(WITH_METHODS):
            for method_index, method in enumerate(node.body):
                if isinstance(method, ast.FunctionDef) and not _refuses(method):
                    yield method, ("body", number, "body", method_index)
