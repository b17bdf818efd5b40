"""Kernels keep to the Python that the NKI language guide lists; what the public kernel library never uses is out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nki_kernels

FOLDER = Path(nki_kernels.__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if path.name != "__init__.py")
DEVICE = {"nisa", "nl", "ncc", "nki"}
ALLOWED_IMPORTS = {"__future__", "dataclasses", "nki", "nki_kernels", "numpy"}
FORBIDDEN_NODES = (
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Lambda,
    ast.Try,
    ast.Raise,
    ast.With,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Global,
    ast.Nonlocal,
    ast.Starred,
    ast.NamedExpr,
    ast.Import,
    ast.ImportFrom,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.Match,
    ast.Delete,
    ast.Set,
)
FORBIDDEN_CALLS = set(
    "enumerate zip sum any all sorted reversed map filter getattr setattr hasattr isinstance eval exec open".split()
)


def runs_on_device(function: ast.FunctionDef) -> bool:
    """Return whether a function runs on the device: all but references, which are plain numpy."""
    return not function.name.endswith("_reference")


def loop_bodies(function: ast.FunctionDef) -> set[str]:
    """Return the functions that are given to `nl.fori_loop` or `nl.while_loop`, as the guide on loops writes them."""
    return {
        argument.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("nl.fori_loop", "nl.while_loop")
        for argument in node.args
        if isinstance(argument, ast.Name)
    }


def offences(function: ast.FunctionDef) -> list[str]:
    """Return what a kernel function uses that the language subset lacks, with the line."""
    messages = []
    arguments = function.args
    if arguments.kwonlyargs:
        messages.append(f"{function.lineno}: keyword-only arguments")
    for default in arguments.defaults:
        if isinstance(default, (ast.List, ast.Dict)):
            messages.append(f"{default.lineno}: a list or dict as default")
    bodies = loop_bodies(function)
    for node in ast.walk(function):
        inner = isinstance(node, ast.FunctionDef) and node is not function and node.name not in bodies
        if isinstance(node, FORBIDDEN_NODES) or inner:
            messages.append(f"{node.lineno}: {type(node).__name__}")
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
        ):
            messages.append(f"{node.lineno}: {node.func.id}()")
        elif isinstance(node, ast.Compare):
            for operator, right in zip(node.ops, node.comparators):
                against_none = isinstance(right, ast.Constant) and right.value is None
                if isinstance(operator, (ast.Is, ast.IsNot)) and not against_none:
                    messages.append(f"{node.lineno}: is, against something else than None")
        elif isinstance(node, ast.Name) and node.id == "np":
            messages.append(f"{node.lineno}: numpy")
    return messages


def functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def classes(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [member for member in node.body if isinstance(member, ast.FunctionDef)]


def stores(function: ast.FunctionDef) -> list[ast.Attribute]:
    """Return the attributes that a function assigns to."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]


