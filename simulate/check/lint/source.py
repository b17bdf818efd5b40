"""Source file for the lint rules: its NKI names, its kernels, and the tensors of its variables.

A kernel is a function under `@nki.jit`. A scope is a function that uses NKI: a kernel or a helper that issues
instructions. Names of NKI's modules are given as nl, nisa and ncc, however a file imports them. The analysis
follows plain assignments only; a variable with values of different kinds is unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TypeVar

from simulate.level import NEWEST, Level

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)

_NEW = {"nki": "nki", "nki.language": "nl", "nki.isa": "nisa", "nki.collectives": "ncc", "nki.typing": "nt"}
_OLD = "neuronxcc.nki"


class Holds(Enum):
    """Kind of object that a local variable refers to."""

    tensor = "tensor"
    register = "register"
    core_number = "core number"
    instruction = "instruction"


@dataclass(frozen=True)
class Tensor:
    """Allocation as the source shows it; None for a buffer, dtype or shape that the source does not show.

    `buffer` and `dtype` are dotted names such as "nl.psum". `line` is the line of the allocation.
    """

    name: str
    buffer: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    line: int


@dataclass
class Scope:
    """Function that uses NKI, and the objects that its variables refer to."""

    node: Function
    is_kernel: bool
    holds: dict[str, Holds] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    bodies: set[str] = field(default_factory=set)  # functions handed to fori_loop or while_loop

    @cached_property
    def syntax_nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the function, in the order of `ast.walk`."""
        return tuple(ast.walk(self.node))

    def nodes(self, node_class: type[Node]) -> Iterator[Node]:
        """Yield the nodes of a class in the function, functions inside it included."""
        return (node for node in self.syntax_nodes if isinstance(node, node_class))

    def has(self, object_kind: Holds, node: ast.expr | None) -> bool:
        """Return whether an expression is a variable that is known to refer to an object of a kind."""
        return isinstance(node, ast.Name) and self.holds.get(node.id) is object_kind

    def tensor_of(self, node: ast.expr | None) -> Tensor | None:
        """Return the tensor that a variable refers to, None for other expressions and unknown variables."""
        return self.tensors.get(node.id) if isinstance(node, ast.Name) else None


