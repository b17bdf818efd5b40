"""Damaged and hostile profiles: one sentence, or a comparison, never a traceback."""

from __future__ import annotations

import json
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nkw.errors import InvalidArgument
from nkw.terminal import rendered
from simulate.profile import Profile
from simulate.profile import profile as predicted_profile
from simulate.profile.vendor import engines as engines_module
from simulate.profile.vendor import read_profile, side_by_side
from simulate.profile.vendor import tables as tables_module
from simulate.profile.vendor import text as vendor_text
from simulate.profile.vendor import trace as trace_module
from simulate.profile.vendor.trace import read_trace_events
from tests.profile.device_profiles import METADATA, T0, TABLES, span, types, write_profile, write_table
from tests.timing import kernels

KIB, MIB = 1 << 10, 1 << 20
CHEAP, EXHAUSTIVE = 100, 10_000


@pytest.fixture(scope="module")
def predicted() -> Profile:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    return predicted_profile(launch.streams, launch.hardware, "matmul_exp on trn2")


HINT = "; give its folder of Parquet tables or its summary-json"


def refusal(path: Path) -> str:
    with pytest.raises(InvalidArgument) as refused:
        read_profile(path)
    assert refused.value.code == "NKW-PROFILE-FILE"
    head = f"{path} is no profile of neuron-explorer or neuron-profile: "
    assert refused.value.message.startswith(head)
    assert "\n" not in refused.value.message
    return refused.value.message.removeprefix(head).removesuffix(HINT)


def replaced(folder: Path, table: str, column: str, values: Any) -> Path:
    """Write the profile, with other values in one column of a table."""
    write_profile(folder)
    path = folder / f"{table}.parquet"
    content = pq.read_table(path)
    index = content.schema.get_field_index(column)
    pq.write_table(content.set_column(index, column, pa.array(values)), path)
    return folder


@pytest.mark.parametrize(
    ("column", "values", "why"),
    [
        ("start_ts", ["1"] * 6, "Instruction.start_ts is of type string, not a time"),
        ("start_ts", [[1]] * 6, "Instruction.start_ts is of type list<element: int64>, not a time"),
        ("engine", [1] * 6, "Instruction.engine is of type int64, not text"),
        ("engine", [b"a"] * 6, "Instruction.engine is of type binary, not text"),
        ("start_ts", [float("nan")] * 6, "Instruction.start_ts has an entry that is no time"),
        ("start_ts", [float("inf")] * 6, "Instruction.start_ts has an entry that is no time"),
        ("start_ts", [None] * 6, "Instruction.start_ts holds a null"),
        ("start_ts", [1, 2, None, 4, 5, 6], "Instruction.start_ts holds a null"),
        ("start_ts", [-1] * 6, "Instruction.start_ts has an entry that is no time"),
        ("end_ts", [1 << 61] * 6, "Instruction.end_ts has an entry that is no time"),
        ("end_ts", [T0 - 1] * 6, "Instruction has an event that ends before it starts"),
        ("pcore_idx", [64] * 6, "Instruction.pcore_idx is 64, and must be below 64"),
        ("raw_flops", [1 << 62] * 6, "Instruction.raw_flops has an entry that is no size"),
    ],
)
def test_a_wrong_column_is_one_sentence(column: str, values: list[Any], why: str, tmp_path: Path) -> None:
    assert refusal(replaced(tmp_path / "profile", "Instruction", column, values)) == why


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("start_ts", [0.0] * 6),
        ("start_ts", [0] * 6),
        ("end_ts", [(1 << 61) - 1] * 6),
        ("end_ts", [T0 + 190] * 6),  # the last one begins there
        ("pcore_idx", [63] * 6),
        ("pcore_idx", [None] * 6),
        ("raw_flops", [(1 << 61) - 1] * 6),
        ("raw_flops", [None] * 6),
    ],
)
def test_its_twin_within_the_limits_is_read(
    column: str, values: list[Any], tmp_path: Path, predicted: Profile
) -> None:
    folder = replaced(tmp_path / "profile", "Instruction", column, values)
    compared(folder, predicted)


