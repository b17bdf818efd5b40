"""What is read of profiles that neuron-explorer and neuron-profile wrote, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simulate.profile.vendor import DeviceProfile, read_profile
from simulate.profile.vendor.dma import normalise_queue
from simulate.profile.vendor.engines import parse_location
from simulate.profile.vendor.intervals import Covered, find_peak_overlap
from simulate.profile.vendor.records import ActiveEngine, MeasuredLine, Queue, Tensor
from tests.profile.device_profiles import (
    KERNEL,
    METADATA,
    TABLES,
    instruction,
    span,
    types,
    write_profile,
    write_table,
)


@pytest.fixture
def profile(tmp_path: Path) -> DeviceProfile:
    return read_profile(write_profile(tmp_path / "profile"))


def test_engines_are_active_as_active_time_says(profile: DeviceProfile) -> None:
    assert profile.engines == (
        ActiveEngine(0, "Tensor", 60.0, 2, 0.0),
        ActiveEngine(0, "Vector", 40.0, 1, 130.0),
        ActiveEngine(0, "Sync", 50.0, 2, 0.0),
    )


def test_without_active_time_instructions_side_by_side_count_once_and_waits_not(tmp_path: Path) -> None:
    read = read_profile(write_profile(tmp_path / "profile", without=["ActiveTime"]))
    # Tensor: 150 to 200 and 180 to 210; Vector: its semaphore wait from 10 to 140 is left out.
    assert {engine.name: engine.active_ns for engine in read.engines} == {
        "Tensor": 60,
        "Vector": 40,
        "Sync": 50,
    }


def test_lines_hold_their_instructions_and_the_dmas_that_these_trigger(profile: DeviceProfile) -> None:
    assert profile.lines == (
        MeasuredLine(KERNEL, 11, "", 1, 20 + 100),
        MeasuredLine(KERNEL, 13, "", 1, 30 + 60),
        MeasuredLine(KERNEL, 14, "", 2, 50 + 30),
        MeasuredLine(KERNEL, 12, "", 1, 40),
    )


def test_an_instruction_without_a_location_takes_the_line_of_its_kernel_instruction(tmp_path: Path) -> None:
    rows = [
        instruction("vector", "COPY", 0, 5, kernel_instruction_name="inst.1:0"),
        instruction("vector", "COPY", 5, 7, kernel_instruction_name="inst.2:7"),
        instruction("vector", "COPY", 7, 8, bir_debug_info_source_location="b.py:3"),
    ]
    read = read_profile(write_profile(tmp_path / "profile", {**TABLES, "Instruction": rows}))
    assert read.lines == (
        MeasuredLine(KERNEL, 15, "script.doubled", 1, 5),
        MeasuredLine("b.py", 3, "", 1, 1),
    )


def test_dma_is_what_the_summary_says(profile: DeviceProfile) -> None:
    dma = profile.dma
    assert (dma.active_ns, dma.bytes, dma.transfers, dma.packets) == (171.0, 65536, 2, 5)
    assert (dma.hbm_read_bytes, dma.hbm_written_bytes) == (32768, 32768)
    assert dma.queues == (Queue(0, "DMA q Sync", 2, 65536, 160.0),)


def test_without_a_summary_dma_is_what_its_rows_cover(tmp_path: Path) -> None:
    read = read_profile(write_profile(tmp_path / "profile", without=["Summary"]))
    # 5-15, 30-90 with 60-130, 240-300 and 301-302 are covered.
    assert (read.dma.active_ns, read.dma.bytes, read.dma.transfers) == (10 + 100 + 60 + 1, 65536, 2)
    assert (read.total_ns, read.work_ns, read.hw_flops, read.transpose_flops) == (302, 302, 8192, 1024)
    assert read.necessary_bytes == 65536
    assert read.notes == ("Summary has no total_time; the time from the first to the last event is used",)
    packets = read_profile(write_profile(tmp_path / "packets", without=["Summary", "DmaPacketAggregated"]))
    assert packets.dma.bytes == 65536  # without instruction fetches and updates of semaphores
    assert packets.dma.queues == ()
    transfers = read_profile(write_profile(tmp_path / "transfers", without=["Summary", "DmaPacket"]))
    assert (transfers.dma.active_ns, transfers.dma.packets) == (160, None)


def test_the_rest_of_the_tables(profile: DeviceProfile) -> None:
    assert (profile.total_ns, profile.work_ns) == (500.0, 302.0)
    assert profile.tensors == (
        Tensor("a", "IN", 32768, 32768, None, 1.0),
        Tensor("out", "OUT", 32768, 32768, None, None),
        Tensor("scratch", "INTERNAL", 99, None, None, None),
    )
    on_chip, waiting, origin = profile.on_chip, profile.synchronization, profile.origin
    assert (on_chip.sbuf_occupied_bytes, on_chip.sbuf_fullest, on_chip.psum_fullest) == (300, 0.125, 0.25)
    assert (waiting.semaphore_updates, waiting.barriers, waiting.barrier_ns) == (1, 2, 9.0)
    assert (waiting.pending_dmas_most, waiting.throttled_ns, waiting.throttled_to) == (3, 50.0, 0.5)
    assert waiting.dependences == {"FLOW_DEPENDENCE": 1, "unknown": 1}
    assert (origin.schema, origin.instance, origin.explorer, origin.cores) == (
        "7.4.0",
        "trn2.3xlarge",
        "2.31.0",
        1,
    )
    assert (origin.dma_peak_bytes_per_ns, origin.tensor_peak_flops_per_ns) == (200.0, 2 * 128 * 128 * 2.5)
    assert profile.warnings == ("DMA descriptors are missing",)
    assert profile.notes == ()


@pytest.mark.parametrize("table", [name for name in TABLES if name != "Metadata"])
def test_a_profile_without_one_table_is_read(table: str, tmp_path: Path) -> None:
    read = read_profile(write_profile(tmp_path / "profile", without=[table]))
    assert read.total_ns == (302.0 if table == "Summary" else 500.0)
    assert bool(read.lines) == (table != "Instruction")


def test_a_table_in_parts_is_one_table(tmp_path: Path, profile: DeviceProfile) -> None:
    folder = write_profile(tmp_path / "parts", without=["Instruction"])
    rows = TABLES["Instruction"]
    for index in range(3):
        write_table(folder, "Instruction", rows[2 * index : 2 * index + 2], f"_{index}")
    read = read_profile(folder)
    assert (read.engines, read.lines) == (profile.engines, profile.lines)


@pytest.mark.parametrize("named", ["Instruction.parquet", ".", ".."])
def test_a_profile_is_named_by_its_folder_a_table_or_the_data_path(
    named: str, tmp_path: Path, profile: DeviceProfile
) -> None:
    folder = write_profile(tmp_path / "data" / "profiles" / "global" / "kernel@latest")
    path = tmp_path / "data" if named == ".." else folder / named
    assert read_profile(path).engines == profile.engines


def test_columns_may_be_narrower_dictionary_coded_or_all_null(tmp_path: Path, profile: DeviceProfile) -> None:
    folder = write_profile(tmp_path / "other", without=["Instruction", "Metadata"])
    rows, column_types = TABLES["Instruction"], types("Instruction")
    columns: dict[str, Any] = {
        name: pa.array([row.get(name) for row in rows], column_type)
        for name, column_type in column_types.items()
    }
    for name in ("start_ts", "end_ts"):
        columns[name] = columns[name].cast(pa.int32())
    for name in ("engine", "opcode", "nki_source_location"):
        columns[name] = columns[name].dictionary_encode()
    columns["evt_wait_time_ns"] = columns["evt_wait_time_ns"].cast(pa.float64())
    columns["bir_debug_info_source_location"] = pa.nulls(len(rows))
    pq.write_table(pa.table(columns), folder / "Instruction.parquet")
    read = read_profile(folder)
    assert (read.engines, read.lines) == (profile.engines, profile.lines)


def test_cores_of_a_logical_core_are_apart(tmp_path: Path) -> None:
    rows = [instruction("Vector", "COPY", 0, 5, pcore_idx=core) for core in (0, 1, 1)]
    read = read_profile(write_profile(tmp_path / "profile", {"Instruction": rows}))
    assert [(engine.core, engine.active_ns, engine.instructions) for engine in read.engines] == [
        (0, 5, 1),
        (1, 5, 2),
    ]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"profile_schema_version": "6.9.0"}, "its schema is 6.9.0; this reader knows 7 to 12"),
        ({"profile_schema_version": "13.0.0"}, "its schema is 13.0.0; this reader knows 7 to 12"),
        ({"profile_schema_version": "12.0.1"}, None),
        ({"is_simulation": True}, "the compiler simulated this profile; no device measured it"),
    ],
)
def test_what_is_unusual_about_a_profile_is_noted(
    changes: dict[str, Any], note: str | None, tmp_path: Path
) -> None:
    tables = {**TABLES, "Metadata": [{**METADATA, **changes}]}
    assert read_profile(write_profile(tmp_path / "profile", tables)).notes == ((note,) if note else ())


def test_a_table_of_another_schema_is_left_out_and_noted(tmp_path: Path, profile: DeviceProfile) -> None:
    folder = write_profile(tmp_path / "other")
    pq.write_table(pa.table({"when": [1], "value": [7]}), folder / "Throttle.parquet")
    read = read_profile(folder)
    assert read.synchronization.throttled_ns is None
    assert read.notes == ("Throttle is left out: it has no column timestamp, duration, k, n",)
    assert read.engines == profile.engines


SUMMARY = {**TABLES["Summary"][0], "tensor_engine_active_time": 60e-9, "tensor_engine_instruction_count": 2}


@pytest.mark.parametrize(
    "document",
    [
        SUMMARY,
        {"n_6879b275_vnc_0": SUMMARY},
        {"summary": [SUMMARY]},
        {"summary": [SUMMARY], "instruction": [{"timestamp": 1, "duration": 2}]},
        [SUMMARY],
    ],
    ids=["fields alone", "under the profile's name", "neuron-profile's json", "with instructions", "list"],
)
def test_a_summary_in_json_has_the_fields_of_the_table(document: Any, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(document))
    read = read_profile(path)
    assert (read.total_ns, read.dma.active_ns) == (pytest.approx(500.0), pytest.approx(171.0))
    assert (read.dma.bytes, read.hw_flops, read.necessary_bytes) == (65536, 8192, 65536)
    assert read.engines == (ActiveEngine(0, "Tensor", pytest.approx(60.0), 2),)
    assert bool(read.notes) == ("instruction" in document)


@pytest.mark.parametrize(
    ("written", "location"),
    [
        ("/home/ubuntu/decoder.py:139", ("/home/ubuntu/decoder.py", 139)),
        ("file.py:42", ("file.py", 42)),
        ("['a b.py:1', 'c.py:2']", ("a b.py", 1)),
        ("file.py", None),
        ("", None),
        ("file.py:", None),
    ],
)
def test_a_location_is_a_file_and_a_line(written: str, location: tuple[str, int] | None) -> None:
    assert parse_location(written) == location


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("qScalarSpillReload0-Q1-E64", "DMA q Scalar"),
        ("qGpSimdPIO0", "DMA q GpSimd"),
        ("qSyncIO0", "DMA q Sync"),
        ("qVectorized", "qVectorized"),
        ("", "DMA queue without a name"),
    ],
)
def test_a_queue_belongs_to_the_engine_in_its_name(written: str, label: str) -> None:
    assert normalise_queue(written) == label


@pytest.mark.parametrize("seed", range(20))
def test_intervals_cover_what_a_bitmap_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    starts = random.integers(0, 400, size=40)
    ends = starts + random.integers(0, 20, size=40)
    sizes = random.integers(1, 9, size=40)
    bitmap = np.zeros((40, 450), np.int64)
    for row, (start, end) in enumerate(zip(starts, ends)):
        bitmap[row, start:end] = sizes[row]
    covered = Covered()
    for indices in np.array_split(np.arange(40), 5):
        covered.add(starts[indices], ends[indices])
    assert covered.ns == bitmap.any(axis=0).sum()
    assert find_peak_overlap(starts, ends, sizes) == bitmap.sum(axis=0).max()


def test_a_span_is_from_the_first_event_on(tmp_path: Path) -> None:
    rows = [span(0, 1, engine="tensor", opcode="MATMUL"), span(7, 9, engine="tensor", opcode="MATMUL")]
    rows = [
        {**row, "start_ts": row["start_ts"] - 1_000_000, "end_ts": row["end_ts"] - 1_000_000} for row in rows
    ]
    assert read_profile(write_profile(tmp_path / "zero", {"Instruction": rows})).total_ns == 9
