"""Lint rule about softmax: exp of scores whose maximum is not subtracted overflows."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import Spot, lint_rule
from simulate.check.lint.source import Scope, Source, argument, base_of
from simulate.isa import INSTRUCTIONS
from simulate.isa.book import documented_signature

_BOUNDS = frozenset(
    "nl.maximum nl.max nl.minimum nl.min nl.subtract nl.negative nisa.max8 nisa.range_select nl.softmax".split()
)
"""Names with which a function can bound the argument of exp; the rule skips functions that use them."""
_INVERSES = frozenset({"nl.divide", "nl.reciprocal", "nisa.reciprocal"})


@lint_rule("NKI048", Severity.warning)
def softmax_subtracts_its_maximum(source: Source, scope: Scope) -> Iterator[Spot]:
    """A softmax subtracts the largest score of a row before exp, which is infinite above 88.7.

    Reported is an exp without a bias whose results are summed, in a function that divides and has no name of
    `_BOUNDS`.
    """
    names = {name for _, name in source.attributes(scope)}
    if names & _BOUNDS or not names & _INVERSES:
        return
    summed = {name for call, called in source.calls(scope) for name in _find_summed(source, call, called)}
    for call, name in source.calls(scope):
        if name not in ("nisa.activation", "nisa.activation_reduce"):
            continue
        if _get_operator(source, call) != "nl.exp" or _has_bias(call, name):
            continue
        if _get_variable(argument(call, 0, "dst")) in summed:
            yield Spot(
                call,
                f"exp of {ast.unparse(argument(call, 2, 'data') or call)} is summed and divided by",
                "nisa.tensor_reduce(op=nl.maximum, negate=True) of the row, as bias= of the activation",
            )


def _find_summed(source: Source, call: ast.Call, name: str) -> Iterator[str]:
    """Yield the variable whose elements a call adds up, nothing for a call that adds up none.

    It is the data of a sum, and dst of an activation that also reduces.
    """
    if name == "nisa.tensor_reduce" and _get_operator(source, call) == "nl.add":
        yield _get_variable(argument(call, 2, "data"))
    elif name == "nl.sum":
        yield _get_variable(argument(call, 0, "x"))
    elif name == "nisa.activation_reduce" or (
        name == "nisa.activation" and argument(call, 5, "reduce_op") is not None
    ):
        yield _get_variable(argument(call, 0, "dst"))


def _get_operator(source: Source, call: ast.Call) -> str:
    """Return the dotted name of the op argument of a call, such as "nl.exp"; empty if it has none."""
    operator = argument(call, 1, "op")
    return "" if operator is None else source.name_of(operator)


def _has_bias(call: ast.Call, name: str) -> bool:
    """Return whether a call of an activation has a bias other than None, or unpacks keywords with `**`."""
    parameters = documented_signature(INSTRUCTIONS[name.removeprefix("nisa.")]).parameters
    bias = argument(call, [*parameters].index("bias"), "bias")
    has_value = bias is not None and not (isinstance(bias, ast.Constant) and bias.value is None)
    return has_value or any(keyword.arg is None for keyword in call.keywords)


def _get_variable(node: ast.expr | None) -> str:
    """Return the name of the variable that an expression is, or is a subscript of; empty for other expressions."""
    base = base_of(node)
    return base.id if isinstance(base, ast.Name) else ""
