"""The table `tuned.py` next to a kernel's file, in which kernels look up their parameters at launch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nkw.errors import InvalidArgument
from nkw.files import MOST_SOURCE_BYTES, OutputFile, read_text
from simulate.kernel_by_name import build_call
from simulate.run.machine import Mode
from simulate.tune.parameters import Candidate, Tunable

FILE = "tuned.py"
"""Name of the file, in the folder of the kernel's file."""
NAME = "TUNED"
"""Dict in the file: by kernel, generation and bucket, the `arguments` of the search and the `values` that it chose."""


class Table:
    """Table of tuned values in the folder of a kernel's file, read when the object is made.

    `entries` has, by name of the entry, a dict of `arguments` and `values`.

    Raises:
        InvalidArgument: If the file cannot be read or contains no table.
    """

    def __init__(self, kernel: Tunable) -> None:
        self.path = Path(kernel.file).with_name(FILE)
        try:
            self._source = read_text(self.path, MOST_SOURCE_BYTES)
            tree = ast.parse(self._source)
            (self._node,) = (
                node
                for node in tree.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == NAME
            )
            self.entries: dict[str, dict[str, Any]] = dict(ast.literal_eval(self._node.value))
            if not all(entry.keys() == {"arguments", "values"} for entry in self.entries.values()):
                raise ValueError("an entry has arguments and values")
        except (AttributeError, OSError, SyntaxError, ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                "NKW-TUNE-TABLE",
                f"{self.path} holds no table: it needs one line `{NAME} = {{}}`, which the command fills ({error})",
            ) from None

    def values(self, entry: str) -> Mapping[str, Any]:
        """Return the tuned values of an entry by parameter; empty if there is no such entry."""
        choices: Mapping[str, Any] = self.entries.get(entry, {}).get("values", {})
        return choices

    def put(self, entry: str, arguments: str, values: Candidate | None) -> None:
        """Store the tuned values of an entry and write the file.

        Args:
            entry: The name of the entry, from `make_entry_name`.
            arguments: The arguments of the search, as text.
            values: The tuned values by parameter; None removes the entry.

        Raises:
            InvalidArgument: If the file cannot be written.
        """
        if values is None:
            self.entries.pop(entry, None)
        else:
            self.entries[entry] = {"arguments": arguments, "values": dict(values)}
        lines = self._source.splitlines(keepends=True)
        lines[self._node.lineno - 1 : self._node.end_lineno] = [self._format_source()]
        with OutputFile(self.path, "table", "NKW-TUNE-TABLE").writing() as file:
            file.write("".join(lines))

    def _format_source(self) -> str:
        """Return the Python statement that assigns the table, with a line for each value so that diffs are small."""
        lines = [f"{NAME} = {{"]
        for entry in sorted(self.entries):
            row = self.entries[entry]
            lines += [
                f"    {_format_literal(entry)}: {{",
                f'        "arguments": {_format_literal(row["arguments"])},',
            ]
            lines += ['        "values": {']
            lines += [
                f"            {_format_literal(name)}: {_format_literal(choice)},"
                for name, choice in row["values"].items()
            ]
            lines += ["        },", "    },"]
        return "\n".join([*lines, "}"] if self.entries else [f"{NAME} = {{}}"]) + "\n"


def make_entry_name(kernel: Tunable, arguments: tuple[str, ...], generation: int) -> str:
    """Return the name of a launch's entry in the table: kernel, generation and bucket.

    An example is "matmul gen2 bfloat16 1024x1024x1024".

    Args:
        kernel: The kernel.
        arguments: The arguments of the launch, as texts of the command line.
        generation: The generation of the chip, such as 3 for trn2.

    Raises:
        InvalidArgument: If the kernel's file has no function for its bucket.
    """
    if kernel.bucket is None:
        raise InvalidArgument(
            "NKW-TUNE-TABLE",
            f"the file of {kernel.name} has no function {kernel.name}_bucket, so no launch of it has an entry; "
            "add the function, or leave --write out",
        )
    args, keywords = build_call(arguments, Mode.dry)
    return f"{kernel.name} gen{generation} {kernel.bucket(*args, **keywords)}"


def _format_literal(literal: Any) -> str:
    """Format a Python literal as ruff formats it: strings in double quotes unless they contain one."""
    text = repr(literal)
    return f'"{text[1:-1]}"' if isinstance(literal, str) and text[0] == "'" and '"' not in text else text
