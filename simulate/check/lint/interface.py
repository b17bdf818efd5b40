"""Lint rules about a kernel's interface: decorator, imports, inputs and outputs, and its grid."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import TRACER, Spot, lint_rule
from simulate.check.lint.source import Holds, Scope, Source
from simulate.level import Level

_NOT_SHARED = frozenset({"nl.hbm", "nl.private_hbm", "nl.sbuf", "nl.psum"})


def _find_returns(scope: Scope) -> Iterator[ast.Return]:
    """Yield the return statements of a function, without those of nested functions."""
    pending: list[ast.AST] = list(scope.node.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(node))


@lint_rule("NKI004", Severity.error, since=Level(0, 3))
def outputs_are_shared(source: Source, scope: Scope) -> Iterator[Spot]:
    """A launched kernel returns tensors that were allocated with buffer=nl.shared_hbm.

    Kernels that other functions call may return tiles and are skipped.
    """
    if not scope.is_kernel or scope.node.name in source.called:
        return
    for node in _find_returns(scope):
        values = node.value.elts if isinstance(node.value, (ast.Tuple, ast.List)) else [node.value]
        for value in values:
            tensor = scope.tensor_of(value)
            if tensor is not None and tensor.buffer in _NOT_SHARED:
                assert value is not None
                yield Spot(
                    value, f"returns {tensor.name}, allocated in {tensor.buffer}", "buffer=nl.shared_hbm"
                )


@lint_rule("NKI005", Severity.error)
def outputs_are_returned(source: Source, scope: Scope) -> Iterator[Spot]:
    """A launched kernel returns its outputs.

    Kernels that other functions call may write to tensors of their callers and are skipped.
    """
    is_launched = scope.is_kernel and scope.node.name not in source.called
    if is_launched and not any(node.value is not None for node in _find_returns(scope)):
        yield Spot(
            scope.node, f"{scope.node.name} returns nothing", "return the nl.shared_hbm tensors it writes"
        )


@lint_rule("NKI008", Severity.warning)
def no_nested_kernels(source: Source, scope: Scope) -> Iterator[Spot]:
    """A function under @nki.jit is not called from another one; helpers stay undecorated.

    A warning: the language guide says so, and kernels of the vendor's library that compile do it.
    """
    for node in scope.nodes(ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in source.kernels:
            yield Spot(node, f"calls the kernel {node.func.id}", f"remove @nki.jit from {node.func.id}")


@lint_rule("NKI024", Severity.warning, since=Level(0, 4))
def no_old_package(source: Source, scope: Scope) -> Iterator[Spot]:
    """The package neuronxcc.nki is not available to kernels; its successor is nki.

    A warning: where neuronx-cc is installed the import still works, and the vendor's library has one.
    """
    if source.scopes[0] is scope:  # imports belong to the file: report them once
        for node in source.old_imports:
            yield Spot(node, ast.unparse(node), ast.unparse(node).replace("neuronxcc.nki", "nki"))


@lint_rule("NKI025", Severity.warning)
def jit_options(source: Source, scope: Scope) -> Iterator[Spot]:
    """nki.jit takes no platform_target, and ignores mode.

    Both are warnings: samples of the first 0.x releases that compile name a platform.
    """
    for decorator in source.decorators(scope.node):
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
            if keyword.arg == "platform_target":
                yield Spot(decorator, "platform_target=", "set NEURON_PLATFORM_TARGET_OVERRIDE")
            elif keyword.arg == "mode":
                yield Spot(decorator, "mode= is ignored", "@nki.jit, and nki.simulate(kernel)")


_RENDEZVOUS = frozenset(
    {"nisa.core_barrier", "nisa.sendrecv", "nl.fori_loop", "nl.while_loop", "nl.dynamic_range"}
)


@lint_rule("NKI035", Severity.error, since=Level(0, 3))
def same_control_flow(source: Source, scope: Scope) -> Iterator[Spot]:
    """Both cores of a logical core run the same barriers, sendrecvs and device loops.

    Reported are `if` statements on the core number whose branches differ in these calls.
    """
    for node in scope.nodes(ast.If):
        if not _has_core_number(source, scope, node.test):
            continue
        first, second = ([*_find_rendezvous(source, branch)] for branch in (node.body, node.orelse))
        if [name for _, name in first] == [name for _, name in second]:
            continue
        for call, name in first or second:
            yield Spot(
                call, f"{name} in one branch of `if {ast.unparse(node.test)}`", "call it on both cores"
            )


def _has_core_number(source: Source, scope: Scope, test: ast.expr) -> bool:
    return any(
        (isinstance(node, ast.Name) and scope.has(Holds.core_number, node))
        or (isinstance(node, ast.Call) and source.name_of(node.func) == "nl.program_id")
        for node in ast.walk(test)
    )


def _find_rendezvous(source: Source, statements: list[ast.stmt]) -> Iterator[tuple[ast.Call, str]]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and source.name_of(node.func) in _RENDEZVOUS:
                yield node, source.name_of(node.func)


@lint_rule("NKI042", Severity.warning, until=TRACER)
def grid_of_cores(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel is launched on a grid of 1 or 2, the number of physical cores of a logical core.

    Only grids that the source shows as a number or a tuple are checked.
    """
    for node in source.syntax_nodes:
        if (
            source.scopes[0] is scope
            and isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id in source.kernels
            and isinstance(node.slice, (ast.Tuple, ast.Constant))
            and not (isinstance(node.slice, ast.Constant) and node.slice.value in (1, 2))
        ):
            yield Spot(
                node, f"the grid {ast.unparse(node.slice)}", f"{node.value.id}[2] or {node.value.id}[1]"
            )
