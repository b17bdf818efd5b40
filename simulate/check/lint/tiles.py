"""Lint rules that follow a name through a function: run-time views, and tiles read before they are written."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import Spot, lint_rule
from simulate.check.lint.source import Holds, Scope, Source, argument, base_of
from simulate.isa import INSTRUCTIONS
from simulate.isa.book import documented_signature

_READERS = frozenset({"nl.store", "nl.device_print"})


def _find_selected_dim(scope: Scope, node: ast.expr) -> int | None:
    """Return the dim that a call of a view method selects at run time, None if it selects none.

    vector_select selects dim 0. select does with a tile or register as its index, ap with a scalar or vector
    offset.
    """
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if node.func.attr == "vector_select":
        return 0
    if node.func.attr == "select":
        index, dim = argument(node, 1, "index"), argument(node, 0, "dim")
        index_object = scope.holds.get(index.id) if isinstance(index, ast.Name) else None
        return _read_number(dim, -1) if index_object in (Holds.tensor, Holds.register) else None
    if node.func.attr == "ap":
        offsets = [k for k in node.keywords if k.arg in ("scalar_offset", "vector_offset")]
        named = [k for k in offsets if not (isinstance(k.value, ast.Constant) and k.value.value is None)]
        return _read_number(argument(node, 4, "indirect_dim"), 0) if named else None
    return None


def _read_number(node: ast.expr | None, otherwise: int) -> int:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else otherwise


def _find_dynamic_views(scope: Scope) -> dict[str, tuple[ast.expr, int]]:
    """Return, by name, the call and the selected dim of each view that is selected at run time.

    Only names that are assigned once count.
    """
    assigned: dict[str, list[ast.expr]] = {}
    for node in scope.nodes(ast.Assign):
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    views = {}
    for name, values in assigned.items():
        dim = _find_selected_dim(scope, values[0]) if len(values) == 1 else None
        if dim is not None:
            views[name] = values[0], dim
    return views


@lint_rule("NKI038", Severity.error)
def one_dynamic_index(source: Source, scope: Scope) -> Iterator[Spot]:
    """A view is indexed at run time once, and the dim of that index is not sliced or selected again."""
    views = _find_dynamic_views(scope)

    def find_dynamic_dim(node: ast.expr) -> int | None:
        if isinstance(node, ast.Name):
            return views[node.id][1] if node.id in views else None
        return _find_selected_dim(scope, node)

    for node in scope.syntax_nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            dim = find_dynamic_dim(node.func.value)
            if dim is None:
                continue
            if _find_selected_dim(scope, node) is not None:
                yield Spot(
                    node,
                    f"{node.func.attr} of a view that is indexed at run time already",
                    "copy the rows with nisa.dma_copy first, and select from the copy",
                )
            elif node.func.attr in ("slice", "select") and _read_number(argument(node, 0, "dim"), -1) == dim:
                yield _report_slice(node, node.func.attr, dim)
        elif isinstance(node, ast.Subscript):
            dim = find_dynamic_dim(node.value)
            keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            plain = not any(map(_is_ellipsis, keys))
            if dim is not None and 0 <= dim < len(keys) and plain and not _is_full_slice(keys[dim]):
                yield _report_slice(node, ast.unparse(node), dim)


def _is_ellipsis(key: ast.expr) -> bool:
    return isinstance(key, ast.Starred) or (isinstance(key, ast.Constant) and key.value is Ellipsis)


def _is_full_slice(key: ast.expr) -> bool:
    return isinstance(key, ast.Slice) and key.lower is None and key.upper is None and key.step is None


def _report_slice(node: ast.expr, seen: str, dim: int) -> Spot:
    return Spot(node, f"{seen} on dim {dim}, which is selected at run time", "slice the index tile instead")


@lint_rule("NKI040", Severity.warning)
def tiles_are_filled_first(source: Source, scope: Scope) -> Iterator[Spot]:
    """A tile from nl.ndarray is written before it is read; on chip it holds earlier data."""
    loops = [n for n in scope.syntax_nodes if isinstance(n, (ast.For, ast.While))]
    nested = [n for n in scope.syntax_nodes if isinstance(n, ast.FunctionDef) and n is not scope.node]
    positions: dict[int, tuple[int, int]] = {}
    for name, tensor in scope.tensors.items():
        if tensor.buffer not in ("nl.sbuf", "nl.psum") or not is_allocated_once(source, scope, name):
            continue
        positions = positions or _map_statement_positions(scope)
        uses = _find_uses(source, scope, name, positions)
        if not uses or nested:  # a function inside may write it before
            continue
        first, reads = uses[0]
        later_writes = [node for node, reading in uses if not reading]
        enclosing = [loop for loop in loops if _is_inside(first, loop) and loop.lineno > tensor.line]
        if reads and not any(_is_inside(write, loop) for write in later_writes for loop in enclosing):
            yield Spot(first, f"{name} is read, and nothing has written it", "nisa.memset or load it first")


def is_allocated_once(source: Source, scope: Scope, name: str) -> bool:
    """Return whether a name is bound exactly once in the function, to a call of nl.ndarray."""
    values = [
        node.value
        for node in scope.nodes(ast.Assign)
        if any(isinstance(n, ast.Name) and n.id == name for t in node.targets for n in ast.walk(t))
    ]
    calls = [value for value in values if isinstance(value, ast.Call)]
    return len(values) == len(calls) == 1 and source.name_of(calls[0].func) == "nl.ndarray"


def _find_uses(
    source: Source, scope: Scope, name: str, positions: dict[int, tuple[int, int]]
) -> list[tuple[ast.expr, bool]]:
    """Return (node, is_read) for each use of a name in program order.

    is_read is True where an instruction only reads the variable. Within one statement the reads come first.
    Uses of the variable's shape, dtype, ndim and buffer are left out.

    Args:
        source: The file.
        scope: The function.
        name: The variable.
        positions: Positions of the statements around expressions, from `_map_statement_positions`.
    """
    reading: set[int] = set()
    for call, called in source.calls(scope):
        for parameter, value in _iter_operands(call, called):
            base = base_of(value)
            if isinstance(base, ast.Name) and base.id == name and _is_input(called, parameter):
                reading.add(id(base))
    names = [n for n in scope.nodes(ast.Name) if n.id == name and isinstance(n.ctx, ast.Load)]
    ignored = {
        id(node.value)
        for node in scope.nodes(ast.Attribute)
        if node.attr in ("shape", "dtype", "ndim", "buffer")
    }
    kept = sorted((node for node in names if id(node) not in ignored), key=lambda n: (n.lineno, n.col_offset))
    # The inputs of a call come first, because the call reads before it writes.
    uses = [(node, id(node) in reading) for node in kept]
    return sorted(
        uses, key=lambda use: (positions.get(id(use[0]), (use[0].lineno, use[0].col_offset)), not use[1])
    )


def _map_statement_positions(scope: Scope) -> dict[int, tuple[int, int]]:
    """Return (line, column) of the statement around each expression, by the id() of the expression's node."""
    return {
        id(node): (statement.lineno, statement.col_offset)
        for statement in scope.syntax_nodes
        if isinstance(statement, (ast.Expr, ast.Assign, ast.Return))
        for node in ast.walk(statement)
    }


