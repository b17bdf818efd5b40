"""Lint rules about tensors used as Python values, and about PSUM tiles that outlive a loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import Spot, lint_rule
from simulate.check.lint.source import Holds, Scope, Source, argument, base_of
from simulate.isa import INSTRUCTIONS
from simulate.isa.book import documented_signature
from simulate.level import Level

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "nl.add",
    ast.Sub: "nl.subtract",
    ast.Mult: "nl.multiply",
    ast.Pow: "nl.power",
}
_CONVERSIONS = frozenset({"int", "float", "bool"})


def _is_tensor(scope: Scope, node: ast.expr | None) -> bool:
    if isinstance(node, ast.Subscript):
        return _is_tensor(scope, node.value)
    return scope.has(Holds.tensor, node)


@lint_rule("NKI019", Severity.error)
def no_operators(source: Source, scope: Scope) -> Iterator[Spot]:
    """Tensors take no Python operators, and only a tensor can be assigned to a slice of a tensor."""
    for node in scope.syntax_nodes:
        if isinstance(node, ast.BinOp) and (_is_tensor(scope, node.left) or _is_tensor(scope, node.right)):
            op = _OPERATORS.get(type(node.op), "…")
            yield Spot(node, ast.unparse(node), f"nisa.tensor_tensor or nisa.tensor_scalar with op={op}")
        elif isinstance(node, ast.UnaryOp) and _is_tensor(scope, node.operand):
            yield Spot(node, ast.unparse(node), "nisa.tensor_scalar")
        elif isinstance(node, ast.AugAssign) and _is_tensor(scope, node.target):
            yield Spot(node, ast.unparse(node), "nisa.tensor_tensor(dst=tile, data1=tile, …)")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                to_tensor = isinstance(target, ast.Subscript) and _is_tensor(scope, target)
                if to_tensor and not _can_be_tensor(source, scope, node.value):
                    yield Spot(
                        node,
                        f"{ast.unparse(target)} = {ast.unparse(node.value)}",
                        "nisa.memset(dst=…, value=…)",
                    )


def _can_be_tensor(source: Source, scope: Scope, node: ast.expr) -> bool:
    """Return whether an assigned value may be a tensor; numbers and what an instruction returned are not."""
    if isinstance(node, ast.Name):
        return scope.holds.get(node.id, Holds.tensor) is Holds.tensor
    if isinstance(node, ast.Call):
        return not (source.name_of(node.func) or "").startswith("nisa.")
    return isinstance(node, (ast.Subscript, ast.Attribute))


@lint_rule("NKI020", Severity.error)
def no_values_into_python(source: Source, scope: Scope) -> Iterator[Spot]:
    """Python does not read the values of a tensor: no if, while, int(), float() or bool() on it."""
    for node in scope.syntax_nodes:
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            conditions = [node.test, *(node.test.values if isinstance(node.test, ast.BoolOp) else [])]
            for condition in conditions:
                compared = (
                    [condition.left, *condition.comparators]
                    if isinstance(condition, ast.Compare)
                    else [condition]
                )
                identity = isinstance(condition, ast.Compare) and any(
                    isinstance(c, ast.Constant) and c.value is None for c in condition.comparators
                )
                if not identity and any(_is_tensor(scope, operand) for operand in compared):
                    yield Spot(
                        node,
                        f"decides by {ast.unparse(condition)}",
                        "nisa.tensor_copy_predicated or nisa.select_reduce",
                    )
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _CONVERSIONS
            and node.args
            and _is_tensor(scope, node.args[0])
        ):
            yield Spot(node, ast.unparse(node), "keep the value in a tile")


@lint_rule("NKI022", Severity.error)
def results_are_not_tiles(source: Source, scope: Scope) -> Iterator[Spot]:
    """An instruction gets a dst tile for its result; the handle that it returns is not passed to other calls.

    Two faults are reported: a call without dst, and an argument that is what an instruction returned.
    """
    for call, name in source.calls(scope):
        if not name.startswith(("nisa.", "nl.")):
            continue
        planner = INSTRUCTIONS.get(name.removeprefix("nisa.")) if name.startswith("nisa.") else None
        parameters = [*documented_signature(planner).parameters] if planner is not None else []
        unpacked = any(isinstance(arg, ast.Starred) for arg in call.args)
        unpacked = unpacked or any(keyword.arg is None for keyword in call.keywords)
        if "dst" in parameters and not unpacked and argument(call, parameters.index("dst"), "dst") is None:
            hint = f"allocate the result with nl.ndarray, and {name}(dst=…)"
            yield Spot(call, f"{name} without dst", hint)
        for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
            if scope.has(Holds.instruction, value):
                seen = f"{ast.unparse(value)} is what an instruction returned"
                yield Spot(value, seen, "pass the tile that was its dst")


@lint_rule("NKI033", Severity.error, since=Level(0, 3))
def dma_from_psum(source: Source, scope: Scope) -> Iterator[Spot]:
    """A DMA does not read PSUM.

    Reported are nisa.dma_copy and nl.store of a tile that was allocated in PSUM.
    """
    for call, name in source.calls(scope):
        position, keyword = {"nisa.dma_copy": (1, "src"), "nl.store": (1, "value")}.get(name, (0, ""))
        value = argument(call, position, keyword) if keyword else None
        tensor = scope.tensor_of(base_of(value))
        if tensor is not None and tensor.buffer == "nl.psum":
            yield Spot(call, f"{name} from {tensor.name} in PSUM", "nisa.tensor_copy it to SBUF first")


@lint_rule("NKI034", Severity.error)
def integer_memset(source: Source, scope: Scope) -> Iterator[Spot]:
    """nisa.memset fills an integer tile with an integer, not a float."""
    for call, name in source.calls(scope):
        if name != "nisa.memset":
            continue
        target, value = argument(call, 0, "dst"), argument(call, 1, "value")
        tensor = scope.tensor_of(base_of(target))
        if tensor is None or not (tensor.dtype or "").removeprefix("nl.").startswith(("int", "uint")):
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, float):
            yield Spot(call, f"value={value.value} for {tensor.dtype}", f"value={int(value.value)}")


@lint_rule("NKI036", Severity.warning)
def psum_over_outer_loops(source: Source, scope: Scope) -> Iterator[Spot]:
    """A PSUM tile that outlives an outer iteration keeps accumulating unless accumulate= says when to start."""
    loops = [*scope.nodes(ast.For)]
    for call, name in source.calls(scope):
        if name != "nisa.nc_matmul" or argument(call, 3, "accumulate") is not None:
            continue
        tensor = scope.tensor_of(argument(call, 0, "dst"))
        if tensor is None or tensor.buffer != "nl.psum":
            continue
        enclosing = [n for n in loops if n.lineno <= call.lineno <= (n.end_lineno or n.lineno)]
        outside = [n for n in enclosing if not n.lineno <= tensor.line <= (n.end_lineno or n.lineno)]
        if len(outside) > 1:
            seen = f"{tensor.name} lives across {len(outside)} loops"
            yield Spot(call, seen, "accumulate=(k > 0), or allocate it inside")


@lint_rule("NKI037", Severity.error)
def partition_step(source: Source, scope: Scope) -> Iterator[Spot]:
    """The step of the first pair of .ap(pattern=…) on a tile on chip is the free size of the tile."""
    for node in scope.nodes(ast.Call):
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "ap"):
            continue
        tensor = scope.tensor_of(node.func.value)
        pattern = argument(node, 0, "pattern")
        if tensor is None or tensor.shape is None or tensor.buffer not in ("nl.sbuf", "nl.psum"):
            continue
        if (
            argument(node, 6, "dtype") is not None
            or not isinstance(pattern, (ast.List, ast.Tuple))
            or not pattern.elts
        ):
            continue
        first = pattern.elts[0]
        pair = (
            [e.value for e in first.elts if isinstance(e, ast.Constant) and isinstance(e.value, int)]
            if isinstance(first, (ast.List, ast.Tuple))
            else []
        )
        free = 1
        for extent in tensor.shape[1:]:
            free *= extent
        if len(pair) == 2 and pair[1] != 1 and pair[0] != free:
            yield Spot(
                node, f"first pair {pair} on a tile of {free} elements per partition", f"[{free}, {pair[1]}]"
            )
