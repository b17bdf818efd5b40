"""Lint rules about names: functions that NKI does not have, attributes that tensors do not have, operands in HBM."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

from nkw.suggestions import TILE_HINTS, closest
from simulate.check.findings import Severity
from simulate.check.lint.rules import Spot, lint_rule
from simulate.check.lint.source import Holds, Scope, Source, argument, base_of
from simulate.check.lint.tiles import is_allocated_once
from simulate.isa import INSTRUCTIONS
from simulate.isa.book import documented_signature
from simulate.memory import NkiTensor

_MODULES = {"nl": "language", "nisa": "isa", "ncc": "collectives"}
_ATTRIBUTES_OF_NUMPY = frozenset({"T", "mT", "astype", "broadcast_to", "transpose", "swapaxes"})
"""Attributes that no argument of a kernel has; their use on a parameter is reported."""
_HBM = frozenset({"nl.hbm", "nl.shared_hbm", "nl.private_hbm"})
_ON_CHIP = ("dst", "data", "data1", "data2", "stationary", "moving", "src", "operand0", "operand1", "bias")
_MAY_BE_NUMBERS = ("operand0", "operand1", "bias")
_REACHES_HBM = ("dma_", "register_", "core_barrier", "sendrecv")


@lint_rule("NKI045", Severity.error)
def names_exist(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel uses only names that nki.language, nki.isa and nki.collectives have."""
    if source.older:  # Beta 1 has other names
        return
    for node, name in source.attributes(scope):
        short, _, attribute = name.partition(".")
        if short not in _MODULES or not attribute or "." in attribute:
            continue
        # By name, because `nki` is above this package and need not be loaded to look at source.
        try:
            getattr(importlib.import_module(f"simulate.nki.{_MODULES[short]}"), attribute)
        except AttributeError as unknown:
            _, _, hint = str(unknown).partition("; ")
            hint = hint.removeprefix("in NKI: ").removeprefix("did you mean ").rstrip("?")
            yield Spot(node, f"{name} does not exist", hint)


@lint_rule("NKI046", Severity.error)
def attributes_of_tensors(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel uses attributes of tensors that NKI documents, such as .shape, and not .T or .astype of NumPy."""
    if source.older:
        return
    shaped = {ast.unparse(node.value) for node in scope.nodes(ast.Attribute) if node.attr == "shape"}
    loaded = {
        ast.unparse(call.args[0]) for call, name in source.calls(scope) if name == "nl.load" and call.args
    }
    # Other parameters may be objects with any attributes.
    parameters = _find_parameters(scope) & (shaped | loaded)
    for node in scope.nodes(ast.Attribute):
        base = node.value
        known_tensor = scope.has(Holds.tensor, base)
        parameter = isinstance(base, ast.Name) and base.id in parameters
        if known_tensor and not hasattr(NkiTensor, node.attr) and node.attr not in _SLOTS:
            meant = closest(node.attr, _SLOTS)
            yield Spot(
                node, f"{ast.unparse(node)}: tensors have no {node.attr}", TILE_HINTS.get(node.attr, meant)
            )
        elif parameter and node.attr in _ATTRIBUTES_OF_NUMPY:
            yield Spot(node, f"{ast.unparse(node)}: tensors have no {node.attr}", TILE_HINTS[node.attr])


_SLOTS = frozenset(name for base in NkiTensor.__mro__ for name in getattr(base, "__slots__", ()))
"""Attributes of tensors that are set by their constructor."""


@lint_rule("NKI047", Severity.error)
def operands_are_on_chip(source: Source, scope: Scope) -> Iterator[Spot]:
    """Engines read and write SBUF and PSUM; only DMAs reach HBM.

    Reported are operands of other instructions that are allocated in HBM, or that are parameters of a
    launched kernel.
    """
    in_hbm = {
        name
        for name, tensor in scope.tensors.items()
        if tensor.buffer in _HBM and is_allocated_once(source, scope, name)
    }
    # A kernel that another one calls may get tiles.
    arguments = _find_parameters(scope) if scope.is_kernel and scope.node.name not in source.called else set()
    for call, name in source.calls(scope):
        instruction = name.removeprefix("nisa.")
        if not name.startswith("nisa.") or instruction not in INSTRUCTIONS:
            continue
        if instruction.startswith(_REACHES_HBM):
            continue
        parameters = documented_signature(INSTRUCTIONS[instruction]).parameters
        for position, parameter in enumerate(parameters):
            operand = base_of(argument(call, position, parameter)) if parameter in _ON_CHIP else None
            if not isinstance(operand, ast.Name):
                continue
            if operand.id in in_hbm or (operand.id in arguments and parameter not in _MAY_BE_NUMBERS):
                hint = "nl.load it first" if parameter != "dst" else "write to a tile, then nl.store it"
                yield Spot(call, f"{parameter}={operand.id} of {name} lies in HBM", hint)


def _find_parameters(scope: Scope) -> set[str]:
    """Return the names of a kernel's parameters that have no default and that no statement binds again.

    Empty for a function without `@nki.jit`, and without names that parameters of functions inside it have.
    """
    arguments = scope.node.args
    required = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    bound = {node.id for node in scope.nodes(ast.Name) if isinstance(node.ctx, ast.Store)}
    inner = [function for function in scope.nodes(ast.FunctionDef) if function is not scope.node]
    shadowed = {argument.arg for function in inner for argument in function.args.args}
    return {argument.arg for argument in required} - bound - shadowed if scope.is_kernel else set()
