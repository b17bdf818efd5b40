"""Cases of matmul, of kernels that work on separate rows, of page copies, and of sums and transfers between ranks."""

from __future__ import annotations

from typing import Any

import nki.language as nl
import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels
from tests.kernels.accuracy import compare, compare_all, in_float64, normal, whole_numbers
from tools.mutants.cases.case import BF16, EPS, Case, Outputs, by_reference, two_cores


def products() -> list[Case]:
    """Return cases of matmul with each order of its operands, at sizes around its tiles and banks."""
    return [
        by_reference("matmul", "trn1", normal(1, 129, 20), normal(2, 129, 24), True),
        by_reference("matmul", "trn2", normal(1, 130, 200), normal(2, 200, 600)),
        by_reference(
            "matmul", "trn3", normal(1, 130, 200), normal(2, 200, 600), False, {"transposes": "tensor"}
        ),
        by_reference("matmul", "trn3", normal(1, 130, 200, dtype=BF16), normal(2, 200, 513, dtype=BF16)),
        by_reference("matmul", "trn1", normal(1, 520, 136), normal(2, 136, 20, dtype=BF16)),
        by_reference("matmul", "trn2", normal(1, 3, 700), normal(2, 700, 2050, dtype=BF16)),
        by_reference("matmul", "trn1", normal(1, 129, 1290), normal(2, 1290, 8)),
        by_reference(
            "matmul", "trn1", normal(1, 3, 520), normal(2, 520, 24), False, {"transposes": "tensor"}
        ),
        by_reference(
            "matmul", "trn1", normal(1, 100, 2560), normal(2, 2560, 24), False, {"transposes": "tensor"}
        ),
        by_reference("matmul", "trn2", normal(1, 3, 512), normal(2, 512, 2048)),
        by_reference("matmul", "trn3", normal(1, 2, 8), normal(2, 8, 2049)),
        by_reference("matmul", "trn1", normal(1, 512, 8), normal(2, 8, 8)),
        by_reference("matmul", "trn2", normal(1, 513, 8), normal(2, 8, 8)),
        two_cores(by_reference("matmul", "trn2", normal(1, 3, 40), normal(2, 40, 1300))),
        two_cores(by_reference("matmul", "trn2", normal(1, 130, 20), normal(2, 20, 8))),
        two_cores(by_reference("matmul", "trn3", normal(1, 20, 130), normal(2, 20, 8), True)),
        by_reference(
            "matmul", "trn2", normal(1, 520, 2048), normal(2, 2048, 8), False, {"resident_bytes": 32768}
        ),
    ]


def _divided_norm(target: str, tokens: int, width: int, ranks: int) -> Case:
    """Return a case of rmsnorm whose rows are divided over ranks; each part is on two neighbouring ranks."""
    x, weight = normal(4, tokens, ranks * width), normal(5, 1, ranks * width)
    plain = nki_kernels.rmsnorm_reference(x, weight, EPS)
    exact = nki_kernels.rmsnorm_reference(in_float64(x), in_float64(weight), EPS)
    group = ReplicaGroup([list(range(2 * ranks))])
    rank_inputs = np.repeat(np.split(np.arange(ranks * width), ranks), 2, axis=0)

    def judge(outputs: Outputs) -> None:
        for (output,), rank_input in zip(outputs, rank_inputs):
            compare(output, exact[:, rank_input], plain[:, rank_input])

    shards = tuple(
        (x[:, rank_input].copy(), weight[:, rank_input].copy(), EPS, None, 0.0, group, 2 * ranks * width)
        for rank_input in rank_inputs
    )
    return Case("rmsnorm", target, shards, judge)


