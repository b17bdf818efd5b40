"""Mutation operators: kinds of changes of a kernel's syntax tree, and the nodes that each applies to.

A guard is a function or assertion that only refuses bad arguments; guards are not mutated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.mutants.source import MODULES, Mutant, Path_, guards, kernels, tree

Change = tuple[str, str, Path_]
"""What is changed, the new source, and the path of the expression below the node that an operator looked at."""

_SIZES = (
    "PARTITIONS",
    "BANK",
    "ACCUMULATOR_BANKS",
    "WEIGHT_ELEMENTS",
    "RESIDENT_ELEMENTS",
    "MAX_SEARCHED",
    "_EIGHT",
)
_FILLS = ("MASKED", "_REMOVED")
_OTHER_OPERATOR = {
    "add": "subtract",
    "subtract": "add",
    "multiply": "add",
    "maximum": "minimum",
    "minimum": "maximum",
    "greater": "greater_equal",
    "greater_equal": "greater",
    "less_equal": "less",
    "exp": "square",
    "square": "abs",
    "silu": "gelu",
    "rsqrt": "sqrt",
}
_OTHER_DTYPE = {
    "float32": ("bfloat16", "int32"),
    "int32": ("float32", "int16"),
    "uint32": ("float32", "uint16"),
    "bfloat16": ("float32",),
}
_BUFFERS = ("sbuf", "psum", "private_hbm")
_OTHER_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "+"}
_OTHER_COMPARISON = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_SWAPPED = (
    ("data1", "data2"),
    ("stationary", "moving"),
    ("dst", "src"),
    ("op0", "op1"),
    ("operand0", "operand1"),
)
_INSTRUCTIONS = ("nisa", "ncc")
_RANKS = "__import__('nki').collectives"


def mutants() -> list[Mutant]:
    """Return every mutant of every kernel file, in the order of the source, with unique keys."""
    candidates: list[Mutant] = []
    for module in MODULES:
        candidates += _constants(module)
        for function, path in kernels(module):
            for number, statement in enumerate(function.body):
                if not _docstring(function, number):
                    candidates += _below(module, function.name, statement, (*path, "body", number))
            candidates += _in_blocks(module, function, path)
    seen: dict[str, int] = {}
    unique = []
    for mutant in candidates:
        seen[mutant.key] = seen.get(mutant.key, 0) + 1
        unique.append(replace(mutant, number=seen[mutant.key] if seen[mutant.key] > 1 else 0))
    return unique


def _docstring(function: ast.FunctionDef, number: int) -> bool:
    """Return whether statement `number` of a function is its docstring."""
    return number == 0 and ast.get_docstring(function) is not None


def _constants(module: str) -> Iterator[Mutant]:
    """Yield mutants of the tile sizes and fill values that a module defines as constants."""
    for number, node in enumerate(tree(module).body):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name, value = node.targets[0].id, ast.unparse(node.value)
        news = ()
        if name in _SIZES:
            news = (f"{value} + 1", f"{value} - 1", f"{value} * 2", f"{value} // 2")
        elif name in _FILLS:
            news = ("0.0", "-1.0", f"-({value})")
        operator = "tile size" if name in _SIZES else "value"
        for new in news:
            yield Mutant(module, "", operator, f"{name} = {new}", node.lineno, ("body", number, "value"), new)


# -- statements -----------------------------------------------------------------------------------------------------


def _in_blocks(module: str, function: ast.FunctionDef, path: Path_) -> Iterator[Mutant]:
    """Yield mutants that drop, repeat or exchange statements, in every block of a function.

    A collective is also skipped on rank 0.
    """
    for block, where in _blocks(function, path):
        for number, node in enumerate(block):
            position = (*where, number)
            if _acts(node):
                source = ast.unparse(node)
                yield Mutant(module, function.name, "drop", _short(source), node.lineno, position, "pass", 1)
                yield Mutant(
                    module,
                    function.name,
                    "duplicate",
                    _short(source),
                    node.lineno,
                    position,
                    count=1,
                    moved=(0, 0),
                )
                if source.startswith("ncc."):
                    indented = "\n    ".join(source.splitlines())
                    new = f"if {_RANKS}.rank_id().value > 0:\n    {indented}"
                    yield Mutant(
                        module,
                        function.name,
                        "rank",
                        f"not on rank 0: {_short(source)}",
                        node.lineno,
                        position,
                        new,
                        1,
                    )
            if number + 1 < len(block) and _exchange(node, block[number + 1]):
                change = f"{_short(ast.unparse(node), 40)} <-> {_short(ast.unparse(block[number + 1]), 40)}"
                yield Mutant(
                    module, function.name, "swap", change, node.lineno, position, count=2, moved=(1, 0)
                )


def _blocks(node: ast.AST, path: Path_) -> Iterator[tuple[list[ast.stmt], Path_]]:
    """Yield each block of statements below a node, with its path in the module's tree."""
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block, (*path, name)
            for number, child in enumerate(block):
                yield from _blocks(child, (*path, name, number))


