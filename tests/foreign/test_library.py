"""The runner of the vendor's library on a library of one kernel, and the table where the clone is at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simulate.numerics import DTYPES
from tests.foreign.library import dtypes
from tests.foreign.library.runner import HERE, rows

torch = pytest.importorskip("torch")

CLONE = "NKW_LIBRARY"
FILES = {
    "src/nkilib_src/nkilib/core/utils/mx_torch_common.py": "_FP4_LUT = None\n",
    "test/utils/common_dataclasses.py": """
from dataclasses import dataclass
from enum import Enum
import boto3  # for the device's side only

class TraceMode(Enum):
    Simulator = "simulation"

class Platforms(Enum):
    TRN2 = "trn2"

    def get_compile_target(self):
        return self.value

@dataclass
class Asked:
    kernel_func: object
    kernel_input: object
    validation_args: object
    compiler_input: object
    inference_args: object

@dataclass
class Wanted:
    golden_output: dict
    relative_accuracy: float
    absolute_accuracy: float

@dataclass
class Compiler:
    platform_target: object
    logical_nc_config: int

@dataclass
class Inference:
    collective_ranks: int
""",
    "test/integration/nkilib/test_scale.py": """
import nki.isa as nisa
import nki.language as nl
import numpy as np
from test.utils.common_dataclasses import *
from test.utils.test_orchestrator import Orchestrator

def scaled(x, unused=None, twice=True, part=False):
    tile, out = nl.load(x), nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0 if twice else 2.5)
    whole = x.shape[0] - 1 if part else x.shape[0]
    nisa.dma_copy(dst=out[:whole], src=tile[:whole])
    return out

class TestScale:
    def test_scale(self, test_manager: Orchestrator, platform_target, rows, dtype, lnc=1, fails=False, spare=False,
                   part=False):
        x = np.arange(rows * 8).reshape(rows, 8).astype(dtype)
        given = {"x": x, "twice": not fails, "part": part, **({"unused": x.copy()} if spare else {})}
        wanted = Wanted({"out": x.astype(np.float32) * 2}, 1e-3, 1e-5)
        wanted = Wanted({"out": wanted.golden_output["out"] * 0}, 1.0, 1e3) if part else wanted
        inference = Inference(1)
        test_manager.execute(Asked(scaled, given, wanted, Compiler(platform_target, lnc), inference))

def test_nothing():
    pass
""",
}


EXPLAINED = {"explained": "it multiplies", "fails_with": "beyond"}
GOOD, WRONG = "rows=4, dtype=np.float32", "rows=4, dtype=np.float32, fails=True"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("test", "test/utils", "test/integration", "test/integration/nkilib"):
        (folder / name / "__init__.py").touch()
    return folder


def _run(clone: Path, calls: list[dict[str, str]], *options: str) -> tuple[int, list[str]]:
    """Return the exit status and the lines of a report, one per call."""
    table = clone / "table.toml"
    defaults = {"kernel": "scale", "file": "test_scale.py", "test": "TestScale.test_scale"}
    entries = [
        "\n".join(f"{key} = '{value}'" for key, value in {**defaults, **call}.items()) for call in calls
    ]
    table.write_text("".join(f"[[row]]\n{entry}\n" for entry in entries))
    command = [sys.executable, str(HERE / "runner.py"), str(clone), "--table", str(table), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_every_row_is_judged_by_the_librarys_own_test(clone: Path) -> None:
    status, lines = _run(
        clone,
        [
            {"arguments": GOOD},
            {"arguments": "rows=129 - 1, dtype=nl.bfloat16, lnc=2"},
            {"arguments": WRONG, **EXPLAINED},
            {"arguments": WRONG},
            {"arguments": WRONG, **EXPLAINED, "fails_with": "other"},
            {"arguments": GOOD, **EXPLAINED},
            {"arguments": "rows=4, dtype=np.float64, nonsense=1"},
            {"test": "test_nothing"},
        ],
    )
    statuses = ["passed", "passed", "explained", *["failed"] * 5]
    assert [line.split()[0] for line in lines[:8]] == statuses, lines
    assert "out: error 0 of" in lines[0] and "beyond" in lines[3] and "passes, though" in lines[5]
    assert "TypeError" in lines[6] and "the test ran nothing" in lines[7]
    assert status == 1 and lines[-1].startswith("2 passed, 5 failed, 1 explained; at most")


@pytest.mark.slow
def test_findings_fail_a_row_unless_they_are_argued(clone: Path) -> None:
    """Equal stores by both cores and an unused input are accepted findings; an incomplete output is not."""
    argued = [{"arguments": f"{GOOD}, lnc=2"}, {"arguments": f"{GOOD}, spare=True"}]
    status, lines = _run(clone, [*argued, {"arguments": WRONG, **EXPLAINED}], "--check")
    assert status == 0, lines
    status, lines = _run(clone, [*argued, {"arguments": f"{GOOD}, part=True"}], "--check")
    assert status == 1 and [line.split()[0] for line in lines[:3]] == ["passed", "passed", "failed"], lines
    assert "NKW-OUTPUT-PARTIAL" in lines[3]


def test_a_folder_without_the_library_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "runner.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "is no clone of nki-library" in done.stderr


@pytest.mark.parametrize("name", ["float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"])
def test_packed_values_come_back(name: str) -> None:
    values = np.array([[0, 1, -2, 3, 4, -6, 0.5, -1.5]], np.float32)
    packed = dtypes.static_cast(values, DTYPES[name])
    assert packed.shape == (1, 2) and packed.dtype == name
    assert packed.plain.dtype == DTYPES[name].storage
    assert np.array_equal(dtypes.static_cast(packed[:, 1:], np.float32), values[:, 4:])
    first = dtypes.static_cast(values[:, :4], DTYPES[name]).view(np.uint8)
    if name.startswith("float8"):  # the first value lies in the lowest byte
        element = values[0, :4].astype(DTYPES[name].packed_storage).view(np.uint8)
        assert np.array_equal(first[0], element)
    else:
        assert first.tolist() == [[0x20, 0x5C]]  # 0, 1, -2, 3 are the codes 0, 2, 12, 5


def test_the_table_is_well_formed() -> None:
    table = rows()
    assert table and all(row.kernel and row.file.endswith(".py") and row.test for row in table)


@pytest.mark.deep
@pytest.mark.skipif(not os.environ.get(CLONE), reason=f"{CLONE} does not name a clone of nki-library")
def test_the_library_agrees_with_its_references_and_has_no_findings() -> None:
    command = [sys.executable, str(HERE / "runner.py"), os.environ[CLONE], "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
