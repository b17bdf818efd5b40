"""The command `bundle`: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulate.bundle import build, folder, run, sources
from simulate.bundle.manifest import load_bundle
from simulate.bundle.run import compute_digest
from simulate.cli import main

COPY = """
import nki
import nki.isa as nisa
import nki.language as nl
{imports}

@nki.jit
def copied(a, twice=False):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=a)
    return out
"""
REFERENCE = """
def copied_reference(a, twice=False):
    return {value}
"""


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs `bundle` in a new folder and returns its exit status and its output on one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        status = main(["bundle", *words])
        captured = capsys.readouterr()
        return status, " ".join((captured.out + captured.err).split())

    return run


def kernel(path: Path, value: str = "1 * a", imports: str = "") -> None:
    path.write_text(COPY.format(imports=imports) + (REFERENCE.format(value=value) if value else ""))


def test_a_kernel_of_a_file_travels_with_what_it_imports(bundled: Any, tmp_path: Path) -> None:
    kernel(
        tmp_path / "mine.py",
        imports="import helper\nfrom json import dumps\nimport numpy as np\nimport pytest",
    )
    (tmp_path / "helper.py").write_text("from other import number\n")
    (tmp_path / "other.py").write_text("number = 3\n")
    status, text = bundled("mine.py:copied", "bf16[8,16]", "twice=True", "--out", "out", "--target", "trn1")
    assert status == 0 and text.startswith("out: 1 kernel launch for trn1 (LNC 1), ")
    made = load_bundle(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "sources").iterdir()} == {
        "mine.py",
        "helper.py",
        "other.py",
    }
    assert (tmp_path / "out" / "sources" / "mine.py").read_bytes() == (tmp_path / "mine.py").read_bytes()
    assert made.expects.packages == ("pytest",)
    assert made.expects.instances == ("trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge")
    array, flag = made.cases[0].arguments
    assert (array.dtype, array.shape, flag.text) == ("bfloat16", (8, 16), "True")
    assert np.load(tmp_path / "out" / array.file).dtype == np.uint16


def test_a_bundle_of_the_same_is_the_same(bundled: Any, tmp_path: Path) -> None:
    kernel(tmp_path / "mine.py")
    for name in ("one", "two"):
        assert bundled("mine.py:copied", "f32[8,16]", "--out", name)[0] == 0
    one, two = (load_bundle(tmp_path / name) for name in ("one", "two"))
    assert one == two
    manifest = json.loads((tmp_path / "one" / "bundle.json").read_text())
    assert compute_digest(tmp_path / "one", manifest) == one.digest
    (tmp_path / "one" / "README.md").write_text("other")
    assert compute_digest(tmp_path / "one", manifest) != one.digest


def test_the_digest_of_instructions_changes_with_an_operand(bundled: Any, tmp_path: Path) -> None:
    kernel(tmp_path / "mine.py")
    digests = set()
    for number, shape in enumerate(("f32[8,16]", "f32[16,8]", "bf16[8,16]")):
        assert bundled("mine.py:copied", shape, "--out", f"out{number}")[0] == 0
        digests.add(load_bundle(tmp_path / f"out{number}").cases[0].instructions.sha256)
    assert len(digests) == 3


def test_all_instructions_are_counted_by_their_names_and_are_in_the_digest(
    bundled: Any, tmp_path: Path
) -> None:
    """Also where one instruction follows another of its name: three copies are not one, nor two others."""
    loop = "    for row in ({rows}):\n        nisa.dma_copy(dst=out[row], src=a[row])"
    counts, digests = [], set()
    for number, rows in enumerate(("0, 1, 2", "0, 2, 1", "0, 1")):
        copy = COPY.replace("    nisa.dma_copy(dst=out, src=a)", loop.format(rows=rows))
        (tmp_path / f"mine{number}.py").write_text(copy.format(imports=""))
        assert bundled(f"mine{number}.py:copied", "f32[3,16]", "--out", f"out{number}")[0] == 0
        instructions = load_bundle(tmp_path / f"out{number}").cases[0].instructions
        counts.append((instructions.count, instructions.ops))
        digests.add(instructions.sha256)
    assert counts == [(3, {"dma_copy": 3})] * 2 + [(2, {"dma_copy": 2})]
    assert len(digests) == 3


def test_the_bound_is_that_of_verify(
    bundled: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy rounds nothing, so its error is 0 and its bound one rounding of the largest value."""
    kernel(tmp_path / "mine.py")
    assert bundled("mine.py:copied", "f32[8,16]", "--out", "out")[0] == 0
    tolerance = load_bundle(tmp_path / "out").cases[0].outputs[0].tolerance
    largest = float(np.abs(np.load(tmp_path / "out" / "inputs" / "copied" / "a.npy")).max())
    assert tolerance is not None and tolerance.error == 0
    assert tolerance.magnitude == pytest.approx(largest, rel=1e-6)
    assert largest * 2**-24 < tolerance.bound < largest * 2**-20


