"""The profile as text, and the command that prints it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from simulate.cli import main
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.profile import profile, text
from simulate.run import Mode
from simulate.timing import Reading, bracket, schedule
from simulate.world import launch
from tests.deep import deep_except
from tests.timing import kernels
from tests.timing.streams import EXACT, Builder, random_streams

SCRIPT = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def doubled(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load(a)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    nisa.dma_copy(dst=out, src=tile)
    return out


doubled(np.zeros((128, 64), np.float32))
"""


def test_a_report_has_the_numbers_of_the_timeline() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    timeline, readings = schedule(launch.streams, launch.hardware), bracket(launch.streams, launch.hardware)
    lines = text(profile(launch.streams, launch.hardware, "matmul_exp on trn2")).splitlines()
    assert lines[0] == f"matmul_exp on trn2: {timeline.length_ns / 1000:.3f} us (program reading)"
    assert lines[1] == (
        f"dataflow {readings.dataflow_ns / 1000:.3f} <= scheduled {readings.scheduled_ns / 1000:.3f}"
        f" <= program {readings.program_ns / 1000:.3f} <= serial {readings.serial_ns / 1000:.3f} us"
    )
    around_us, host_us = timeline.overhead_ns / 1000, launch.hardware.host_overhead_ns / 1000
    assert lines[2].startswith(f"device time; starting and ending the kernel takes {around_us:.3f} us more")
    assert f"a synchronous call from the host about {host_us:.3f} us on top" in " ".join(
        map(str.strip, lines[2:4])
    )
    used = {timeline.tracks[track] for track in timeline.track.tolist()}
    for track in timeline.tracks:
        rows = [line for line in lines if re.match(rf"{track}  +[\d.]", line)]
        assert bool(rows) == (track in used)
        for row in rows:
            busy, share, idle = re.findall(r"[\d.]+", row.removeprefix(track))[:3]
            assert busy == f"{timeline.busy_ns[track] / 1000:.3f}"
            assert share == f"{100 * timeline.busy_ns[track] / timeline.length_ns:.1f}"
            assert idle == f"{timeline.idle_ns[track] / 1000:.3f}"


def test_a_report_has_bytes_and_flops_with_their_rates() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    length = schedule(launch.streams, launch.hardware).length_ns
    moved = 4 * (256 * 128 + 256 * 512 + 128 * 512)
    flops = 2 * 256 * 128 * 512
    chip = launch.hardware
    peak = 2 * 128 * 128 * chip.tensor_clock_ghz
    report = text(profile(launch.streams, chip))
    assert f"{moved / 1e6:.3f} MB in 5 transfers, {moved / length:.1f} GB/s" in report
    assert f"MBU {100 * moved / length / chip.hbm_gb_per_s_per_core:.1f} %" in report
    assert (
        f"{flops / 1e9:.3f} GFLOP, {flops / length / 1e3:.2f} TFLOP/s, MFU {100 * flops / length / peak:.1f} %"
        in report
    )


def test_a_table_has_only_so_many_rows_and_the_largest_first() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    done = profile(launch.streams, launch.hardware)
    blocks = {block.split("\n", 1)[0].split("  ")[0]: block for block in text(done, rows=2).split("\n\n")}
    path = blocks["critical path, by line"].splitlines()[1:]
    assert len(path) == 2
    assert "kernels.py" in path[0]
    shares = [float(line.split()[-3]) for line in path]
    assert shares == sorted(shares, reverse=True)
    assert len([line for line in blocks["line"].splitlines() if line.startswith("tests/")]) == 2
    changes = [float(line.split()[-2]) for line in blocks["twice as fast"].splitlines()[1:3]]
    assert changes == sorted(changes)


@pytest.mark.slow
@pytest.mark.parametrize("reading", Reading)
def test_a_report_is_eighty_columns_wide_and_the_same_every_time(reading: Reading) -> None:
    for streams in (random_streams(1, 40, 3), random_streams(2, 40)):
        report = text(profile(streams, EXACT, reading=reading))
        assert max(map(len, report.splitlines())) <= 80
        assert report == text(profile(streams, EXACT, reading=reading))


def test_a_launch_without_instructions_has_a_report() -> None:
    report = text(profile(Builder().stream, EXACT))
    assert report.startswith("timeline: 0.000 us (program reading)")
    assert "0.0 GB/s" in report


def test_of_many_cores_the_one_that_ends_last_is_shown() -> None:
    launch = kernels.dry(kernels.halves, kernels.zeros(256, 64), cores=2, ranks=2)
    report = text(profile(launch.streams, launch.hardware))
    assert "rank 0 core 0 of 4 cores, the one that ends last:" in report
    assert "rank 1" not in report