def _acts(node: ast.stmt) -> bool:
    """Return whether a statement is a call of an instruction or of a helper other than a guard."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    return _name(node.value.func) not in guards()


def _exchange(first: ast.stmt, second: ast.stmt) -> bool:
    """Return whether two statements are worth exchanging: one of them acts, and Python allows the other order."""
    if isinstance(first, (ast.Assert, ast.Return)) or isinstance(second, (ast.Assert, ast.Return)):
        return False
    if not (_acts(first) or _acts(second)):
        return False
    assigned = {n.id for n in ast.walk(first) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    used = {n.id for n in ast.walk(second) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return not (assigned & used) and not _is_text(first) and not _is_text(second)


def _is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring or another constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# -- expressions ----------------------------------------------------------------------------------------------------


def _below(module: str, function: str, node: ast.AST, path: Path_) -> Iterator[Mutant]:
    """Yield the mutants of a node and of everything below it, except guards."""
    if isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and _name(node.func) in guards()):
        return
    for operator, look in _OPERATORS.items():
        for change, new, below in look(node):
            line = getattr(node, "lineno", 0)
            yield Mutant(module, function, operator, change, line, (*path, *below), new)
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield from _below(module, function, value, (*path, field))
        elif isinstance(value, list):
            for number, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield from _below(module, function, child, (*path, field, number))


def _bound(node: ast.AST) -> Iterator[Change]:
    """Yield changes of the bounds of slices and ranges by one."""
    if isinstance(node, ast.Slice):
        for field in ("lower", "upper"):
            edge = getattr(node, field)
            if edge is not None:
                for step in ("+ 1", "- 1"):
                    if not (step == "- 1" and isinstance(edge, ast.Constant) and edge.value == 0):
                        yield _around(f"{field} of {ast.unparse(node)}", edge, step, (field,))
    if isinstance(node, ast.Call) and _name(node.func) in ("range", "slice"):
        for number, edge in enumerate(node.args):
            for step in ("+ 1", "- 1"):
                if not (step == "- 1" and isinstance(edge, ast.Constant) and edge.value == 0):
                    yield _around(ast.unparse(node), edge, step, ("args", number))


def _clamp(node: ast.AST) -> Iterator[Change]:
    """Yield changes of min and max to one of their two arguments."""
    if isinstance(node, ast.Call) and _name(node.func) in ("min", "max") and len(node.args) == 2:
        for kept in (0, 1):
            new = ast.unparse(node.args[kept])
            # The call itself cannot be replaced from below, so it becomes a call with one argument twice.
            yield f"{ast.unparse(node)} -> {new}", new, ("args", 1 - kept)


def _size(node: ast.AST) -> Iterator[Change]:
    """Yield changes of a tile's size by one element in one dim."""
    if _allocates(node) and isinstance(node.args[0], ast.Tuple):  # type: ignore[attr-defined]
        for number, extent in enumerate(node.args[0].elts):  # type: ignore[attr-defined]
            for step in ("+ 1", "- 1"):
                yield _around(ast.unparse(node.args[0]), extent, step, ("args", 0, "elts", number))  # type: ignore[attr-defined]


def _accumulate(node: ast.AST) -> Iterator[Change]:
    """Yield changes of `accumulate` to True, False, None and its negation."""
    if isinstance(node, ast.Call):
        for number, keyword in enumerate(node.keywords):
            if keyword.arg == "accumulate":
                old = ast.unparse(keyword.value)
                for new in ("True", "False", "None", f"not ({old})"):
                    if new != old:
                        yield f"accumulate={old} -> {new}", new, ("keywords", number, "value")


def _buffer(node: ast.AST) -> Iterator[Change]:
    """Yield changes of a tile's memory."""
    for old, below in _keyword(node, "buffer"):
        for other in _BUFFERS:
            if old not in (f"nl.{other}", "nl.hbm"):
                yield f"{_tile(node)} buffer={old} -> nl.{other}", f"nl.{other}", below


