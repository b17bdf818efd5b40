"""What else public code reaches for besides instructions: modules, entry points, parameter objects, schedules."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest

from nkw.errors import InvalidArgument, RuleViolation, Unsupported
from simulate import nki
from simulate.memory import MemoryRegion, NkiTensor
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import recorded


def _ones(rows: int, columns: int) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


@nki.jit
def doubled(x, factor=2.0):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor, name="scale")
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=float(nl.num_programs()), name="shift")
    if nl.program_id(0) == 0:
        nl.store(out, tile)
    return out


# -- entry points -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        lambda cores, x: nki.cpu_simulate(doubled)[cores](x=x, factor=3.0),
        lambda cores, x: nki.simulate(doubled)[cores](x, factor=3.0),
        lambda cores, x: nki.simulate(doubled[cores])(x, 3.0),
        lambda cores, x: nki.simulator.simulate_kernel(doubled, (x,), {"factor": 3.0}, cores),
        lambda cores, x: nki.simulator.simulate_kernel(
            doubled.func, args=[x], kwargs={"factor": 3.0}, lnc=cores
        ),
        lambda cores, x: nki.jit()(doubled.func)[cores](x, 3.0),
        lambda cores, x: nki.jit(mode="auto")(doubled)[(cores,)](x, 3.0),
    ],
)
def test_every_entry_runs_the_kernel_on_the_cores_asked_for(call, cores: int) -> None:
    x = _ones(8, 4)
    np.testing.assert_array_equal(call(cores, x), x * 3 + cores)


@pytest.mark.parametrize("cores", [0, 3, True, (1, 2), "2"])
def test_other_grids_are_refused(cores) -> None:
    with pytest.raises(InvalidArgument, match="NKW-LNC"):
        nki.simulator.simulate_kernel(doubled, (_ones(8, 4),), {}, cores)


# -- modules ------------------------------------------------------------------------------------------------


def test_the_constants_are_the_enums_of_the_instructions() -> None:
    for name in (
        "dge_mode",
        "dma_engine",
        "engine",
        "matmul_perf_mode",
        "nc_version",
        "oob_mode",
        "reduce_cmd",
    ):
        assert getattr(nisa.constants, name) is getattr(nisa, name)


def test_dtypes_have_a_module_and_short_names() -> None:
    assert nki.dtype.float8_e4m3 is nl.float8_e4m3 and nl.bool is nl.bool_
    assert list(nl.range(2, 5)) == [2, 3, 4]
    assert nki.experimental.while_loop is nl.while_loop
    assert nki.tensor is nki.typing.tensor and nki.meta.tensor is nki.tensor


def test_tile_sizes_follow_the_chip(monkeypatch) -> None:
    sizes = {}
    for target in ("trn1", "trn2", "trn3"):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        sizes[target] = nl.tile_size.sbuf_fmax_bytes
        assert nl.tile_size.sbuf_fmax == sizes[target] // 4
        assert nl.tile_size.sbuf_size_bytes == 128 * sizes[target]
        assert nl.tile_size.psum_num_banks == 8
    assert sizes == {"trn1": 180224, "trn2": 212984, "trn3": 245752}


@pytest.mark.parametrize("name", ["psum_min_align", "sbuf_min_align"])
def test_sizes_without_a_documented_value_say_so(name: str) -> None:
    with pytest.raises(Unsupported, match=f"nl.tile_size.{name}: the reference names it without a value"):
        getattr(nl.tile_size, name)


# -- parameter objects --------------------------------------------------------------------------------------


class Plain(nl.NKIObject):
    rows: int
    scale: float = 2.0
    weights: object = None


class Wider(Plain):
    extra: int = 7

    def __post_init__(self):
        self.total = self.rows + self.extra


@dataclass(frozen=True)
class Frozen(nl.NKIObject):
    rows: int
    scale: float = 2.0
    weights: object = None


class Kind(Enum):
    add = 1
    multiply = 2


def test_a_class_without_an_initialiser_gets_one_from_its_fields() -> None:
    assert vars(Plain(3)) == {"rows": 3, "scale": 2.0, "weights": None}
    assert vars(Plain(scale=4.0)) == {"rows": None, "scale": 4.0, "weights": None}
    assert Wider(1).total == 8 and Wider(1, extra=2).total == 3
    with pytest.raises(
        InvalidArgument,
        match=r"NKW-OBJECT.*Plain has the fields .*, and 4 values were given; pass at most one",
    ):
        Plain(1, 2.0, None, 4)


def _apply(dst, data, config):
    nisa.tensor_scalar(dst=dst, data=data, op0=nl.multiply, operand0=config.scale)


@nki.jit
def configured(config, pair, table, operation, step):
    left, right = pair
    out = nl.ndarray(left.shape, left.dtype, buffer=nl.shared_hbm)
    sums = nl.ndarray((left.shape[0], 1), nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(left)
    step(tile, tile, config)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(right), op=nl.add)
    if operation == Kind.multiply:
        nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(config.weights), op=nl.multiply)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=nl.load(table["bias"]), op=nl.add)
    nl.store(out, tile)
    total = nl.ndarray((left.shape[0], 1), nl.float32)
    nisa.tensor_reduce(dst=total, data=tile, op=nl.add, axis=1)
    nl.store(sums, total)
    return out, {"sums": sums}


@pytest.mark.parametrize("config_type", [Plain, Wider, Frozen])
@pytest.mark.parametrize("way", list(Kind))
def test_objects_tuples_dicts_enums_and_functions_reach_the_kernel(config_type, way) -> None:
    x, weights = _ones(4, 6), _ones(4, 6) + 1
    config = config_type(4, 3.0, weights)
    out, named_outputs = configured(config, (x, x), {"bias": weights}, operation=way, step=_apply)
    expected = (4 * x) * (weights if way is Kind.multiply else 1) + weights
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(named_outputs["sums"], expected.sum(1, keepdims=True))
    assert config.weights is weights  # the caller's object is not changed


@nki.jit
def in_place(x, y):
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    nl.store(y, tile)
    return x, y


def test_one_array_given_twice_is_one_tensor() -> None:
    x = _ones(4, 4)
    before = x.copy()
    first, second = in_place(x, x)
    assert first is x and second is x
    np.testing.assert_array_equal(x, before + 1)


def test_a_list_without_arrays_is_the_callers_own() -> None:
    seen = []

    @nki.jit
    def noting(x, notes):
        notes.append(x.shape)
        return x

    noting(_ones(2, 2), seen)
    assert seen == [(2, 2)]


# -- ordering requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [[("shift", "scale")], [("shift", ["scale"])]])
def test_a_schedule_orders_named_instructions(edges) -> None:
    with recorded() as launches:
        doubled.with_schedule(edges)(_ones(4, 4))
        doubled(_ones(4, 4))
    ordered, plain = (launch.streams[0] for launch in launches)
    names = {name: index for index, name in ordered.names.items()}
    assert ordered.requested == [(names["scale"], names["shift"])]
    assert plain.requested == []


def test_a_schedule_keeps_the_grid_and_the_values() -> None:
    x = _ones(4, 4)
    scheduled = doubled[2].with_schedule([("shift", "scale")])
    np.testing.assert_array_equal(scheduled(x), x * 2 + 2)
    np.testing.assert_array_equal(nki.simulate(doubled.with_schedule([]))[2](x), x * 2 + 2)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (
            [("shift", "scales")],
            "names 'scales', which no instruction of core 0 has; its names are scale, shift",
        ),
        ([("shift",)], "give pairs of names"),
        ([("shift", 3)], "give pairs of names"),
        (["shift"], "give pairs of names"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(edges, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        doubled.with_schedule(edges)(_ones(4, 4))


@nki.jit
def hinted(x):
    tile = nl.load(x)
    first = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    second = nisa.memset(dst=nl.ndarray((2, 2), nl.float32), value=0)
    assert second.depends_on(first) is second
    with nl.no_reorder():
        for _ in nl.static_range(2):
            nisa.memset(dst=nl.ndarray((2, 2), nl.float32), value=0)
    nl.device_print("tile", tile)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


def test_depends_on_no_reorder_and_device_print(capsys) -> None:
    with recorded() as launches:
        hinted(_ones(2, 2))
    assert launches[0].streams[0].requested == [(1, 2), (3, 4)]
    assert "tile" in capsys.readouterr().out


# -- tensors ------------------------------------------------------------------------------------------------


def test_a_tensor_can_be_a_placeholder_without_storage() -> None:
    tensor = NkiTensor((128, 512), "bfloat16", None, MemoryRegion.shared_hbm, "x")
    assert (tensor.shape, str(tensor.dtype), tensor.buffer, tensor.name) == (
        (128, 512),
        "bfloat16",
        nl.shared_hbm,
        "x",
    )
    assert NkiTensor((2, 2), nl.float32, None).buffer is nl.sbuf
    assert tensor[0:64, 0:16].shape == (64, 16)


def test_a_storage_can_be_bound_again() -> None:
    @nki.jit
    def rebound(x):
        same = NkiTensor((4, 4), x.dtype, x.storage, name="again")
        assert same.buffer == x.buffer and same.name == "again"
        out = nl.ndarray((4, 4), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(same))
        return out

    np.testing.assert_array_equal(rebound(_ones(2, 8)), _ones(4, 4))


def test_what_is_missing_can_be_imported_and_says_why() -> None:
    import simulate

    simulate.install("simulate")
    from simulate.nki.missing import NOT_YET

    names = itertools.chain.from_iterable(((m, n) for n in names) for m, names in NOT_YET.items())
    for module, name in names:
        value = getattr(importlib.import_module(module), name)
        with pytest.raises(Unsupported, match=rf"{module}\.{name} cannot be simulated: \w"):
            value()


def test_a_registers_word_may_be_one_dimensional() -> None:
    @nki.jit
    def kernel(x):
        word = nl.ones([1], dtype=nl.int32, buffer=nl.sbuf)
        register = nisa.register_alloc()
        nisa.register_load(register, word)
        nisa.register_store(x, register)
        assert word.shape == (1, 1)
        return x

    assert kernel(np.zeros((1,), np.int32))[0] == 1
    with pytest.raises(RuleViolation, match="NKW-TILE-SHAPE"):
        nki.simulate(lambda x: nl.ndarray([2], nl.int32))(np.zeros((1,), np.int32))


@pytest.mark.parametrize(("name", "picks"), [("abs_max", np.greater), ("abs_min", np.less)])
def test_magnitudes_compare_with_a_column(monkeypatch, name: str, picks) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    x, column = _ones(8, 4) - 15, np.array([[-3.0], [3.0]] * 4, np.float32)

    @nki.jit
    def kernel(x, column):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, getattr(nl, name)(nl.load(x), nl.load(column)))
        return out

    # The signed operand itself: x where its magnitude is larger (smaller), y otherwise and in a tie.
    expected = np.where(picks(np.abs(x), np.abs(column)), x, column)
    np.testing.assert_array_equal(kernel(x, column), expected)
    with pytest.raises(RuleViolation, match="NKW-NL-SHAPES"):
        nki.simulate(lambda x, y: nl.add(nl.load(x), nl.load(y)))(x, column)
