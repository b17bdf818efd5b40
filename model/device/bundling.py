"""A rank that computes, and keeps the launches of one layer of the model as the cases of a bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.device.binding import checked, kernel_named
from model.device.simulated import SimulatedDevice
from simulate.bundle.cases import Cases, Written
from simulate.bundle.folder import check_free
from simulate.bundle.manifest import LAYER
from simulate.run import target_hardware
from simulate.run.launch import plain


class BundlingDevice(SimulatedDevice):
    """One simulated rank whose launches of layer `layer` become cases, named `<phase>-<number>-<kernel>`.

    `phase` is that of the step to come; numbers count its launches from 1. `layer_done` has to be told of every
    layer. Replays are exact, so that the arguments of a launch are the bytes that the launches before it returned.
    Raises ModelError for a launch that cannot travel, before it is made.
    """

    def __init__(self, target: str, layer: int) -> None:
        super().__init__(target, 1, exact=True)
        self.phase = ""
        self._layer, self._running = layer, -1
        self._chip = checked(lambda: target_hardware(target))
        self._cases = Cases()
        self._numbers: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        """How many were kept."""
        return len(self._cases.cases)

    def layer_done(self, done: int, layers: int) -> None:
        """So many layers are done: what follows is the layer of this number, counted from 0."""
        self._running = done

    def run(
        self, kernel: str, arguments: Sequence[tuple[Any, ...]], written: Sequence[int | None] = ()
    ) -> list[Any]:
        """Launch a kernel; keep it first, as it comes, where it belongs to the layer."""
        if self._running == self._layer:
            self._numbers[self.phase] += 1
            name = f"{self.phase}-{self._numbers[self.phase]}-{kernel}"
            function, (own,) = plain(kernel_named(kernel)), arguments
            words = f"nki_kernels:{kernel}"
            checked(lambda: self._cases.add_launch(function, words, own, name, self._chip))
        return super().run(kernel, arguments, written)

    def write(self, folder: Path) -> Written:
        """Write the bundle; ModelError where the folder cannot be written."""
        return checked(lambda: self._cases.write(folder, LAYER, self._chip.name))  # type: ignore[no-any-return]


def check_folder(folder: Path) -> None:
    """Raise ModelError where a bundle cannot be written: the folder has to be absent or empty."""
    checked(lambda: check_free(folder))
