"""Cases of causal convolution, selective scan and state space duality, with fresh, padded and empty sequences."""

from __future__ import annotations

import numpy as np

from tests.kernels.recurrent import convolution, duality, selective
from tools.mutants.cases.case import BF16, Case, by_reference, two_cores


def recurrent() -> list[Case]:
    """Return cases of each kernel for prompts and for one token per sequence, at sizes around its tiles."""
    return [*_convolutions(), *_selective_scans(), *_dualities()]


def _convolutions() -> list[Case]:
    def case(target: str, *sizes: int, **options: object) -> Case:
        return by_reference("causal_conv1d", target, *convolution(*sizes, **options))

    return [
        case("trn2", 3, 5, 140),
        case("trn1", 4, 1, 140, first=3),
        case("trn3", 2, 130, 129, 2, dtype=BF16, first=2, bias=False, activation=None),
        case("trn2", 3, 1, 20, 2, bias=False, activation=None),
        case("trn2", 129, 1, 8, weights=BF16),
        case("trn2", 2, 3, 4100, dtype=BF16),
        case("trn2", 129, 2, 8),
        case("trn2", 2, 1, 4100),
        case("trn2", 33, 1, 1100),
        two_cores(case("trn2", 2, 5, 200)),
        two_cores(case("trn2", 3, 1, 200)),
    ]


def _selective_scans() -> list[Case]:
    def case(target: str, *sizes: int, **options: object) -> Case:
        return by_reference("selective_scan", target, *selective(*sizes, **options))

    return [
        case("trn2", 3, 5, 140, first=3),
        case("trn1", 4, 1, 140, first=3),
        case("trn3", 2, 130, 129, 3, 130, dtype=BF16),
        case("trn2", 1, 260, 8, 2),
        case("trn2", 1, 515, 8, 2, dtype=BF16, weights=np.float32),
        case("trn2", 2, 43, 600, 9, dtype=BF16),
        case("trn2", 129, 1, 8, 2, dtype=BF16),
        case("trn2", 128, 1, 70, 16),
        case("trn2", 1, 1, 2100, 2, 130, weights=BF16),
        case("trn2", 24, 1, 640, 8, dtype=BF16),
        case("trn3", 8, 1, 81, 64, 2, dtype=BF16),
        case("trn2", 2, 1, 1100, 2, 1024),
        case("trn2", 2, 1, 257, 64),
        two_cores(case("trn2", 2, 5, 200)),
        two_cores(case("trn2", 3, 1, 200)),
    ]


def _dualities() -> list[Case]:
    def case(target: str, *sizes: int, **options: object) -> Case:
        return by_reference("ssd", target, *duality(*sizes, **options))

    return [
        case("trn2", 3, 5, 6, groups=2, first=3),
        case("trn1", 4, 1, 6, groups=2, first=3),
        case("trn3", 2, 130, 9, 64, 12, 1, dtype=BF16, limits=(0.1, 0.2)),
        case("trn2", 1, 130, 6, 256, 4, dtype=BF16),
        case("trn2", 1, 260, 3, dtype=BF16),
        case("trn2", 3, 290, 6, dtype=BF16),
        case("trn2", 3, 1, 9, 128, 12, 3, dtype=BF16, limits=(0.1, 0.2)),
        case("trn2", 129, 1, 2),
        case("trn2", 8, 1, 43, 120, 2, dtype=BF16),
        case("trn3", 2, 1, 11, 256, 3),
        two_cores(case("trn2", 2, 5, 9, groups=3)),
        two_cores(case("trn2", 3, 1, 9, groups=3)),
    ]
