"""Decode attention over ranks that divide the positions of a cache: the arguments of each, and what all return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

from tests.kernels.accuracy import as_tuple
from tests.kernels.case import Arguments, Ranks


@dataclass(frozen=True)
class OverPositions(Ranks):
    """Ranks of which each has every `count`-th position of the caches, and a share of each key/value head's queries.

    A page of a rank has the positions of one of the whole launch, so it is as many times shorter.

    Attributes:
        kv_heads: Key/value heads of the launch.
        paged: Whether caches are in pages.
        summed: Whether the first output is a sum over ranks, which all of them return.
    """

    axes: Any = field(default_factory=dict)
    alike: bool = False
    kv_heads: int = 2
    paged: bool = False
    summed: bool = False

    def shards(self, arguments: Arguments) -> list[tuple[Any, ...]]:
        """Return the arguments of every rank."""
        group = ReplicaGroup([list(range(self.count))])
        shards = [
            {**arguments, "position_group": group, "position_ranks": self.count} for _ in range(self.count)
        ]
        for rank, shard in enumerate(shards):
            shard["position_rank"] = np.int32([[rank]])
            for name, axis in zip(("k_cache", "v_cache"), self.position_axes()):
                shard[name] = np.moveaxis(
                    np.moveaxis(shard[name], axis, 0)[rank :: self.count], 0, axis
                ).copy()
            for name in {"q", "sinks"} & {name for name in shard if shard[name] is not None}:
                shard[name] = self.share(shard[name], rank)
            if shard.get("slots") is not None:
                shard["slots"] = shard["slots"] // self.count
            if self.summed:
                for name in ("w_qkv", "w_qkv_scales", "w_qkv_zeros"):
                    if shard.get(name) is not None:
                        q, keys_values = np.split(shard[name], [shard["q_size"]], axis=1)
                        shard[name] = np.concatenate([self.share(q, rank), keys_values], axis=1)
                shard["w_o"] = self.share(shard["w_o"].T, rank).T.copy()
                shard |= dict(q_size=shard["q_size"] // self.count, replica_group=group)
        return [tuple(shard.values()) for shard in shards]

    def share(self, columns: np.ndarray, rank: int) -> np.ndarray:
        """Return the columns of a rank's query heads."""
        heads = columns.reshape(len(columns), self.kv_heads, self.count, -1)
        return heads[:, :, rank].reshape(len(columns), -1).copy()

    def position_axes(self) -> tuple[int, int]:
        """Return the axes of positions of both caches."""
        return (1, 1) if self.paged else (3, 2)

    def join_outputs(self, outputs: Sequence[Any]) -> list[tuple[np.ndarray, ...]]:
        """Return the outputs of one rank that has all positions and heads."""
        first, *caches = zip(*map(as_tuple, outputs))
        joined = []
        for rank_caches, axis in zip(caches, self.position_axes()):
            shape = rank_caches[0].shape
            joined.append(np.stack(rank_caches, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :]))
        if self.summed:
            return [(y, *joined) for y in first]
        heads = [o.reshape(len(o), self.kv_heads, -1) for o in first]
        return [(np.concatenate(heads, axis=2).reshape(len(first[0]), -1), *joined)]


@dataclass(frozen=True)
class OverHeads(Ranks):
    """Ranks that have some key/value heads with their queries, whose products all ranks add up."""

    axes: Any = field(default_factory=lambda: dict(k_cache=1, v_cache=1, w_o=0))

    def shards(self, arguments: Arguments) -> list[tuple[Any, ...]]:
        """Return the arguments of every rank."""
        sizes = {name: arguments[name] // self.count for name in ("q_size", "kv_size", "num_kv_heads")}
        edges = [arguments["q_size"], arguments["q_size"] + arguments["kv_size"]]
        shards = [{**dict(zip(arguments, shard)), **sizes} for shard in super().shards(arguments)]
        for name in ("w_qkv", "w_qkv_scales", "w_qkv_zeros"):
            if arguments.get(name) is None:
                continue
            blocks_by_rank = [
                np.split(block, self.count, axis=1) for block in np.split(arguments[name], edges, axis=1)
            ]
            for shard, columns in zip(shards, zip(*blocks_by_rank)):
                shard[name] = np.concatenate(columns, axis=1)
        return [tuple(shard.values()) for shard in shards]

    def join_outputs(self, outputs: Sequence[Any]) -> list[tuple[np.ndarray, ...]]:
        """Return the rows of one rank, which all return, and the caches of all."""
        rows, *caches = zip(*outputs)
        assert all(np.array_equal(y, rows[0]) for y in rows)
        return [(rows[0], *(np.concatenate(rank_caches, axis=1) for rank_caches in caches))]
