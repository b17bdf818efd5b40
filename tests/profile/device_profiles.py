"""Device profiles as neuron-explorer lays them out, made after the vendor's page "Profile Parquet Schema Reference".

Columns and types are those of schema 7.4.0 (Neuron SDK 2.31): all required columns of each table, and of the optional
ones those that say something here. Numbers are made up; no device measured them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SPAN = "start_ts end_ts duration_ns"
# table: (int64, string, other columns)
SCHEMA: dict[str, tuple[str, str, dict[str, pa.DataType]]] = {
    "Instruction": (
        f"{SPAN} id pc pcore_idx dma_trigger_start_ts dma_trigger_end_ts evt_wait_time_ns raw_flops flops_transpose",
        "engine opcode operands bir_id nki_source_location bir_debug_info_source_location kernel_instruction_name",
        {},
    ),
    "DmaPacket": (
        f"{SPAN} id packet_aggregation_id read_bytes write_bytes transfer_bytes crc pcore_idx",
        "queue_type queue_name variable",
        {"packet_idx": pa.int32(), "throughput": pa.float32()},
    ),
    "DmaPacketAggregated": (
        f"{SPAN} id queue_idx read_bytes write_bytes transfer_bytes pcore_idx",
        "queue_name queue_type op variable source dest semaphore_id read_sbuf_partitions read_shape read_offset "
        "read_steps write_sbuf_partitions write_shape write_offset write_steps",
        {
            "block_id": pa.int32(),
            "read_num_sbuf_partitions": pa.int32(),
            "write_num_sbuf_partitions": pa.int32(),
            "throughput": pa.float32(),
        },
    ),
    "ActiveTime": (f"{SPAN} pcore_idx", "engine", {}),
    "SemaphoreUpdate": ("timestamp pcore_idx", "id", {"value": pa.int32()}),
    "Throttle": ("duration timestamp pcore_idx", "type", {"k": pa.int32(), "n": pa.int32()}),
    "CoreBarriers": (
        f"{SPAN} id semaphore compiler_pc pcore_idx",
        "engine_name compiler_opcode compiler_operands",
        {},
    ),
    "SbufAllocation": ("start_ts end_ts start_address end_address partition pcore_idx", "tensor_name", {}),
    "SbufUsage": ("timestamp pcore_idx", "", {"avg_util_percent": pa.float64()}),
    "PsumUsage": ("timestamp pcore_idx", "", {"avg_util_percent": pa.float64()}),
    "PendingDma": ("timestamp pcore_idx", "", {"value": pa.int32()}),
    "Flow": ("in_id out_id gap_time", "in_table out_table dependency_type", {}),
    "Summary": (
        "hardware_flops transpose_flops dma_transfer_count dma_transfer_total_bytes hbm_read_bytes hbm_write_bytes "
        "inputs_outputs_weights_size_bytes",
        "",
        dict.fromkeys(
            "total_time total_exec_time dma_active_time dma_active_time_percent tensor_engine_active_time".split(),
            pa.float64(),
        ),
    ),
    "TensorInfo": (
        "size node pcore_idx load_to_sbuf_total_size_bytes",
        "variable_name type format shape",
        {"load_to_sbuf_repeat_factor": pa.float64()},
    ),
    "KernelStackFrames": (
        "stack_frame_id parent_stack_frame_id line_number",
        "fully_qualified_function_name file_path",
        {},
    ),
    "KernelInstructions": ("stack_frame_id line_number", "kernel_instruction_name file_path", {}),
    "Warning": ("", "message category", {}),
    "Metadata": (
        "first_hw_timestamp last_hw_timestamp tensor_engine_num_rows tensor_engine_num_cols ticks_per_nanosec",
        "profile_schema_version first_ts last_ts instance_type explorer_version compiler_version",
        {
            "num_physical_cores": pa.int32(),
            "dma_ddr_bandwidth": pa.float64(),
            "tensor_engine_clock_freq": pa.float32(),
            "is_simulation": pa.bool_(),
        },
    ),
}
Row = Mapping[str, Any]
T0 = 1_000_000  # ns; profiles do not start at 0
KERNEL = "/home/ubuntu/work/script.py"

METADATA: Row = {
    "profile_schema_version": "7.4.0",
    "instance_type": "trn2.3xlarge",
    "explorer_version": "2.31.0",
    "tensor_engine_num_rows": 128,
    "tensor_engine_num_cols": 128,
    "tensor_engine_clock_freq": 2.5,
    "dma_ddr_bandwidth": 200e9,
    "num_physical_cores": 1,
}


def span(start: int, end: int, **more: Any) -> Row:
    """Return a row of a timeline of events, `start` ns after the first."""
    return {"start_ts": T0 + start, "end_ts": T0 + end, "duration_ns": end - start, **more}


def instruction(engine: str, opcode: str, start: int, end: int, line: int | None = None, **more: Any) -> Row:
    location = {} if line is None else {"nki_source_location": f"{KERNEL}:{line}"}
    return span(start, end, engine=engine, opcode=opcode, **location, **more)


def types(table: str) -> dict[str, pa.DataType]:
    integers, texts, other_columns = SCHEMA[table]
    return {
        **dict.fromkeys(integers.split(), pa.int64()),
        **dict.fromkeys(texts.split(), pa.string()),
        **other_columns,
    }


def write_table(folder: Path, table: str, rows: Sequence[Row], suffix: str = "", **options: Any) -> Path:
    """Write one table; columns that no row names are null."""
    columns = {
        name: pa.array([row.get(name) for row in rows], column_type)
        for name, column_type in types(table).items()
    }
    path = folder / f"{table}{suffix}.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


# A load of 100 ns, an addition of 40 ns with a wait before it, a store of 60 ns: 300 ns of work in 500 ns.
TABLES: dict[str, list[Row]] = {
    "Metadata": [METADATA],
    "Instruction": [
        instruction(
            "Sync", "DMA_DIRECT2D", 0, 20, 11, dma_trigger_start_ts=T0 + 30, dma_trigger_end_ts=T0 + 130
        ),
        instruction("Vector", "EVENT_SEMAPHORE", 10, 140),
        instruction("Vector", "TENSOR_TENSOR", 140, 180, 12, id=3, evt_wait_time_ns=130),
        instruction("Tensor", "MATMUL", 150, 200, 14, raw_flops=4096, flops_transpose=1024),
        instruction("Tensor", "MATMUL", 180, 210, 14, raw_flops=4096),
        instruction(
            "Sync", "DMA_DIRECT2D", 190, 220, 13, dma_trigger_start_ts=T0 + 240, dma_trigger_end_ts=T0 + 300
        ),
    ],
    "DmaPacketAggregated": [
        span(30, 130, id=7, transfer_bytes=32768, queue_name="qSyncIO0", variable="a", queue_type="input"),
        span(240, 300, transfer_bytes=32768, queue_name="qSyncIO0", variable="out", queue_type="output"),
    ],
    "DmaPacket": [
        span(30, 90, transfer_bytes=16384, queue_type="input"),
        span(60, 130, transfer_bytes=16384, queue_type="input"),
        span(5, 15, transfer_bytes=256, queue_type="instruction"),
        span(240, 300, transfer_bytes=32768, queue_type="output"),
        span(301, 302, transfer_bytes=4, queue_type="output"),
    ],
    "ActiveTime": [
        span(140, 180, engine="vector", pcore_idx=0),
        span(150, 210, engine="tensor", pcore_idx=0),
        span(0, 20, engine="sync", pcore_idx=0),
        span(190, 220, engine="sync", pcore_idx=0),
    ],
    "SemaphoreUpdate": [{"timestamp": T0 + 130, "id": "1", "value": 1}],
    "Throttle": [
        {"timestamp": T0 + 150, "duration": 50, "k": 1, "n": 2, "type": "activity_0"},
        {"timestamp": T0 + 200, "duration": 50, "k": 2, "n": 2, "type": "activity_0"},
    ],
    "CoreBarriers": [span(0, 7, engine_name="GpSimd"), span(3, 5, engine_name="Sync")],
    "SbufAllocation": [
        span(30, 200, start_address=0, end_address=255, partition=0),
        span(100, 150, start_address=256, end_address=299, partition=0),
        span(200, 300, start_address=0, end_address=255, partition=0),
        span(30, 300, start_address=0, end_address=279, partition=32),
    ],
    "SbufUsage": [{"timestamp": T0 + 100, "avg_util_percent": 12.5}, {"timestamp": T0 + 200}],
    "PsumUsage": [{"timestamp": T0 + 100, "avg_util_percent": 0.25}],
    "PendingDma": [{"timestamp": T0 + 20, "value": 3}, {"timestamp": T0 + 40, "value": 1}],
    "Flow": [
        {
            "in_id": 7,
            "in_table": "dma_block",
            "out_id": 3,
            "out_table": "instruction",
            "dependency_type": "FLOW_DEPENDENCE",
        },
        {"in_id": 2, "out_id": 99, "in_table": "instruction", "out_table": "instruction"},
    ],
    "Summary": [
        {
            "total_time": 500e-9,
            "total_exec_time": 302e-9,
            "dma_active_time": 171e-9,
            "dma_transfer_total_bytes": 65536,
            "dma_transfer_count": 2,
            "hbm_read_bytes": 32768,
            "hbm_write_bytes": 32768,
            "inputs_outputs_weights_size_bytes": 65536,
            "hardware_flops": 8192,
            "transpose_flops": 1024,
        }
    ],
    "TensorInfo": [
        {"variable_name": "a", "type": "IN", "size": 32768, "load_to_sbuf_repeat_factor": 1.0},
        {"variable_name": "out", "type": "OUT", "size": 32768},
        {"variable_name": "scratch", "type": "INTERNAL", "size": 99},
    ],
    "KernelStackFrames": [
        {"stack_frame_id": 1, "fully_qualified_function_name": "script.doubled", "line_number": 9}
    ],
    "KernelInstructions": [
        {"kernel_instruction_name": "inst.1:0", "stack_frame_id": 1, "file_path": KERNEL, "line_number": 15}
    ],
    "Warning": [{"message": "DMA descriptors are missing", "category": "Missing Data"}],
}


def write_profile(
    folder: Path, tables: Mapping[str, Sequence[Row]] = TABLES, without: Sequence[str] = ()
) -> Path:
    """Write a folder with these tables; those without rows are not written, as neuron-explorer does."""
    folder.mkdir(parents=True, exist_ok=True)
    for table, rows in tables.items():
        if rows and table not in without:
            write_table(folder, table, rows)
    return folder