def test_without_a_reference_there_is_no_bound_and_a_reason(bundled: Any, tmp_path: Path) -> None:
    kernel(tmp_path / "mine.py", value="")
    assert bundled("mine.py:copied", "f32[8,16]", "--out", "out")[0] == 0
    output = load_bundle(tmp_path / "out").cases[0].outputs[0]
    assert (output.tolerance, output.why) == (None, "there is no copied_reference beside copied")
    (tmp_path / "truth.py").write_text(REFERENCE.format(value="a"))
    words = ("--reference", "truth.py:copied_reference", "--out", "again")
    assert bundled("mine.py:copied", "f32[8,16]", *words)[0] == 0
    assert load_bundle(tmp_path / "again").cases[0].outputs[0].tolerance is not None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("mine.py:copied", "f32[8,16]"), "--out DIR is missing: the folder to write"),
        (
            ("mine.py", "f32[8,16]", "--out", "out"),
            "mine.py names no kernel; give FILE.py:NAME or MODULE:NAME",
        ),
        (("mine.py:copied", "--catalogue", "--out", "out"), "names a kernel; --catalogue takes a package"),
        (
            ("json", "--catalogue", "--out", "out"),
            "json has no table of examples: No module named 'json.examples'",
        ),
        (("mine.py:absent", "f32[8,16]", "--out", "out"), "mine.py has no kernel absent"),
        (
            ("mine.py:copied", "f32[8,16]", "--ranks", "2", "--out", "out"),
            "a bundle holds launches of one rank",
        ),
        (
            ("mine.py:copied", "f32[8,16]", "--out", "full"),
            "full exists already; give a new or empty folder",
        ),
        (("mine.py:copied", "f32[8,16]", "--out", "mine.py"), "mine.py exists already"),
        (("mine.py:copied", "f32[8,16]", "--out", "mine.py/out"), "mine.py/out cannot be written: "),
        (
            ("mine.py:copied", "f32[1250,1001]", "--out", "out"),
            "copied has 10,010,000 bytes of arrays; a bundle takes",
        ),
        (
            ("mine.py:copied", "f32[8,16]", "group", "--out", "out"),
            "the argument twice of copied is a ReplicaGroup",
        ),
        (
            ("wrong.py:copied", "f32[8,16]", "--out", "out"),
            "output 0 of copied differs from its reference on the simulator: error ",
        ),
        (
            ("greedy.py:copied", "f32[8,16]", "--out", "out"),
            "imports the simulator, which is not there on an instance",
        ),
    ],
)
def test_what_cannot_be_bundled_is_one_sentence(
    words: tuple[str, ...], sentence: str, bundled: Any, tmp_path: Path
) -> None:
    kernel(tmp_path / "mine.py")
    kernel(tmp_path / "wrong.py", value="2 * a")
    kernel(tmp_path / "greedy.py", imports="from simulate.errors import NkwError")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = {path.name for path in tmp_path.iterdir()}
    status, text = bundled(*words)
    assert status == 2 and "error: [NKW-" in text
    assert sentence in text
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before


@pytest.mark.parametrize(("columns", "status"), [(1030, 0), (1040, 2)])
def test_a_bundle_has_ten_megabytes_at_most(columns: int, status: int, bundled: Any, tmp_path: Path) -> None:
    """The arrays have 9,888,000 and 9,984,000 bytes; run.py and the rest some 40,000. An empty folder is taken."""
    kernel(tmp_path / "mine.py")
    (tmp_path / "out").mkdir()
    exit_status, text = bundled("mine.py:copied", f"f32[1200,{columns}]", "--out", "out")
    assert exit_status == status
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert size < 10_000_000
    assert ("the bundle would have 10,0" in text) == (status == 2)


