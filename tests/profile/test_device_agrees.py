"""A device that did exactly what was predicted: written as its profile, every ratio is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulate.profile import Profile, profile
from simulate.profile.vendor import read_profile, side_by_side
from simulate.timing import SliceKind
from tests.profile.device_profiles import METADATA, T0, Row, instruction, span, write_profile
from tests.timing import kernels


def as_a_device_would(predicted: Profile, folder: Path) -> Path:
    """Write the slices of a prediction as the tables of a profile, in whole ns."""
    rows: dict[str, list[Row]] = {"Instruction": [], "DmaPacketAggregated": [], "DmaPacket": []}
    slices = list(predicted.timeline.slices())
    moved = {(piece.stream, piece.event): piece for piece in slices if piece.slice_kind is SliceKind.transfer}
    for piece in slices:
        stream = predicted.streams[piece.stream]
        code, line = stream.lines[stream.line_ids[piece.event]]
        engine = piece.track.split()[-1]
        start, end = round(piece.start_ns), round(piece.end_ns)
        if piece.slice_kind is SliceKind.transfer:
            dma = stream.costs[stream.cost_ids[piece.event]].dma
            assert dma is not None
            more = {"queue_name": f"q{engine}IO0-Q1", "transfer_bytes": dma.bytes, "queue_type": "data"}
            rows["DmaPacketAggregated"].append(span(start, end, pcore_idx=stream.core, **more))
            rows["DmaPacket"].append(span(start, end, pcore_idx=stream.core, **more))
            continue
        location: dict[str, Any] = {
            "nki_source_location": f"/home/ubuntu/{Path(code.co_filename).name}:{line}",
            "pcore_idx": stream.core,
        }
        transfer = moved.get((piece.stream, piece.event))
        if piece.slice_kind is SliceKind.trigger and transfer is not None:
            location["dma_trigger_start_ts"] = T0 + round(transfer.start_ns)
            location["dma_trigger_end_ts"] = T0 + round(transfer.end_ns)
        rows["Instruction"].append(instruction(engine.lower(), "ANY", start, end, **location))
    return write_profile(folder, {**rows, "Metadata": [metadata(predicted)], "Summary": [summary(predicted)]})


def metadata(predicted: Profile) -> Row:
    chip = predicted.hardware
    return {
        **METADATA,
        "dma_ddr_bandwidth": 1e9 * chip.dma_engines * chip.dma_engine_bytes_per_ns,
        "tensor_engine_clock_freq": chip.tensor_clock_ghz,
    }


def summary(predicted: Profile) -> Row:
    traffic = predicted.traffic
    return {
        "total_time": (predicted.length_ns + predicted.timeline.overhead_ns) / 1e9,
        "total_exec_time": predicted.length_ns / 1e9,
        "hardware_flops": predicted.roofline.flops,
        "transpose_flops": 0,
        "hbm_read_bytes": sum(tensor.read_bytes for tensor in traffic),
        "hbm_write_bytes": sum(tensor.written_bytes for tensor in traffic),
        "inputs_outputs_weights_size_bytes": sum(
            tensor.nbytes for tensor in traffic if tensor.argument or not tensor.read_bytes
        ),
    }


MATMUL = (kernels.matmul_exp, ((512, 128), (512, 512)), 1)
SWIGLU = (kernels.rmsnorm_swiglu, ((128, 512), (1, 512), (512, 512), (512, 512)), 1)
HALVES = (kernels.halves, ((256, 512),), 2)


@pytest.mark.parametrize("case", [MATMUL, SWIGLU, HALVES], ids=["matmul_exp", "rmsnorm_swiglu", "halves"])
def test_a_device_that_did_as_predicted_has_ratios_of_one(case: Any, tmp_path: Path) -> None:
    kernel, shapes, cores = case
    launch = kernels.dry(kernel, *(kernels.zeros(*shape) for shape in shapes), cores=cores)
    predicted = profile(launch.streams, launch.hardware)
    comparison = side_by_side(predicted, read_profile(as_a_device_would(predicted, tmp_path / "profile")))
    off_ns = len(predicted.timeline)  # both ends of each slice are rounded, by half a ns at most
    transposes = "compute_bound_ideal_flops"  # the summary above leaves them out
    for pair in (
        *comparison.times,
        *comparison.engines,
        *comparison.dma_ns,
        *comparison.lines,
        *comparison.bounds,
    ):
        if pair.name != transposes:
            # The Tensor engine's clock is a number of 32 bits in Metadata.
            assert pair.measured == pytest.approx(pair.predicted, rel=2**-23, abs=off_ns), pair
    for pair in (*comparison.dma_bytes, *comparison.counts):
        assert pair.measured == pair.predicted, pair
    assert comparison.lines and len(comparison.engines) >= 2 * cores
    assert len(comparison.bounds) == (7 if cores == 1 else 0)