@pytest.mark.parametrize(
    ("table", "column", "values", "why"),
    [
        ("Throttle", "k", [3, 1], "Throttle has a limit k / n outside 0 to 1"),
        ("Throttle", "n", [0, 0], "Throttle has a limit k / n outside 0 to 1"),
        (
            "SbufUsage",
            "avg_util_percent",
            [-0.5, 1.0],
            "SbufUsage.avg_util_percent has a sample outside 0 to 100 %",
        ),
        (
            "PsumUsage",
            "avg_util_percent",
            [102.0],
            "PsumUsage.avg_util_percent has a sample outside 0 to 100 %",
        ),
        (
            "SbufAllocation",
            "end_address",
            [0, 0, 0, 0],
            "SbufAllocation has a region that ends before it starts",
        ),
        (
            "SbufAllocation",
            "start_address",
            [-2] * 4,
            "SbufAllocation has a region that ends before it starts",
        ),
        ("SbufAllocation", "partition", [1 << 20] * 4, "SbufAllocation has a partition out of range"),
        ("Summary", "total_time", [-1.0], "total_time is -1, and must be at least 0 and below 1e+18"),
        (
            "Summary",
            "total_time",
            [float("inf")],
            "total_time is inf, and must be at least 0 and below 1e+18",
        ),
        (
            "Metadata",
            "dma_ddr_bandwidth",
            [-2.0],
            "dma_ddr_bandwidth is -2, and must be at least 0 and below 1e+18",
        ),
        ("DmaPacket", "end_ts", [0] * 5, "DmaPacket has an event that ends before it starts"),
    ],
)
def test_impossible_values_are_one_sentence(
    table: str, column: str, values: list[Any], why: str, tmp_path: Path
) -> None:
    assert refusal(replaced(tmp_path / "profile", table, column, values)) == why


def test_a_nan_in_the_summary_is_no_value(tmp_path: Path) -> None:
    read = read_profile(replaced(tmp_path / "profile", "Summary", "total_time", [float("nan")]))
    assert read.total_ns == 302.0


@pytest.mark.parametrize("kept", [0, 3, 4, 8, 100, -1])
def test_a_truncated_table_is_one_sentence(kept: int, tmp_path: Path) -> None:
    path = write_profile(tmp_path / "profile") / "DmaPacket.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    assert refusal(path.parent).startswith("DmaPacket.parquet cannot be read: ")


def test_a_folder_without_tables_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "Other_x.parquet").write_text("")
    assert refusal(tmp_path) == "it has no file named after a table, such as Instruction.parquet"
    write_table(tmp_path, "Warning", TABLES["Warning"])
    assert refusal(tmp_path) == "it has no Summary.total_time and no row of Instruction or of a DMA table"


def test_a_data_path_with_several_profiles_is_one_sentence(tmp_path: Path) -> None:
    for name in ("a@latest", "b@latest"):
        write_profile(tmp_path / "profiles" / "global" / name)
    assert "has 2 profiles; give the folder of one" in refusal(tmp_path)


