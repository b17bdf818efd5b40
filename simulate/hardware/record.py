"""Hardware record: every number that the simulator needs about one chip, with its source.

Hot code reads plain attributes (`hw.vector_clock_ghz` is a float); `hw.provenance["vector_clock_ghz"]` is the
`Number` of this field, with its source and confidence. A record is built from Numbers only, so every number has a
source; a missing or surplus field fails when the module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar


class Confidence(str, Enum):
    """Evidence for a number.

    documented: stated by the vendor. derived: computed or measured from published data. guessed: no direct
    evidence; the note says why this value.
    """

    documented = "documented"
    derived = "derived"
    guessed = "guessed"


@dataclass(frozen=True, slots=True)
class Number:
    """Value of a record with its source and confidence; `overlay` names the overlay file that replaced it, if any."""

    value: Any
    source: str
    confidence: Confidence
    note: str = ""
    overlay: str = ""


def documented(value: Any, source: str, note: str = "") -> Number:
    """Return a number that the vendor states."""
    return Number(value, source, Confidence.documented, note)


def derived(value: Any, source: str, note: str = "") -> Number:
    """Return a number that is computed or measured from published data."""
    return Number(value, source, Confidence.derived, note)


def guessed(value: Any, source: str, note: str) -> Number:
    """Return a number without direct evidence; `source` says where it is taken from, `note` why."""
    return Number(value, source, Confidence.guessed, note)


def carry_over(record: Hardware, *names: str, reason: str) -> dict[str, Number]:
    """Return numbers of another generation's record by name, as guesses for the record that is being written.

    Args:
        record: The record of the other generation.
        names: The fields to take.
        reason: The note of each number: why it should hold here too.
    """
    taken = {name: record.provenance[name] for name in names}
    return {name: guessed(n.value, f"{record.name}: {n.source}", reason) for name, n in taken.items()}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Hardware:
    """Record of one NeuronCore and its chip. A GB is 1e9 bytes.

    Limits, clocks and times are plain numbers in the units that end their names. `provenance` has the `Number` of each
    field. Two records are equal if all their numbers, sources and notes are.

    Kernels that unpack 4-bit weights rest on two guesses, which an overlay can replace:

    - `matmul_keeps_fp8_subnormals`: whether a matmul multiplies subnormal fp8 operands by their values; if False, it
      takes them as 0. True, because IEEE arithmetic keeps them and no document says otherwise; so results are right
      unless a chip contradicts it.
    - `vector_bitwise_32bit_elements_per_cycle`: elements per cycle of the Vector engine's tensor_scalar with bitvec
      operators on 32-bit tiles in SBUF. 2 from gen3 on, the pace of every other tensor_scalar on such tiles, which the
      clock has always taken: a guess that no measurement contradicts changes no predicted time. An overlay with 1
      gives the cautious times; report figures of such kernels with both.
    """

    # Identity
    name: str
    generation: int
    sub_version: int
    core: str
    chip: str
    physical_cores_per_chip: int
    logical_core_sizes: tuple[int, ...]

    # Clocks
    tensor_clock_ghz: float
    tensor_throttled_clock_ghz: float
    vector_clock_ghz: float
    scalar_clock_ghz: float
    gpsimd_clock_ghz: float
    sync_clock_ghz: float

    # Memory
    partitions: int
    partitions_per_quadrant: int
    sbuf_physical_bytes_per_partition: int
    sbuf_usable_bytes_per_partition: int
    psum_bytes_per_partition: int
    psum_banks: int
    psum_bank_bytes: int
    hbm_bytes_per_chip: int
    hbm_bytes_per_core: int
    hbm_gb_per_s_per_chip: float
    hbm_gb_per_s_per_core: float
    hbm_gb_per_s_per_stack: float
    free_elements_max_sbuf: int
    free_elements_max_psum: int
    access_pattern_free_dims_max: int
    access_pattern_size_max: int
    access_pattern_stride_max_elements: int
    dims_max: int

    # Limits of instructions
    contraction_max: int
    contraction_max_double_row: int
    stationary_free_max: int
    moving_free_max: int
    moving_free_max_psum_bf16: int
    moving_free_max_psum_fp32: int
    matmul_tile_sizes: tuple[int, ...]
    bn_stats_free_max: int
    vector_transpose_max: int
    max8_free_min: int
    max8_free_max: int
    exact_float_integer_max: int
    partitions_per_gpsimd_core: int

    # Capabilities
    core_barrier: bool
    sendrecv: bool
    hardware_dge: bool
    dma_priority: bool
    indirect_dma_transpose: bool
    indirect_views: bool
    scalar_engine_tensor_copy: bool
    scalar_engine_tensor_scalar: bool
    activation_immediate_bias: bool
    activation_reciprocal_bias: bool
    activate2: bool
    matmul_transpose_mode: bool
    matmul_transpose_fp8: bool
    matmul_crosses_psum_banks: bool
    matmul_bf16_destination: bool
    matmul_e4m3fn: bool
    matmul_double_row: bool
    matmul_keeps_fp8_subnormals: bool
    psum_accumulate_after_other_write: bool
    mx: bool
    alu_extended_operators: bool
    vector_exponential: bool
    range_select: bool
    nonzero_with_count: bool
    gpsimd_random: bool
    random_state: bool
    vector_random_state: bool
    rand2: bool
    receive_displacements: bool

    # Shared resources
    vector_gpsimd_share_sbuf_port: bool
    vector_scalar_share_psum_port: bool
    vector_fast_modes_share_bus_with_gpsimd: bool
    psum_same_bank_slowdown_factor: float
    activity_throttle: bool
    activity_throttle_window_ns: float
    activity_throttle_busy_fraction: float

    # Tensor engine timing
    matmul_min_interval_cycles: int
    matmul_issue_overhead_cycles: float
    matmul_latency_ns: float
    matmul_throttled_latency_ns: float
    matmul_fp32_passes: int
    matmul_fp32_instructions: int
    transpose_fp32_passes: int
    load_weights_cycles_per_row: float
    load_weights_latency_ns: float
    load_weights_fp32_latency_ns: float

    # Vector engine timing
    vector_interval_overhead_ns: float
    vector_fast_mode_interval_overhead_ns: float
    vector_latency_overhead_ns: float
    vector_min_interval_cycles: int
    vector_accumulate_extra_cycles: int
    vector_tensor_tensor_sbuf_cycles_per_element: float
    vector_scalar_tensor_tensor_cycles_per_element: float
    vector_scan_cycles_per_element: float
    vector_copy_predicated_sbuf_cycles_per_element: float
    vector_bn_aggr_cycles_per_element: float
    vector_reciprocal_cycles_per_element: float
    vector_fast_mode_16bit: float
    vector_fast_mode_16bit_strided: float
    vector_fast_mode_fp32: float
    vector_bitwise_32bit_elements_per_cycle: float
    vector_tensor_tensor_16bit: float
    vector_reduce_16bit: float
    vector_memset_zero_16bit: float
    vector_quantize_mx_elements_per_cycle: float
    vector_exponential_elements_per_cycle: float
    vector_random_elements_per_cycle: float

    # Scalar engine timing
    scalar_interval_overhead_ns: float
    scalar_latency_overhead_ns: float
    scalar_table_function_interval_ns: float
    scalar_table_function_latency_ns: float
    scalar_table_function_sbuf_interval_ns: float
    scalar_table_function_sbuf_latency_ns: float
    scalar_min_interval_cycles: int
    activation_table_load_ns: float
    activation_accumulate_extra_cycles: int

    # GpSimd, Sync and control timing
    gpsimd_fixed_cycles: int
    gpsimd_cycles_per_element: float
    gpsimd_topk_cycles_per_element: float
    semaphore_ns: float
    same_engine_wait_ns: float
    register_load_hbm_ns: float
    device_loop_iteration_ns: float
    device_loop_first_iteration_ns: float
    core_barrier_ns: float
    sendrecv_latency_ns: float
    sendrecv_gb_per_s: float

    # DMA
    dma_engines: int
    dma_engine_bytes_per_ns: float
    dma_cast_bytes_per_ns: float
    dma_descriptor_ns: float
    dma_piece_ns: float
    dma_piece_bytes_per_ns: float
    dma_descriptor_latency_ns: float
    dma_descriptor_bytes_max: int
    dma_static_trigger_ns: float
    dma_static_first_ns: float
    dma_static_store_first_ns: float
    dma_hwdge_trigger_ns: float
    dma_hwdge_first_ns: float
    dma_hwdge_descriptors_free: int
    dma_hwdge_descriptor_ns: float
    dma_swdge_trigger_ns: float
    dma_swdge_gpsimd_ns: float
    dma_swdge_known_gpsimd_ns: float
    dma_swdge_descriptor_ns: float
    dma_swdge_first_ns: float
    dma_load_skew_ns: float
    dma_store_skew_ns: float
    dma_completion_ns: float
    dma_outstanding_per_queue: int
    dma_transpose_hbm_fraction: float
    dma_transpose_sbuf_fraction: float
    dma_compute_fraction: float

    # Kernel and host
    kernel_start_ns: float
    kernel_end_ns: float
    kernel_handover_ns: float
    benchmark_overhead_ns: float
    host_overhead_ns: float

    # Links between chips, and collectives over n ranks: time = latency + bytes / mesh rate up to the switch
    # size, above it ring latency + 2 (n-1)/n * bytes / bus rate, and no less than at the switch size.
    neuronlink_gb_per_s_per_chip: float
    collective_hop_ns: float
    collective_efa_step_ns: float
    collective_latency_ns: Mapping[int, float]
    collective_ring_latency_ns: Mapping[int, float]
    collective_mesh_gb_per_s: Mapping[int, float]
    collective_bus_gb_per_s: Mapping[int, float]
    collective_switch_bytes: Mapping[int, int]

    provenance: Mapping[str, Number]

    def __repr__(self) -> str:
        return f"Hardware({self.name}, {self.core})"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Hardware) and self.provenance == other.provenance)

    def __hash__(self) -> int:
        return hash((self.name, self.hbm_gb_per_s_per_core))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), [(name, *_unwrap(number)) for name, number in self.provenance.items()])

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the fields whose numbers an overlay replaced; empty without an overlay."""
        return tuple(name for name, number in self.provenance.items() if number.overlay)

    @property
    def label(self) -> str:
        """Name for reports, with the overlay if there is one: `trn2`, `trn2 with 2 numbers of measured.json`."""
        names = self.replaced
        if not names:
            return self.name
        counted = "1 number" if len(names) == 1 else f"{len(names)} numbers"
        return f"{self.name} with {counted} of {self.provenance[names[0]].overlay}"

    def alone(self) -> Hardware:
        """Return this record for one working core while the chip's other cores are idle.

        The core then has a stack of HBM to itself. Its bandwidth is what its DMA engines can move, at most the stack's
        rate. Published decode kernels on one core of gen3 sustain 386 to 402 GB/s, above half of a stack.
        """
        return _build_alone(self)

    def working(self, cores: int) -> Hardware:
        """Return the record for `cores` physical cores of a chip that work at the same time.

        A single core has a stack of HBM to itself (`alone`); for more this is the record itself.
        """
        return self.alone() if cores == 1 else self

    def with_numbers(self, **numbers: Number) -> Hardware:
        """Return a copy of this record with some numbers replaced, for a sibling chip or a what-if experiment.

        Raises:
            TypeError: A keyword is no field of the record.
        """
        return build(Hardware, {**self.provenance, **numbers})