def _iter_operands(call: ast.Call, called: str) -> Iterator[tuple[str, ast.expr]]:
    planner = INSTRUCTIONS.get(called.removeprefix("nisa.")) if called.startswith("nisa.") else None
    names = list(documented_signature(planner).parameters) if planner is not None else ["dst", "value"]
    yield from zip(names, call.args)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


def _is_input(called: str, parameter: str) -> bool:
    """Return whether a call only reads its argument for a parameter.

    Args:
        called: The dotted name of what is called.
        parameter: The name of the parameter.
    """
    if called in _READERS:
        return parameter == "value" or called == "nl.device_print"
    known = called.startswith("nisa.") and called.removeprefix("nisa.") in INSTRUCTIONS
    barrier = called == "nisa.core_barrier"
    return known and not barrier and not any(word in parameter for word in ("dst", "res", "name"))


def _is_inside(node: ast.AST, outer: ast.AST) -> bool:
    line = getattr(node, "lineno", 0)
    return getattr(outer, "lineno", 0) <= line <= (getattr(outer, "end_lineno", 0) or 0)


@lint_rule("NKW-DMA-RESHAPED", Severity.warning)
def dma_into_an_allocation(source: Source, scope: Scope) -> Iterator[Spot]:
    """A DMA writes to a tensor as it was allocated, not to a reshaped view of HBM.

    A user report: the DMA wrote the right elements in simulation and wrong ones on the chip.
    """
    outputs = {
        name for name, tensor in scope.tensors.items() if tensor.buffer in ("nl.shared_hbm", "nl.private_hbm")
    }
    reshaped = {
        target.id
        for node in scope.nodes(ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and _is_reshaped_tensor(node.value, outputs)
    }
    for call, name in source.calls(scope):
        target = base_of(argument(call, 0, "dst")) if name == "nisa.dma_copy" else None
        if target is not None and (
            (isinstance(target, ast.Name) and target.id in reshaped) or _is_reshaped_tensor(target, outputs)
        ):
            yield Spot(
                call,
                f"a DMA into {ast.unparse(target)}, a reshaped tensor of HBM (a user report: wrong on the chip)",
                "allocate it in the shape in which it is written",
            )


def _is_reshaped_tensor(node: ast.expr, tensors: set[str]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "reshape"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in tensors
    )
