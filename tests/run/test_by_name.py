"""Launches of a kernel by module, name and shapes, as commands take them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from nkw.errors import InvalidArgument, RuleViolation
from simulate.cli import main
from simulate.kernel_by_name import DTYPES, launch_by_name, names_a_kernel
from simulate.run import Mode

Capture = pytest.CaptureFixture[str]
KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def scaled(a, factor, twice=False):
    assert a.shape[0] <= 256, f"at most 256 rows, not {a.shape[0]}"
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load(a)
    for _ in range(2 if twice else 1):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=tile)
    return out


NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return str(path)


def test_a_kernel_of_a_file_is_launched_dry(file: str) -> None:
    done = launch_by_name(f"{file}:scaled", ["bf16[128,64]", "2.0", "twice=True"])
    assert (done.kernel, done.mode) == ("scaled", Mode.dry)
    assert done.outputs[0].shape == (128, 64)
    assert [event.op for event in done.streams[0]] == [
        "dma_copy",
        "tensor_scalar",
        "tensor_scalar",
        "dma_copy",
    ]


def test_a_kernel_of_a_module_is_launched_dry() -> None:
    done = launch_by_name("nki_kernels:rmsnorm", ["f32[127,129]", "f32[1,129]", "1e-5"])
    assert done.kernel == "rmsnorm"
    assert done.outputs[0].shape == (127, 129)


def test_arguments_have_numbers_where_numbers_are_computed(file: str) -> None:
    done = launch_by_name(f"{file}:scaled", ["f32[128,64]", "2.0"], Mode.eager)
    assert abs(done.outputs[0].std() - 2) < 0.2
    again = launch_by_name(f"{file}:scaled", ["f32[128,64]", "2.0"], Mode.eager)
    assert np.array_equal(done.outputs[0], again.outputs[0])
    counted = launch_by_name("nki_kernels:embedding", ["i32[5,1]", "f32[9,8]"], Mode.eager)
    table = np.random.default_rng(1).standard_normal((9, 8)).astype(np.float32)
    assert np.array_equal(counted.outputs[0], table[:5])


def test_ranks_of_the_environment_run_a_kernel_with_numbers_of_their_own(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = launch_by_name(f"{file}:scaled", ["f32[8,4]", "2.0"], Mode.eager).outputs
    monkeypatch.setenv("NKW_RANKS", "2")
    first, second = launch_by_name(f"{file}:scaled", ["f32[8,4]", "2.0"], Mode.eager).outputs
    assert np.array_equal(first, alone)
    assert not np.array_equal(first, second)
    done = launch_by_name("nki_kernels:all_reduce", ["f32[8,4]", "replica_group=group"], Mode.eager)
    inputs = [np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32) for seed in (0, (0, 1))]
    for output in done.outputs:
        np.testing.assert_array_equal(
            output, inputs[0] + inputs[1]
        )  # one addition of two numbers rounds once


def test_a_kernel_imports_what_stands_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_kernel.py").write_text("COUNT = 2\n")
    lines = KERNEL.replace("import nki\n", "import nki\nfrom beside_the_kernel import COUNT\n", 1)
    (tmp_path / "imports_beside.py").write_text(lines)
    before = list(sys.path)
    assert launch_by_name(f"{tmp_path / 'imports_beside.py'}:scaled", ["f32[8,4]", "2.0"]).kernel == "scaled"
    monkeypatch.chdir(tmp_path)
    assert launch_by_name("imports_beside:scaled", ["f32[8,4]", "2.0"]).kernel == "scaled"
    assert sys.path == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reaches_the_kernel(file: str, dtype: str) -> None:
    done = launch_by_name(f"{file}:scaled", [f"{dtype}[4,8]", "1.0"])
    assert done.outputs[0].dtype == np.dtype(DTYPES[dtype])


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("float32", "f32"),
        ("fp32", "f32"),
        ("float16", "f16"),
        ("fp16", "f16"),
        ("bfloat16", "bf16"),
        ("int8", "i8"),
        ("uint16", "u16"),
        ("float8_e4m3", "f8e4m3"),
    ],
)
def test_long_names_of_dtypes_are_taken(file: str, name: str, short: str) -> None:
    done = launch_by_name(f"{file}:scaled", [f"{name}[4,8]", "1.0"])
    assert done.outputs[0].dtype == np.dtype(DTYPES[short])


def test_a_misspelt_dtype_comes_with_the_one_that_was_meant(file: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"dtype flaot32 of flaot32\[4\] is not known; did you mean float32\?"
    ):
        launch_by_name(f"{file}:scaled", ["flaot32[4]", "1.0"])


def test_words_that_name_a_kernel_are_told_from_a_path(tmp_path: Path) -> None:
    assert names_a_kernel("nowhere.py:kernel")
    assert names_a_kernel("package.module:kernel")
    assert not names_a_kernel("kernel.py")
    assert not names_a_kernel("kernel.py:1")
    (tmp_path / "a.py:b").write_text("")
    assert not names_a_kernel(str(tmp_path / "a.py:b"))


@pytest.mark.parametrize(
    ("kernel", "arguments", "code", "message"),
    [
        (
            "scaled",
            ["f33[4]", "1.0"],
            "NKW-KERNEL-ARGUMENT",
            f"dtype f33 of f33[4] is not known; known are {', '.join(DTYPES)}, and the names of NumPy such as float32",
        ),
        (
            "scaled",
            ["f32[4,x]"],
            "NKW-KERNEL-ARGUMENT",
            "the shape of f32[4,x] is not a list of positive numbers; give sizes such as f32[128,512]",
        ),
        (
            "scaled",
            ["f32[4,0]"],
            "NKW-KERNEL-ARGUMENT",
            "the shape of f32[4,0] is not a list of positive numbers; give sizes such as f32[128,512]",
        ),
        (
            "scaled",
            ["four"],
            "NKW-KERNEL-ARGUMENT",
            "argument 'four' is neither a tensor such as f32[128,512] nor a Python literal nor `group`",
        ),
        (
            "scaled",
            ["f32[4,4]"],
            "NKW-KERNEL-CALL",
            "{file}:scaled does not take these arguments: scaled() missing 1 required positional argument: 'factor'",
        ),
        (
            "scaled",
            ["f32[257,4]", "1.0"],
            "NKW-KERNEL-CALL",
            "{file}:scaled does not take these arguments: at most 256 rows, not 257",
        ),
        (
            "NUMBER",
            [],
            "NKW-KERNEL-NAME",
            "{file} has no kernel NUMBER; give the name of a function that it defines",
        ),
        (
            "absent",
            [],
            "NKW-KERNEL-NAME",
            "{file} has no kernel absent; give the name of a function that it defines",
        ),
    ],
)
def test_refuses_in_one_sentence(
    file: str, kernel: str, arguments: list[str], code: str, message: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        launch_by_name(f"{file}:{kernel}", arguments)
    assert (refused.value.code, refused.value.message) == (code, message.format(file=file))


def test_refuses_places_that_are_not_there() -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere\.py is not a file"):
        launch_by_name("nowhere.py:kernel", [])
    with pytest.raises(InvalidArgument, match="no_such_module is not a module"):
        launch_by_name("no_such_module:kernel", [])


def test_a_broken_rule_keeps_its_type(file: str) -> None:
    """129 rows pass the kernel's own check and break the rule of the partitions."""
    with pytest.raises(RuleViolation):
        launch_by_name(f"{file}:scaled", ["f32[129,4]", "1.0"])


