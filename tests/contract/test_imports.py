"""Who may import whom: the contracts of pyproject.toml, and what import-linter cannot say."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a kernel file may import: it runs unchanged on the real package, which offers nki and numpy. `math` is evaluated
# while a kernel is specialised; the language guide lists it.
KERNEL_IMPORTS = frozenset({"__future__", "dataclasses", "math", "nki", "nki_kernels", "numpy"})
# What `nki_kernels/__init__.py` imports as well: it binds the simulator and finds the kernel files.
PACKAGE_IMPORTS = frozenset({"importlib", "pkgutil", "simulate", "simulate.bind"})

LINT_IMPORTS = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

# The least project that has every package, with the imports that are allowed across borders.
HEALTHY = {
    "simulate/__init__.py": "from simulate.bind import install",
    "simulate/__main__.py": "from simulate.cli import main",
    "simulate/cli.py": "from simulate.bind import install",
    "simulate/bind.py": "import simulate.nki",
    "simulate/nki/__init__.py": "import simulate.run",
    "simulate/check/__init__.py": "import simulate.run",
    "simulate/timing/__init__.py": "import simulate.run",
    "simulate/profile/__init__.py": "import simulate.timing",
    "simulate/world.py": "import simulate.replay",
    "simulate/replay/__init__.py": "import simulate.run",
    "simulate/run/__init__.py": "import simulate.isa",
    "simulate/isa/__init__.py": "import simulate.memory",
    "simulate/memory/__init__.py": "import simulate.numerics",
    "simulate/numerics/__init__.py": "import simulate.hardware",
    "simulate/hardware/__init__.py": "import nkw.errors",
    "nkw/files.py": "from nkw.errors import NkwError",
    "simulate/level.py": "import nkw.errors",
    "nkw/errors.py": "",
    "nki_kernels/__init__.py": "from simulate.bind import install",
    "nki_kernels/add.py": "import numpy as np\nimport nki.language as nl\nfrom nki_kernels.tiles import load",
    "nki_kernels/tiles.py": "from __future__ import annotations\nimport math",
    "model/__init__.py": "",
    "model/commands/__init__.py": "",
    "model/device/__init__.py": "import model.device.dry",
    "model/device/dry.py": "import nki_kernels\nimport simulate\nfrom simulate.timing import schedule",
    "model/commands/generate/__init__.py": "",
    "model/commands/generate/generation.py": "import model.device",
    "nkw/__init__.py": "",
    "nkw/__main__.py": "def main():\n    from nkw.commands import main",
    "nkw/commands.py": "import importlib",
    "model/__main__.py": "from nkw.__main__ import main",
    "model/commands/overlay.py": "import model.device",
}

# Each file is replaced by an import that must be refused; the second string is how import-linter words it.
VIOLATIONS = {
    "nkw/errors.py": ("import simulate.hardware", "nkw.errors -> simulate.hardware"),
    "nkw/files.py": ("import model", "nkw.files -> model"),
    "simulate/level.py": ("import simulate.memory", "simulate.level -> simulate.memory"),
    "simulate/hardware/__init__.py": ("import simulate.numerics", "simulate.hardware -> simulate.numerics"),
    "simulate/numerics/__init__.py": ("import simulate.memory", "simulate.numerics -> simulate.memory"),
    "simulate/memory/__init__.py": ("import simulate.isa", "simulate.memory -> simulate.isa"),
    "simulate/isa/__init__.py": ("import simulate.run", "simulate.isa -> simulate.run"),
    "simulate/run/__init__.py": ("import simulate.replay", "simulate.run -> simulate.replay"),
    "simulate/replay/__init__.py": ("import simulate.world", "simulate.replay -> simulate.world"),
    "simulate/check/__init__.py": ("import simulate.timing", "simulate.check -> simulate.timing"),
    "simulate/timing/__init__.py": ("import simulate.profile", "simulate.timing -> simulate.profile"),
    "simulate/profile/__init__.py": ("import simulate.nki", "simulate.profile -> simulate.nki"),
    "simulate/nki/__init__.py": ("import simulate.bind", "simulate.nki -> simulate.bind"),
    "simulate/bind.py": ("import nki_kernels\nimport model.commands.overlay", "simulate.bind -> nki_kernels"),
    "nki_kernels/add.py": ("import simulate.run", "nki_kernels.add -> simulate.run"),
    "nki_kernels/tiles.py": (
        "def late():\n    import model.commands.overlay",
        "nki_kernels.tiles -> model.commands.overlay",
    ),
    "model/commands/generate/generation.py": (
        "import simulate",
        "model.commands.generate.generation -> simulate",
    ),
    "model/commands/overlay.py": ("import simulate.run", "model.commands.overlay -> simulate.run"),
    "nkw/commands.py": ("def late():\n    from simulate.cli import main", "nkw.commands -> simulate.cli"),
}


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    (root / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS], cwd=root, capture_output=True, text=True, check=False
    )


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import in a file, wherever it stands."""
    package = path.parent.name
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, f"{package}.{node.module or ''}" if node.level else node.module or ""


def refused_kernel_imports(root: Path) -> list[str]:
    """Return imports of kernel files that the real package lacks; `__init__` alone may bind the simulator."""
    return [
        f"{path.relative_to(root).as_posix()}:{line} imports {name}"
        for path in sorted((root / "nki_kernels").rglob("*.py"))
        for line, name in imported_modules(path)
        if name.split(".")[0] not in KERNEL_IMPORTS
        and not (path == root / "nki_kernels" / "__init__.py" and name in PACKAGE_IMPORTS)
    ]


