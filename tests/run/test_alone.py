"""A core that works alone takes of its stack of HBM what its DMA engines can move; two cores or ranks share it."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from nkw.targets import TARGETS
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import Launch, Mode
from simulate.timing import schedule
from simulate.world import launch


def _copied(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x)
    return out


def _launched(target: str, ranks: int, cores: int, mode: Mode = Mode.dry) -> Launch:
    x = np.zeros((1024, 16384), np.uint8)
    return launch(_copied, [((x,), {})] * ranks, hardware(target), cores, mode)


@pytest.mark.parametrize(
    ("target", "both", "alone"), [("trn1", 410, 410), ("trn2", 358, 16 * 27.2), ("trn3", 612.5, 16 * 38.4)]
)
def test_one_core_alone_has_a_stack_to_itself(target: str, both: float, alone: float) -> None:
    assert _launched(target, 1, 1).hardware.hbm_gb_per_s_per_core == alone
    assert _launched(target, 2, 1).hardware.hbm_gb_per_s_per_core == both


def test_two_cores_of_one_rank_share_a_stack() -> None:
    assert _launched("trn2", 1, 2).hardware == hardware("trn2")
    assert _launched("trn2", 2, 2).hardware == hardware("trn2")


def test_a_copy_within_hbm_takes_what_its_bytes_take_of_the_stack() -> None:
    moved = 2 * 1024 * 16384
    for ranks, gb_per_s in ((1, 16 * 27.2), (2, 358.0)):
        done = _launched("trn2", ranks, 1)
        (dma,) = (event.cost.dma for event in done.streams[0] if event.cost.dma)
        on_engines = moved / 2 / (16 * 27.2)
        assert dma.busy_ns >= max(on_engines, moved / gb_per_s)
        assert schedule(done.streams, done.hardware).length_ns > moved / gb_per_s
    one, two = (
        schedule(done.streams, done.hardware).length_ns for done in (_launched("trn2", n, 1) for n in (1, 2))
    )
    assert one < two


@pytest.mark.parametrize("target", TARGETS)
def test_the_record_of_a_core_alone_differs_in_one_number(target: str) -> None:
    chip = hardware(target)
    alone = chip.alone()
    differing = {name for name, number in alone.provenance.items() if number != chip.provenance[name]}
    most = min(chip.hbm_gb_per_s_per_stack, chip.dma_engines * chip.dma_engine_bytes_per_ns)
    shares = most > chip.hbm_gb_per_s_per_core
    assert differing == ({"hbm_gb_per_s_per_core"} if shares else set())
    assert (alone == chip) is not shares
    assert alone.hbm_gb_per_s_per_core == max(most, chip.hbm_gb_per_s_per_core)
    assert alone.alone() is alone and alone.name == chip.name
    assert pickle.loads(pickle.dumps(alone)) == alone == copy.deepcopy(alone)
