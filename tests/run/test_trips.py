"""Trip counts of dry launches: device loops over registers, in the order they are reached."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from simulate.cli import main
from simulate.errors import InvalidArgument, Unsupported
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import Mode
from simulate.world import World

X = np.ones((4, 8), np.float32)
N = np.array([[3]], np.int32)


def _copy(x):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_copy(dst=nl.ndarray(x.shape, x.dtype), src=tile)


def registers(x, n):
    count = nisa.register_alloc()
    nisa.register_load(count, nl.load(n))
    nl.fori_loop(0, count, lambda i: _copy(x))
    return x


def scalars(x, n):
    nl.fori_loop(1, nisa.scalar_load(n) + 1, lambda i: _copy(x))
    return x


def whiles(x, n):
    def body(left):
        _copy(x)
        return left - 1

    nl.while_loop(nisa.scalar_load(n), body)
    return x


def ranges(x, n):
    count = nisa.register_alloc()
    nisa.register_load(count, n)
    for _ in nl.dynamic_range(count):
        _copy(x)
    return x


def _events(kernel, mode: Mode, **how) -> list[str]:
    (stream,) = World("trn2").launch(kernel, [((X, N), {})], mode, **how).streams
    return [stream.op_names[number] for number in stream.ops]


@pytest.mark.parametrize("kernel", [registers, scalars, whiles, ranges])
def test_a_dry_launch_with_the_right_count_has_the_stream_of_an_eager_one(kernel) -> None:
    assert _events(kernel, Mode.dry, trips=(3,)) == _events(kernel, Mode.eager)
    for trips in (0, 1, 5):
        assert _events(kernel, Mode.dry, trips=(trips,)).count("tensor_copy") == trips
    with pytest.raises(Unsupported, match=r"NKW-DRY-CONTROL.*give trip counts, --trips N"):
        _events(kernel, Mode.dry)


def test_an_eager_launch_counts_for_itself() -> None:
    assert _events(scalars, Mode.eager, trips=(7,)) == _events(scalars, Mode.eager)


def test_loops_take_their_counts_in_the_order_they_are_reached() -> None:
    def fills(i):
        nisa.memset(dst=nl.ndarray((4, 4), nl.float32), value=0.0)

    def counts(i):
        nisa.iota(nl.ndarray((4, 4), nl.int32), [[1, 4]], 0)

    def nested(x, n):
        inner = nisa.scalar_load(n)

        def body(i):
            nl.fori_loop(0, inner, lambda j: _copy(x))

        nl.fori_loop(0, inner, body)
        nl.fori_loop(0, inner, fills)
        nl.fori_loop(0, 3, counts)
        return x

    found = _events(nested, Mode.dry, trips=(2, 3, 4))
    assert [found.count(name) for name in ("tensor_copy", "memset", "iota")] == [6, 4, 3]
    found = _events(nested, Mode.dry, trips=(2,))
    assert [found.count(name) for name in ("tensor_copy", "memset", "iota")] == [4, 2, 3]


@pytest.mark.parametrize("trips", [(-1,), (1.5,), ("3",), (True,)])
def test_a_trip_count_is_a_number_of_iterations(trips) -> None:
    with pytest.raises(InvalidArgument, match="NKW-TRIPS"):
        simulate.launch(scalars, [((X, N), {})], mode=Mode.dry, trips=trips)


KERNEL = """
import nki.isa as nisa
import nki.language as nl

def kernel(x, n):
    def body(i):
        tile = nl.load(x)
        nl.store(x, tile)
    nl.fori_loop(0, nisa.scalar_load(n), body)
    return x
"""


@pytest.mark.parametrize("command", ["time", "memory"])
def test_commands_take_trip_counts(tmp_path, capsys, command: str) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    words = [command, f"{file}:kernel", "f32[128,512]", "i32[1,1]"]
    assert main(words) == 1
    assert "NKW-DRY-CONTROL" in capsys.readouterr().err
    assert main([*words, "--trips", "4"]) == 0
    assert main([words[0], "--trips", "4,2", *words[1:]]) == 0
    with pytest.raises(SystemExit):
        main([*words, "--trips", "x"])
    assert "'x' is no list of counts; give N or N,N" in capsys.readouterr().err
