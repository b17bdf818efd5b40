"""Lint rules about Python itself: the constructs that the compiler's parser accepts, up to the tracer of 0.7."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import TRACER, Spot, lint_rule
from simulate.check.lint.source import Scope, Source

_CONSTRUCTS: dict[type[ast.AST], str] = {
    ast.ListComp: "a list comprehension",
    ast.SetComp: "a set comprehension",
    ast.DictComp: "a dict comprehension",
    ast.GeneratorExp: "a generator expression",
    ast.Lambda: "a lambda",
    ast.Try: "try",
    ast.Raise: "raise",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Starred: "a starred expression",
    ast.NamedExpr: "an assignment expression",
    ast.Match: "match",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.ClassDef: "a class",
    ast.Await: "await",
}
_BUILTINS = frozenset(
    "enumerate zip sum any all sorted reversed map filter getattr setattr hasattr eval exec".split()
)
_LIBRARY_BASES = frozenset({"NKIObject", "Enum", "IntEnum"})


@lint_rule("NKI001", Severity.error, until=TRACER)
def identity(source: Source, scope: Scope) -> Iterator[Spot]:
    """`is` and `is not` are not supported; public kernels that compile use them against None only.

    So a comparison with None is a warning.
    """
    for node in scope.syntax_nodes:
        if not isinstance(node, ast.Compare):
            continue
        for operator, right in zip(node.ops, node.comparators):
            if isinstance(operator, (ast.Is, ast.IsNot)):
                word, sign = ("is", "==") if isinstance(operator, ast.Is) else ("is not", "!=")
                against_none = isinstance(right, ast.Constant) and right.value is None
                yield Spot(
                    node,
                    f"`{word} {ast.unparse(right)}`",
                    f"{sign} {ast.unparse(right)}",
                    Severity.warning if against_none else None,
                )


@lint_rule("NKI002", Severity.error, until=TRACER)
def keyword_only(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel signature has no `*` that makes arguments keyword-only."""
    names = [argument.arg for argument in scope.node.args.kwonlyargs]
    if scope.is_kernel and names:
        yield Spot(scope.node, f"keyword-only arguments {', '.join(names)}", "leave out the `*`")


@lint_rule("NKI003", Severity.error)
def list_arguments(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel takes no lists, as arguments or defaults; tuples are hashable."""
    if not scope.is_kernel:
        return
    for default in [*scope.node.args.defaults, *filter(None, scope.node.args.kw_defaults)]:
        if isinstance(default, ast.List):
            yield Spot(default, f"the default {ast.unparse(default)}", f"({ast.unparse(default)[1:-1]},)")
    for call in source.syntax_nodes:
        if not isinstance(call, ast.Call):
            continue
        called = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        if isinstance(called, ast.Name) and called.id == scope.node.name:
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                if isinstance(argument, ast.List):
                    yield Spot(
                        argument, f"the argument {ast.unparse(argument)}", f"({ast.unparse(argument)[1:-1]},)"
                    )


@lint_rule("NKI009", Severity.error, until=TRACER)
def user_classes(source: Source, scope: Scope) -> Iterator[Spot]:
    """A class that a kernel makes instances of has one base: nl.NKIObject, Enum or IntEnum."""
    for node in scope.nodes(ast.Call):
        known = source.classes.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if known is None:
            continue
        bases = [ast.unparse(base) for base in known.bases]
        if len(bases) != 1 or bases[0].split(".")[-1] not in _LIBRARY_BASES:
            seen = (
                f"class {known.name}({', '.join(bases)})" if bases else f"class {known.name} without a base"
            )
            yield Spot(node, seen, f"class {known.name}(nl.NKIObject)")


@lint_rule("NKI010", Severity.error, until=TRACER)
def dict_keys(source: Source, scope: Scope) -> Iterator[Spot]:
    """The keys of a dict are strings, not numbers or counters of loops."""
    for literal in scope.nodes(ast.Dict):
        for key in literal.keys:
            if isinstance(key, ast.Constant) and not isinstance(key.value, str):
                yield Spot(key, f"the key {ast.unparse(key)}", f'"{ast.unparse(key)}"')
    dicts = {
        target.id
        for node in scope.nodes(ast.Assign)
        if isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    counters = {
        node.target.id
        for node in scope.nodes(ast.For)
        if isinstance(node.target, ast.Name)
        and isinstance(node.iter, ast.Call)
        and (ast.unparse(node.iter.func) == "range" or source.name_of(node.iter.func).endswith("_range"))
    }
    for stored in scope.nodes(ast.Subscript):
        if not (isinstance(stored.ctx, ast.Store) and isinstance(stored.value, ast.Name)):
            continue
        index = stored.slice
        number = isinstance(index, ast.Constant) and not isinstance(index.value, str)
        counted = isinstance(index, ast.Name) and index.id in counters
        if stored.value.id in dicts and (number or counted):
            seen = f"the key {ast.unparse(index)} of {stored.value.id}"
            yield Spot(stored, seen, "a list, or f-strings as keys")


@lint_rule("NKI032", Severity.warning, until=TRACER)
def full_python(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel uses only Python constructs that public kernels use; others need the tracer of NKI 0.7."""
    decorators = {id(node) for decorator in scope.node.decorator_list for node in ast.walk(decorator)}
    for node in scope.syntax_nodes:
        if id(node) in decorators:
            continue
        if type(node) in _CONSTRUCTS:
            yield Spot(node, _CONSTRUCTS[type(node)], "write a plain loop, `if` or assert")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node is not scope.node and node.name not in scope.bodies:
                yield Spot(
                    node, f"the function {node.name} inside {scope.node.name}", "move it to the module"
                )
        elif isinstance(node, ast.With):
            for item in node.items:
                call = item.context_expr
                name = source.name_of(call.func) if isinstance(call, ast.Call) else ""
                if name != "nl.no_reorder":
                    yield Spot(node, f"with {ast.unparse(call)}", "only `with nl.no_reorder():` is listed")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
            yield Spot(node, f"{node.func.id}()", "use range(len(…)) and an explicit loop")