def test_run_computes_a_kernel_by_name_and_prints_its_launch(file: str, capsys: Capture) -> None:
    assert main(["run", f"{file}:scaled", "f32[128,64]", "2.0", "--target", "trn1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("scaled on trn1: eager, 1 rank, 1 core, 3 instructions\n\n")
    assert "   0       0  (128, 64) float32\n" in out and "dma_copy           2\n" in out
    assert err == "target trn1\n"
    assert main(["run", f"{file}:scaled", "f32[257,64]", "2.0"]) == 2
    assert "at most 256 rows, not 257" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--replay", "--exact", "--verify-replay", "--replay-report"])
def test_options_of_replay_are_refused_beside_a_kernel_by_name(
    file: str, option: str, capsys: Capture
) -> None:
    assert main(["run", f"{file}:scaled", "f32[128,64]", "2.0", option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        f"error: [NKW-REPLAY-OPTION] {option} is about launches that a script repeats, and "
    )


LONG = "a" * 5000


@pytest.mark.parametrize("command", ["run", "check", "time", "memory"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (LONG, "is not a file"),
        (f"{LONG}.py", "is not a file"),
        (f"{LONG}.py:kernel", "is not a file"),
        (f"folder/{LONG}/kernel.py:kernel", "is not a file"),
        (f"{LONG}:kernel", "is not a module: No module named"),
    ],
    ids=["script", "Python file", "kernel of a file", "kernel in a folder", "kernel of a module"],
)
def test_a_name_that_is_too_long_gets_one_sentence(
    capfd: Capture, command: str, words: str, reason: str
) -> None:
    assert main([command, words, "f32[8,8]"]) == 2
    (refused,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("target ")]
    assert refused.startswith("error: ") and reason in refused and " … " in refused
    assert len(refused) < 600


@pytest.mark.parametrize("words", [LONG, f"{LONG}.json"])
def test_a_result_whose_name_is_too_long_gets_one_sentence(capfd: Capture, words: str) -> None:
    assert main(["calibrate", words]) == 2
    (refused,) = capfd.readouterr().err.splitlines()
    assert refused.startswith("error: ") and "cannot be read: File name too long" in refused
    assert len(refused) < 600
