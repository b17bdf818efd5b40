"""What is distributed, and what may be installed with it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import simulate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"simulate", "nki_kernels", "model", "nkw"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

# The newest versions on the public index that are placeholders: they install, and their import raises ImportError.
PLACEHOLDERS = {
    "nki": "0.0.1",
    "neuronx-cc": "1.0.post1",
    "torch-neuronx": "1.0",
    "libneuronxla": "1.0",
    "transformers-neuronx": "0.1",
    "neuronx-distributed": "0.1",
}
# Versions of the vendor's own repository, as they are written there, that the extra must admit.
GENUINE = {
    "nki": ("0.6.0", "0.7.0"),
    "neuronx-cc": ("2.20.9961.0+0acef03a", "2.22.12471.0+b4a00d10"),
    "torch-neuronx": ("2.7.0.2.12.22436+0f1dac25", "2.9.0.2.11.19912"),
    "libneuronxla": ("2.2.12677.0+5e4cd9ec",),
    "transformers-neuronx": ("0.12.313", "0.13.1216"),
}

# Files that need an extra as soon as they are imported; everything else must import with the base install.
NEED_AN_EXTRA = {
    "model/serve/openai/answers.py",
    "model/serve/openai/audio/answers.py",
    "model/serve/openai/audio/requests.py",
    "model/serve/http/app.py",
    "model/serve/http/shared_routes.py",
    "model/serve/images/metrics.py",
    "model/serve/images/requests.py",
    "model/serve/images/routes.py",
    "model/serve/http/admission.py",
    "model/serve/openai/messages.py",
    "model/serve/metrics.py",
    "model/serve/http/origins.py",
    "model/serve/openai/requests.py",
    "model/serve/openai/response_requests.py",
    "model/serve/openai/responses.py",
    "model/serve/cluster/handle.py",
    "model/serve/cluster/request_router.py",
    "model/serve/replicas/backend.py",
    "model/serve/replicas/router.py",
    "model/serve/replicas/sockets.py",
    "model/serve/http/server.py",
    "simulate/pytest_plugin.py",
    "simulate/testing/strategies.py",
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """Return the [project] table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build the wheel that `pip install .` would install and yield it, opened as a zip file."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def requirements(project: dict[str, Any], *extras: str) -> list[Requirement]:
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def neuron_extra(project: dict[str, Any]) -> dict[str, SpecifierSet]:
    extras = project["optional-dependencies"]
    lines = map(Requirement, extras["neuron"] + extras["legacy"])
    return {canonicalize_name(line.name): line.specifier for line in lines}


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def applies(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


def third_party_imports_at_import(path: Path) -> set[str]:
    """Return top-level names that importing a file needs, apart from the standard library and our own packages."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"), str(path))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
        waiting += ast.iter_child_nodes(node)
    return names - set(sys.stdlib_module_names) - PACKAGES


def test_neuron_extra_admits_no_placeholder(project: dict[str, Any]) -> None:
    for name, specifier in neuron_extra(project).items():
        assert name in PLACEHOLDERS, f"{name}: note which versions of it the public index carries"
        assert not specifier.contains(PLACEHOLDERS[name], prereleases=True), name


def test_neuron_extra_admits_the_genuine_packages(project: dict[str, Any]) -> None:
    extra = neuron_extra(project)
    assert set(extra) == set(GENUINE)
    for name, versions in GENUINE.items():
        for version in versions:
            assert extra[name].contains(version), f"{name} {version}"


def test_no_other_extra_names_a_neuron_package(project: dict[str, Any]) -> None:
    other_requirements = requirements(project, *set(project["optional-dependencies"]) - {"neuron", "legacy"})
    assert not {canonicalize_name(line.name) for line in other_requirements} & set(PLACEHOLDERS)


def test_extras_are_those_that_readme_names_and_none_is_empty(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(extras) == {*re.findall(r"pip install '\.\[(\w+)\]'", readme), "dev"}
    assert all(extras.values())


def test_nkw_is_the_only_command(project: dict[str, Any]) -> None:
    assert project["scripts"] == {"nkw": "nkw.__main__:main"}


def test_python_3_9_is_refused_and_its_successors_accepted(project: dict[str, Any]) -> None:
    requires = SpecifierSet(project["requires-python"])
    assert "3.9" not in requires
    assert all(python in requires for python in PYTHONS)


def test_numpy_1_25_is_refused_and_1_26_accepted(project: dict[str, Any]) -> None:
    (numpy,) = (line.specifier for line in requirements(project) if line.name == "numpy")
    assert "1.25.2" not in numpy
    assert "1.26.0" in numpy
    assert "2.4.6" in numpy


def test_version_heads_the_changelog() -> None:
    headings = [
        line
        for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("## ")
    ]
    assert headings[0].startswith(f"## {simulate.__version__}")


@pytest.mark.parametrize("python", PYTHONS)
def test_development_versions_are_pinned_within_the_ranges(project: dict[str, Any], python: str) -> None:
    pins: dict[str, str] = {}
    for line in constraints():
        (specifier,) = line.specifier
        assert specifier.operator == "==", f"{line} is no pin"
        if applies(line, python):
            name = canonicalize_name(line.name)
            assert name not in pins, f"{name} is pinned twice for Python {python}"
            pins[name] = specifier.version
    for line in requirements(project, "dev", "serve", "speed", "tune", "cluster", "load"):
        if applies(line, python):
            assert line.specifier.contains(pins[canonicalize_name(line.name)]), f"{line}, Python {python}"


SERVER_PACKAGES = ("fastapi", "h11", "llguidance", "prometheus-client", "pydantic", "starlette", "uvicorn")


def test_packages_of_the_server_have_upper_bounds(project: dict[str, Any]) -> None:
    bounded = [line for line in requirements(project, "serve", "dev") if line.name in SERVER_PACKAGES]
    assert sorted(line.name for line in bounded) == sorted(2 * SERVER_PACKAGES)
    for line in bounded:
        assert not line.specifier.contains("999"), line
    (uvicorn, _) = (line for line in bounded if line.name == "uvicorn")
    pinned = next(Version(str(pin.specifier)[2:]) for pin in constraints() if pin.name == "uvicorn")
    assert uvicorn.specifier.contains(pinned)
    assert not uvicorn.specifier.contains(f"{pinned.major}.{pinned.minor + 1}"), (
        "its protocol class is subclassed"
    )


@pytest.mark.slow
def test_base_install_suffices_to_import_everything(project: dict[str, Any]) -> None:
    base = {line.name for line in requirements(project)} | {"nki"}
    surplus = {
        name: sorted(third_party_imports_at_import(path) - base)
        for package in sorted(PACKAGES)
        for path in sorted((ROOT / package).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) not in NEED_AN_EXTRA
        and third_party_imports_at_import(path) - base
    }
    assert surplus == {}


@pytest.mark.slow
def test_every_base_dependency_is_imported(project: dict[str, Any]) -> None:
    imported = {
        name.split(".")[0]
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert {line.name for line in requirements(project)} <= imported


@pytest.mark.parametrize("name", sorted(NEED_AN_EXTRA))
def test_files_that_need_an_extra_exist_and_need_it(project: dict[str, Any], name: str) -> None:
    base = {line.name for line in requirements(project)}
    assert third_party_imports_at_import(ROOT / name) - base


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import torch.nn", {"torch"}),
        ("try:\n    from torch import nn\nexcept ImportError:\n    nn = None", {"torch"}),
        ("class A:\n    import torch", {"torch"}),
        ("def late():\n    import torch", set()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", set()),
        ("import json\nimport simulate.run\nfrom . import sibling", set()),
    ],
)
def test_finds_what_a_file_needs_when_imported(tmp_path: Path, text: str, imported: set[str]) -> None:
    file = tmp_path / "file.py"
    file.write_text(text, encoding="utf-8")
    assert third_party_imports_at_import(file) == imported


@pytest.mark.slow
def test_wheel_holds_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == PACKAGES | {f"nki_workbench-{simulate.__version__}.dist-info"}


def test_wheel_holds_every_module_and_the_shipped_model(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    modules = {
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    weights = {
        path.relative_to(ROOT).as_posix()
        for folder in ("pretrained", "published")
        for path in (ROOT / "model" / folder).iterdir()
        if path.suffix in (".json", ".safetensors")
    }
    assert modules <= names
    assert {"model/pretrained/model.safetensors", "model/published/llama-3.1-70b.json"} <= weights
    assert weights <= names


def test_wheel_holds_what_the_profile_page_is_made_of(wheel: zipfile.ZipFile) -> None:
    assets = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "simulate" / "profile" / "page").iterdir()
        if path.suffix in (".html", ".css", ".js")
    }
    assert len(assets) > 2
    assert assets <= set(wheel.namelist())


@pytest.mark.slow
def test_fidelity_of_an_installed_wheel_says_which_folder_it_needs(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "installed")
    # Without `site`, so that no .pth file of a development install adds this checkout to the path.
    paths = [str(tmp_path / "installed"), *map(sysconfig.get_path, ("purelib", "platlib"))]
    ran = {
        folder: subprocess.run(
            [sys.executable, "-S", "-m", "simulate", "fidelity", "--help"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
        )
        for folder in (tmp_path, ROOT)
    }
    assert ran[tmp_path].returncode == 2
    assert ran[tmp_path].stderr == (
        "error: [NKW-FIDELITY-CHECKOUT] fidelity needs the folder benchmarks/fidelity, which is not installed with the "
        "package: run `python -m simulate fidelity` in the top folder of a checkout of the repository\n"
    )
    assert ran[ROOT].returncode == 0
    assert "--measurements FILE" in ran[ROOT].stdout
    assert ran[ROOT].stdout.startswith("usage: python -m simulate fidelity ")


def test_wheel_carries_licence_and_command(wheel: zipfile.ZipFile) -> None:
    info = f"nki_workbench-{simulate.__version__}.dist-info"
    assert b"nkw = nkw.__main__:main" in wheel.read(f"{info}/entry_points.txt")
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
