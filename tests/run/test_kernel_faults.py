"""Errors of a kernel's own Python code name the kernel's line and what to write."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from nkw.errors import InvalidArgument
from simulate.cli import main
from simulate.kernel_by_name import launch_by_name
from simulate.memory import NkiTensor
from simulate.run.kernel_faults import KernelError

Capture = pytest.CaptureFixture[str]

HEAD = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(x):
    tile = nl.load(x)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    {line}
    nl.store(out, tile)
    return out


def kernel_reference(x):
    return x * 1.0
"""
LINE = 12
PRODUCT = "nisa.nc_matmul(dst=psum_tile, stationary=a_transposed, moving=b) with stationary [K, M] and moving [K, N]"
TRANSPOSE = (
    "nisa.nc_transpose(dst=..., data=tile) for a tile, nisa.dma_transpose(dst=tile, src=x) for an HBM tensor"
)
BARRIER = (
    "no call is needed: the compiler orders instructions by their operands; nisa.core_barrier joins two cores"
)
HANDLE = "an instruction writes to dst and returns a handle; use the tile that was passed as dst"


def written(folder: Path, line: str) -> str:
    path = folder / "typo.py"
    path.write_text(HEAD.format(line=line))
    return f"{path}:kernel"


CASES = [
    (
        "nisa.tensor_scaler(dst=tile, data=tile)",
        "module 'nki.isa' has no attribute 'tensor_scaler'; did you mean nisa.tensor_scalar?",
    ),
    ("nl.swish(tile)", "module 'nki.language' has no attribute 'swish'; in NKI: nl.silu"),
    ("nl.Float32", "module 'nki.language' has no attribute 'Float32'; did you mean nl.float32?"),
    ("nl.zero((128, 4))", "module 'nki.language' has no attribute 'zero'; did you mean nl.zeros?"),
    ("nisa.load(x)", "module 'nki.isa' has no attribute 'load'; did you mean nl.load?"),
    (
        "nl.tensor_scalar(tile)",
        "module 'nki.language' has no attribute 'tensor_scalar'; did you mean nisa.tensor_scalar?",
    ),
    ("nl.qqq(tile)", "module 'nki.language' has no attribute 'qqq'"),
    ("nisa.matmul(tile, tile)", f"module 'nki.isa' has no attribute 'matmul'; in NKI: {PRODUCT}"),
    ("tile.T", f"'NkiTensor' object has no attribute 'T'; in NKI: {TRANSPOSE}"),
    (
        "tile.broadcast_to((128, 64))",
        "'NkiTensor' object has no attribute 'broadcast_to'; in NKI: .broadcast(dim, size) repeats a dim of size 1; "
        "for all partitions load src=row.broadcast(0, 128)",
    ),
    (
        "tile.exp()",
        "'NkiTensor' object has no attribute 'exp'; in NKI: nl.exp(tile), or op=nl.exp in an instruction",
    ),
    ("tile.reshpe((128, 64))", "'NkiTensor' object has no attribute 'reshpe'; did you mean .reshape?"),
    ("tile.qqq", "'NkiTensor' object has no attribute 'qqq'"),
    (
        "nisa.tensor_copy(dst=tile, src=tile).shape",
        f"'NkiInstruction' object has no attribute 'shape'; in NKI: {HANDLE}",
    ),
    ("tl.dot(tile, tile)", f"name 'tl' is not defined; in NKI, tl.dot is {PRODUCT}"),
    ("tl.load(x)", "name 'tl' is not defined; in NKI, tl.load is nl.load"),
    ("tl.qqq(x)", "name 'tl' is not defined; in NKI: kernels use nki.language as nl and nki.isa as nisa"),
    ("__syncthreads()", f"name '__syncthreads' is not defined; in NKI: {BARRIER}"),
    ("nl.store(out, tlie)", "name 'tlie' is not defined; did you mean tile?"),
    ("nl.store(out, qqq)", "name 'qqq' is not defined"),
    ("tensor_copy(dst=tile, src=tile)", "name 'tensor_copy' is not defined; in NKI: nisa.tensor_copy"),
    (
        "tile.reshape(128, 4)",
        "NkiTensor.reshape() takes 2 positional arguments but 3 were given; in NKI: .reshape((a, b)) takes one tuple",
    ),
    ("tile.shape()", "'tuple' object is not callable; in NKI: without parentheses, .shape[dim]"),
    ("tile.shape[2]", "tuple index out of range; tile has the 2 dims (128, 4)"),
    ("len(tile)", "object of type 'NkiTensor' has no len(); in NKI: .shape[0] is the size of the first dim"),
    ("nl.load(x, type=1)", "load() got an unexpected keyword argument 'type'; did you mean dtype=?"),
    (
        "tile.broadcast(axis=1, size=2)",
        "NkiTensor.broadcast() got an unexpected keyword argument 'axis'; did you mean dim=?",
    ),
    ("nl.load()", "load() missing 1 required positional argument: 'src'"),
    (
        "nl.fori_loop(0, 4, lambda: None)",
        "fori_loop: kernel.<locals>.<lambda>() takes 0 positional arguments but 1 was given",
    ),
]


