"""The links over which pages move between replicas, at their documented bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from model.device import Hardware, Instance, Number


@dataclass(frozen=True)
class Link:
    """What one rank has of the slowest link between two replicas; `words` name the link, `source` who documents it."""

    gb_per_s: float
    words: str
    source: str

    def time_ns(self, rank_bytes: int) -> int:
        """The time in which every rank of a replica sends so many bytes to its peer; at least 1 ns."""
        return max(1, ceil(rank_bytes / self.gb_per_s))


def link_between(instance: Instance, record: Hardware) -> Link:
    """The slowest link that two replicas on an instance may have between them, shared equally by all cores.

    Between the instances of several it is their link, between chips NeuronLink, and on a single chip its HBM, which
    reads and writes.
    """
    found: list[tuple[float, str, Number]] = []
    if instance.between_gb_per_s is not None:
        rate, cores = instance.between_gb_per_s, instance.physical_cores / instance.parts
        number = instance.provenance["between_gb_per_s"]
        found.append((rate / cores, f"{rate:,.0f} GB/s between instances", number))
    if instance.neuronlink_gb_per_s_per_chip is not None:
        rate, cores = instance.neuronlink_gb_per_s_per_chip, record.physical_cores_per_chip
        number = instance.provenance["neuronlink_gb_per_s_per_chip"]
        found.append((rate / cores, f"NeuronLink, {rate:,.0f} GB/s of a chip", number))
    if not found:
        rate, cores = record.hbm_gb_per_s_per_chip, record.physical_cores_per_chip
        number = record.provenance["hbm_gb_per_s_per_chip"]
        found.append((rate / 2 / cores, f"HBM, {rate:,.0f} GB/s of a chip, read and written", number))
    share, words, number = min(found, key=lambda each: each[0])
    return Link(share, words, number.source)
