"""Lint rules about device loops and registers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import TRACER, Spot, lint_rule
from simulate.check.lint.source import Function, Holds, Scope, Source, argument
from simulate.level import Level

_STEPS = {"nl.fori_loop": 3, "nl.dynamic_range": 2}
_REGISTER_WRITERS = frozenset({"nisa.register_move", "nisa.register_load"})


def _is_register(scope: Scope, node: ast.expr | None) -> bool:
    return scope.has(Holds.register, node)


def _find_functions(scope: Scope, source: Source) -> dict[str, Function]:
    named = {n.name: n for n in source.statements if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    inner = {n.name: n for n in scope.syntax_nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return {**named, **inner}


def _find_body_function(source: Source, scope: Scope, call: ast.Call) -> Function | None:
    """Return the body function of a call of nl.fori_loop or nl.while_loop, None if the source does not define it."""
    node = argument(call, 2 if source.name_of(call.func) == "nl.fori_loop" else 1, "body_fun")
    return _find_functions(scope, source).get(node.id) if isinstance(node, ast.Name) else None


def _find_dynamic_ranges(source: Source, scope: Scope) -> Iterator[ast.For]:
    """Yield the loops over nl.dynamic_range."""
    for node in scope.nodes(ast.For):
        if isinstance(node.iter, ast.Call) and source.name_of(node.iter.func) == "nl.dynamic_range":
            yield node


def _find_counted_bodies(source: Source, scope: Scope) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield, for each device loop with a counter, the counter's name and the statements of the body."""
    for loop in _find_dynamic_ranges(source, scope):
        if isinstance(loop.target, ast.Name):
            yield loop.target.id, loop.body
    for call, name in source.calls(scope):
        body = _find_body_function(source, scope, call) if name == "nl.fori_loop" else None
        if body is not None and body.args.args:
            yield body.args.args[0].arg, body.body


@lint_rule("NKI011", Severity.warning, since=Level(0, 6), until=TRACER)
def old_device_loops(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.dynamic_range and `while register:` are deprecated for nl.fori_loop and nl.while_loop."""
    yield from _find_old_loops(source, scope)


@lint_rule("NKI044", Severity.error, since=TRACER)
def removed_device_loops(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.dynamic_range and `while register:` do not exist from NKI 0.7 on, whose tracer cannot follow them."""
    yield from _find_old_loops(source, scope)


def _find_old_loops(source: Source, scope: Scope) -> Iterator[Spot]:
    for call, name in source.calls(scope):
        if name == "nl.dynamic_range":
            yield Spot(call, "nl.dynamic_range", "nl.fori_loop(lower, upper, body)")
    for node in scope.nodes(ast.While):
        if _is_register(scope, node.test):
            yield Spot(node, f"while {ast.unparse(node.test)}:", "nl.while_loop(register, body)")


@lint_rule("NKI012", Severity.error)
def register_control(source: Source, scope: Scope) -> Iterator[Spot]:
    """A register has a value on the device only: no `if`, int() or range() on it.

    Loops whose condition is a register have rules of their own, NKI011 and NKI044.
    """
    for node in scope.syntax_nodes:
        if isinstance(node, ast.If) and _is_register(scope, node.test):
            yield Spot(node, f"if {ast.unparse(node.test)}:", "nl.while_loop, or a predicate tile")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("int", "range")
            and any(_is_register(scope, arg) for arg in node.args)
        ):
            yield Spot(node, ast.unparse(node), "nl.fori_loop takes registers as bounds")


@lint_rule("NKI013", Severity.error, until=TRACER)
def register_arithmetic(source: Source, scope: Scope) -> Iterator[Spot]:
    """There is no Python arithmetic on registers, nor on the counter of a device loop."""
    counters = {
        node
        for name, statements in _find_counted_bodies(source, scope)
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == name
    }
    hint = "compute in an SBUF tile with nisa.tensor_scalar, then nisa.register_load"
    for binary in scope.nodes(ast.BinOp):
        if any(_is_register(scope, side) or side in counters for side in (binary.left, binary.right)):
            yield Spot(binary, ast.unparse(binary), hint)


@lint_rule("NKI014", Severity.error)
def counter_is_read_only(source: Source, scope: Scope) -> Iterator[Spot]:
    """No instruction writes to the counter of a device loop."""
    for counter, statements in _find_counted_bodies(source, scope):
        for node in (node for statement in statements for node in ast.walk(statement)):
            if isinstance(node, ast.Call) and source.name_of(node.func) in _REGISTER_WRITERS:
                target = argument(node, 0, "dst")
                if isinstance(target, ast.Name) and target.id == counter:
                    yield Spot(node, f"writes the counter {counter}", "use a separate register")


