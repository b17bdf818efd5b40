"""`nl.tile_size`: the limits of tiles on the chip that a kernel is specialised for."""

from __future__ import annotations

from simulate.errors import Unsupported
from simulate.hardware import Hardware
from simulate.memory import NKIObject
from simulate.run.machine import running_core
from simulate.run.target import target_hardware


class _TileSize(NKIObject):
    """Limits of the chip that the running kernel is specialised for (outside of a kernel: the target's)."""

    @property
    def _hardware(self) -> Hardware:
        core = running_core()
        return core.hardware if core is not None else target_hardware()

    @property
    def pmax(self) -> int:
        return self._hardware.partitions

    @property
    def psum_num_banks(self) -> int:
        """PSUM banks per partition; the lowering of dma_transpose that reserves one of them is not simulated."""
        return self._hardware.psum_banks

    @property
    def psum_bank_fmax(self) -> int:
        return self._hardware.psum_bank_bytes // 4

    @property
    def psum_fmax(self) -> int:
        return self.psum_bank_fmax

    @property
    def psum_bank_fmax_bytes(self) -> int:
        return self._hardware.psum_bank_bytes

    @property
    def gemm_stationary_fmax(self) -> int:
        return self._hardware.stationary_free_max

    @property
    def gemm_moving_fmax(self) -> int:
        return self._hardware.moving_free_max

    @property
    def bn_stats_fmax(self) -> int:
        return self._hardware.bn_stats_free_max

    @property
    def sbuf_fmax(self) -> int:
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_fmax_bytes(self) -> int:
        return self._hardware.sbuf_usable_bytes_per_partition

    @property
    def sbuf_size_bytes(self) -> int:
        """Usable bytes of all partitions together; whether the reserved ones count too is not documented."""
        return self.pmax * self.sbuf_fmax_bytes

    @property
    def total_available_sbuf_size(self) -> int:
        return self.sbuf_fmax_bytes

    @property
    def psum_min_align(self) -> int:
        raise _undocumented("psum_min_align")

    @property
    def sbuf_min_align(self) -> int:
        raise _undocumented("sbuf_min_align")


def _undocumented(name: str) -> Unsupported:
    return Unsupported("NKW-UNSUPPORTED", f"nl.tile_size.{name}: the reference names it without a value")


tile_size = _TileSize()