def is_of_self(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id == "self"


def fields(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the declared fields of a record, with their defaults."""
    return {
        member.target.id: member.value
        for member in node.body
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name)
    }


def is_record(node: ast.ClassDef) -> bool:
    return [ast.unparse(decorator) for decorator in node.decorator_list] == ["dataclass"]


def counters(node: ast.ClassDef) -> set[str]:
    """Return the fields of a record that begin at 0."""
    return {
        name for name, default in fields(node).items() if default is not None and ast.unparse(default) == "0"
    }


def class_offences(node: ast.ClassDef) -> list[str]:
    """Return what a class has that the language subset lacks, or that is no declared field of a record."""
    messages = []
    if [ast.unparse(base) for base in node.bases] != ["nl.NKIObject"] or node.keywords:
        messages.append(f"{node.lineno}: a base other than nl.NKIObject")
    if node.decorator_list and not is_record(node):
        messages.append(f"{node.lineno}: a decorator other than @dataclass")
    for method in methods(node):
        messages += offences(method)
        if is_record(node):
            messages += [
                f"{attribute.lineno}: {attribute.attr} is not declared"
                for attribute in stores(method)
                if is_of_self(attribute) and attribute.attr not in fields(node)
            ]
    return messages


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_keep_to_the_language_subset(path: Path) -> None:
    if path.stem == "precision":
        return
    messages = [
        f"{path.name}:{line}"
        for function in functions(path.read_text())
        if runs_on_device(function)
        for line in offences(function)
    ]
    messages += [f"{path.name}:{line}" for node in classes(path.read_text()) for line in class_offences(node)]
    assert messages == []


def test_only_methods_advance_the_counters_of_a_record() -> None:
    """No function of a file that names the record assigns to its counters."""
    sources = [path.read_text() for path in FILES]
    records = [node for source in sources for node in classes(source) if is_record(node) and counters(node)]
    assert {"Prefetch", "RankSum", "RowGather"} <= {node.name for node in records}
    for node in records:
        assigned = {
            attribute.attr
            for source in sources
            if node.name in source
            for function in functions(source)
            for attribute in stores(function)
        }
        assert counters(node) & assigned == set(), node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernel_files_import_nki_and_numpy_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots = {str(node.module).split(".")[0]}
        else:
            continue
        assert roots <= ALLOWED_IMPORTS, f"{path.name}:{node.lineno}"


def test_only_kernels_are_decorated_and_each_has_its_reference() -> None:
    for name in nki_kernels.__all__:
        if name.endswith("_reference"):
            continue
        definitions = functions((FOLDER / f"{name}.py").read_text())
        decorated = [function.name for function in definitions if function.decorator_list]
        assert decorated == [name]
        by_name = {function.name: [a.arg for a in function.args.args] for function in definitions}
        assert by_name[f"{name}_reference"] == by_name[name]


@pytest.mark.parametrize(
    ("line", "offence"),
    [
        ("a = [b for b in range(3)]", "ListComp"),
        ("f = lambda x: x", "Lambda"),
        ("for i, b in enumerate(a): pass", "enumerate()"),
        ("if a is b: pass", "is, against something else than None"),
        ("a = np.zeros(3)", "numpy"),
        ("a = f(*b)", "Starred"),
    ],
)
def test_the_check_speaks_on_what_is_out(line: str, offence: str) -> None:
    (function,) = functions(f"def kernel(a):\n    {line}\n")
    assert offence in [message.split(": ", 1)[1] for message in offences(function)]


def test_the_check_is_silent_on_what_is_in() -> None:
    (function,) = functions(
        "def kernel(a, b=None):\n"
        "    assert a.shape == (1, 1), f'a is {a.shape}'\n"
        "    tiles = []\n"
        "    for i in range(0, 4, 2):\n"
        "        tiles.append(a[i : min(4, i + 2)] if b is None else b)\n"
        "    return tiles, len(tiles)\n"
    )
    assert offences(function) == []


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("class A(nl.NKIObject):\n    def f(self):\n        yield 1", "Yield"),
        ("class A(B):\n    a: int", "a base other than nl.NKIObject"),
        ("@dataclass(frozen=True)\nclass A(nl.NKIObject):\n    a: int", "a decorator other than @dataclass"),
        (
            "@dataclass\nclass A(nl.NKIObject):\n    a: int\n    def f(self):\n        self.b = 1",
            "b is not declared",
        ),
    ],
)
def test_the_check_speaks_on_a_class_that_is_out(source: str, offence: str) -> None:
    (node,) = classes(source)
    assert [message.split(": ", 1)[1] for message in class_offences(node)] == [offence]


def test_the_check_is_silent_on_a_record() -> None:
    (node,) = classes(
        "@dataclass\n"
        "class A(nl.NKIObject):\n"
        "    a: list\n"
        "    b: int = 0\n"
        "    def f(self):\n"
        "        self.b += len(self.a)\n"
    )
    assert class_offences(node) == []
    assert counters(node) == {"b"}


def test_a_function_inside_is_the_body_of_a_device_loop_or_out() -> None:
    inner = "def kernel(a):\n    def body(i):\n        use(a, i)\n    {}\n"
    (function,) = functions(inner.format("nl.fori_loop(0, a, body)"))
    assert offences(function) == []
    (function,) = functions(inner.format("body(0)"))
    assert offences(function) == ["2: FunctionDef"]
