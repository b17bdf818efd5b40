"""Share of held-out captions whose images are right, by the numpy model and by kernels.

    python -m tools.shapes.evaluate [FOLDER] --steps 50 20 8 4 --kernels 10

Every caption of `list_held_out_captions` becomes one image, whose seed is the number of the caption. A checker that
knows nothing of the model compares the image with the caption.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from model.loading.shipped import SHAPES
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.denoise import Drawing, ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from model.runners.pipelines.pipeline import Backend
from tools.shapes.captions import Caption, list_held_out_captions
from tools.shapes.checker import Verdict, check_picture

_BATCH = 20
_ATTRIBUTES = ("count", "colour", "shape", "size", "relation")


def draw_captions(
    folder: Path, captions: Sequence[Caption], sampling: Sampling, backend: Backend
) -> list[Drawing]:
    """Return the drawings of captions, one for each batch of up to 20 images."""
    runner = ImageRunner(open_pipeline(folder), backend)
    requests = [ImageRequest(caption.text, seed) for seed, caption in enumerate(captions)]
    return [
        runner.draw(requests[first : first + _BATCH], sampling) for first in range(0, len(requests), _BATCH)
    ]


def judge(captions: Sequence[Caption], drawings: Sequence[Drawing]) -> list[Verdict]:
    """Return the checker's verdict on the image of each caption."""
    images = np.concatenate([drawing.images for drawing in drawings])
    return [check_picture(image, caption) for caption, image in zip(captions, images, strict=True)]


def describe(captions: Sequence[Caption], verdicts: Sequence[Verdict]) -> str:
    """Return the shares of right images with one and with two figures, and of right attributes of the latter."""
    cells = []
    for figures in (1, 2):
        chosen = [verdict for caption, verdict in zip(captions, verdicts) if len(caption.figures) == figures]
        right = sum(verdict.is_right for verdict in chosen)
        cells.append(f"{right} of {len(chosen)} ({right / len(chosen):.1%})")
    for attribute in _ATTRIBUTES:
        right = sum(getattr(verdict, attribute) is True for verdict in chosen)
        cells.append(f"{right / len(chosen):.1%}")
    return " | ".join(cells)


def main() -> None:
    """Print a row of a table for each number of steps, and whether kernels draw the same bytes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", nargs="?", type=Path, default=SHAPES)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 20, 8, 4])
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument(
        "--kernels", type=int, default=0, help="captions that kernels draw too, with 20 steps"
    )
    options = parser.parse_args()
    captions = list_held_out_captions()
    print("| steps | one figure | two figures | " + " | ".join(_ATTRIBUTES) + " |")
    print("|---|---|---|---|---|---|---|---|")
    for steps in options.steps:
        drawings = draw_captions(
            options.folder, captions, Sampling(steps, options.guidance), ReferenceBackend()
        )
        print(f"| {steps} | {describe(captions, judge(captions, drawings))} |", flush=True)
    if options.kernels:
        from model.device import SimulatedDevice

        chosen, sampling = captions[:: len(captions) // options.kernels], Sampling(20, options.guidance)
        computed, expected = (
            np.concatenate(
                [drawing.images for drawing in draw_captions(options.folder, chosen, sampling, backend)]
            )
            for backend in (KernelBackend(SimulatedDevice("trn2", 1)), ReferenceBackend())
        )
        errors = np.abs(computed.astype(int) - expected)
        print(
            f"{len(chosen)} images by kernels: {np.count_nonzero(errors)} of {errors.size} bytes differ from the numpy "
            f"model, by at most {errors.max()}"
        )


if __name__ == "__main__":
    main()
