"""The table `tuned.py` beside a kernel's file: the entries that kernels look up when they are launched."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nkw.errors import InvalidArgument
from nkw.files import MOST_SOURCE_BYTES, OutputFile, read_text
from simulate.kernel_by_name import call_of
from simulate.run.machine import Mode
from simulate.tune.parameters import Candidate, Tunable

FILE = "tuned.py"
"""The name of the file, beside that of the kernel."""
NAME = "TUNED"
"""The dict in it: by kernel, generation and bucket the `arguments` of the search and the `values` that it found."""


class Table:
    """The table of one kernel's folder; raises InvalidArgument for a file that holds none."""

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
            if not all(each.keys() == {"arguments", "values"} for each in self.entries.values()):
                raise ValueError("an entry has arguments and values")
        except (AttributeError, OSError, SyntaxError, ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                "NKW-TUNE-TABLE",
                f"{self.path} holds no table: it needs one line `{NAME} = {{}}`, which the command fills ({error})",
            ) from None

    def values(self, entry: str) -> Mapping[str, Any]:
        """The values of an entry, none where there is no entry."""
        found: Mapping[str, Any] = self.entries.get(entry, {}).get("values", {})
        return found

    def put(self, entry: str, arguments: str, values: Candidate | None) -> None:
        """Give an entry values and write the file; without values the entry goes."""
        if values is None:
            self.entries.pop(entry, None)
        else:
            self.entries[entry] = {"arguments": arguments, "values": dict(values)}
        lines = self._source.splitlines(keepends=True)
        lines[self._node.lineno - 1 : self._node.end_lineno] = [self._text()]
        with OutputFile(self.path, "table", "NKW-TUNE-TABLE").writing() as file:
            file.write("".join(lines))

    def _text(self) -> str:
        """The table with a line for each value, so that a change of one shows as a line."""
        out = [f"{NAME} = {{"]
        for entry in sorted(self.entries):
            found = self.entries[entry]
            out += [f"    {_quoted(entry)}: {{", f'        "arguments": {_quoted(found["arguments"])},']
            out += ['        "values": {']
            out += [
                f"            {_quoted(name)}: {_quoted(each)}," for name, each in found["values"].items()
            ]
            out += ["        },", "    },"]
        return "\n".join([*out, "}"] if self.entries else [f"{NAME} = {{}}"]) + "\n"


def entry_name(kernel: Tunable, arguments: tuple[str, ...], generation: int) -> str:
    """The entry of a launch. Raises InvalidArgument for a kernel that names no buckets."""
    if kernel.bucket is None:
        raise InvalidArgument(
            "NKW-TUNE-TABLE",
            f"the file of {kernel.name} has no function {kernel.name}_bucket, so no launch of it has an entry",
        )
    args, keywords = call_of(arguments, Mode.dry)
    return f"{kernel.name} gen{generation} {kernel.bucket(*args, **keywords)}"


def _quoted(value: Any) -> str:
    """A value as ruff would write it."""
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text