def _divided_table(target: str, ranks: int, *options: Any) -> Case:
    """Return a case of embedding 129 tokens from a table whose rows are divided over ranks."""
    table, ids = normal(1, 100 * ranks, 12), np.random.default_rng(2).integers(0, 100 * ranks, (129, 1))
    arguments = (ids.astype(np.int32), table, nl.float32, *options)
    group = ReplicaGroup([list(range(ranks))])

    def judge(outputs: Outputs) -> None:
        for output in outputs:
            compare_all(output, nki_kernels.embedding_reference, arguments)

    shards = []
    for rank, rank_input in enumerate(np.split(table, ranks)):
        local_ids = ids - 100 * rank
        local_ids = np.where((local_ids < 0) | (local_ids > 100), 100, local_ids).astype(np.int32)
        shards.append((local_ids, rank_input.copy(), nl.float32, *options, group))
    return Case("embedding", target, tuple(shards), judge)


def rows() -> list[Case]:
    """Return cases of embedding, rope and rmsnorm with 128 rows, one more and two more, and with their options."""
    rng = np.random.default_rng(2)
    table, ids = normal(1, 300, 12), rng.integers(0, 300, (130, 1)).astype(np.int32)
    ids[[0, 129]] = [[299], [0]]
    positions = rng.integers(0, 60, (130, 1)).astype(np.int32)
    angles = np.arange(60)[:, None] / 10000 ** (np.arange(4) / 4)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = normal(3, 130, 3 * 8)
    around = [
        case
        for rows in (128, 129)
        for case in (
            by_reference("embedding", "trn2", ids[:rows], table),
            by_reference("rope", "trn2", turned[:rows], positions[:rows], *tables, 3),
            by_reference("rmsnorm", "trn2", normal(4, rows, 24), normal(5, 1, 24), EPS),
        )
    ]
    few, some = normal(6, 3, 172, dtype=BF16), normal(6, 17, 72, dtype=BF16)
    return [
        *around,
        by_reference("embedding", "trn2", ids, table),
        by_reference("embedding", "trn1", ids[:3], table.astype(BF16)),
        by_reference("embedding", "trn2", ids, table, nl.float32, 3.5),
        by_reference(
            "embedding", "trn1", ids, table.astype(BF16), nl.bfloat16, 0.5, positions, normal(6, 60, 12)
        ),
        _divided_table("trn2", 2, 1.0, None, None),
        _divided_table("trn1", 3, 0.5, positions[:129], normal(6, 60, 12)),
        by_reference("embedding", "trn2", ids, table, nl.float32, 3.5, None, None, None, normal(7, 130, 12)),
        by_reference("rope", "trn2", turned, positions, *tables, 3),
        by_reference("rope", "trn1", turned[:5].astype(BF16), positions[:5], *tables, 3),
        by_reference("rmsnorm", "trn2", normal(4, 130, 72), normal(5, 1, 72), EPS),
        by_reference("rmsnorm", "trn3", normal(4, 130, 72, scale=1e-3), normal(5, 1, 72), EPS),
        by_reference("rmsnorm", "trn1", normal(4, 5, 200, dtype=BF16), normal(5, 1, 200, dtype=BF16), EPS),
        by_reference("rmsnorm", "trn2", normal(4, 130, 72), normal(5, 1, 72), EPS, normal(6, 130, 72), 1.0),
        by_reference(
            "rmsnorm", "trn2", *(normal(s, n, 172, dtype=BF16) for s, n in ((4, 3), (5, 1))), EPS, few
        ),
        by_reference(
            "rmsnorm", "trn2", *(normal(s, n, 72, dtype=BF16) for s, n in ((4, 17), (5, 1))), EPS, some
        ),
        _divided_norm("trn2", 130, 24, 2),
        *_scaled_norms(),
    ]


def _scaled_norms() -> list[Case]:
    """Return rmsnorm of the sum of x and a scaled residual, with few rows and with many."""
    scale = np.array([[0.7]], np.float32)
    return [
        by_reference(
            *("rmsnorm", target, *(normal(seed, rows, width) for seed, rows in ((4, rows), (5, 1))), EPS),
            *(normal(6, rows, width), 0.0, None, None, scale),
        )
        for target, rows, width in (("trn2", 3, 172), ("trn1", 1, 20), ("trn3", 130, 72))
    ]


