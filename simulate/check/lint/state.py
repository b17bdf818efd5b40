"""Lint rule about state that is not an argument: a compiled kernel is reused after the state has changed.

State is a mutable global, a clock, a random generator, the environment, or an attribute of a class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import Spot, lint_rule
from simulate.check.lint.source import Function, Scope, Source

_OUTSIDE = ("random", "time", "datetime", "uuid", "secrets", "os.environ", "os.getenv", "numpy.random")
"""Modules and names of Python and NumPy whose results differ between calls or processes."""

_CHANGES = frozenset("append extend insert remove pop popitem clear update setdefault add discard".split())


@lint_rule("NKI031", Severity.warning)
def mutable_globals(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel is compiled once: it reads no mutable global, clock, random or environment value and changes no class.

    A compiled kernel is reused when such state has changed. Helpers that issue no instructions are checked
    with the first kernel that calls them; there a global counts only if some code changes it.
    """
    mutable = {
        target.id
        for node in source.statements
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Dict, ast.Set))
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.startswith("__")
    }
    yield from _find_reads(scope.node, mutable)
    if not scope.is_kernel:
        return
    modules = _find_imported_modules(source)
    yield from _find_outside_reads(scope.node, modules)
    yield from _find_class_stores(source, scope.node)
    changed = mutable & _find_mutated(source, scope.node.lineno)
    for helper in _find_helpers(source, scope):
        yield from _find_reads(helper, changed)  # a table that nothing changes is a constant
        yield from _find_outside_reads(helper, modules)
        yield from _find_class_stores(source, helper)


def _find_reads(function: Function, names: set[str]) -> Iterator[Spot]:
    local_names = {argument.arg for argument in function.args.args} | {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in names - local_names and isinstance(node.ctx, ast.Load):
            yield Spot(node, f"reads the global {node.id}", "pass it as an argument, or make it a tuple")


def _find_outside_reads(function: Function, modules: dict[str, str]) -> Iterator[Spot]:
    """Yield a spot for each read of a clock, a random generator or the environment."""
    inner = {node.value for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        if not isinstance(node, (ast.Name, ast.Attribute)) or node in inner:
            continue
        root, *attributes = ast.unparse(node).split(".")
        if root not in modules:
            continue
        name = ".".join([modules[root], *attributes])
        if any(name == outside or name.startswith(outside + ".") for outside in _OUTSIDE):
            yield Spot(node, f"reads {ast.unparse(node)}, whose result changes", "pass it as an argument")


def _find_imported_modules(source: Source) -> dict[str, str]:
    """Return what each name that a file imports at module level refers to, as a dotted name.

    For example {"np": "numpy", "environ": "os.environ"}.
    """
    names: dict[str, str] = {}
    for node in source.statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _find_class_stores(source: Source, function: Function) -> Iterator[Spot]:
    """Yield a spot for each assignment to an attribute of a class, which outlives the launch."""
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in source.classes
        ):
            yield Spot(
                node, f"changes {ast.unparse(node)}", "keep it in an instance, or pass it as an argument"
            )


def _find_mutated(source: Source, kernel_line: int) -> set[str]:
    """Return the names of variables that any function of the file changes in place, or the module below `kernel_line`.

    In place is a store to or deletion of an element, or a method such as append.
    """
    functions = [
        node for node in source.syntax_nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    below = [node for node in source.statements if node.lineno > kernel_line]
    names = set()
    for node in (child for statement in (*functions, *below) for child in ast.walk(statement)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target: ast.expr = node.value
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES
        ):
            target = node.func.value
        else:
            continue
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


def _find_helpers(source: Source, scope: Scope) -> list[Function]:
    """Return the functions of the file that issue no instructions and that a kernel calls, directly or through others.

    A helper that several kernels call belongs to the first of them. Empty for a scope that is no kernel.
    """
    plain = {
        node.name: node
        for node in source.statements
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and all(node is not device_scope.node for device_scope in source.scopes)
    }
    for before in source.scopes:
        reached = _find_reached(source, before, plain) if before.is_kernel else []
        if before is scope:
            return reached
        for helper in reached:
            del plain[helper.name]
    return []


def _find_reached(source: Source, scope: Scope, plain: dict[str, Function]) -> list[Function]:
    functions = {**plain, **{device_scope.node.name: device_scope.node for device_scope in source.scopes}}
    seen: list[Function] = [scope.node]
    for function in seen:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = functions.get(node.func.id)
                if called is not None and called not in seen:
                    seen.append(called)
    return [function for function in seen if plain.get(function.name) is function]
