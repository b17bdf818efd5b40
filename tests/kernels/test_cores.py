"""The number of physical cores that each kernel's file states as `cores`, against a launch on two of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels
import simulate
import tests.kernels
from nkw.errors import NkwError
from simulate.profile.traffic import sum_traffic
from tests.kernels.case import F32, KernelCase, KernelTests, Slow

MOST_LAUNCHES = 3
"""Launches of a kernel that are tried at most."""


def cases() -> dict[str, list[KernelCase]]:
    """Return the cases of every kernel by its name, those with launches on two cores first."""
    cases_by_kernel: dict[str, list[KernelCase]] = {name: [] for name in nki_kernels.__all__}
    for module in pkgutil.iter_modules(tests.kernels.__path__):
        if not module.name.startswith("test_"):
            continue
        for member in vars(importlib.import_module(f"tests.kernels.{module.name}")).values():
            if isinstance(member, type) and issubclass(member, KernelTests) and hasattr(member, "case"):
                cases_by_kernel.setdefault(member.case.kernel.__name__, []).append(member.case)
    for kernel_cases in cases_by_kernel.values():
        kernel_cases.sort(key=lambda case: not (case.two_cores or case.two_sums))
    return cases_by_kernel


CASES = cases()
KERNELS = [name for name in nki_kernels.__all__ if not name.endswith("_reference")]


PAIR = np.ones((2, 3), F32), ReplicaGroup([[0, 1]])
EVEN = np.ones((2, 4), F32), ReplicaGroup([[0, 1]]), 2
OF_RANKS = {
    "all_reduce": [PAIR, PAIR],
    "exchange_heads": [EVEN, EVEN],
    "send_receive": [(PAIR[0], [(0, 1)])] * 2,
}
"""Arguments of two ranks, of kernels that have no case."""


def launches(name: str) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Yield the arguments of all ranks of launches of a kernel: of its case, or of `OF_RANKS`."""
    if name in OF_RANKS:
        yield OF_RANKS[name]
    for case in CASES[name]:
        for row in [*case.two_cores, *case.two_sums, *case.values, *case.every_chip]:
            yield [tuple(case.arguments(row.row if isinstance(row, Slow) else row).values())]
        for row in case.ranks:
            row = row.row if isinstance(row, Slow) else row
            yield row.shards(case.arguments(row.settings))


def launch(kernel: Any, arguments: Sequence[tuple[Any, ...]], cores: int) -> simulate.Launch:
    return simulate.World("trn2", len(arguments), cores).launch(
        kernel, [(argument, {}) for argument in arguments], simulate.Mode.dry, trips=0
    )


def divides(kernel: Any, arguments: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether two cores both work, and no result is written by each of them."""
    try:
        streams = launch(kernel, arguments, 2).streams
    except (NkwError, AssertionError):
        return False
    repeated = any(
        tensor.writes > 1 and not tensor.argument and not tensor.reads for tensor in sum_traffic(streams)
    )
    return all(len(stream) for stream in streams) and not repeated


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_divides_its_work_among_the_cores_that_its_file_states(name: str) -> None:
    kernel, cores = getattr(nki_kernels, name), importlib.import_module(f"nki_kernels.{name}").cores
    assert cores in ((1,), (1, 2))
    divided = []
    for arguments in islice(launches(name), MOST_LAUNCHES):
        launch(kernel, arguments, 1)
        divided.append(divides(kernel, arguments))
    assert divided and any(divided) == (2 in cores)
