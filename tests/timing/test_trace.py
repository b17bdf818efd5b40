"""Traces: the Trace Event Format, drawn without overlaps, equal bytes for equal launches."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nkw.errors import InvalidArgument
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.run import Launch
from simulate.timing import Reading, SliceKind, schedule, write_trace
from tests.timing import kernels
from tests.timing.streams import EXACT, Builder, dma_cost


@pytest.fixture(scope="module")
def launch() -> Launch:
    return kernels.dry(kernels.matmul_exp, kernels.zeros(512, 256), kernels.zeros(512, 512))


def overlaps(events: list[dict[str, Any]]) -> bool:
    by_thread = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            by_thread[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    return any(
        before[1] > after[0] for spans in by_thread.values() for before, after in pairwise(sorted(spans))
    )


def written(path: Path, *launches: Launch) -> list[dict[str, Any]]:
    timelines = [
        (f"{x.kernel} #{n}", x.streams, schedule(x.streams, x.hardware)) for n, x in enumerate(launches)
    ]
    write_trace(path, timelines)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def threads(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    named = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    assert len(names) == len(named), "a thread is named twice"
    return names


def test_every_event_is_complete_and_on_a_named_thread(launch: Launch, tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", launch)
    names = threads(events)
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f")
        if event["ph"] == "X":
            assert set(event) == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in names
            assert event["pid"] in processes
    assert set(names.values()) == {
        "Kernels",
        "Tensor",
        "Scalar",
        "GpSimd",
        "Sync",
        "DMA q GpSimd",
        "DMA q Sync",
    }


def test_slices_of_a_thread_do_not_overlap_though_data_phases_of_a_queue_do(
    launch: Launch, tmp_path: Path
) -> None:
    events = written(tmp_path / "trace.json", launch, launch)
    assert not overlaps(events)
    lanes = [name for name in threads(events).values() if name == "DMA q Sync"]
    assert len(lanes) > 1


def test_a_dataflow_reading_can_be_drawn_too(launch: Launch, tmp_path: Path) -> None:
    timeline = schedule(launch.streams, launch.hardware, Reading.dataflow)
    write_trace(tmp_path / "trace.json", [("dataflow", launch.streams, timeline)])
    assert not overlaps(json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"])


def test_a_trace_has_every_slice_at_its_nanosecond(launch: Launch, tmp_path: Path) -> None:
    events = [e for e in written(tmp_path / "trace.json", launch) if e["ph"] == "X" and e["cat"] != "kernel"]
    timeline = schedule(launch.streams, launch.hardware)
    drawn = sorted(
        (e["args"]["event"], round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)) for e in events
    )
    assert drawn == sorted((p.event, round(p.start_ns), round(p.end_ns)) for p in timeline.slices())


def test_slices_say_what_they_are(launch: Launch, tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", launch)
    stream = launch.streams[0]
    first = stream.event(0)
    load = next(e for e in events if e.get("cat") == "DMA" and e["args"]["event"] == 0)
    assert load["name"] == "dma_copy"
    assert load["args"]["bytes"] == first.cost.dma.bytes == 128 * 128 * 4
    assert load["args"]["line"] == f"{first.where.file}:{first.where.line}"
    matmul = next(e for e in events if e["name"] == "nc_matmul")
    assert matmul["args"]["interval_cycles"] == round(stream.event(2).cost.interval_cycles, 3)
    assert len(matmul["args"]["reads"].split()) == 2
    table = next(e for e in events if e.get("cat") == "table load")
    assert table["name"] == "load table exp"


def test_arrows_join_the_slices_of_dependent_events_on_different_tracks(tmp_path: Path) -> None:
    """A load feeds a matmul, that a copy on Vector; the second matmul follows the first on its own track."""
    build = Builder()
    source, tile, total, result = (build.tensor(name) for name in ("source", "tile", "total", "result"))
    build.dma((source,), (tile,), dma_cost(busy=200.0), Engine.sync)
    for _ in range(2):
        build.event(Engine.tensor, (tile,), (total,), Cost(50.0, 80.0), accumulate=True)
    build.event(Engine.vector, (total,), (result,), Cost(30.0, 40.0))
    write_trace(tmp_path / "trace.json", [("kernel", build.stream, schedule(build.stream, EXACT))])
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "kernel"]

    def bound(end: dict[str, Any]) -> tuple[str, int]:
        (matching,) = [
            e
            for e in slices
            if (e["pid"], e["tid"]) == (end["pid"], end["tid"])
            and e["ts"] <= end["ts"] < round(e["ts"] + e["dur"], 3)
        ]
        return matching["cat"], matching["args"]["event"]

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() == {0, 1, 2}
    assert [(bound(starts[n]), bound(ends[n])) for n in range(3)] == [
        (("DMA", 0), ("instruction", 1)),
        (("DMA", 0), ("instruction", 2)),
        (("instruction", 2), ("instruction", 3)),
    ]
    assert all(starts[n]["ts"] <= ends[n]["ts"] for n in starts)
    assert {end["bp"] for end in ends.values()} == {"e"}


def test_arrows_of_several_launches_have_numbers_of_their_own(launch: Launch, tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", launch, launch)
    numbers = [e["id"] for e in events if e["ph"] == "s"]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) % 2 == 0 < len(numbers)


def test_launches_lie_one_after_another(launch: Launch, tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", launch, launch)
    shown = [e for e in events if e.get("cat") == "kernel"]
    length_us = round(schedule(launch.streams, launch.hardware).length_ns) / 1000
    assert [(e["name"], e["ts"], e["dur"]) for e in shown] == [
        ("matmul_exp #0", 0.0, length_us),
        ("matmul_exp #1", length_us, length_us),
    ]


def test_every_core_is_a_process(tmp_path: Path) -> None:
    events = written(
        tmp_path / "trace.json", kernels.dry(kernels.halves, kernels.zeros(256, 64), cores=2, ranks=2)
    )
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 core 0", "rank 0 core 1", "rank 1 core 0", "rank 1 core 1"]


def test_equal_launches_give_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        again = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
        written(tmp_path / name, again)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_launch_is_an_empty_trace(tmp_path: Path) -> None:
    assert written(tmp_path / "trace.json") == []


def test_refuses_a_path_that_cannot_be_written_and_leaves_nothing_behind(
    launch: Launch, tmp_path: Path
) -> None:
    timeline = schedule(launch.streams, launch.hardware)
    missing = tmp_path / "missing" / "trace.json"
    with pytest.raises(InvalidArgument) as refused:
        write_trace(missing, [("kernel", launch.streams, timeline)])
    assert refused.value.code == "NKW-TRACE-PATH"
    assert refused.value.message == f"the trace cannot be written to {missing}: No such file or directory"
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidArgument, match="cannot be written"):
        write_trace(tmp_path / "folder", [("kernel", launch.streams, timeline)])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_table_load_is_a_slice_of_its_own(launch: Launch) -> None:
    timeline = schedule(launch.streams, launch.hardware)
    assert [p.track for p in timeline.slices() if p.slice_kind is SliceKind.table_load] == ["Scalar"]
