"""Parameters that are no tiles: numbers, enums, modes."""

from __future__ import annotations

import pytest

from nkw.errors import RuleViolation
from simulate.hardware import hardware
from simulate.isa import plan_for
from simulate.isa.enums import DgeMode, OobMode
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.nki import language as nl
from simulate.numerics import as_dtype


def tensor(shape: tuple[int, ...], dtype: str = "float32", region: MemoryRegion = nl.sbuf) -> NkiTensor:
    element = as_dtype(dtype)
    return NkiTensor(shape, element, Storage(shape, element, region, ""))


def refused(code: str, name: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(RuleViolation) as refusal:
        plan_for(name, hardware("trn2"), *args, **kwargs)
    assert refusal.value.code == code


@pytest.mark.parametrize("scale", ["x", None, 10**400, 1e39])
def test_refuses_a_scale_or_bias_that_is_no_float32(scale: object) -> None:
    data = tensor((8, 8))
    with pytest.raises(RuleViolation):
        plan_for("activation", hardware("trn2"), data, nl.exp, data, scale=scale)
    if scale is not None:
        with pytest.raises(RuleViolation):
            plan_for("activation", hardware("trn2"), data, nl.exp, data, bias=scale)
    plan_for("activation", hardware("trn2"), data, nl.exp, data, scale=3.4e38, bias=-1)


def test_refuses_unknown_modes_of_a_matmul() -> None:
    operands = (tensor((8, 4), region=nl.psum), tensor((8, 8)), tensor((8, 4)))
    refused("NKW-MATMUL-PERF-MODE", "nc_matmul", *operands, perf_mode="bogus")
    refused("NKW-MATMUL-ARRAY-TILE", "nc_matmul", *operands, tile_position=3)
    plan_for(
        "nc_matmul", hardware("trn2"), *operands, perf_mode="none", tile_position=(0, 0), tile_size=(32, 32)
    )


@pytest.mark.parametrize(
    ("parameter", "wrong", "right"),
    [
        ("engine", "sync", nl.isa.engine.unknown),
        ("dge_mode", 2, DgeMode.none),
        ("oob_mode", "skip", OobMode.skip),
    ],
)
def test_refuses_an_enum_given_as_something_else(parameter: str, wrong: object, right: object) -> None:
    operands = (tensor((8, 4)), tensor((8, 4), region=nl.hbm))
    refused("NKW-ENUM", "dma_copy", *operands, **{parameter: wrong})
    plan_for("dma_copy", hardware("trn2"), *operands, **{parameter: right})


def test_refuses_average_between_two_tiles() -> None:
    tile = tensor((8, 8))
    refused("NKW-ELEMENT-OPERATOR", "tensor_tensor", tile, tile, tile, nl.average)
    plan_for("tensor_tensor", hardware("trn2"), tile, tile, tile, nl.maximum)


@pytest.mark.parametrize(("columns", "fits"), [(8191, True), (8192, True), (8193, False)])
def test_a_bfloat16_result_may_fill_psum_on_gen4(columns: int, fits: bool) -> None:
    operands = (
        tensor((8, columns), "bfloat16", nl.psum),
        tensor((8, 8), "bfloat16"),
        tensor((8, columns), "bfloat16"),
    )
    if fits:
        plan_for("nc_matmul", hardware("trn3"), *operands)
    else:
        with pytest.raises(RuleViolation):
            plan_for("nc_matmul", hardware("trn3"), *operands)