@pytest.mark.parametrize(("line", "message"), CASES)
def test_a_fault_of_the_kernels_code_is_reported_at_its_line(
    tmp_path: Path, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KernelError) as refused:
        launch_by_name(written(tmp_path, line), ["f32[128,4]"])
    assert str(refused.value) == f"[NKW-KERNEL-ERROR] {message}\n  at typo.py:{LINE} in kernel"


def test_other_exceptions_of_the_kernels_code_are_reported_at_their_line(tmp_path: Path) -> None:
    with pytest.raises(KernelError) as refused:
        launch_by_name(written(tmp_path, "{}['rows']"), ["f32[128,4]"])
    assert refused.value.message == "KeyError: 'rows'"
    assert refused.value.where is not None and refused.value.where.line == LINE


def test_a_keyword_of_an_instruction_that_does_not_exist_gets_the_similar_one(tmp_path: Path) -> None:
    line = "nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand=1.0)"
    with pytest.raises(InvalidArgument) as refused:
        launch_by_name(written(tmp_path, line), ["f32[128,4]"])
    assert refused.value.message == (
        "tensor_scalar: got an unexpected keyword argument 'operand'; did you mean operand0=? its parameters are "
        "dst, data, op0, operand0, reverse0, op1, operand1, reverse1, engine, name"
    )
    assert refused.value.where is not None and refused.value.where.line == LINE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kernel() missing 1 required positional argument: 'x'"),
        (["f32[128,4]", "1"], "kernel() takes 1 positional argument but 2 were given"),
        (["data=f32[128,4]"], "kernel() got an unexpected keyword argument 'data'; did you mean x=?"),
        (["f32[128,4]", "y=1"], "kernel() got an unexpected keyword argument 'y'"),
    ],
)
def test_a_wrong_call_is_reported_as_one(tmp_path: Path, arguments: list[str], message: str) -> None:
    words = written(tmp_path, "pass")
    with pytest.raises(InvalidArgument) as refused:
        launch_by_name(words, arguments)
    assert refused.value.code == "NKW-KERNEL-CALL"
    assert refused.value.message == f"{words} does not take these arguments: {message}"


def test_a_type_error_at_the_kernels_first_line_is_no_wrong_call(tmp_path: Path) -> None:
    path = tmp_path / "first.py"
    path.write_text("import nki\n@nki.jit\ndef kernel(x):\n    return len(5)\n")
    with pytest.raises(KernelError) as refused:
        launch_by_name(f"{path}:kernel", ["f32[128,4]"])
    assert (refused.value.message, refused.value.where.line) == ("object of type 'int' has no len()", 4)  # type: ignore[union-attr]


