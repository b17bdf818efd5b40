"""Launches of faults, and the decorator that makes a kernel a row of a table of faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A kernel with the code of its fault, the arguments of every rank, and the right outputs of every rank.

    The launch is executed again in `orders` other orders of its instructions, and under `seeds` other schedules of its
    cores. A kernel that is `switched` takes `sick`; the others are healthy, and lint finds
    the fault in the source of another function.
    """

    code: str
    kernel: Callable[..., Any]
    inputs: Callable[[], Sequence[Arguments]]
    answer: Callable[[Sequence[Arguments]], Sequence[Any]]
    target: str = "trn2"
    cores: int = 1
    orders: int = 0
    seeds: int = 0
    switched: bool = True


def fault(
    code: str,
    *arguments: Any,
    answer: Callable[..., Any],
    ranks: Sequence[Arguments] | None = None,
    target: str = "trn2",
    cores: int = 1,
) -> Callable[[Callable[..., Any]], Program]:
    """Make a row: the kernel below takes `arguments` and `sick`, and its healthy output is `answer(*arguments)`.

    With `ranks`, the arguments of each, `answer` takes that list and returns the output of each.
    """
    rank_arguments = [arguments] if ranks is None else ranks
    answers = answer if ranks is not None else lambda rank_inputs: [answer(*rank_inputs[0])]
    return lambda kernel: Program(code, kernel, lambda: copy.deepcopy(rank_arguments), answers, target, cores)