def _dtype(node: ast.AST) -> Iterator[Change]:
    """Yield changes of the dtype of a tile, a load or a cast."""
    for old, below in _keyword(node, "dtype"):
        for other in _other_dtypes(old):
            yield f"{_tile(node)} dtype={old} -> nl.{other}", f"nl.{other}", below
    if (
        isinstance(node, ast.Call)
        and _name(node.func) in ("load", "cast", "load_blocks")
        and len(node.args) > 1
    ):
        old = ast.unparse(node.args[1])
        for other in _other_dtypes(old):
            yield f"{_short(ast.unparse(node))} -> nl.{other}", f"nl.{other}", ("args", 1)


def _other_dtypes(old: str) -> tuple[str, ...]:
    """Return the dtypes that replace a dtype; most dtypes become bfloat16."""
    return _OTHER_DTYPE.get(old.removeprefix("nl."), ("bfloat16",))


def _operator(node: ast.AST) -> Iterator[Change]:
    """Yield changes of an instruction's operator."""
    if isinstance(node, ast.keyword) and node.arg in ("op", "op0", "op1", "reduce_op", "cmp_op"):
        old = ast.unparse(node.value).removeprefix("nl.")
        if old in _OTHER_OPERATOR:
            yield (
                f"{node.arg}=nl.{old} -> nl.{_OTHER_OPERATOR[old]}",
                f"nl.{_OTHER_OPERATOR[old]}",
                ("value",),
            )


def _arithmetic(node: ast.AST) -> Iterator[Change]:
    """Yield changes of the operator of an arithmetic operation or a comparison."""
    for field, value in ast.iter_fields(node):
        for below, child in _children(field, value):
            if isinstance(child, ast.BinOp) and type(child.op) in _OTHER_ARITHMETIC:
                left, right = ast.unparse(child.left), ast.unparse(child.right)
                new = f"({left}) {_OTHER_ARITHMETIC[type(child.op)]} ({right})"
                yield f"{ast.unparse(child)} -> {new}", new, below
            elif isinstance(child, ast.Compare) and type(child.ops[0]) in _OTHER_COMPARISON:
                left, right = ast.unparse(child.left), ast.unparse(child.comparators[0])
                new = f"{left} {_OTHER_COMPARISON[type(child.ops[0])]} {right}"
                yield f"{ast.unparse(child)} -> {new}", new, below


def _condition(node: ast.AST) -> Iterator[Change]:
    """Yield changes of a condition to True and to False."""
    if isinstance(node, (ast.If, ast.IfExp)):
        for new in ("True", "False"):
            yield f"if {ast.unparse(node.test)} -> {new}", new, ("test",)


def _value(node: ast.AST) -> Iterator[Change]:
    """Yield changes of the numbers and flags that an instruction or helper gets by keyword."""
    if isinstance(node, ast.keyword) and node.arg != "accumulate":
        old = node.value
        if isinstance(old, ast.Constant) and isinstance(old.value, bool):
            yield f"{node.arg}={old.value} -> {not old.value}", str(not old.value), ("value",)
        elif isinstance(old, ast.Constant) and isinstance(old.value, (int, float)):
            yield _around(f"{node.arg}={ast.unparse(old)}", old, "+ 1", ("value",))
        elif isinstance(old, ast.UnaryOp) and isinstance(old.op, ast.USub):
            yield (
                f"{node.arg}={ast.unparse(old)} -> {ast.unparse(old.operand)}",
                ast.unparse(old.operand),
                ("value",),
            )
        elif node.arg in ("offset", "scale"):
            yield _around(f"{node.arg}={ast.unparse(old)}", old, "+ 1", ("value",))


def _pattern(node: ast.AST) -> Iterator[Change]:
    """Yield changes by one of the steps and counts in access patterns, and of the axes in permutations.

    The step of a dim of size 1 stays, because it has no effect.
    """
    if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.List):
        for pair, inner in enumerate(node.elts):
            assert isinstance(inner, ast.List)
            is_single = ast.unparse(inner.elts[-1]) == "1"
            for number, element in enumerate(inner.elts):
                if is_single and number == 0:
                    continue
                for step in ("+ 1", "- 1"):
                    yield _around(ast.unparse(node), element, step, ("elts", pair, "elts", number))
    if isinstance(node, ast.Call) and _name(node.func) == "permute":
        for number, dim in enumerate(getattr(node.args[0], "elts", [])):
            yield _around(ast.unparse(node.args[0]), dim, "- 1", ("args", 0, "elts", number))