def test_a_table_that_is_a_folder_or_a_pipe_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "Instruction.parquet").mkdir()
    assert refusal(tmp_path).startswith("Instruction.parquet cannot be read: ")
    (tmp_path / "Instruction.parquet").rmdir()
    os.mkfifo(tmp_path / "Instruction.parquet")
    assert "it is not a regular file" in refusal(tmp_path)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no JSON: "),
        ("{", "it is no JSON: "),
        (DEEP, "it is nested too deeply"),
        ("{}", "it holds no summary with a total_time"),
        ("[]", "it holds no summary with a total_time"),
        ("[1]", "it holds no summary with a total_time"),
        ("null", "it holds no summary with a total_time"),
        ('{"summary": []}', "it holds no summary with a total_time"),
        ('{"a": {"total_time": 1}, "b": {"total_time": 2}}', "it holds 2 summaries; give a file with one"),
        ('{"summary": [{"total_time": 1}, {"total_time": 2}]}', "it holds 2 summaries; give a file with one"),
        ('{"total_time": null}', "it has no total_time"),
        ('{"total_time": "1"}', "total_time is no number"),
        ('{"total_time": true}', "total_time is no number"),
        ('{"total_time": [1]}', "total_time is no number"),
        ('{"total_time": NaN}', "NaN is no number"),
        ('{"total_time": Infinity}', "Infinity is no number"),
        ('{"total_time": 1e999}', "total_time is out of range"),
        ('{"total_time": -1}', "total_time is -1, and must be at least 0 and below 1e+18"),
        ('{"total_time": 1, "dma_active_time": {}}', "dma_active_time is no number"),
        ('{"total_time": 1, "hardware_flops": -3}', "hardware_flops is -3"),
        ('{"total_time": 1' + "0" * 5000 + "}", "it is damaged: "),
    ],
)
def test_json_of_a_wrong_shape_is_one_sentence(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(text)
    assert refusal(path).startswith(why)


def test_bytes_that_are_no_text_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "profile.ntff"
    path.write_bytes(bytes(range(256)))
    assert refusal(path) == "it is not UTF-8"
    assert refusal(tmp_path / "absent.json") == "No such file or directory"
    assert refusal(tmp_path / "absent.parquet").startswith("No such file or directory")
    assert refusal(Path("/dev/zero")) == "it is not a regular file"


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_profile(tmp_path / "profile")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InvalidArgument) as refused:
        read_profile(folder)
    assert refused.value.code == "NKW-PROFILE-EXTRA"
    assert (
        refused.value.message
        == "profiles in Parquet need pyarrow, which is not installed; pip install 'nki-workbench[profiles]'"
    )
    (tmp_path / "summary.json").write_text('{"total_time": 1e-6}')
    assert read_profile(tmp_path / "summary.json").total_ns == pytest.approx(1000)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_rows_of_a_table_have_a_limit(more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_profile(tmp_path / "profile")
    most = len(TABLES["Instruction"]) - more
    monkeypatch.setattr(tables_module, "MOST_ROWS", most)
    if more <= 0:
        assert read_profile(folder).lines
    else:
        assert refusal(folder) == f"Instruction.parquet has 6 rows, more than {most}"


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_column_that_unpacks_to_too_much_is_one_sentence(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path, "Warning", [{"message": "x" * 100_000}])  # packs to some hundred bytes
    write_table(tmp_path, "Summary", TABLES["Summary"])
    column = pq.read_metadata(path).row_group(0).column(0)
    assert (column.path_in_schema, path.stat().st_size < 10_000) == ("message", True)
    size = column.total_uncompressed_size
    monkeypatch.setattr(tables_module, "MOST_COLUMN_BYTES", size - more)
    if more <= 0:
        assert [len(warning) for warning in read_profile(tmp_path).warnings] == [2000]
    else:
        assert refusal(tmp_path) == f"message has {size:,} bytes in one row group, more than {size - 1:,}"


def test_parts_of_a_table_share_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_profile(tmp_path / "profile", without=["Instruction"])
    for index in range(6):
        write_table(folder, "Instruction", TABLES["Instruction"][index : index + 1], f"_{index}")
    monkeypatch.setattr(tables_module, "MOST_ROWS", 5)
    assert refusal(folder) == "Instruction has more than 5 rows"


@pytest.mark.parametrize("most", [4, 5, 6])
def test_a_trace_has_a_limit_of_rows(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_profile(tmp_path / "profile")
    monkeypatch.setattr(trace_module, "MOST_SLICES", most + 1)
    if most + 1 >= len(TABLES["Instruction"]):
        assert list(read_trace_events(folder))
    else:
        with pytest.raises(InvalidArgument, match="Instruction has more than 5 rows, too many for a trace"):
            list(read_trace_events(folder))


@pytest.mark.parametrize("most", [3, 4, 5])
def test_different_texts_of_a_column_have_a_limit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "MOST_TEXTS", most)
    names = tables_module.Names()
    numbers = [names.number(text) for text in ("a", "b", "", None, "a", "c")]
    assert numbers == [0, 1, -1, -1, 0, 2]
    if most > 3:
        assert names.number("d") == 3
    else:
        with pytest.raises(ValueError, match="a column has more than 3 different texts"):
            names.number("d")


@pytest.mark.parametrize("most", [2, 3, 4])
def test_engines_and_queues_have_a_limit(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_profile(tmp_path / "profile")  # of three engines
    monkeypatch.setattr(engines_module, "MOST_TRACKS", most)
    if most >= 3:
        assert len(read_profile(folder).engines) == 3
    else:
        assert refusal(folder) == "Instruction has more than 2 engines, queues or partitions"


@pytest.mark.slow
def test_thousands_of_queues_are_refused_and_as_many_lines_are_read(tmp_path: Path) -> None:
    rows = np.arange(50_000)
    times = {"start_ts": T0 + rows, "end_ts": T0 + rows + 1, "transfer_bytes": rows}
    queues = pa.array([f"queue {row}" for row in rows])
    pq.write_table(pa.table({**times, "queue_name": queues}), tmp_path / "DmaPacketAggregated.parquet")
    assert refusal(tmp_path) == "DmaPacketAggregated has more than 10,000 engines, queues or partitions"
    (tmp_path / "DmaPacketAggregated.parquet").unlink()
    lines = pa.array([f"k.py:{row}" for row in range(49_990)] + ["k.py:1"] * 10)
    same = pa.array(["tensor"] * len(rows))
    columns = {**times, "engine": same, "opcode": same, "nki_source_location": lines}
    pq.write_table(pa.table(columns), tmp_path / "Instruction.parquet")
    read = read_profile(tmp_path)
    assert len(read.lines) == 49_990 and read.lines[0].held_ns == 11


def many_packets(path: Path, rows: int) -> None:
    """Write packets whose intervals overlap by pairs, in an order that is not that of time."""
    rows_per_batch = 100_000
    schema = pa.schema(
        {name: types("DmaPacket")[name] for name in ("start_ts", "end_ts", "transfer_bytes", "queue_type")}
    )
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, rows_per_batch):
            starts = T0 + 100 * (
                first + (np.arange(min(rows_per_batch, rows - first)) * 7919) % rows_per_batch
            )
            columns = {
                "start_ts": starts,
                "end_ts": starts + 150,
                "transfer_bytes": np.full(len(starts), 512),
                "queue_type": pa.array(["data"] * len(starts)),
            }
            writer.write_table(pa.table(columns, schema))


@pytest.mark.slow
def test_ten_million_packets_are_read_in_bounded_memory(tmp_path: Path) -> None:
    rows = 10_000_000
    many_packets(tmp_path / "DmaPacket.parquet", rows)
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        read = read_profile(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(pa.system_memory_pool())
    assert (read.dma.packets, read.dma.bytes) == (rows, 512 * rows)
    assert read.dma.active_ns == 100 * (rows - 1) + 150
    # The rows hold 280 MB. Of them 256 Ki + 64 Ki intervals are kept, in 12 columns of 8 bytes while they are merged.
    assert most < 12 * 8 * 320 * KIB + 16 * MIB
    assert pool.max_memory() < 64 * MIB


def compared(path: Path, predicted: Profile) -> str:
    """Return the whole comparison with a profile, or the sentence that refuses it."""
    try:
        comparison = side_by_side(predicted, read_profile(path), 1024)
        text = rendered(vendor_text.make_report(comparison))
        json.dumps(vendor_text.make_contents(comparison), allow_nan=False)
        json.dumps(list(read_trace_events(path)), allow_nan=False)
    except InvalidArgument as refused:
        if refused.code != "NKW-PROFILE-FILE":
            raise
        return refused.message
    assert text
    return text


Change = Callable[[random.Random, bytes], bytes]


def flipped(chance: random.Random, content: bytes) -> bytes:
    out = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        out[chance.randrange(len(out))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    return bytes(out)


def cut(chance: random.Random, content: bytes) -> bytes:
    return content[: chance.randrange(len(content))]


def spliced(chance: random.Random, content: bytes) -> bytes:
    position, other, length = (chance.randrange(len(content)) for _ in range(3))
    return content[:position] + content[other : other + length % 200] + content[position:]


def hostile_value(chance: random.Random) -> Any:
    return chance.choice(
        [None, 0, 1, -1, T0, T0 + 500, (1 << 61) - 1, 1 << 61, (1 << 63) - 1, -(1 << 63), 0.5, float("nan")]
        + [
            float("inf"),
            -0.0,
            1e300,
            "",
            "tensor",
            "k.py:1",
            "\x1b[31m",
            "x" * 5000,
            "a\nb\tc",
            True,
            b"\xff",
        ]
    )


def hostile_table(chance: random.Random, path: Path) -> None:
    """Write a table with the columns of its schema, of values and types by chance."""
    table = path.stem
    rows = chance.choice([0, 1, 3, 9])
    columns = {}
    for name, column_type in types(table).items():
        if chance.random() < 0.1:
            continue
        values = [hostile_value(chance) for _ in range(rows)]
        if chance.random() < 0.8:  # of the type of the schema
            kept = [value for value in values if value is None or fits(value, column_type)]
            columns[name] = pa.array((kept + [None] * rows)[:rows] if rows else [], column_type)
        else:
            one = chance.choice(values) if rows else 0
            columns[name] = pa.array([one] * rows)
    pq.write_table(pa.table(columns), path)


def fits(value: Any, column_type: pa.DataType) -> bool:
    try:
        pa.array([value], column_type)
    except (pa.ArrowException, OverflowError):
        return False
    return True


def campaign(folder: Path, predicted: Profile, count: int, seed: int) -> set[str]:
    """Compare `count` damaged profiles; the first words of what was said."""
    chance = random.Random(seed)
    write_profile(folder)
    names = sorted(path.name for path in folder.iterdir())
    contents = {name: (folder / name).read_bytes() for name in names}
    summary = json.dumps({"n_1": TABLES["Summary"][0]}).encode()
    messages = set()
    for _ in range(count):
        name = chance.choice([*names, "summary.json"])
        path = folder / name
        if name == "summary.json":
            path = folder.with_name("summary.json")
            path.write_bytes(chance.choice([flipped, cut, spliced])(chance, summary))
            messages.add(compared(path, predicted)[:20])
            continue
        if chance.random() < 0.5:
            hostile_table(chance, path)
        else:
            path.write_bytes(chance.choice([flipped, cut, spliced])(chance, contents[name]))
        messages.add(compared(folder, predicted)[:20])
        path.write_bytes(contents[name])
    return messages


@pytest.mark.slow
def test_damaged_profiles_are_compared_or_refused(tmp_path: Path, predicted: Profile) -> None:
    messages = campaign(tmp_path / "profile", predicted, CHEAP, 1)
    assert "matmul_exp on trn2: " in messages and len(messages) > 1


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2, 6))
def test_thousands_of_damaged_profiles_are_compared_or_refused(
    seed: int, tmp_path: Path, predicted: Profile
) -> None:
    assert "matmul_exp on trn2: " in campaign(tmp_path / "profile", predicted, EXHAUSTIVE // 4, seed)


def test_names_from_outside_do_not_reach_the_terminal_raw(tmp_path: Path, predicted: Profile) -> None:
    rows: Sequence[Any] = [
        span(
            0, 9, transfer_bytes=4096, queue_name="q\x1b[31mred", variable="v\x1b[2J\nnext", queue_type="data"
        )
    ]
    tables = {
        "DmaPacketAggregated": rows,
        "Warning": [{"message": "w\x1b[31m"}],
        "Metadata": [{**METADATA, "instance_type": "\x1b[31m"}],
    }
    text = compared(write_profile(tmp_path / "profile", tables), predicted)
    assert "\x1b" not in text and "\\x1b[31m" in text