Record = TypeVar("Record")


def build(record: Callable[..., Record], numbers: Mapping[str, Number]) -> Record:
    """Build a record from one Number for each of its fields; mappings become immutable.

    Args:
        record: The dataclass of the record, with a field `provenance`, which receives the numbers.
        numbers: The numbers by field, without `provenance`.

    Raises:
        TypeError: A field has no number, or a number has no field.
    """
    wanted = [field.name for field in fields(record) if field.name != "provenance"]  # type: ignore[arg-type]
    missing = [name for name in wanted if name not in numbers]
    surplus = [name for name in numbers if name not in wanted]
    if missing or surplus:
        raise TypeError(f"{getattr(record, '__name__', record)}: missing {missing}, surplus {surplus}")
    frozen = {name: _freeze(numbers[name]) for name in wanted}
    values = {name: number.value for name, number in frozen.items()}
    return record(**values, provenance=MappingProxyType(frozen))


@lru_cache(64)
def _build_alone(record: Hardware) -> Hardware:
    """Return the record with the HBM bandwidth of a core that works alone, or itself if that is no higher."""
    stack = record.provenance["hbm_gb_per_s_per_stack"]
    rate = min(stack.value, record.dma_engines * record.dma_engine_bytes_per_ns)
    if rate <= record.hbm_gb_per_s_per_core:
        return record
    return record.with_numbers(
        hbm_gb_per_s_per_core=derived(rate, stack.source, "one core on a stack of its own")
    )


def _freeze(number: Number) -> Number:
    """Return a number whose value, if it is a mapping, is an immutable copy."""
    if isinstance(number.value, Mapping):
        return replace(number, value=MappingProxyType(dict(number.value)))
    return number


def _unwrap(number: Number) -> tuple[Any, str, Confidence, str, str]:
    """Return the fields of a Number with a dict in place of its mapping proxy, which cannot be pickled."""
    value = dict(number.value) if isinstance(number.value, Mapping) else number.value
    return value, number.source, number.confidence, number.note, number.overlay


def _rebuild(record: Callable[..., Record], rows: list[tuple[Any, ...]]) -> Record:
    """Rebuild a pickled record from rows of a field's name and the fields of its Number."""
    return build(record, {name: Number(*columns) for name, *columns in rows})