@lint_rule("NKI015", Severity.error)
def constant_step(source: Source, scope: Scope) -> Iterator[Spot]:
    """The step of a device loop is a positive compile-time integer."""
    for call, name in source.calls(scope):
        if name not in _STEPS:
            continue
        step = argument(call, _STEPS[name], "step")
        value = step.operand if isinstance(step, ast.UnaryOp) and isinstance(step.op, ast.USub) else step
        number = value.value if isinstance(value, ast.Constant) else 1
        wrong = isinstance(number, (int, float)) and (
            number < 1 or number != int(number) or value is not step
        )
        if _is_register(scope, step) or (step is not None and wrong):
            assert step is not None
            yield Spot(step, f"step {ast.unparse(step)}", "a Python int, 1 or more")


@lint_rule("NKI016", Severity.error)
def body_tensors_stay_inside(source: Source, scope: Scope) -> Iterator[Spot]:
    """A tensor made in the body of a loop over nl.dynamic_range is not used after the loop."""
    for node in _find_dynamic_ranges(source, scope):
        end = node.end_lineno or node.lineno
        inside = {name for name, tensor in scope.tensors.items() if node.lineno <= tensor.line <= end}
        for use in scope.nodes(ast.Name):
            if use.id in inside and use.lineno > end and isinstance(use.ctx, ast.Load):
                yield Spot(use, f"{use.id} was made inside the loop", "allocate it before the loop")


@lint_rule("NKI017", Severity.error)
def no_reorder_holds_no_loop(source: Source, scope: Scope) -> Iterator[Spot]:
    """There is no device loop inside `with nl.no_reorder():`."""
    for node in scope.nodes(ast.With):
        names = [
            source.name_of(i.context_expr.func) for i in node.items if isinstance(i.context_expr, ast.Call)
        ]
        if "nl.no_reorder" not in names:
            continue
        for call in (child for statement in node.body for child in ast.walk(statement)):
            if isinstance(call, ast.Call) and source.name_of(call.func) in (*_STEPS, "nl.while_loop"):
                yield Spot(
                    call,
                    f"{source.name_of(call.func)} inside nl.no_reorder()",
                    "put no_reorder into the body",
                )


@lint_rule("NKI018", Severity.error)
def what_bodies_return(source: Source, scope: Scope) -> Iterator[Spot]:
    """The body of nl.fori_loop returns nothing; the body of nl.while_loop returns the register to test next."""
    for call, name in source.calls(scope):
        if name not in ("nl.fori_loop", "nl.while_loop"):
            continue
        body = _find_body_function(source, scope, call)
        if body is None:
            continue
        returns = [n for n in ast.walk(body) if isinstance(n, ast.Return) and n.value is not None]
        if name == "nl.fori_loop" and returns:
            yield Spot(
                returns[0], f"the body {body.name} returns a value", "write to a tile that outlives the body"
            )
        elif name == "nl.while_loop" and not returns:
            yield Spot(call, f"the body {body.name} returns nothing", "return the register to test next")


@lint_rule("NKI041", Severity.error)
def requests_stay_in_the_loop(source: Source, scope: Scope) -> Iterator[Spot]:
    """depends_on names no instruction inside a device loop, unless the waiting instruction is inside it as well."""
    bodies: list[ast.AST] = [
        body
        for call, name in source.calls(scope)
        if name in ("nl.fori_loop", "nl.while_loop")
        and (body := _find_body_function(source, scope, call)) is not None
    ]
    bodies += _find_dynamic_ranges(source, scope)
    assigned_lines: dict[str, list[int]] = {}
    for assignment in scope.nodes(ast.Assign):
        if isinstance(assignment.targets[0], ast.Name):
            assigned_lines.setdefault(assignment.targets[0].id, []).append(assignment.lineno)
    for node in scope.nodes(ast.Call):
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "depends_on"):
            continue
        consumer = node.func.value
        if not isinstance(consumer, ast.Name):
            continue
        consumer_loops = _find_enclosing_loops(bodies, assigned_lines.get(consumer.id, []))
        for producer in node.args:
            producer_loops = (
                _find_enclosing_loops(bodies, assigned_lines.get(producer.id, []))
                if isinstance(producer, ast.Name)
                else None
            )
            if (
                consumer_loops is not None
                and producer_loops is not None
                and not producer_loops <= consumer_loops
            ):
                assert isinstance(producer, ast.Name)
                yield Spot(
                    node,
                    f"{consumer.id} depends on {producer.id}, which is issued inside a device loop",
                    "keep both in the body, or the producer before the loop",
                )


def _find_enclosing_loops(bodies: list[ast.AST], lines: list[int]) -> frozenset[int] | None:
    """Return the indices in `bodies` of the device loops around the line that assigns a name.

    None if `lines`, the lines that assign the name, are not exactly one.
    """
    if len(lines) != 1:
        return None
    return frozenset(
        index
        for index, body in enumerate(bodies)
        if getattr(body, "lineno", 0) <= lines[0] <= (getattr(body, "end_lineno", 0) or 0)
    )
