"""`nl.tile_size`: the limits of tiles on the chip that a kernel is specialised for."""

from __future__ import annotations

from nkw.errors import Unsupported
from simulate.hardware import Hardware
from simulate.memory import NKIObject
from simulate.run.environment import target_hardware
from simulate.run.machine import running_core, running_level


class _TileSize(NKIObject):
    """Limits of the chip for which the running kernel is specialised; outside a kernel, those of the target chip."""

    @property
    def _hardware(self) -> Hardware:
        core = running_core()
        return core.hardware if core is not None else target_hardware()

    pmax = property(lambda self: self._hardware.partitions)
    psum_num_banks = property(lambda self: self._hardware.psum_banks)
    """PSUM banks per partition; the lowering of dma_transpose that reserves one of them is not simulated."""
    psum_bank_fmax = property(lambda self: self._hardware.psum_bank_bytes // 4)
    psum_bank_fmax_bytes = property(lambda self: self._hardware.psum_bank_bytes)
    gemm_stationary_fmax = property(lambda self: self._hardware.stationary_free_max)
    gemm_moving_fmax = property(lambda self: self._hardware.moving_free_max)
    bn_stats_fmax = property(lambda self: self._hardware.bn_stats_free_max)
    sbuf_fmax_bytes = property(lambda self: self._hardware.sbuf_usable_bytes_per_partition)
    sbuf_fmax = property(lambda self: self.sbuf_fmax_bytes // 4)
    sbuf_size_bytes = property(lambda self: self.pmax * self.sbuf_fmax_bytes)
    """Usable bytes of all partitions together; whether the reserved ones count too is not documented."""

    @property
    def psum_fmax(self) -> int:
        """Float32 elements of a PSUM bank per partition, as psum_bank_fmax; deprecated since 0.4."""
        running_level().notice("nl.tile_size.psum_fmax")
        return self._hardware.psum_bank_bytes // 4

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable bytes of SBUF per partition, as sbuf_fmax_bytes; deprecated since 0.4."""
        running_level().notice("nl.tile_size.total_available_sbuf_size")
        return self._hardware.sbuf_usable_bytes_per_partition

    @property
    def psum_min_align(self) -> int:
        raise _undocumented("psum_min_align")

    @property
    def sbuf_min_align(self) -> int:
        raise _undocumented("sbuf_min_align")


def _undocumented(name: str) -> Unsupported:
    return Unsupported("NKW-UNSUPPORTED", f"nl.tile_size.{name}: the reference names it without a value")


tile_size = _TileSize()