def _operands(node: ast.AST) -> Iterator[Change]:
    """Yield changes of one keyword operand to another operand of the same call, as `data1` to `data2`."""
    if not isinstance(node, ast.Call):
        return
    names = {keyword.arg: number for number, keyword in enumerate(node.keywords)}
    for one, other in _SWAPPED:
        if one in names and other in names:
            for to, source in ((one, other), (other, one)):
                new = ast.unparse(node.keywords[names[source]].value)
                old = ast.unparse(node.keywords[names[to]].value)
                if new != old:
                    yield (
                        f"{_called(node)} {to}={_short(old, 40)} -> {_short(new, 40)}",
                        new,
                        ("keywords", names[to], "value"),
                    )


def _argument(node: ast.AST) -> Iterator[Change]:
    """Yield changes of a keyword argument of an instruction to None."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and _name(node.func.value) in _INSTRUCTIONS
    ):
        for number, keyword in enumerate(node.keywords):
            if keyword.arg not in ("dst", "accumulate", "replica_group"):
                yield f"{_called(node)} {keyword.arg} -> None", "None", ("keywords", number, "value")


def _group(node: ast.AST) -> Iterator[Change]:
    """Yield changes of a collective's replica group, as None, one rank alone, or another order."""
    for old, below in _keyword(node, "replica_group"):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _name(node.func.value) == "ncc"
        ):
            group = f"{_RANKS}.ReplicaGroup"
            ranks = f"[rank for ranks in {old}.groups for rank in ranks]"
            for change, new in (
                ("None", "None"),
                ("rank 0 alone", f"{group}([[0]])"),
                ("every rank alone", f"{group}([[rank] for rank in {ranks}])"),
                ("the order reversed", f"{group}([list(reversed(ranks)) for ranks in {old}.groups])"),
                ("one rank too many", f"{group}([[*{ranks}, len({ranks})]])"),
                ("another on rank 0", f"{group}([{ranks}[::-1 if {_RANKS}.rank_id().value else 1]])"),
            ):
                yield f"{_called(node)} replica_group: {change}", new, below


_OPERATORS: dict[str, Callable[[ast.AST], Iterator[Change]]] = {
    "bound": _bound,
    "clamp": _clamp,
    "tile size": _size,
    "accumulate": _accumulate,
    "buffer": _buffer,
    "dtype": _dtype,
    "operator": _operator,
    "arithmetic": _arithmetic,
    "condition": _condition,
    "value": _value,
    "pattern": _pattern,
    "operand": _operands,
    "argument": _argument,
    "group": _group,
}


# -- helpers --------------------------------------------------------------------------------------------------------


def _around(context: str, old: ast.expr, step: str, below: Path_) -> Change:
    """Return the change of an expression by a step such as "+ 1"; `context` describes it in the mutant's key."""
    text = ast.unparse(old)
    return f"{_short(context)}: {text} {step}", f"({text}) {step}", below


def _children(field: str, value: object) -> Iterator[tuple[Path_, ast.AST]]:
    """Yield (path, node) for a field of a node that is a node or a list of nodes."""
    if isinstance(value, ast.AST):
        yield (field,), value
    elif isinstance(value, list):
        for number, child in enumerate(value):
            if isinstance(child, ast.AST):
                yield (field, number), child


def _keyword(node: ast.AST, name: str) -> Iterator[tuple[str, Path_]]:
    """Yield the source and the path of a call's keyword argument; nothing if the node is no call with it."""
    if isinstance(node, ast.Call):
        for number, keyword in enumerate(node.keywords):
            if keyword.arg == name:
                yield ast.unparse(keyword.value), ("keywords", number, "value")


def _allocates(node: ast.AST) -> bool:
    """Return whether a node is a call of `ndarray`."""
    return isinstance(node, ast.Call) and _name(node.func) == "ndarray"


def _tile(node: ast.AST) -> str:
    """Return the source of a call's first argument, shortened, or ""."""
    return _short(ast.unparse(node.args[0]), 40) if isinstance(node, ast.Call) and node.args else ""


def _called(node: ast.Call) -> str:
    """Return the name of the called function without its module."""
    return _name(node.func)


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name, or "" for other expressions."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _short(text: str, width: int = 90) -> str:
    """Return text as one line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."
