"""The roofline: what a phase computes and moves, and the least time that takes on given peaks.

    time = max(operations / peak operations per second, bytes / peak bytes per second)

Two operations are one multiply-add. A phase reads every weight that its tokens pass once, whatever the batch; a decode
step reads besides the cache of every sequence, a prompt writes it. So for a batch of B sequences of S tokens, as long
as bytes decide,

    time per token = (weight bytes + B * S * cache bytes per token) / bandwidth,     tokens per second = B / time

Activations are not counted, nor what ranks exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from model.device import Hardware
from model.errors import ModelError
from model.layers.launch import Phase
from model.plan.sizes import DTYPE_BYTES, ModelSizes

_LEAST_PEAK, _MOST_PEAK = 1e-9, 1e9
"""Of an accelerator, in TFLOPS and TB/s: from a thousand operations a second to more than all computers together."""


class Bound(Enum):
    """The resource that decides the time of a phase."""

    compute = "compute"
    bandwidth = "bandwidth"


@dataclass(frozen=True)
class Accelerator:
    """One device by its peaks: operations of the dtype per second, bytes per second, and memory where it is known."""

    name: str
    operations_per_s: float
    bytes_per_s: float
    memory_bytes: int | None
    source: str

    @property
    def ridge(self) -> float:
        """Operations per byte above which compute decides."""
        return self.operations_per_s / self.bytes_per_s

    def seconds(self, operations: float, moved_bytes: float) -> float:
        """The least time of a number of operations and bytes."""
        return max(operations / self.operations_per_s, moved_bytes / self.bytes_per_s)

    def times(self, devices: int) -> Accelerator:
        """`devices` of these as one device."""
        memory = None if self.memory_bytes is None else self.memory_bytes * devices
        return Accelerator(
            self.name, self.operations_per_s * devices, self.bytes_per_s * devices, memory, self.source
        )


ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator(
            "h100", 989e12, 3.35e12, 80 * 10**9, "NVIDIA H100 data sheet: SXM, fp16 without sparsity"
        ),
        Accelerator(
            "a100", 312e12, 2.039e12, 80 * 10**9, "NVIDIA A100 data sheet: SXM 80 GB, fp16 without sparsity"
        ),
    )
}


def accelerator(text: str) -> Accelerator:
    """A known accelerator by name, or one as TFLOPS,TB/s; ModelError for anything else."""
    if text.lower() in ACCELERATORS:
        return ACCELERATORS[text.lower()]
    try:
        tera_operations, tera_bytes = (float(part) for part in text.split(","))
    except ValueError:
        known = ", ".join(sorted(ACCELERATORS))
        raise ModelError(
            f"accelerator {text!r:.60}; known are {known}, or give TFLOPS,TB/s as in 989,3.35"
        ) from None
    if not all(_LEAST_PEAK <= each < _MOST_PEAK for each in (tera_operations, tera_bytes)):
        raise ModelError(
            f"accelerator {text!r:.60}; TFLOPS and TB/s are numbers from {_LEAST_PEAK:g} to {_MOST_PEAK:g}"
        )
    return Accelerator(text, tera_operations * 1e12, tera_bytes * 1e12, None, "as given")


def core(chip: Hardware, dtype: str) -> Accelerator:
    """One NeuronCore of a chip: the whole PE array at its full clock, and the core's part of the HBM bandwidth."""
    array = chip.contraction_max * chip.stationary_free_max
    passes = chip.matmul_fp32_passes if dtype == "float32" else 1
    return Accelerator(
        chip.name,
        2e9 * array * chip.tensor_clock_ghz / passes,
        1e9 * chip.hbm_gb_per_s_per_core,
        chip.hbm_bytes_per_core,
        "hardware record",
    )


@dataclass(frozen=True)
class Work:
    """The operations of a phase, and the bytes of weights and cache that it moves."""

    operations: float
    weight_bytes: float
    cache_bytes: float

    @property
    def bytes(self) -> float:
        """All bytes moved."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def bound(self, peaks: Accelerator) -> Bound:
        """The resource that decides the time of this work on given peaks."""
        return Bound.compute if self.intensity > peaks.ridge else Bound.bandwidth

    def seconds(self, peaks: Accelerator) -> float:
        """The least time it takes."""
        return peaks.seconds(self.operations, self.bytes)


def decode(model: ModelSizes, dtype: str, batch: int, context: int) -> Work:
    """One token for each of `batch` sequences, each the last of `context` tokens."""
    products = model.active + model.head_parameters + model.products(Phase.decode, context)
    return Work(
        2.0 * batch * products,
        DTYPE_BYTES[dtype] * model.passed(batch),
        batch * model.cache_bytes(context, dtype, read=True),
    )


def prefill(model: ModelSizes, dtype: str, batch: int, tokens: int) -> Work:
    """The prompts of `batch` sequences, of `tokens` tokens each; the head for the last token of each only."""
    products = model.active * tokens + model.head_parameters + model.products(Phase.prefill, tokens)
    weights = model.passed(batch * tokens)
    for window in filter(None, (network.window for network in model.network.before.values())):
        products += model.parameters["aside"] * window + model.aside.products(Phase.prefill, window)
        weights += model.parameters["aside"]
    return Work(
        2.0 * batch * products, DTYPE_BYTES[dtype] * weights, batch * model.cache_bytes(tokens, dtype)
    )
