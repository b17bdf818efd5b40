"""Levels of NKI: what exists, what is deprecated, and what is refused because of the level alone."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument, RuleViolation
from simulate import nki
from simulate.level import FEATURES, LEVELS, NEWEST, Level
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import World, launch


def _deprecations(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if warning.category is DeprecationWarning]


def _launched(kernel, level: str, *arrays):
    return launch(kernel, [(arrays, {})], level=level).outputs[0]


def test_the_newest_level_is_the_default_and_the_environment_chooses(monkeypatch) -> None:
    assert Level.resolve() == NEWEST == Level(0, 7)
    monkeypatch.setenv("NKI_LEVEL", "0.3")
    assert Level.resolve() == Level(0, 3)
    assert Level.resolve("0.5") == Level(0, 5)
    assert World(level="0.4").level == Level(0, 4)
    assert nki.__version__ == "0.3.0"
    monkeypatch.delenv("NKI_LEVEL")
    assert nki.__version__ == "0.7.0"


@pytest.mark.parametrize("name", ["0.1", "0.8", "7", "x"])
def test_a_level_that_was_never_released_is_refused(monkeypatch, name: str) -> None:
    monkeypatch.setenv("NKI_LEVEL", name)
    with pytest.raises(InvalidArgument, match=rf"NKI_LEVEL is '{name}'; known are 0.2, 0.3, .*0.7"):
        Level.resolve()
    with pytest.raises(InvalidArgument, match="NKW-LEVEL-NAME"):
        World(level=name)


def test_every_row_of_the_table_lies_between_released_levels() -> None:
    for name, row in FEATURES.items():
        assert row.instead, name
        assert row.since in LEVELS and (row.until is None or row.since < row.until), name
        assert row.deprecated is None or row.since <= row.deprecated, name


def _scalars(x):
    tile = nl.load(x)
    nisa.scalar_store(tile, nisa.scalar_load(tile) + 1)
    nl.store(x, tile)
    return x


def _registers(x):
    tile = nl.load(x)
    register = nisa.register_alloc(tile)
    nisa.register_store(tile, register)
    nl.store(x, tile)
    return x


def test_a_name_of_0_7_is_refused_before_it_and_the_message_names_the_level() -> None:
    word = np.array([[4]], np.int32)
    assert _launched(_scalars, "0.7", word.copy())[0, 0] == 5
    with pytest.raises(RuleViolation) as caught:
        _launched(_scalars, "0.6", word.copy())
    assert caught.value.code == "NKW-LEVEL"
    assert "nisa.scalar_load exists from level 0.7 on; NKI_LEVEL is 0.6" in str(caught.value)
    assert "NKI_LEVEL=0.7" in caught.value.hint
    for level in ("0.6", "0.7"):
        assert _launched(_registers, level, word.copy())[0, 0] == 4


@pytest.mark.parametrize(("level", "counter_type"), [("0.6", nisa.VirtualRegister), ("0.7", nisa.NkiScalar)])
def test_the_counter_of_a_loop_has_arithmetic_from_0_7_on(level: str, counter_type: type) -> None:
    counter_types = []

    def kernel(x):
        nl.fori_loop(0, 2, lambda i: counter_types.append(type(i)))
        return x

    _launched(kernel, level, np.ones((1, 1), np.float32))
    assert counter_types == [counter_type, counter_type]


@pytest.mark.parametrize(
    ("use", "name", "first"),
    [
        (lambda: nl.affine_range(2), "nl.affine_range", "0.7"),
        (lambda: nl.sequential_range(2), "nl.sequential_range", "0.7"),
        (lambda: nl.static_range(2), "nl.static_range", "0.7"),
        (lambda: list(nl.dynamic_range(2)), "nl.dynamic_range", "0.6"),
        (lambda: nl.tile_size.psum_fmax, "nl.tile_size.psum_fmax", "0.4"),
        (lambda: nl.tile_size.total_available_sbuf_size, "nl.tile_size.total_available_sbuf_size", "0.4"),
    ],
)
def test_a_name_is_deprecated_from_its_level_on(use, name: str, first: str) -> None:
    def kernel(x):
        use()
        return x

    for level in map(str, LEVELS):
        deprecations = _deprecations(
            lambda kernel_level=level: _launched(kernel, kernel_level, np.ones((1, 1), np.float32))
        )
        if Level.resolve(level) < Level.resolve(first):
            assert deprecations == []
        else:
            assert deprecations == [f"{name} is deprecated since NKI {first}; {FEATURES[name].instead}"]


def test_install_chooses_the_level_of_the_process(monkeypatch) -> None:
    monkeypatch.setenv("NKI_LEVEL", "0.7")
    simulate.install("simulate", level="0.6")
    assert Level.resolve() == Level(0, 6)
    with pytest.raises(InvalidArgument, match="NKW-LEVEL-NAME"):
        simulate.install("simulate", level="1.0")


def test_replay_keeps_levels_apart() -> None:
    counter_types = []

    def kernel(x):
        nl.fori_loop(0, 1, lambda i: counter_types.append(type(i)))
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    launches = [((np.ones((1, 1), np.float32),), {})]
    worlds = [World(level=level) for level in ("0.6", "0.7")]
    worlds[1]._replays = worlds[0].replays
    for world in worlds:
        world.launch(kernel, launches, simulate.Mode.replay)
    assert counter_types == [nisa.VirtualRegister, nisa.NkiScalar]


# -- the number of physical cores of a call -----------------------------------------------------------------


@nki.jit
def numbers(x):
    out = nl.ndarray((2, 2), nl.int32, buffer=nl.shared_hbm)
    row = nl.ndarray((1, 2), nl.int32)
    nisa.memset(row[:, 0:1], value=nl.num_programs())
    nisa.memset(row[:, 1:2], value=nl.program_ndim())
    if nl.num_programs() == 1:
        nl.store(out[1:2], row)
    core = nl.program_id(0)
    nl.store(out[core : core + 1], row)
    return out


def _cores(call) -> tuple[int, int]:
    ran = call(np.ones((1, 1), np.float32))
    return int(ran[0, 0]), int(ran[0, 1])


LNC = "NEURON_LOGICAL_NC_CONFIG"


def test_the_environment_sets_the_cores_of_a_call_from_0_7_on(monkeypatch) -> None:
    assert _cores(numbers) == (1, 0)
    monkeypatch.setenv(LNC, "2")
    assert _cores(numbers) == (2, 1)
    assert _cores(numbers[2]) == (2, 1)
    monkeypatch.setenv("NKI_LEVEL", "0.6")
    assert _cores(numbers[2]) == (2, 1)
    with pytest.raises(InvalidArgument) as caught:
        numbers(np.ones((1, 1), np.float32))
    assert caught.value.message == (
        "numbers(…) is a launch on 1 physical cores and NEURON_LOGICAL_NC_CONFIG is 2; "
        "at NKI_LEVEL=0.6 write numbers[2](…)"
    )


@pytest.mark.parametrize("level", ["0.6", "0.7"])
@pytest.mark.parametrize(("grid", "text"), [(1, "2"), (2, "1")])
def test_a_grid_that_disagrees_with_the_environment_is_refused(monkeypatch, level, grid, text) -> None:
    monkeypatch.setenv("NKI_LEVEL", level)
    monkeypatch.setenv(LNC, text)
    with pytest.raises(InvalidArgument) as caught:
        numbers[grid](np.ones((1, 1), np.float32))
    assert caught.value.message == (
        f"numbers[{grid}](…) is a launch on {grid} physical cores and {LNC} is {text}; "
        "give both the same number of cores, or only one of them"
    )


@pytest.mark.parametrize("text", ["0", "3", "two"])
def test_the_environment_takes_one_or_two_cores(monkeypatch, text: str) -> None:
    monkeypatch.setenv(LNC, text)
    with pytest.raises(InvalidArgument, match=rf"{LNC} is '{text}'; set it to 1 or 2"):
        numbers(np.ones((1, 1), np.float32))


def test_the_grid_is_deprecated_from_0_7_on(monkeypatch) -> None:
    monkeypatch.setenv("NKI_LEVEL", "0.6")
    assert _deprecations(lambda: numbers[2]) == []
    monkeypatch.setenv("NKI_LEVEL", "0.7")
    assert _deprecations(lambda: numbers[2]) == [
        "kernel[n](…) as the number of cores of a launch is deprecated since NKI 0.7; "
        "set NEURON_LOGICAL_NC_CONFIG"
    ]


def test_an_older_parameter_is_deprecated_from_0_6_on() -> None:
    def kernel(x):
        tile = nl.load(x)
        nisa.tensor_copy(dst=tile, src=tile, dtype=nl.float32)
        return x

    x = np.ones((1, 1), np.float32)
    assert _deprecations(lambda: _launched(kernel, "0.5", x)) == []
    for level in ("0.6", "0.7"):
        (deprecation,) = _deprecations(lambda kernel_level=level: _launched(kernel, kernel_level, x))
        assert deprecation.startswith("nisa.tensor_copy(dtype=…) is of an earlier release of NKI")
