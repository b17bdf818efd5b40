"""Links over which pages of the cache move from one replica to another, at their documented bandwidth.

`Deployment` asks for the slowest link if some replicas only compute prompts and others only decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from model.device import Hardware, Instance


@dataclass(frozen=True)
class Link:
    """Bandwidth that each rank of a replica has to its peer in another replica, in GB/s.

    `words` name the link in reports, and `source` is the document of its bandwidth.
    """

    gb_per_s: float
    words: str
    source: str

    def transfer_ns(self, rank_bytes: int) -> int:
        """Return the time in whole ns, at least 1, in which every rank sends `rank_bytes` bytes to its peer."""
        return max(1, ceil(rank_bytes / self.gb_per_s))


def find_slowest_link(instance: Instance, record: Hardware, lnc: int = 1) -> Link:
    """Return the slowest link between two replicas on an instance, with the bandwidth that one rank gets.

    Candidates are the link between the members of a group of instances, and NeuronLink between chips. An instance of a
    single chip has neither: pages are read from its HBM and written to it, at half of the HBM's bandwidth. The physical
    cores on a link share its bandwidth equally.

    Args:
        instance: The instance.
        record: Figures of the instance's chip.
        lnc: Number of physical cores of a rank.
    """
    links: list[Link] = []
    if instance.between_gb_per_s is not None:
        rate, cores = instance.between_gb_per_s, instance.physical_cores / instance.members
        links.append(
            Link(
                lnc * rate / cores,
                f"{rate:,.0f} GB/s between instances",
                instance.provenance["between_gb_per_s"].source,
            )
        )
    if instance.neuronlink_gb_per_s_per_chip is not None:
        rate, cores = instance.neuronlink_gb_per_s_per_chip, record.physical_cores_per_chip
        links.append(
            Link(
                lnc * rate / cores,
                f"NeuronLink, {rate:,.0f} GB/s of a chip",
                instance.provenance["neuronlink_gb_per_s_per_chip"].source,
            )
        )
    if not links:
        rate, cores = record.hbm_gb_per_s_per_chip, record.physical_cores_per_chip
        links.append(
            Link(
                lnc * rate / 2 / cores,
                f"HBM, {rate:,.0f} GB/s of a chip, read and written",
                record.provenance["hbm_gb_per_s_per_chip"].source,
            )
        )
    return min(links, key=lambda link: link.gb_per_s)