def test_rank_1_is_not_mixed_up_with_rank_10() -> None:
    def kernel(a: Any, times: int) -> Any:
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        tile = nl.load(a)
        for _ in range(times):
            nisa.activation(dst=tile, op=nl.exp, data=tile)
        nisa.dma_copy(dst=out, src=tile)
        return out

    arguments = [((kernels.zeros(128, 64), 3 if rank == 1 else 1), {}) for rank in range(11)]
    done = launch(kernel, arguments, hardware("trn2"), mode=Mode.dry)
    report = text(profile(done.streams, done.hardware))
    assert "rank 1 of 11 cores, the one that ends last:" in report
    assert re.findall(r"^rank \d+", report, re.MULTILINE).count("rank 1") > 5
    assert "rank 10" not in report


def timed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["time", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_time_prints_a_profile_of_every_launch(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = timed(capsys, "--target", "trn2", script)
    assert (status, err) == (0, "target trn2\n")
    assert out.startswith("doubled #0 on trn2: ")
    assert "(program reading)" in out
    assert "nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)" in out
    assert timed(capsys, "--target", "trn2", script)[1] == out
    assert "(dataflow reading)" in timed(capsys, "--target", "trn2", "--reading", "dataflow", script)[1]


def test_time_refuses_what_it_cannot_use_in_one_sentence(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere" / "file")
    assert timed(capsys, nowhere) == (2, "", f"error: {nowhere} is not a file\n")
    status, _, err = timed(capsys, "--target", "trn2", "--trace", nowhere, script)
    assert status == 2
    assert err.splitlines()[-1].startswith(
        f"error: [NKW-TRACE-PATH] the trace cannot be written to {nowhere}: "
    )
    with pytest.raises(SystemExit) as left:
        main(["time", "--reading", "hopeful", script])
    assert left.value.code == 2
    assert "invalid choice: 'hopeful'" in capsys.readouterr().err
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert timed(capsys, "--target", "trn2", str(empty)) == (0, "", "target trn2\nno kernel was launched\n")


def test_time_takes_a_kernel_by_name_with_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["nki_kernels:rmsnorm", "f32[256,512]", "f32[1,512]", "1e-5"]
    status, out, err = timed(capsys, "--target", "trn1", *words)
    assert (status, err) == (0, "target trn1\n")
    assert out.startswith("rmsnorm #0 on trn1: ")
    status, out, err = timed(capsys, "--target", "trn1", "nki_kernels:absent")
    assert (status, out) == (2, "")
    refusal = (
        "[NKW-KERNEL-NAME] nki_kernels has no kernel absent; give the name of a function that it defines"
    )
    assert err == f"target trn1\nerror: {refusal}\n"


@pytest.mark.slow
@pytest.mark.parametrize("times", deep_except([9, 99, 100, 128, 999, 1000, 4096], [9, 99, 100, 128]))
def test_columns_of_a_tensor_that_is_read_often_stay_apart(times: int) -> None:
    def kernel(a: Any, row: Any) -> Any:
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(a.shape, dtype=a.dtype)
        for _ in range(times):
            nisa.dma_copy(dst=tile[0:1, :], src=row)
        nisa.dma_copy(dst=tile, src=a)
        nisa.dma_copy(dst=out, src=tile)
        return out

    lines = text(profile(*timed_streams(kernel, kernels.zeros(128, 512), kernels.zeros(1, 512)))).splitlines()
    size, read = 2048 / 1e6, times * 2048 / 1e6
    (row,) = [line.split() for line in lines if re.match(r"row +0\.002", line)]
    assert [float(cell) for cell in row[1:]] == pytest.approx([size, read, times, 0, 0], abs=0.0005)
    assert max(map(len, lines)) <= 80


def timed_streams(kernel: Any, *arguments: Any) -> tuple[Any, Any]:
    done = kernels.dry(kernel, *arguments)
    return done.streams, done.hardware


def test_wide_characters_take_two_columns_and_leave_the_others_in_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {}
    for name in ("kernel_of_a_model", "模型的内核_" * 2, "模型的内核_" * 9):
        path = tmp_path / f"{name}.py"
        path.write_text(SCRIPT.replace("total", "合计"))
        reports[name] = timed(capsys, "--target", "trn2", str(path))[1].splitlines()
    heads = ("critical path, by line", "chain: start us", "HBM tensor", "line  ", "twice as fast")
    for lines in reports.values():
        for line in lines:
            assert columns(line) <= 80
    plain, *wide = reports.values()
    for lines in wide:
        for head in heads:
            index, other = (
                next(i for i, line in enumerate(report) if line.startswith(head)) for report in (plain, lines)
            )
            assert columns(plain[index + 1]) == columns(lines[other + 1]), (
                head
            )  # but for the names they are equal


def columns(line: str) -> int:
    """Return columns of a terminal, for text of ASCII and ideographs."""
    return len(line) + sum(ord(character) > 0x2E80 for character in line)