def test_a_kernel_that_breaks_a_rule_is_not_bundled(bundled: Any, tmp_path: Path) -> None:
    kernel(tmp_path / "mine.py")
    text = (tmp_path / "mine.py").read_text().replace("src=a)", "src=a[0:4])")
    (tmp_path / "mine.py").write_text(text)
    status, printed = bundled("mine.py:copied", "f32[8,16]", "--out", "out")
    assert status == 1 and "error: [NKW-" in printed
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_leaves_nothing(
    bundled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(tmp_path / "mine.py")

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.os, "replace", full)
    status, text = bundled("mine.py:copied", "f32[8,16]", "--out", "out")
    assert (status, "out cannot be written: No space left on device" in text) == (2, True)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


def test_compare_before_a_run_says_what_to_run_first(
    bundled: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel(tmp_path / "mine.py")
    assert bundled("mine.py:copied", "f32[8,8]", "--target", "trn2", "--out", "out")[0] == 0
    assert main(["compare", "out"]) == 2
    refusal = " ".join(capsys.readouterr().err.split())
    assert refusal == (
        "error: [NKW-BUNDLE] out has no result yet: run `python run.py` in it on the instance, copy its folder result "
        "back to out/result, then compare"
    )
    (tmp_path / "out" / "result").mkdir()
    (tmp_path / "out" / "result" / "result.json").write_text("{}")
    assert main(["compare", "out"]) == 2
    assert "has no result yet" not in capsys.readouterr().err


def test_packages_that_bind_the_simulator_travel_with_an_empty_init(tmp_path: Path) -> None:
    collected = sources.Sources()
    module, file = "nki_kernels.matmul", Path(build.__file__).parents[2] / "nki_kernels" / "matmul.py"
    assert sources.collect_sources(collected, module, file) == "nki"
    assert "simulate" not in collected.files["nki_kernels/__init__.py"]
    assert collected.files["nki_kernels/matmul.py"] == file.read_text()
    assert not any(name.startswith("simulate") for name in collected.files)
    assert collected.packages == set()


@pytest.mark.slow
def test_every_shipped_kernel_of_one_rank_is_in_the_catalogue(bundled: Any, tmp_path: Path) -> None:
    import nki_kernels
    from nki_kernels.examples import EXAMPLES, RANKS

    kernels = {name for name in nki_kernels.__all__ if not name.endswith("_reference")}
    assert {name for name in EXAMPLES if ":" not in name} == kernels
    status, text = bundled(
        "nki_kernels", "--catalogue", "--target", "trn2", "--out", "out", "--json", "told.json"
    )
    assert status == 0
    told = json.loads((tmp_path / "told.json").read_text())
    names = {case["name"] for case in told["cases"]}
    assert names == {name.rpartition(":")[2] for name in EXAMPLES} - set(RANKS)
    assert [name.partition(":")[0] for name in told["left_out"]] == list(RANKS)
    assert told["bytes"] < 11_000_000
    assert "target trn2" in text


def test_run_py_imports_nothing_of_the_project_and_is_python_310() -> None:
    tree = ast.parse(Path(run.__file__).read_text(), feature_version=(3, 10))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name.name for node in imports if isinstance(node, ast.Import) for name in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"numpy"}


def works(python: str) -> bool:
    """Return whether there is such a Python; some names on the path only say that there is none."""
    return (
        bool(shutil.which(python)) and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    )


OTHERS = list(filter(works, ("python3.10", "python3.12", "python3.13", "python3.14")))


@pytest.mark.slow
@pytest.mark.parametrize("python", [sys.executable, *OTHERS], ids=lambda path: Path(path).name)
def test_run_py_needs_nothing_but_the_standard_library(
    python: str, carried: Path, capsys: pytest.CaptureFixture[str], compared: Callable[[Path], Any]
) -> None:
    """Without any package it says so in a result, which is compared as any other."""
    command = [python, "-I", "-S", str(carried / "run.py")]  # no site-packages
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(
        "scaled: skipped, import: Environment: these kernels import nki, and no package nki"
    )
    seen = compared(carried)
    assert seen.likely[0].rule == 1 and not seen.agrees
