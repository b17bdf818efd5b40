"""Trip counts of dry launches: device loops over registers, in the order they are reached."""

from __future__ import annotations

import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument, RuleViolation, Unsupported
from simulate.cli import main
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


def statements(x, n):
    left = nisa.register_alloc(n)
    while left:
        _copy(x)
        word = nl.ndarray((1, 1), nl.int32)
        nisa.register_store(word, left)
        nisa.tensor_scalar(dst=word, data=word, op0=nl.subtract, operand0=1)
        nisa.register_load(left, word)
    return x


LOOPS = [registers, scalars, whiles, ranges, statements]


def _events(kernel, mode: Mode, count: np.ndarray = N, **how) -> list[str]:
    (stream,) = World("trn2").launch(kernel, [((X, count), {})], mode, **how).streams
    return [stream.op_names[number] for number in stream.ops]


@pytest.mark.parametrize("kernel", LOOPS)
def test_a_dry_launch_with_the_right_count_has_the_stream_of_an_eager_one(kernel) -> None:
    assert _events(kernel, Mode.dry, trips=(3,)) == _events(kernel, Mode.eager)
    for trips in (0, 1, 5):
        assert _events(kernel, Mode.dry, trips=trips).count("tensor_copy") == trips


@pytest.mark.parametrize("kernel", LOOPS)
def test_a_dry_launch_follows_the_numbers_that_it_is_given(kernel) -> None:
    assert _events(kernel, Mode.dry) == _events(kernel, Mode.eager)
    for count in (0, 1, 5):
        assert _events(kernel, Mode.dry, np.array([[count]], np.int32)).count("tensor_copy") == count
    with pytest.raises(Unsupported, match=r"NKW-DRY-CONTROL.*give trip counts, --trips N"):
        _events(kernel, Mode.dry, np.broadcast_to(np.int32(3), (1, 1)))


def _after(prepare, count: np.ndarray) -> int:
    """Return the copies of a dry launch whose loop is bounded by what `prepare` leaves in a tile."""

    def kernel(x, n):
        nl.fori_loop(0, nisa.register_alloc(prepare(n)), lambda i: _copy(x))
        return x

    return _events(kernel, Mode.dry, count).count("tensor_copy")


def _constant(n):
    return nl.full((1, 1), 4, nl.int32)


def _shared(n):
    return nl.shared_constant(np.array([[6]], np.int32))


def _sum_of_row(n):
    row = nl.ndarray((1, n.shape[1]), nl.int32)
    nisa.dma_copy(dst=row[0:1, 0:2], src=n[0:1, 0:2])
    nisa.tensor_tensor(dst=row[0:1, 0:1], data1=row[0:1, 0:1], data2=row[0:1, 1:2], op=nl.add)
    return row[0:1, 0:1]


def _random_row(n):
    row = nl.load(n)
    nisa.rng(dst=row.view(nl.uint32))
    return row


def _random(n):
    return _random_row(n)[0:1, 0:1]


def _filled_in_part(n):
    row = _random_row(n)
    nisa.memset(dst=row[0:1, 1:2], value=2)
    return row[0:1, 1:2]


def _filled_again(n):
    row = _random_row(n)
    nisa.memset(dst=row, value=2)
    return row[0:1, 1:2]


def _overwritten(n):
    nisa.dma_copy(dst=n, src=nl.load(n))
    return n[0:1, 0:1]


def _through_floats(n):
    tile = nl.ndarray((1, 1), nl.float32)
    nisa.tensor_copy(dst=tile, src=nl.load(n[0:1, 0:1]))
    word = nl.ndarray((1, 1), nl.int32)
    nisa.tensor_copy(dst=word, src=tile)
    return word


@pytest.mark.parametrize(
    ("prepare", "copies"), [(_constant, 4), (_shared, 6), (_sum_of_row, 3), (_filled_again, 2)]
)
def test_small_integers_that_follow_from_known_ones_are_known(prepare, copies: int) -> None:
    assert _after(prepare, np.array([[1, 2]], np.int32)) == copies


@pytest.mark.parametrize("prepare", [_random, _filled_in_part, _overwritten, _through_floats])
def test_what_may_depend_on_unknown_numbers_is_not_known(prepare) -> None:
    with pytest.raises(Unsupported, match="NKW-DRY-CONTROL"):
        _after(prepare, np.array([[1, 2]], np.int32))


@pytest.mark.parametrize(("elements", "known"), [(1023, True), (1024, True), (1025, False)])
def test_a_dry_launch_computes_small_allocations_alone(elements: int, known: bool) -> None:
    count = np.full((1, elements), 2, np.int32)

    def prepare(n):
        return nl.load(n)[0:1, elements - 1 : elements]

    if known:
        assert _after(prepare, count) == 2
    else:
        with pytest.raises(Unsupported, match="NKW-DRY-CONTROL"):
            _after(prepare, count)


def test_a_dry_launch_leaves_its_arguments_as_they_were() -> None:
    def kernel(x, n):
        nisa.register_store(n, nisa.register_alloc(9))
        return n

    count = N.copy()
    _events(kernel, Mode.dry, count)
    assert count == N


def test_a_condition_on_a_register_is_no_loop() -> None:
    def kernel(x, n):
        for _ in range(3):
            if nisa.register_alloc(n):
                _copy(x)
        return x

    assert _events(kernel, Mode.dry).count("tensor_copy") == 3
    with pytest.raises(Unsupported, match="NKW-DRY-CONTROL"):
        _events(kernel, Mode.dry, trips=1)


def test_while_register_takes_its_count_each_time_it_is_reached() -> None:
    def kernel(x, n):
        def inner():
            left = nisa.register_alloc(n)
            while left:
                _copy(x)

        nl.fori_loop(0, nisa.scalar_load(n), lambda i: inner())
        return x

    assert _events(kernel, Mode.dry, trips=(2, 3)).count("tensor_copy") == 2 * 3


@pytest.mark.parametrize("mode", [Mode.eager, Mode.dry])
def test_while_register_without_an_end_is_refused(monkeypatch, mode: Mode) -> None:
    monkeypatch.setenv("NKW_LOOP_EVENTS", "100")

    def kernel(x, n):
        left = nisa.register_alloc(n)
        while left:
            pass
        return x

    with pytest.raises(RuleViolation, match=r"NKW-LOOP-EVENTS(.|\n)*is not 0 after 101 iterations"):
        _events(kernel, mode)


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

    events = _events(nested, Mode.dry, trips=(2, 3, 4))
    assert [events.count(name) for name in ("tensor_copy", "memset", "iota")] == [6, 4, 3]
    events = _events(nested, Mode.dry, trips=(2,))
    assert [events.count(name) for name in ("tensor_copy", "memset", "iota")] == [4, 2, 3]


@pytest.mark.parametrize("trips", [(-1,), (1.5,), ("3",), (True,), -1, 1.5, "3", None])
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