def _per_layer_input(target: str, rows: int, hidden: int, width: int, *options: object, dtype: type) -> Case:
    """Return the case of per_layer_input for the second of three layers."""
    gate = normal(2, hidden, width, dtype=BF16, scale=hidden**-0.5)
    x, inputs = normal(1, rows, hidden, dtype=dtype), normal(3, rows, 3 * width, dtype=dtype)
    arguments = (x, gate, inputs, normal(4, width, hidden, dtype=BF16), width)
    return by_reference("per_layer_input", target, *arguments, *options)


def gated_inputs() -> list[Case]:
    """Return cases of per_layer_input with one row, with several tiles of rows, and with several blocks and banks."""
    few = _per_layer_input("trn2", 1, 20, 10, "relu", dtype=np.float32)
    return [
        few,
        _per_layer_input("trn1", 130, 136, 10, dtype=BF16),
        _per_layer_input("trn3", 257, 1100, 136, dtype=np.float32),
        two_cores(_per_layer_input("trn2", 257, 136, 10, dtype=np.float32)),
        two_cores(few),
    ]


def page_copies() -> list[Case]:
    """Return cases of copy_pages: a page both written and read, copies in pieces or rows, and one or several arrays."""
    ends = np.int32([[3], [1], [0], [5]]), np.int32([[2], [3], [4], [1]])
    several = by_reference("copy_pages", "trn2", *(normal(seed, 7, 4, 2, 8) for seed in (1, 2)), *ends)
    return [
        several,
        by_reference(
            *("copy_pages", "trn1"),
            *(normal(seed, 7, 128, 1, 132, dtype=BF16) for seed in (1, 2)),
            *(output_end[:2] for output_end in ends),
        ),
        by_reference("copy_pages", "trn2", normal(1, 7, 129, 128), normal(2, 7, 6), *ends),
        two_cores(several),
        two_cores(by_reference("copy_pages", "trn2", normal(3, 7, 4, 24), None, *ends)),
    ]


def _reduced(target: str, group: ReplicaGroup) -> Case:
    """Return a case of all_reduce over the ranks of each group, of whole numbers."""
    ranks = sum(map(len, group.groups))
    rank_inputs = [whole_numbers(rank, 129, 17, largest=100_000) for rank in range(ranks)]
    sums = {
        rank: np.sum([rank_inputs[one] for one in ranks_of], axis=0)
        for ranks_of in group.groups
        for rank in ranks_of
    }

    def judge(outputs: Outputs) -> None:
        for rank, (output,) in enumerate(outputs):
            assert output.dtype == np.float32
            assert np.array_equal(output, sums[rank])

    return Case("all_reduce", target, tuple((rank_input, group) for rank_input in rank_inputs), judge)


def sums() -> list[Case]:
    """Return all_reduce over one group, and over two groups whose ranks are not in order."""
    groups = [[0, 1]], [[0, 3], [2, 1]]
    return [_reduced(target, ReplicaGroup(group)) for target, group in zip(("trn1", "trn2"), groups)]


def passed_on() -> list[Case]:
    """Return send_receive along a chain of ranks, and around a ring of ranks that are not in order."""
    chains = [(0, 1), (1, 2)], [(0, 2), (2, 1), (1, 0)]
    return [_passed(target, pairs) for target, pairs in zip(("trn1", "trn2"), chains)]


def _passed(target: str, pairs: list[tuple[int, int]]) -> Case:
    """Return a case of send_receive with these (source, target) pairs of ranks."""
    rank_inputs = [normal(rank, 129, 17) for rank in range(3)]
    source_of = {end: source for source, end in pairs}

    def judge(outputs: Outputs) -> None:
        for rank, (output,) in enumerate(outputs):
            assert np.array_equal(output, rank_inputs[source_of.get(rank, rank)])

    return Case("send_receive", target, tuple((rank_input, pairs) for rank_input in rank_inputs), judge)