class Source:
    """Parsed source file: its scopes, kernels and classes, and the NKI names of its expressions."""

    def __init__(self, tree: ast.Module, level: Level = NEWEST) -> None:
        """Parse the imports, kernels and variables of a file.

        Args:
            tree: The syntax tree of the file.
            level: The release of NKI that the file is written for.
        """
        self.syntax_nodes = tuple(ast.walk(tree))
        self.level = level
        self.aliases: dict[str, str] = {}
        self.old_imports: list[ast.stmt] = []
        self._new_imports = 0
        self._read_imports()
        self.older = bool(self.old_imports) and not self._new_imports  # the whole file is in Beta 1
        self.statements = tuple(_iter_module_level(tree.body))
        self.classes = {node.name: node for node in self.statements if isinstance(node, ast.ClassDef)}
        self.kernels = {
            node.name
            for node in self.statements
            if isinstance(node, ast.FunctionDef) and self.decorators(node)
        }
        self.scopes = [
            Scope(node, bool(self.decorators(node)))
            for node in self.statements
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and self._is_on_device(node)
        ]
        for scope in self.scopes:
            _Variables(self, scope).visit(scope.node)
        functions = [node.func for scope in self.scopes for node in scope.nodes(ast.Call)]
        self.called_names = frozenset(
            function.id if isinstance(function, ast.Name) else function.attr
            for function in functions
            if isinstance(function, (ast.Name, ast.Attribute))
        )
        self.called = self.called_names
        """Functions that kernels of this file call; `lint` adds those that other files call."""

    def _read_imports(self) -> None:
        for node in self.syntax_nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._bind(
                        alias.name, alias.asname or alias.name.split(".")[0], node, alias.asname is None
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    self._bind(f"{node.module}.{alias.name}", alias.asname or alias.name, node, False)

    def _bind(self, module: str, name: str, node: ast.stmt, root: bool) -> None:
        if module == _OLD or module.startswith(_OLD + "."):
            self.old_imports.append(node)
            module = module.removeprefix("neuronxcc.")
        elif module == "nki" or module.startswith("nki."):
            self._new_imports += 1
        if module in _NEW:
            self.aliases[name] = "nki" if root else _NEW[module]
        elif module == "nki.jit":
            self.aliases[name] = "nki.jit"

    def name_of(self, node: ast.expr) -> str:
        """Return the dotted name of an expression with NKI's modules as nl, nisa or ncc; empty for other names.

        For example "nl.load" for `language.load` after `import nki.language as language`.
        """
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        root = self.aliases.get(node.id, "")
        if not root:
            return ""
        dotted = ".".join([root, *reversed(attributes)])
        for module, short in _NEW.items():
            if dotted.startswith(module + ".") and module != "nki":
                return short + dotted[len(module) :]
        return dotted

    def decorators(self, node: Function) -> list[ast.expr]:
        """Return the `@nki.jit` decorators of a function, with or without arguments; empty for a helper."""
        return [
            d
            for d in node.decorator_list
            if self.name_of(d.func if isinstance(d, ast.Call) else d) == "nki.jit"
        ]

    def _is_on_device(self, node: Function) -> bool:
        return bool(self.decorators(node)) or any(
            isinstance(call, ast.Call) and self.name_of(call.func).startswith(("nl.", "nisa.", "ncc."))
            for call in ast.walk(node)
        )

    def calls(self, scope: Scope) -> Iterator[tuple[ast.Call, str]]:
        """Yield (call, dotted NKI name) for each call of an NKI name in a function, such as "nisa.dma_copy"."""
        for node in scope.nodes(ast.Call):
            name = self.name_of(node.func)
            if name:
                yield node, name

    def attributes(self, scope: Scope) -> Iterator[tuple[ast.Attribute, str]]:
        """Yield (node, dotted NKI name) for each attribute access in a function, those inside a longer chain included.

        The name is that of `name_of`, such as "nl.load"; it is empty outside of NKI.
        """
        for node in scope.nodes(ast.Attribute):
            yield node, self.name_of(node)


_ALLOCATES = frozenset(
    "nl.ndarray nl.zeros nl.ones nl.full nl.zeros_like nl.empty_like nl.load nl.shared_identity_matrix".split()
)


class _Variables(ast.NodeVisitor):
    """Visitor that fills `holds`, `tensors` and `bodies` of a scope from the assignments of its function.

    A variable that is bound to objects of different kinds is unknown and gets no entry.
    """

    def __init__(self, source: Source, scope: Scope) -> None:
        self.source = source
        self.scope = scope
        self.unknown: set[str] = set()

    def visit_Assign(self, node: ast.Assign) -> None:
        """Record what each target of `name = value` refers to; elements of tuples become unknown."""
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Record what the target of `name: type = value` refers to; a declaration without value changes nothing."""
        if node.value is not None:
            self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Record that the counter of nl.dynamic_range is a register, and any other loop variable unknown."""
        over = self.source.name_of(node.iter.func) if isinstance(node.iter, ast.Call) else ""
        if isinstance(node.target, ast.Name):
            self._hold(node.target.id, Holds.register if over == "nl.dynamic_range" else None)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Record the names of functions that are bodies of nl.fori_loop and nl.while_loop."""
        name = self.source.name_of(node.func)
        where = {"nl.fori_loop": 2, "nl.while_loop": 1}.get(name)
        if where is not None:
            body = argument(node, where, "body_fun")
            if isinstance(body, ast.Name):
                self.scope.bodies.add(body.id)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self._hold(node.id, None)
            return
        name = target.id
        called = self.source.name_of(value.func) if isinstance(value, ast.Call) else ""
        if called in _ALLOCATES:
            assert isinstance(value, ast.Call)
            self._hold(name, Holds.tensor)
            self.scope.tensors[name] = self._read_tensor(name, called, value)
        elif called == "nisa.register_alloc":
            self._hold(name, Holds.register)
        elif called == "nl.program_id":
            self._hold(name, Holds.core_number)
        elif called.startswith("nisa.") and not called.startswith("nisa.get_"):
            self._hold(name, Holds.instruction)
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
            same = value.value.id
            self._hold(name, self.scope.holds.get(same) if same in self.scope.tensors else None)
        else:
            self._hold(name, None)

    def _hold(self, name: str, object_kind: Holds | None) -> None:
        before = self.scope.holds.get(name)
        if object_kind is None or name in self.unknown or (before is not None and before is not object_kind):
            self.unknown.add(name)
            self.scope.holds.pop(name, None)
            self.scope.tensors.pop(name, None)
        else:
            self.scope.holds[name] = object_kind

    def _read_tensor(self, name: str, called: str, call: ast.Call) -> Tensor:
        if called in ("nl.load", "nl.zeros_like", "nl.empty_like", "nl.shared_identity_matrix"):
            return Tensor(name, None, None, None, call.lineno)
        position = 3 if called == "nl.full" else 2
        buffer = argument(call, position, "buffer")
        dtype = argument(call, position - 1, "dtype")
        shape = argument(call, 0, "shape")
        return Tensor(
            name,
            "nl.sbuf" if buffer is None else self.source.name_of(buffer) or None,
            self.source.name_of(dtype) or None if dtype is not None else None,
            _read_integers(shape),
            call.lineno,
        )


def base_of(node: ast.expr | None) -> ast.expr | None:
    """Return `t` for the subscript `t[…]`, and any other expression, or None, unchanged."""
    return node.value if isinstance(node, ast.Subscript) else node


def _iter_module_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those in branches of its `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for branch in (node.body, *handlers, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from _iter_module_level(branch)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return an argument of a call by keyword or position, None if the call does not have it.

    Args:
        call: The call.
        position: The index of the parameter; it is ignored after a starred argument.
        name: The name of the parameter.
    """
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
        return call.args[position]
    return None


def _read_integers(node: ast.expr | None) -> tuple[int, ...] | None:
    if not isinstance(node, (ast.Tuple, ast.List)):
        return None
    values = [
        element.value
        for element in node.elts
        if isinstance(element, ast.Constant) and isinstance(element.value, int)
    ]
    return tuple(values) if len(values) == len(node.elts) else None
