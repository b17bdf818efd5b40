"""HBM of the ranks that draw images: the weights of all components, and the activations of one pass beside them.

Components run one after the other, so the largest activations count. Constants, code and the runtime's buffers are not
counted, so what fills all memory of a rank will not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from model.device import chip
from model.errors import ModelError
from model.loading.component import LoadedComponent
from model.runners.image_mesh import create_mesh

_FEWER_BITS = "weights of fewer bits (--quantization of nkw plan, imagine and serve)"


@dataclass(frozen=True)
class RankMemory:
    """HBM of a rank, and the bytes of its part of the weights.

    ranks         ranks that share the weights; Ulysses ranks have the same ones of a denoiser
    lnc           physical cores of a rank
    weight_bytes  bytes of the first rank's weights, of all components
    hbm_bytes     bytes of HBM of a rank
    """

    target: str
    ranks: int
    lnc: int
    weight_bytes: int
    hbm_bytes: int

    @classmethod
    def measure(
        cls, components: Iterable[LoadedComponent], target: str, ranks: int = 1, lnc: int = 1
    ) -> RankMemory:
        """Return the memory of a rank of a chip with its weights as kernels of the chip read them."""
        arrays = [
            array
            for component in components
            for array in component.describe_shards(create_mesh(component.config, ranks), target)[
                0
            ].arrays.values()
        ]
        hbm_bytes = lnc * chip(target).hbm_bytes_per_core
        return cls(target, ranks, lnc, sum(array.nbytes for array in arrays), hbm_bytes)

    def fits(self, activation_bytes: int = 0) -> bool:
        """Return whether the weights and the activations of a pass fit into the rank's HBM."""
        return self.weight_bytes + activation_bytes <= self.hbm_bytes

    def check_weights(self) -> None:
        """Raise ModelError if the weights do not fit."""
        if not self.fits():
            raise ModelError(
                f"{self._describe_weights()}; {self._describe_limit()}: give more ranks (--tp), or {_FEWER_BITS}",
                "NKW-MODEL-MEMORY",
            )

    def check_pass(self, name: str, batch: int, activation_bytes: int) -> None:
        """Raise ModelError if the activations of a pass do not fit beside the weights.

        Args:
            name: Name of the component.
            batch: Images or texts of the pass.
            activation_bytes: Bytes of the pass on a rank.
        """
        if not self.fits(activation_bytes):
            raise ModelError(
                f"{self._describe_weights()}, and a pass of the {name.replace('_', ' ')} over a batch of {batch} takes "
                f"{activation_bytes:,}; {self._describe_limit()}: give fewer or smaller images, more ranks (--tp), or "
                f"{_FEWER_BITS}",
                "NKW-MODEL-MEMORY",
            )

    def _describe_weights(self) -> str:
        share = "the weights take" if self.ranks == 1 else f"the weights take on each of {self.ranks} ranks"
        return f"{share} {self.weight_bytes:,} bytes of HBM"

    def _describe_limit(self) -> str:
        return f"a rank of {self.target} (LNC {self.lnc}) has {self.hbm_bytes:,}"
