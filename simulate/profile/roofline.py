"""Rates of a launch against the peaks of its chip, and its arithmetic intensity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulate.hardware import Hardware
from simulate.numerics import DTYPES
from simulate.profile.traffic import TensorTraffic
from simulate.run.stream import READ, Stream


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates of a launch against the peaks of the cores that it runs on.

    Rates are FLOP and bytes per ns (1 TFLOP/s is 1,000 FLOP per ns). `peaks` are those of the Tensor engine
    at full clock, by operand width. `operand_peak` is the peak for this launch's mix of operand widths.
    `flops` counts the multiplications and additions of matmuls. `hbm_bytes` are the bytes moved to or from
    HBM, `needed_bytes` those that any kernel must move. `dma_bytes` are the bytes of all DMAs, each counted
    once, `transfers` the number of DMAs.
    """

    length_ns: float
    flops: int
    hbm_bytes: int
    needed_bytes: int
    dma_bytes: int
    transfers: int
    peaks: tuple[tuple[str, float], ...]
    operand_peak: float
    hbm_peak: float
    dma_peak: float

    @property
    def peak(self) -> float:
        """Peak of the Tensor engines with 16-bit operands in FLOP per ns, the denominator of `mfu`."""
        return dict(self.peaks)["16-bit"]

    @property
    def flops_rate(self) -> float:
        """FLOP of matmuls per ns; 0 for a launch of length 0."""
        return self.flops / self.length_ns if self.length_ns else 0.0

    @property
    def hbm_rate(self) -> float:
        """Bytes moved to or from HBM per ns, which is GB/s; 0 for a launch of length 0."""
        return self.hbm_bytes / self.length_ns if self.length_ns else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: `flops_rate` over the peak of 16-bit operands, a share such as 0.4."""
        return self.flops_rate / self.peak

    @property
    def operand_mfu(self) -> float:
        """`flops_rate` over the peak for this launch's mix of operand widths."""
        return self.flops_rate / self.operand_peak

    @property
    def mbu(self) -> float:
        """Memory bandwidth utilisation: `hbm_rate` over the HBM bandwidth of the launch's cores."""
        return self.hbm_rate / self.hbm_peak

    @property
    def intensity(self) -> float | None:
        """FLOP per byte that this launch moves to or from HBM, or None if no byte moves."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None

    @property
    def algorithmic_intensity(self) -> float | None:
        """FLOP per byte that any kernel with these arguments must move, or None if there is no such byte."""
        return self.flops / self.needed_bytes if self.needed_bytes else None

    @property
    def ridge(self) -> float:
        """Intensity at which HBM and the Tensor engine take equally long, in FLOP per byte."""
        return self.operand_peak / self.hbm_peak

    @property
    def least_ns(self) -> float:
        """Time at peak rates for the FLOP and the necessary bytes, whichever takes longer, in ns."""
        return max(self.flops / self.operand_peak, self.needed_bytes / self.hbm_peak)

    @property
    def bound(self) -> str:
        """Limit that decides `least_ns`: "compute" or "memory"."""
        return "compute" if self.flops / self.operand_peak > self.needed_bytes / self.hbm_peak else "memory"


def compute_roofline(
    streams: Sequence[Stream], hardware: Hardware, length_ns: float, traffic: Sequence[TensorTraffic]
) -> Roofline:
    """Compute the rates of a launch against the peaks of its cores.

    Args:
        streams: Streams of the launch, one for each core.
        length_ns: Length of the launch.
        traffic: Bytes to and from HBM by tensor, as `sum_traffic` returns them.
    """
    cores = len(streams)
    peaks = list_matmul_peaks(hardware, cores)
    by_width = dict(peaks)
    flops = moved = transfers = 0
    peak_rate_ns = 0.0
    for stream in streams:
        for event, cost_id in enumerate(stream.cost_ids):
            cost = stream.costs[cost_id]
            if cost.dma is not None:
                moved += cost.dma.bytes
                transfers += 1
            if cost.flops:
                flops += cost.flops
                peak_rate_ns += cost.flops / by_width[_find_operand_width(stream, event, by_width)]
    return Roofline(
        length_ns=length_ns,
        flops=flops,
        hbm_bytes=sum(tensor.moved_bytes for tensor in traffic),
        needed_bytes=sum(tensor.needed_bytes for tensor in traffic),
        dma_bytes=moved,
        transfers=transfers,
        peaks=peaks,
        operand_peak=flops / peak_rate_ns if flops else by_width["16-bit"],
        hbm_peak=cores * hardware.hbm_gb_per_s_per_core,
        dma_peak=cores * hardware.dma_engines * hardware.dma_engine_bytes_per_ns,
    )


def list_matmul_peaks(hardware: Hardware, cores: int = 1) -> tuple[tuple[str, float], ...]:
    """Return (operand width, FLOP per ns) for the Tensor engines of some cores, highest peak first.

    The widths are "16-bit" and "32-bit", and "8-bit" and "mx" where the chip has such a mode.
    """
    column = 2 * hardware.stationary_free_max * hardware.tensor_clock_ghz * cores
    plain = column * hardware.contraction_max
    peaks = [("16-bit", plain), ("32-bit", plain / hardware.matmul_fp32_passes)]
    if hardware.matmul_double_row:
        peaks.insert(0, ("8-bit", column * hardware.contraction_max_double_row))
    if hardware.mx:  # four packed values per element of the contraction
        peaks.insert(0, ("mx", 4 * plain))
    return tuple(peaks)


def _find_operand_width(stream: Stream, event: int, peaks: dict[str, float]) -> str:
    """Return the operand width of a matmul as a key of `peaks`; the widest operand decides."""
    names = [stream.tensors[a.tensor].dtype for a in stream.accesses(event) if a.mode == READ]
    if "mx" in peaks and any(name.endswith("_x4") for name in names):
        return "mx"
    width = max((DTYPES[name].itemsize for name in names), default=2)
    return "32-bit" if width >= 4 else "8-bit" if width == 1 and "8-bit" in peaks else "16-bit"
