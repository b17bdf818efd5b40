"""Arguments of narrow dtypes: torch's, and packed ones as packages spell them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument
from nkw.targets import GENERATIONS
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.numerics import DTYPES

torch = pytest.importorskip("torch")

CHIPS = tuple(GENERATIONS.values())
SEEN: tuple[str, ...] = ("float8_e5m2", "float8_e8m0fnu", "bfloat16")


def copied(target: str, array: Any) -> tuple[Any, str, tuple[str, ...]]:
    """Return a copy that a kernel makes of an array, the dtype that the kernel saw, and the warnings."""
    seen = []

    def kernel(x):
        seen.append(str(x.dtype))
        tile = nl.load(x)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    done = simulate.World(target).launch(kernel, [((array,), {})])
    return done.outputs[0], seen[0], done.warnings


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("name", SEEN)
def test_a_narrow_dtype_of_torch_arrives_bit_by_bit(target: str, name: str) -> None:
    bits = torch.arange(4 * 64, dtype=torch.int32).to(torch.uint8).reshape(4, 64)
    array = bits.view(getattr(torch, name))
    result, seen, warnings = copied(target, array)
    assert seen == name and result.dtype == array.dtype and not warnings
    assert torch.equal(result.view(torch.uint8), bits)


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize(("largest", "beyond"), [(224.0, 0), (240.0, 0), (256.0, 1)])
def test_float8_e4m3fn_of_torch_is_converted_where_the_chip_multiplies_e4m3(
    target: str, largest: float, beyond: int
) -> None:
    array = torch.tensor([[0.0, -0.5, 2.0**-9, largest]]).to(torch.float8_e4m3fn)
    result, seen, warnings = copied(target, array)
    assert result.dtype == torch.float8_e4m3fn
    if hardware(target).matmul_e4m3fn:
        assert seen == "float8_e4m3fn" and torch.equal(result.float(), array.float()) and not warnings
        return
    assert seen == "float8_e4m3"
    assert torch.equal(result.float()[:, :3], array.float()[:, :3])
    assert bool(result.float()[0, 3].isnan()) == bool(beyond)  # infinity, which float8_e4m3fn does not have
    assert [text.partition(" of")[0] for text in warnings] == ["[NKW-ARGUMENT-FP8] 1"] * beyond


def test_a_converted_argument_is_multiplied_on_gen3() -> None:
    def kernel(a, b):
        sums = nl.ndarray((16, 16), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=nl.load(a), moving=nl.load(b))
        tile = nl.ndarray((16, 16), dtype=nl.float32)
        nisa.tensor_copy(dst=tile, src=sums)
        out = nl.ndarray((16, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    world, rng = simulate.World("trn2"), np.random.default_rng(1)
    for _ in range(3):  # the second and third may replay; each has values of its own
        a, b = (torch.from_numpy(rng.integers(-8, 9, (32, 16)).astype(np.float32)) for _ in range(2))
        narrow = tuple(array.to(torch.float8_e4m3fn) for array in (a, b))
        result = world.launch(kernel, [(narrow, {})], mode=simulate.Mode.replay).outputs[0]
        assert torch.equal(result, a.T @ b)


@pytest.mark.parametrize("mine", [True, False])
def test_writes_of_a_kernel_reach_a_converted_argument(mine: bool) -> None:
    def kernel(x):
        tile = nl.ndarray((1, 4), dtype=x.dtype)
        nisa.memset(dst=tile, value=2.0)
        nisa.dma_copy(dst=x[:, 0 : 4 if mine else 2], src=tile[:, 0 : 4 if mine else 2])
        return x

    array = torch.ones(1, 4).to(torch.float8_e4m3fn)
    simulate.World("trn2").launch(kernel, [((array,), {})])
    assert array.float().tolist() == [[2.0] * 4 if mine else [2.0, 2.0, 1.0, 1.0]]


class Spelled(np.ndarray):
    """Words whose dtype another package named."""

    spelling = ""

    @property
    def dtype(self) -> Any:
        return self.spelling or np.ndarray.view(self, np.ndarray).dtype


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("float8_e4m3fn_x4", "float8_e4m3fn_x4"),
        ("neuron_dtypes.float8_e4m3_x4", "float8_e4m3fn_x4"),
        ("mxfp8_e5m2x4", "float8_e5m2_x4"),
        ("MXFP4_E2M1FN_X4", "float4_e2m1fn_x4"),
    ],
)
def test_packed_words_go_by_their_name(spelling: str, name: str) -> None:
    words = np.arange(32, dtype=DTYPES[name].storage).reshape(4, 8)
    array = words.view(Spelled)
    array.spelling = spelling
    result, seen, _ = copied("trn3", array)
    assert seen == name and np.array_equal(np.asarray(result), words)


def test_four_fields_of_one_dtype_are_a_packed_word() -> None:
    fields = np.dtype([(f"value{n}", ml_dtypes.float8_e4m3fn) for n in range(4)])
    words = np.arange(32, dtype=np.uint32).reshape(4, 8)
    result, seen, _ = copied("trn3", words.view(fields))
    assert seen == "float8_e4m3fn_x4" and np.array_equal(result, words)


def test_fields_that_are_no_packed_word_are_refused() -> None:
    for fields in ([("a", ml_dtypes.float8_e4m3fn)] * 1, [("a", np.int8), ("b", np.int8)]):
        with pytest.raises(InvalidArgument, match="is no dtype of a NeuronCore"):
            copied("trn3", np.zeros((4, 8), np.dtype(fields)))


def test_pairs_of_torch_are_packed_words() -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4_e2m1fn_x2")
    bits = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    result, seen, _ = copied("trn3", bits.view(torch.float4_e2m1fn_x2))
    assert seen == "float4_e2m1fn_x4" and tuple(result.shape) == (4, 4)
    assert torch.equal(result.view(torch.uint8), bits)
    with pytest.raises(InvalidArgument, match=r"argument x: float4_e2m1fn_x2 of shape .* must be even"):
        copied("trn3", bits[:, :7].view(torch.float4_e2m1fn_x2))


def test_a_dtype_of_torch_that_no_chip_has_is_named() -> None:
    with pytest.raises(
        InvalidArgument, match=r"argument x: torch\.float8_e4m3fnuz is no dtype of a NeuronCore"
    ):
        copied("trn3", torch.zeros(4, 4).to(torch.float8_e4m3fnuz))
