"""Prints the questions of an exam on docstrings or files, drawn with the hash of a commit as the seed.

A reader who has not seen the project answers them: what each function returns, what it changes and when it fails, from
its signature and docstring alone; or what a file is for, from the file alone. A second reader compares the answers with
the code.

    python -m tools.docstring_exam docstrings COMMIT
    python -m tools.docstring_exam files COMMIT
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "docstrings": ("simulate", "model", "nki_kernels", "nkw"),
    "files": ("simulate", "model", "nki_kernels"),
}
SIZES = {"docstrings": 60, "files": 30}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def list_docstrings(root: Path) -> list[str]:
    """Return one question for each documented function of the packages, in the order of files and lines."""
    return [
        question
        for package in PACKAGES["docstrings"]
        for path in sorted((root / package).rglob("*.py"))
        for question in _read_questions(path, path.relative_to(root).as_posix())
    ]


def list_files(root: Path) -> list[str]:
    """Return the paths of the packages' modules that contain a class or a function, relative to a folder."""
    return [
        path.relative_to(root).as_posix()
        for package in PACKAGES["files"]
        for path in sorted((root / package).rglob("*.py"))
        if any(isinstance(node, (ast.ClassDef, ast.FunctionDef)) for node in ast.parse(path.read_text()).body)
    ]


def draw(population: list[str], size: int, commit: str) -> list[str]:
    """Return `size` members of a population in a random order; equal commits give equal members."""
    return random.Random(commit).sample(population, size)


def _read_questions(path: Path, name: str) -> Iterator[str]:
    """Yield the question of each documented function of a module."""
    for owner, function in _walk_functions(ast.parse(path.read_text(encoding="utf-8")), ""):
        docstring = ast.get_docstring(function)
        if docstring is not None:
            yield f"{name}: {owner}\n{_write_signature(function)}\n{docstring}\n"


def _walk_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    """Yield the qualified name and the node of each function below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from _walk_functions(child, f"{name}.")
        else:
            yield from _walk_functions(child, prefix)


def _write_signature(function: FunctionNode) -> str:
    """Return decorators and signature without the body."""
    decorators = [f"@{ast.unparse(decorator)}" for decorator in function.decorator_list]
    returned = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return "\n".join([*decorators, f"def {function.name}({ast.unparse(function.args)}){returned}:"])


def main(arguments: list[str] | None = None) -> None:
    """Print the questions with their numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("subject", choices=PACKAGES)
    parser.add_argument(
        "commit", help="seed: a commit, such as HEAD; the files are those of the working tree"
    )
    options = parser.parse_args(arguments)
    command = ["git", "rev-parse", "--verify", f"{options.commit}^{{commit}}"]
    commit = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    population = list_docstrings(ROOT) if options.subject == "docstrings" else list_files(ROOT)
    print(f"{SIZES[options.subject]} of {len(population)}, seed {commit}\n")
    for number, question in enumerate(draw(population, SIZES[options.subject], commit), start=1):
        print(f"{number}. {question}")


if __name__ == "__main__":
    main()
