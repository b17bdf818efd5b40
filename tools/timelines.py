"""Writes tests/timing/stored: the timeline of every shipped kernel at a small shape on every generation, as text.

Predicted times are exact, so a change of a kernel, a cost or the scheduling shows as a difference of these files. The
reading is `program`. Times are in microseconds; a DMA has a line for its trigger and one for its data phase.

    python -m tools.timelines [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import nki_kernels
import simulate
from nki_kernels import ladder
from simulate.targets import GENERATIONS
from simulate.terminal import progress
from simulate.timing import listing, schedule

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "timing" / "stored"
TARGETS = tuple(GENERATIONS.values())
"""One chip of each generation."""


@dataclass(frozen=True)
class Case:
    """A kernel and its arguments, the same on each of `ranks` ranks; of arrays only shape and dtype matter."""

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    ranks: int = 1

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__


def cases() -> tuple[Case, ...]:
    """Every kernel of the package and the first rung of the ladder, each at a shape of few instructions."""
    from nki.collectives import ReplicaGroup

    x, norm = _wide(4, 256), _wide(1, 256)
    q, k, v = _wide(130, 128), _wide(130, 64), _wide(130, 64)
    caches = _wide(1, 1, 64, 256), _wide(1, 1, 256, 64)
    pages = _wide(32, 16, 1, 64), _wide(32, 16, 1, 64)
    angles, places = _wide(256, 32), np.zeros((130, 1), np.int32)
    one, pair = np.zeros((1, 1), np.int32), ReplicaGroup([[0, 1]])
    image = _narrow(1, 16, 9, 10)
    latent = (
        *(_narrow(1, 24), _narrow(1, 128, 24), one, _wide(1, 16), 1e-5),
        *(_wide(128, 4), _wide(128, 4), _narrow(16, 16), _narrow(16, 16)),
    )
    return (
        Case(nki_kernels.matmul, (_wide(130, 256), _narrow(256, 640))),
        Case(nki_kernels.embedding, (places, _narrow(1024, 256))),
        Case(nki_kernels.rmsnorm, (_wide(130, 256), norm, 1e-5)),
        Case(nki_kernels.qkv_projection, (x, norm, _narrow(256, 640), 1e-5, 512, 64)),
        Case(nki_kernels.rope, (q, places, angles, angles, 2)),
        Case(nki_kernels.attention_prefill, (q, k, v, *caches, 0.125)),
        Case(nki_kernels.attention_decode, (q[:1], k[:1], v[:1], *caches, one, 0.125)),
        Case(
            nki_kernels.attention_mixed,
            (
                *(q[:9], k[:9], v[:9], *pages, places[:9], 0.125, 1, 1, places[:9]),
                *(np.zeros((1, count), np.int32) for count in (8, 1)),
            ),
        ),
        Case(nki_kernels.latent_attention_decode, (_narrow(1, 32), *latent[:3], 0.25, *latent[3:])),
        Case(nki_kernels.latent_keys_values, (*latent, 2)),
        Case(
            nki_kernels.attention_block_decode,
            (
                x[:1],
                norm,
                _narrow(256, 256),
                1e-5,
                128,
                64,
                *caches,
                one,
                0.125,
                _narrow(128, 256),
                1,
                angles,
                angles,
            ),
        ),
        Case(
            nki_kernels.decoder_layer_decode,
            (
                *(_wide(1, 128), _wide(1, 128), _narrow(128, 192), 1e-5, 64, 64, *caches, one, 0.125),
                *(_narrow(64, 128), _wide(1, 128), *(_narrow(128, 128) for _ in range(3))),
            ),
        ),
        Case(nki_kernels.output_projection, (_wide(4, 256), _narrow(256, 640), _wide(4, 640))),
        Case(nki_kernels.mlp, (x, norm, _narrow(256, 640), _narrow(256, 640), _narrow(640, 256), 1e-5)),
        Case(nki_kernels.per_layer_input, (x, _narrow(256, 64), _wide(4, 192), _narrow(64, 256), 64)),
        Case(nki_kernels.copy_pages, (_narrow(9, 4, 2, 8), _narrow(9, 4, 2, 8), one, one)),
        Case(nki_kernels.router, (x, norm, _narrow(256, 16), 1e-5, 2)),
        Case(nki_kernels.experts_decode, (x[:1], x[:1], *_choice(), *_experts())),
        Case(nki_kernels.experts_prefill, (x[:1], x[:1], *_choice(), *_experts())),
        Case(nki_kernels.experts_dispatch, (x[:1], *_choice(), one, 2, pair, 2), ranks=2),
        Case(nki_kernels.experts_combine, (_wide(2, 256), _wide(1, 256), pair, 2), ranks=2),
        Case(nki_kernels.gated_delta, _delta(4)),
        Case(nki_kernels.gated_delta_step, _delta(1)),
        Case(
            nki_kernels.causal_conv1d,
            (_narrow(4, 256), _narrow(4, 256), _narrow(1, 256), _narrow(2, 3, 256), one, one, one),
        ),
        Case(
            nki_kernels.selective_scan,
            (
                *(_narrow(4, 256), _narrow(4, 12), _narrow(8, 256), _narrow(1, 256), _narrow(256, 2)),
                *(_narrow(1, 256), _narrow(4, 256), _wide(2, 256, 2), one, one, one),
            ),
        ),
        Case(
            nki_kernels.ssd,
            (
                *(_narrow(4, 160), _narrow(4, 2), _narrow(1, 2), _narrow(1, 2), _narrow(1, 2)),
                *(_narrow(4, 128), _wide(2, 16, 128), one, one, one),
            ),
        ),
        Case(nki_kernels.conv1d, (_narrow(1, 16, 20), _narrow(3, 16, 32), _wide(1, 32), 2, 1, "gelu")),
        Case(nki_kernels.conv2d, (image, _narrow(3, 3, 16, 32), _wide(1, 32), (2, 2), (1, 1), "relu")),
        Case(nki_kernels.max_pool, (image, (3, 3), (2, 2), (1, 1))),
        Case(nki_kernels.average_pool, (image, (2, 2))),
        Case(nki_kernels.lm_head, (x, norm, _narrow(256, 640), 1e-5, 8, one)),
        Case(nki_kernels.sample, (_wide(4, 64), *(_wide(4, 1) for _ in range(5)), 8)),
        Case(nki_kernels.all_reduce, (_wide(128, 512), pair), ranks=2),
        Case(nki_kernels.send_receive, (_wide(128, 512), [(0, 1)]), ranks=2),
        Case(ladder.tile_by_tile, (_narrow(256, 256), _narrow(256, 512))),
    )


def _delta(tokens: int) -> tuple[Any, ...]:
    """Tokens of one sequence with one key head and one value head of 16."""
    row, number = _narrow(1, 1), np.zeros((1, 1), np.int32)
    given = _narrow(tokens, 48), _narrow(tokens, 18), row, row, _narrow(1, 16), _wide(2, 1, 16, 16)
    return *given, number, number, number, 1, 1e-6


def _choice() -> tuple[np.ndarray, np.ndarray]:
    """Weight and number of one expert for one token."""
    return _wide(1, 1), np.zeros((1, 1), np.int32)


def _experts() -> tuple[np.ndarray, ...]:
    """The weights of two small experts."""
    return _narrow(2, 256, 128), _narrow(2, 256, 128), _narrow(2, 128, 256)


def _wide(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def _narrow(*shape: int) -> np.ndarray:
    return np.zeros(shape, ml_dtypes.bfloat16)


def timeline(case: Case, target: str) -> str:
    """The timeline of one kernel on one chip, from a launch that computes no numbers."""
    world = simulate.World(target, case.ranks)
    launch = world.launch(case.kernel, [(case.arguments, {})] * case.ranks, mode=simulate.Mode.dry)
    return listing(launch.streams, schedule(launch.streams, launch.hardware))


def timelines() -> dict[str, str]:
    """The timelines of all cases on all chips, computed anew, by the name of their file."""
    every = [(case, target) for case in cases() for target in TARGETS]
    return {
        f"{case.name}-{target}.txt": timeline(case, target) for case, target in progress(every, "timelines")
    }


def write(folder: Path = FOLDER) -> None:
    """Write all timelines into a folder, and remove those of kernels and chips that are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = timelines()
    for stale in {path.name for path in folder.glob("*.txt")} - set(fresh):
        (folder / stale).unlink()
    for name, text in fresh.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
