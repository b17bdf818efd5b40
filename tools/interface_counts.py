"""Count what makes kernels and layers hard to extend: values without a name, and records without a declaration.

python -m tools.interface_counts             the counts of each package
python -m tools.interface_counts --list      every occurrence

positional launches   Launch(kernel, (...)): arguments that are distinguished by position only
string keys           job["rows"]: values of one dict that have names and no declaration
fields from outside   job.rows = ...: a field that a function other than the record's methods sets
long signatures       functions of more than 8 parameters, without kernels and their references
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("nki_kernels", "model/layers", "model/formats")
MOST_PARAMETERS = 8


@dataclass(frozen=True)
class Occurrence:
    """One of the counted constructs in the source: its name in the table above, file, line and text."""

    fault: str
    path: str
    line: int
    text: str


def find_occurrences(path: str, source: str) -> Iterator[Occurrence]:
    """Yield the counted constructs in one file, in the order of `ast.walk`."""
    for node in ast.walk(ast.parse(source)):
        for fault, expression in _faults(node):
            yield Occurrence(fault, path, expression.lineno, ast.unparse(expression).splitlines()[0][:80])


def _faults(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield (name of the construct, node) for each counted construct that a node itself is."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Launch":
        if len(node.args) > 1 and isinstance(node.args[1], ast.Tuple):
            yield "positional launches", node
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.JoinedStr)):
        if isinstance(node.slice, ast.JoinedStr) or isinstance(node.slice.value, str):
            yield "string keys", node
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (("fields from outside", field) for field in _fields_of_others(target))
    elif isinstance(node, ast.FunctionDef) and _is_helper(node) and _count_parameters(node) > MOST_PARAMETERS:
        yield "long signatures", node


def _fields_of_others(target: ast.expr) -> Iterator[ast.Attribute]:
    """Yield the attributes of objects other than `self` in a target of an assignment."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _fields_of_others(element)
    elif isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
        yield target


def _is_helper(function: ast.FunctionDef) -> bool:
    """Return whether a function is neither decorated, as kernels are, nor a reference."""
    return not function.decorator_list and not function.name.endswith("_reference")


def _count_parameters(function: ast.FunctionDef) -> int:
    """Return the number of parameters without `self`."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) + len(function.args.kwonlyargs) - (names[:1] == ["self"])


def main() -> int:
    """Print the counts of each package, and every occurrence with --list. Returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.interface_counts", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="print every occurrence")
    options = parser.parse_args()
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"))
        occurrences = [
            occurrence
            for file in files
            for occurrence in find_occurrences(
                file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
            )
        ]
        if options.list:
            for occurrence in occurrences:
                print(f"{occurrence.path}:{occurrence.line}: {occurrence.fault}: {occurrence.text}")
        counts = Counter(occurrence.fault for occurrence in occurrences)
        faults = ("positional launches", "string keys", "fields from outside", "long signatures")
        print(f"{package}: " + ", ".join(f"{counts[fault]} {fault}" for fault in faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
