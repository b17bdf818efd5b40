"""Reports of `nkw imagine`: comparison with the numpy model, passes, and predicted times by component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.runners.denoise import Drawing
from model.runners.image_times import ComponentTime
from nkw.report import Hanging, Part, table


@dataclass(frozen=True)
class Difference:
    """Largest difference of images from those of the numpy model, in latents and in bytes, and bytes that differ."""

    latents: float
    bytes: int
    share: float

    @classmethod
    def measure(cls, drawing: Drawing, expected: Drawing) -> Difference:
        """Return the difference of two drawings of the same images."""
        latents = float(np.abs(drawing.latents - expected.latents).max())
        errors = np.abs(drawing.images.astype(int) - expected.images.astype(int))
        return cls(latents, int(errors.max()), float((errors > 0).mean()))

    def describe(self) -> str:
        """Return the difference as a sentence."""
        if self.bytes == 0:
            return f"equal to the numpy model in every byte; latents differ by at most {self.latents:.2g}"
        return (
            f"{self.share:.2%} of the bytes differ from the numpy model, by at most {self.bytes} of 255; latents "
            f"differ by at most {self.latents:.2g}"
        )


@dataclass(frozen=True)
class TargetTimes:
    """Predicted times of the components for one batch of images on one chip.

    `fits` says whether HBM holds the weights and the activations of every pass.
    """

    target: str
    images: int
    components: tuple[ComponentTime, ...]
    fits: bool

    @property
    def total_ns(self) -> float:
        """Time of the batch in ns."""
        return sum(component.total_ns for component in self.components)

    def build_document(self) -> dict[str, Any]:
        """Return the times as a JSON object; times are in ns."""
        return {
            "target": self.target,
            "fits": self.fits,
            "total_ns": self.total_ns,
            "images_per_second": self.images / self.total_ns * 1e9,
            "components": [component.build_document() for component in self.components],
        }


def summarise(
    drawing: Drawing, difference: Difference | None, times: Sequence[TargetTimes], ranks: int
) -> list[Part]:
    """Return the report of drawn images.

    Args:
        drawing: The images.
        difference: Their difference from the numpy model; None if they were not compared.
        times: Predicted times by chip.
        ranks: Tensor-parallel ranks.
    """
    lines: list[Part] = []
    if difference is not None:
        lines.append(Hanging(difference.describe()))
    passes = ", ".join(
        f"{name.replace('_', ' ')} {count} (batch of {batch})"
        for (name, batch), count in drawing.passes.items()
    )
    lines.append(Hanging(f"passes: {passes}"))
    if times:
        cores = "1 core" if ranks == 1 else f"{ranks} cores"
        lines += ["", f"predicted on {cores} (program order):", tabulate(times)]
    return lines


def tabulate(times: Sequence[TargetTimes]) -> Part:
    """Return a table with the time of each component on each chip, and the images a second."""
    names = [component.name.replace("_", " ") for component in times[0].components]
    columns = [
        (
            *(_describe(component) for component in target.components),
            f"{target.total_ns / 1e6:,.2f} ms",
            f"{target.images / target.total_ns * 1e9:,.2f}",
        )
        for target in times
    ]
    chips = (target.target if target.fits else f"{target.target}, HBM too small" for target in times)
    return table("|".join(("", *chips)), zip((*names, "together", "images/s"), *columns))


def _describe(component: ComponentTime) -> str:
    """Return "passes x time of a pass"."""
    return f"{component.passes} x {component.prediction.program_ns / 1e6:,.3f} ms"
