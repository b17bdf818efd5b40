"""Whatever is passed to an instruction or a collective, it is planned or refused with a typed error."""

from __future__ import annotations

import inspect
import random

import numpy as np
import pytest

from nkw.errors import NkwError
from simulate.hardware import hardware
from simulate.isa import COLLECTIVES, INSTRUCTIONS
from simulate.isa.book import Planner, plan
from simulate.nki import collectives as ncc
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.tiles import HBM, PSUM, TARGETS, tile

_ATTEMPTS = 150
_VALUES = [
    *(None, 3, -1, True, 2**70, 1.5, float("nan"), np.float32(2), "x", (1, 0), [1, 2], [[0, 1]]),
    *(nl.add, nl.relu, nl.bypass, nisa.reduce_cmd.reduce, nisa.engine.gpsimd, nisa.dma_engine.dma),
    *(tile((8, 6)), tile((8, 1)), tile((1, 6)), tile((32, 6), "bfloat16"), tile((16, 6), "uint32")),
    *(tile((8, 6), buffer=PSUM), tile((8, 6), "float32", HBM), tile((8, 6), "float8_e4m3fn_x4")),
    *([tile((8, 6))], [tile((8, 6), "float32", HBM)], [[tile((8, 6))]], ncc.ReplicaGroup([[0, 1]])),
]


def attempt(planner: Planner, hidden: tuple[object, ...], chosen: random.Random) -> None:
    arguments = {}
    for parameter in list(inspect.signature(planner).parameters.values())[len(hidden) :]:
        needed = parameter.default is inspect.Parameter.empty
        if parameter.name != "name" and (needed or chosen.random() < 0.3):
            arguments[parameter.name] = chosen.choice(_VALUES)
    refusal = None
    try:
        plan(planner, hidden, (), arguments)
    except NkwError as error:
        refusal = error
    assert refusal is None or (refusal.code.startswith("NKW-") and refusal.message)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions_refuse_with_a_typed_error(name: str, target: str) -> None:
    chosen = random.Random(name + target)
    for _ in range(_ATTEMPTS):
        attempt(INSTRUCTIONS[name], (hardware(target),), chosen)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_refuse_with_a_typed_error(name: str) -> None:
    chosen = random.Random(name)
    for _ in range(3 * _ATTEMPTS):
        attempt(COLLECTIVES[name], (hardware("trn3"), 0), chosen)