def test_an_error_keeps_pythons_type_and_the_kernels_frame() -> None:
    from simulate import nki

    @nki.jit
    def kernel(x):
        return x.T

    with pytest.raises(AttributeError, match="nc_transpose") as refused:
        kernel(np.ones((4, 4), np.float32))
    assert isinstance(refused.value, KernelError)
    assert refused.traceback[-1].name == "kernel"


def test_an_exception_class_of_the_kernels_file_stays_unchanged() -> None:
    from simulate import nki

    class Mine(TypeError):
        pass

    @nki.jit
    def kernel(x):
        raise Mine("said by the kernel")

    with pytest.raises(Mine, match=r"^said by the kernel$"):
        kernel(np.ones((4, 4), np.float32))


@pytest.mark.parametrize(("command", "status"), [("run", 3), ("check", 3), ("verify", 3), ("time", 3)])
def test_every_command_reports_the_line(
    tmp_path: Path, capsys: Capture, command: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = written(tmp_path, "nisa.tensor_scaler(dst=tile, data=tile)")
    assert main([command, words, "f32[128,4]"]) == status
    done = capsys.readouterr()
    printed = done.out + done.err
    assert "did you mean nisa.tensor_scalar?" in printed.replace("\n", " ")
    assert f"typo.py:{LINE}" in printed
    assert "does not take these arguments" not in printed and "Traceback" not in printed


def test_a_script_reports_the_line(tmp_path: Path, capsys: Capture) -> None:
    words = written(tmp_path, "tile.T")
    script = Path(words.rpartition(":")[0])
    script.write_text(script.read_text() + "\nkernel(np.ones((128, 4), np.float32))\n")
    assert main(["run", str(script)]) == 1
    printed = capsys.readouterr().err
    assert "[NKW-KERNEL-ERROR] 'NkiTensor' object has no attribute 'T'; in NKI: nisa.nc_transpose" in printed
    assert f"typo.py:{LINE} in kernel" in printed


def test_numpy_on_a_tile_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"try:   nl\.exp, as a function of tiles or as op=nl\.exp of an"
    ):
        launch_by_name(written(tmp_path, "np.exp(tile)"), ["f32[128,4]"])
    with pytest.raises(AssertionError, match=r"try:   allocate the result with nl\.ndarray and copy"):
        launch_by_name(written(tmp_path, "np.stack([tile, tile])"), ["f32[128,4]"])


def test_dir_of_a_tile_has_the_documented_names_alone() -> None:
    api = json.loads((Path(__file__).parents[1] / "contract/nki_api.json").read_text())
    members = api["classes"]["nki.language"]["NkiTensor"]
    documented = {name for name in (*members["methods"], *members["attributes"]) if not name.startswith("__")}
    tile = NkiTensor((128, 4), "float32", None)  # type: ignore[arg-type]
    assert set(dir(tile)) == documented | {"base_tensor", "data"}
    assert all(hasattr(tile, name) for name in dir(tile))


@pytest.mark.slow
def test_a_notebook_and_pytest_show_the_suggestion(tmp_path: Path) -> None:
    kernel = HEAD.format(line="tile.T") + "\nX = np.ones((128, 4), np.float32)\n"
    install = "import simulate; simulate.install('simulate')\n"
    shell = textwrap.dedent(
        f"""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance(colors="NoColor")
        shell.run_cell({install + kernel!r})
        shell.run_cell("kernel(X)")
        """
    )
    (tmp_path / "test_kernel.py").write_text(
        f"{install}{kernel}\ndef test_it(check_kernel):\n    check_kernel(kernel, kernel_reference, X)\n"
    )
    commands = (["-c", shell], ["-m", "pytest", "-q", "-p", "simulate.pytest_plugin", "test_kernel.py"])
    for command in commands:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path)
        assert "in NKI: nisa.nc_transpose" in done.stdout
        assert "simulate/run/launcher.py" not in done.stdout
