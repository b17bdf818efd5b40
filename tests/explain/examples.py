"""Runs an example of `explain` in its setting, and tells which codes it gets."""

from __future__ import annotations

import ast
import re
from types import FunctionType
from typing import Any

import numpy as np

import simulate
from nkw.errors import NkwError
from simulate.check import detect, gathered
from simulate.check.lint import lint_source
from simulate.level import Level
from simulate.testing import tolerance
from tests.explain.settings import Setting

simulate.install("simulate")

import nki  # noqa: E402
import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402
from neuronxcc import nki as older  # noqa: E402
from neuronxcc.nki import isa as older_nisa  # noqa: E402
from neuronxcc.nki import language as older_nl  # noqa: E402

_SHAPE = re.compile(r"\b(\w+) (\(\d[\d, ]*\))")
_REMARK = re.compile(r" \([a-z]\w* in [A-Z]+\)$")


def as_code(text: str, filler: str = "more") -> str | None:
    """Return an example as Python, as statements or as arguments of a call; None where it is a sentence."""
    text = _SHAPE.sub(r"\1=T(\2)", _REMARK.sub("", text)).replace("…", filler)
    for form in ("{}", "f({})", "{} pass", "{}\ndef f(): pass"):
        try:
            tree = ast.parse(form.format(text))
        except SyntaxError:
            continue
        inner = tree.body if form == "{}" else [tree.body[0]]
        node_types: tuple[type[ast.AST], ...] = (
            ast.keyword,
            ast.Assign,
            ast.Subscript,
            ast.BinOp,
            ast.Compare,
            ast.If,
        )
        node_types += ast.AugAssign, ast.Import, ast.FunctionDef
        calls = sum(isinstance(node, ast.Call) for statement in inner for node in ast.walk(statement))
        if calls > (form == "f({})") or any(
            isinstance(n, node_types) for statement in inner for n in ast.walk(statement)
        ):
            return text if form == "f({})" else form.format(text)
    return None


def _filled(shape: Any, dtype: Any = nl.float32, buffer: Any = nl.sbuf, value: float = 0) -> Any:
    tile = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    nisa.memset(dst=tile, value=value)
    return tile


def _in_hbm(shape: Any, dtype: Any = nl.float32) -> Any:
    tensor = nl.ndarray(shape, dtype=dtype, buffer=nl.private_hbm)
    nisa.dma_copy(dst=tensor, src=_filled(shape, dtype))
    return tensor


def _zeros(shape: Any, dtype: Any) -> Any:
    tile = nl.ndarray(shape, dtype=dtype)
    nisa.memset(dst=tile, value=0)
    return tile


def _call(function: Any, base: dict[str, Any], **changes: Any) -> Any:
    return function(**{**base, **changes})


def codes(setting: Setting, code: str) -> list[str]:
    """Return the codes that a kernel of these lines gets: of the rule that stops it, else of its findings."""
    body = "\n    ".join(setting.lines.format(code).splitlines())
    space: dict[str, Any] = {
        "nl": nl,
        "nisa": nisa,
        "ncc": ncc,
        "np": np,
        "T": _filled,
        "H": _in_hbm,
        "O": lambda shape: nl.ndarray(shape, dtype=nl.float32, buffer=nl.private_hbm),
        "S": lambda shape: nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm),
        "Z": _zeros,
        "call": _call,
        "nki": nki,
        "ReplicaGroup": ncc.ReplicaGroup,
        "World": simulate.World,
        "tolerance": tolerance,
        "gathered": gathered,
    }
    if setting.beta1:
        space.update(nl=older_nl, nisa=older_nisa)
    exec(f"def kernel(x, wide):\n    {body}\n    return None\n", space)
    kernel: FunctionType = older.jit(space["kernel"]) if setting.beta1 else space["kernel"]
    x, wide = np.zeros((128, 512), np.float32), np.zeros((1, 1), np.int64)
    with gathered() as seen:
        try:
            world = simulate.World(
                setting.target, setting.ranks, setting.cores, level=Level.resolve(setting.level)
            )
            world.launch(kernel, [((x, wide), {})] * setting.ranks)
        except NkwError as error:
            return [error.code]
    return [finding.code for launch, evidence in seen.launches for finding in detect(launch, evidence)]


def linted(setting: Setting, code: str) -> list[str]:
    """Return the codes that lint gives a file of these lines."""
    head = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n"
    findings = lint_source(head + setting.lines.format(code), "kernel.py", Level.resolve(setting.level))
    return [finding.code for finding in findings]