def modules_named_nki(root: Path) -> list[str]:
    """Return whatever at the top of a tree would take the name `nki` from the real package."""
    return [
        path.name for path in sorted(root.iterdir()) if path.name == "nki" or path.name.startswith("nki.")
    ]


def imports_of_the_package_root(root: Path) -> list[str]:
    """Return files below the top of simulate that import `simulate` itself, and so everything in it."""
    top = {root / "simulate" / name for name in ("__init__.py", "__main__.py", "cli.py")}
    return [
        f"{path.relative_to(root).as_posix()}:{line}"
        for path in sorted((root / "simulate").rglob("*.py"))
        if path not in top
        for line, name in imported_modules(path)
        if name == "simulate"
    ]


def imports_within(root: Path) -> dict[str, set[str]]:
    """Return for each module of simulate those that it imports: at its top, in functions, under TYPE_CHECKING."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / "simulate").rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        named: list[str] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Import):
                named += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                named += [name if name in files else node.module for name in full]
        graph[module] = {name for name in named if name in files}
    return graph


def import_circles(root: Path) -> set[frozenset[str]]:
    """Return the largest groups of modules in which each one imports each other one, directly or through the group."""
    graph = imports_within(root)

    def reached(module: str) -> set[str]:
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            more = graph[waiting.pop()] - seen
            seen |= more
            waiting += more
        return seen

    reach = {module: reached(module) for module in graph}
    return {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }


# Packages that still have a circle, with the reason.
def test_modules_import_in_no_circle() -> None:
    assert not import_circles(ROOT)


@pytest.mark.parametrize(
    "back",
    [
        "from simulate.run import high",
        "import simulate.run.high",
        "def late():\n    from simulate.run.high import value",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from simulate.run.high import value",
    ],
)
def test_finds_a_circle_wherever_the_import_stands(tmp_path: Path, back: str) -> None:
    chain = {
        "simulate/run/high.py": "import simulate.run.middle",
        "simulate/run/middle.py": "from simulate.run import low",
        "simulate/run/low.py": "from simulate.isa import plan",
    }
    write_tree(tmp_path, HEALTHY | chain)
    assert import_circles(tmp_path) == set()
    write_tree(tmp_path, {"simulate/run/low.py": back})
    assert import_circles(tmp_path) == {frozenset(f"simulate.run.{m}" for m in ("high", "middle", "low"))}


def test_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_contracts_accept_the_allowed_imports(tmp_path: Path) -> None:
    write_tree(tmp_path, HEALTHY)
    result = lint_imports(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_contracts_refuse_every_forbidden_import(tmp_path: Path) -> None:
    write_tree(tmp_path, HEALTHY | {name: text for name, (text, _) in VIOLATIONS.items()})
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    missed = [wording for _, wording in VIOLATIONS.values() if f"{wording} (l." not in result.stdout]
    assert missed == [], result.stdout


def test_contracts_refuse_a_package_without_a_layer(tmp_path: Path) -> None:
    write_tree(tmp_path, HEALTHY | {"simulate/attic.py": ""})
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert "attic" in result.stdout


def test_kernels_import_nki_and_numpy_only() -> None:
    assert refused_kernel_imports(ROOT) == []


def test_accepts_a_kernel_that_imports_its_siblings(tmp_path: Path) -> None:
    write_tree(tmp_path, HEALTHY)
    assert refused_kernel_imports(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "blamed"),
    [
        ("add.py", "import numpy\nimport torch", "add.py:2 imports torch"),
        ("add.py", "def reference():\n    from ml_dtypes import bfloat16", "add.py:2 imports ml_dtypes"),
        ("add.py", "from simulate.bind import install", "add.py:1 imports simulate.bind"),
        ("__init__.py", "import simulate.run", "__init__.py:1 imports simulate.run"),
        ("ladder/add.py", "import nkilib", "ladder/add.py:1 imports nkilib"),
    ],
)
def test_refuses_a_kernel_that_imports_more(tmp_path: Path, file: str, text: str, blamed: str) -> None:
    write_tree(tmp_path, HEALTHY | {f"nki_kernels/{file}": text})
    assert refused_kernel_imports(tmp_path) == [f"nki_kernels/{blamed}"]


def test_no_module_takes_the_name_nki() -> None:
    assert modules_named_nki(ROOT) == []


@pytest.mark.parametrize("name", ["nki/__init__.py", "nki/language.py", "nki.py", "nki.pyi"])
def test_refuses_a_module_named_nki(tmp_path: Path, name: str) -> None:
    write_tree(tmp_path, HEALTHY | {name: ""})
    assert modules_named_nki(tmp_path) == [name.split("/")[0]]


def test_modules_do_not_import_the_package_root() -> None:
    assert imports_of_the_package_root(ROOT) == []


@pytest.mark.parametrize("text", ["import simulate", "def late():\n    from simulate import install"])
def test_refuses_a_module_that_imports_the_package_root(tmp_path: Path, text: str) -> None:
    write_tree(tmp_path, HEALTHY)
    assert imports_of_the_package_root(tmp_path) == []
    write_tree(tmp_path, {"simulate/run/__init__.py": text})
    assert imports_of_the_package_root(tmp_path) == [f"simulate/run/__init__.py:{text.count(chr(10)) + 1}"]
