"""Readers of the stream ask a plan for its facts, and name no instruction."""

from __future__ import annotations

import ast
from pathlib import Path

import simulate
from simulate.isa import COLLECTIVES, INSTRUCTIONS

ROOT = Path(simulate.__file__).parent
READERS = ("check", "profile", "timing", "occupancy", "replay")
EXCEPTIONS = {
    "profile/advice/overlap.py",  # proposes another engine for copies, and for no other instruction
    "profile/advice/products.py",  # leaves out the copies that casts and transposes need
}


def test_only_known_readers_name_an_instruction() -> None:
    names = {*INSTRUCTIONS, *COLLECTIVES}
    readers = {
        str(file.relative_to(ROOT))
        for reader in READERS
        for file in (ROOT / reader).rglob("*.py")
        if "lint" not in file.parts  # reads the source of kernels, which calls instructions by name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert readers == EXCEPTIONS
