"""Rooflines: the least time in which given peaks can do the operations and memory traffic of a prompt or decode step.

    time = max(operations / peak operations per second, bytes / peak bytes per second)

One multiply-add counts as two operations. A prompt or a decode step reads each weight that its tokens use once,
whatever the batch. A decode step also reads the cache of every sequence, and a prompt writes it. So for a batch of B
sequences of S tokens, as long as the bytes decide,

    time per token = (weight bytes + B * S * cache bytes per token) / bandwidth,     tokens per second = B / time

Activations and the bytes that ranks exchange are not counted.

A roofline is a lower bound. Where only the roofline is known, a `Time` has three readings: the roofline itself, the
time at the shares of the peaks that this project's kernels usually reach (`USUAL`), and the time at the least shares
that published runs reach (`LEAST`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from model.device import Hardware
from model.errors import ModelError
from model.layers.launch import Phase
from model.plan.dry import Time
from model.plan.origin import Confidence, Origin
from model.plan.sizes import DTYPE_BYTES, ModelSizes
from nkw.suggestions import did_you_mean

_MIN_PEAK, _MAX_PEAK = 1e-9, 1e9
"""Peaks of an accelerator, in TFLOPS and TB/s: from a thousand operations a second to more than all computers have."""


class Bound(Enum):
    """The peak that decides a roofline: operations per second or bytes per second."""

    compute = "compute"
    bandwidth = "bandwidth"


@dataclass(frozen=True)
class Reach:
    """Share of the peak operations per second, and of the peak bytes per second, that real kernels reach.

    The first applies to kernels whose time the operations decide, the second to kernels whose time the bytes decide.
    `origin` is the source of both.
    """

    operations: float
    bytes: float
    origin: Origin


USUAL = Reach(
    0.46,
    0.50,
    Origin(
        "medians of dry runs of this project's kernels: prompts and decode steps of eight models on 8 ranks of trn1 "
        "and trn2 (python -m benchmarks.stacks --shares)",
        Confidence.derived,
    ),
)
"""The middle reading of a time of which only the roofline is known."""

LEAST = Reach(
    0.17,
    0.17,
    Origin(
        "the least of the fitted published runs of Transformers NeuronX without engine time: prompts of models of 69 "
        "billion parameters or more, and decode steps (python -m benchmarks.stacks --shares)",
        Confidence.derived,
    ),
)
"""The largest reading of a time of which only the roofline is known."""


@dataclass(frozen=True)
class Accelerator:
    """Peaks of one device: operations of one dtype per second and bytes per second, and its memory (None if unknown).

    A rank of a Trainium chip is an `Accelerator` too; see `compute_core_peaks`.
    """

    name: str
    operations_per_s: float
    bytes_per_s: float
    memory_bytes: int | None
    source: str

    @property
    def ridge(self) -> float:
        """Operations per byte above which operations, not bytes, decide the roofline."""
        return self.operations_per_s / self.bytes_per_s

    def compute_seconds(self, operations: float, moved_bytes: float) -> float:
        """Return the roofline in seconds: the longer of the times for the operations and for the bytes at the peaks."""
        return max(operations / self.operations_per_s, moved_bytes / self.bytes_per_s)

    def estimate(self, operations: float, moved_bytes: float) -> Time:
        """Return the time in ns of work of which only the roofline is known.

        Its dataflow reading is the roofline; the program and serial readings are at the shares in `USUAL` and `LEAST`.
        """
        least, *longer = (
            1e9 * self.compute_seconds(operations / share, moved_bytes / byte_share)
            for share, byte_share in (
                (1.0, 1.0),
                *((reach.operations, reach.bytes) for reach in (USUAL, LEAST)),
            )
        )
        return Time(least, *longer)

    def scale(self, devices: int) -> Accelerator:
        """Return one device with the peaks and the memory of `devices` equal devices; the name stays."""
        return replace(
            self,
            operations_per_s=self.operations_per_s * devices,
            bytes_per_s=self.bytes_per_s * devices,
            memory_bytes=None if self.memory_bytes is None else self.memory_bytes * devices,
        )


ACCELERATORS = {
    "h100": Accelerator(
        "h100", 989e12, 3.35e12, 80 * 10**9, "NVIDIA H100 data sheet: SXM, fp16 without sparsity"
    ),
    "a100": Accelerator(
        "a100", 312e12, 2.039e12, 80 * 10**9, "NVIDIA A100 data sheet: SXM 80 GB, fp16 without sparsity"
    ),
}
"""Accelerators by name, with their peaks of 16-bit products."""

_FLOAT32_OPERATIONS = {"h100": 67e12, "a100": 19.5e12}
"""Peaks of float32 products in operations per second, of the same data sheets: in full precision, not TF32."""


def parse_accelerator(text: str, dtype: str) -> Accelerator:
    """Return an accelerator from its name (h100, a100) or from its peaks, written as TFLOPS,TB/s.

    A named accelerator has its data sheet's peak of float32 products if `dtype` is "float32", else of 16-bit products.
    An accelerator that is given by its peaks has an unknown memory.

    Raises:
        ModelError: the text is neither a known name nor two numbers within the limits.
    """
    if text.lower() in ACCELERATORS:
        known = ACCELERATORS[text.lower()]
        if dtype != "float32":
            return known
        source = known.source.replace("fp16 without sparsity", "fp32")
        return replace(known, operations_per_s=_FLOAT32_OPERATIONS[known.name], source=source)
    try:
        tera_operations, tera_bytes = map(float, text.split(","))
    except ValueError:
        meant = did_you_mean(text.lower(), ACCELERATORS)
        names = ", ".join(sorted(ACCELERATORS))
        raise ModelError(
            f"accelerator {text!r:.60}{meant or ';'} known are {names}, or give TFLOPS,TB/s as in 989,3.35"
        ) from None
    if not all(_MIN_PEAK <= peak < _MAX_PEAK for peak in (tera_operations, tera_bytes)):
        raise ModelError(
            f"accelerator {text!r:.60}; TFLOPS and TB/s are numbers from {_MIN_PEAK:g} to {_MAX_PEAK:g}"
        )
    return Accelerator(text, tera_operations * 1e12, tera_bytes * 1e12, None, "as given")


def compute_core_peaks(chip: Hardware, dtype: str, lnc: int = 1) -> Accelerator:
    """Return the peaks and the HBM of one rank of a chip as an `Accelerator`.

    A rank has `lnc` NeuronCores, each with one PE array, taken at full clock, and with a core's share of the chip's HBM
    bandwidth and bytes.

    Args:
        chip: hardware record of the chip.
        dtype: dtype of the products; float32 products take several passes of the PE array.
        lnc: NeuronCores of the rank.
    """
    array = chip.contraction_max * chip.stationary_free_max
    passes = chip.matmul_fp32_passes if dtype == "float32" else 1
    core = Accelerator(
        chip.name,
        2e9 * array * chip.tensor_clock_ghz / passes,
        1e9 * chip.hbm_gb_per_s_per_core,
        chip.hbm_bytes_per_core,
        "hardware record",
    )
    return core.scale(lnc)


@dataclass(frozen=True)
class Work:
    """Operations of a prompt or decode step, summed over all ranks.

    `weight_bytes` and `cache_bytes` are the bytes of weights and of the cache that are read or written.
    """

    operations: float
    weight_bytes: float
    cache_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes of weights and cache together."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def find_bound(self, peaks: Accelerator) -> Bound:
        """Return whether operations or bytes decide the roofline of this work on the peaks."""
        return Bound.compute if self.intensity > peaks.ridge else Bound.bandwidth

    def compute_seconds(self, peaks: Accelerator) -> float:
        """Return the roofline of this work in seconds."""
        return peaks.compute_seconds(self.operations, self.bytes)

    def estimate(self, peaks: Accelerator) -> Time:
        """Return the time of this work in ns in three readings, from its roofline alone; see `Accelerator.estimate`."""
        return peaks.estimate(self.operations, self.bytes)


def count_decode_work(model: ModelSizes, dtype: str, batch: int, context: int) -> Work:
    """Return the work of one decode step, which adds one token to each of `batch` sequences.

    Args:
        model: sizes of the model.
        dtype: dtype of weights and cache.
        batch: number of sequences.
        context: positions of each sequence that its new token attends to, the token included.
    """
    products = model.active + model.head_parameters + model.count_products(Phase.decode, context)
    return Work(
        2.0 * batch * products,
        model.count_bytes_read(batch, dtype),
        batch * model.count_cache_bytes(context, dtype, read=True),
    )


def count_prefill_work(model: ModelSizes, dtype: str, batch: int, tokens: int) -> Work:
    """Return the work of computing `batch` prompts of `tokens` tokens each.

    Includes the output projection (head) for the last token of each prompt. For a speech model, includes the encoder
    for one window of each prompt.
    """
    products = model.active * tokens + model.head_parameters + model.count_products(Phase.prefill, tokens)
    weight_bytes = model.count_bytes_read(batch * tokens, dtype)
    for window in filter(None, (network.window for network in model.network.before.values())):
        products += model.parameters["aside"] * window + model.aside.count_products(Phase.prefill, window)
        weight_bytes += DTYPE_BYTES[dtype] * model.parameters["aside"]
    return Work(2.0 * batch * products, weight_bytes, batch * model.count_cache_bytes(tokens, dtype))
