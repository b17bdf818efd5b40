"""The report and the listing."""

from __future__ import annotations

import re

from simulate.isa.enums import Engine
from simulate.timing import Reading, bracket, listing, report, schedule
from tests.timing import kernels
from tests.timing.streams import EXACT, Builder, dma_cost, random_streams


def test_a_report_has_the_numbers_of_the_timeline() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    timeline, found = schedule(launch.streams, launch.hardware), bracket(launch.streams, launch.hardware)
    text = report(launch.streams, launch.hardware, title="matmul_exp on trn2")
    lines = text.splitlines()
    assert lines[0] == f"matmul_exp on trn2: {timeline.length_ns / 1000:.3f} us (program reading)"
    assert lines[1] == (
        f"dataflow {found.dataflow_ns / 1000:.3f} us <= scheduled {found.scheduled_ns / 1000:.3f} us"
        f" <= program {found.program_ns / 1000:.3f} us <= serial {found.serial_ns / 1000:.3f} us"
    )
    assert f"{timeline.overhead_ns / 1000:.3f} us" in lines[2]
    for track in timeline.tracks:
        row = next(line for line in lines if line.startswith(f"{track} "))
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
    text = report(launch.streams, chip)
    assert f"{moved / 1e6:.3f} MB in 5 transfers, {moved / length:.1f} GB/s" in text
    assert (
        f"{flops / 1e9:.3f} GFLOP, {flops / length / 1e3:.2f} TFLOP/s, {100 * flops / length / peak:.1f} %"
        in text
    )


def test_the_lines_that_take_most_time_come_first_and_only_so_many() -> None:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    text = report(launch.streams, launch.hardware, lines=3)
    table = text[text.index("\nline") :].splitlines()[2:]
    times = [float(line.split()[-3]) for line in table]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)
    assert "kernels.py" in table[0]


def test_a_report_is_eighty_columns_wide_and_the_same_every_time() -> None:
    for streams in (random_streams(1, 40, 3), random_streams(2, 40)):
        text = report(streams, EXACT)
        assert max(map(len, text.splitlines())) <= 80
        assert text == report(streams, EXACT)
    assert report(random_streams(1), EXACT, reading=Reading.serial).startswith("timeline: ")


def test_a_launch_without_instructions_has_a_report() -> None:
    text = report(Builder().stream, EXACT)
    assert text.startswith("timeline: 0.000 us (program reading)")
    assert "0.0 GB/s" in text


def test_a_listing_shows_every_slice_in_order_of_start() -> None:
    build = Builder()
    build.dma((), (), dma_cost(busy=40.0, transfer=200.0), Engine.sync)
    timeline = schedule(build.stream, EXACT)
    assert listing(build.stream, timeline) == (
        "    start us       end us     ready us  track                  event\n"
        "      0.0000       0.0080       0.3720  Sync                   dma_copy #0\n"
        "      0.1080       0.3080       0.3720  DMA q Sync             dma_copy #0\n"
    )
