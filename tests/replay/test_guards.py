"""Guards: a launch is replayed while all that its kernel reads is unchanged, and never with a stale program."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import simulate
from simulate.replay import ReplayCache
from simulate.replay.guards import Guards
from simulate.run.launch import Observer
from simulate.run.observers import observing
from simulate.world import process_replays

simulate.install("simulate")

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

X = np.arange(1, 17, dtype=np.float32).reshape(4, 4)


def launched(kernel: Any, *arguments: Any, mode: simulate.Mode = simulate.Mode.replay) -> Any:
    return (
        simulate.World("trn2", replays=process_replays())
        .launch(kernel, [(arguments, {})], mode=mode)
        .outputs[0]
    )


def scaled(x, factor=1.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=float(factor))
    nisa.dma_copy(dst=out, src=tile)
    return out


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    exec(source, vars(made))
    return made


CHANGES: list[Callable[[], tuple[Any, Callable[[], object]]]] = []
"""Each gives a kernel of one array and what changes its meaning."""
PAIRS: list[Callable[[], tuple[Any, Any, Any]]] = []
"""Each gives a kernel and two arguments besides the array that mean something else to it."""
REFUSALS: list[tuple[Callable[[], Any], str]] = []
"""Each gives a kernel that is not replayed, with the reason."""

change, pair = CHANGES.append, PAIRS.append


def refusal(reason: str) -> Callable[[Callable[[], Any]], None]:
    return lambda make: REFUSALS.append((make, reason))


def by_name(makers: list[Any]) -> Any:
    return pytest.mark.parametrize("make", makers, ids=lambda make: make.__name__)


# -- what a kernel finds around it ---------------------------------------------------------------------------------


@change
def an_attribute_of_a_class():
    class Config:
        factor = 2.0

    return lambda x: scaled(x, Config.factor), lambda: setattr(Config, "factor", 3.0)


@change
def an_attribute_of_a_base_class():
    class Base:
        factor = 2.0

    class Config(Base):
        pass

    return lambda x: scaled(x, Config.factor), lambda: setattr(Base, "factor", 3.0)


@change
def a_static_method():
    class Config:
        @staticmethod
        def factor():
            return 2.0

    return lambda x: scaled(x, Config.factor()), lambda: setattr(Config, "factor", lambda: 3.0)


@change
def a_property_of_a_class_made_in_the_kernel():
    class Config:
        @property
        def factor(self):
            return 2.0

    return lambda x: scaled(x, Config().factor), lambda: setattr(Config, "factor", 3.0)


@change
def a_default_of_a_dataclass_made_in_the_kernel():
    @dataclasses.dataclass
    class Config(nl.NKIObject):
        factor: float = 2.0

    return lambda x: scaled(x, Config().factor), lambda: setattr(Config.__init__, "__defaults__", (3.0,))


@change
def a_field_that_repr_leaves_out():
    @dataclasses.dataclass
    class Config(nl.NKIObject):
        factor: float = dataclasses.field(default=2.0, repr=False)

    config = Config()
    return lambda x: scaled(x, config.factor), lambda: setattr(config, "factor", 3.0)


@change
def a_name_of_a_module_in_a_module():
    package, inside = module("package", ""), module("package.inside", "FACTOR = 2.0")
    package.inside = inside
    return lambda x: scaled(x, package.inside.FACTOR), lambda: setattr(inside, "FACTOR", 3.0)


@change
def a_module_whose_name_begins_like_that_of_a_known_one():
    helpers = module("math_helpers", "FACTOR = 2.0")
    return lambda x: scaled(x, helpers.FACTOR), lambda: setattr(helpers, "FACTOR", 3.0)


@change
def a_global_of_a_function_of_such_a_module():
    helpers = module("numpy_helpers", "FACTOR = 2.0\ndef factor(): return FACTOR")
    factor = helpers.factor
    return lambda x: scaled(x, factor()), lambda: setattr(helpers, "FACTOR", 3.0)


@change
def a_name_of_a_module_by_getattr():
    settings, name = module("settings", "FACTOR = 2.0"), "FACTOR"
    return lambda x: scaled(x, getattr(settings, name)), lambda: setattr(settings, "FACTOR", 3.0)


@change
def a_global_that_hides_a_built_in_function():
    code = "def kernel(x): return scaled(x, max(1.0, 2.0))"
    names = {"scaled": scaled}
    exec(code, names)
    return names["kernel"], lambda: names.update(max=lambda a, b: 3.0)


@change
def a_function_without_a_module():
    names: dict[str, Any] = {"FACTOR": 2.0}
    exec("def factor(): return FACTOR", names)
    factor = names["factor"]
    return lambda x: scaled(x, factor()), lambda: names.update(FACTOR=3.0)


@change
def a_function_that_is_dressed_as_numpys():
    state = [2.0]

    @functools.wraps(np.sum)
    def factor():
        return state[0]

    return lambda x: scaled(x, factor()), lambda: state.__setitem__(0, 3.0)


@change
def a_function_under_a_decorator_of_the_standard_library():
    state = [2.0]

    @contextlib.contextmanager
    def factor():
        yield state[0]

    def kernel(x):
        with factor() as value:
            return scaled(x, value)

    return kernel, lambda: state.__setitem__(0, 3.0)


@change
def a_default_that_is_changed_in_place():
    def kernel(x, *, factor=2.0):
        return scaled(x, factor)

    return kernel, lambda: kernel.__kwdefaults__.update(factor=3.0)


@change
def keyword_defaults_that_are_replaced():
    def kernel(x, *, factor=2.0):
        return scaled(x, factor)

    return kernel, lambda: setattr(kernel, "__kwdefaults__", {"factor": 3.0})


@change
def a_global_that_is_deleted():
    names: dict[str, Any] = {"scaled": scaled, "max": lambda a, b: 3.0}
    exec("def kernel(x): return scaled(x, max(1.0, 2.0))", names)
    return names["kernel"], lambda: names.pop("max")


@change
def the_name_of_the_last_attribute_of_a_class():
    class Config:
        pass

    Config.factor = 2.0  # type: ignore[attr-defined]

    def rename():
        del Config.factor  # type: ignore[attr-defined]
        Config.other = 2.0  # type: ignore[attr-defined]

    return lambda x: scaled(x, getattr(Config, "factor", 3.0)), rename


@change
def the_first_attribute_of_a_function():
    def helper():
        pass

    return lambda x: scaled(x, getattr(helper, "factor", 2.0)), lambda: setattr(helper, "factor", 3.0)


@change
def the_code_of_a_helper():
    def factor():
        return 2.0

    return lambda x: scaled(x, factor()), lambda: setattr(factor, "__code__", (lambda: 3.0).__code__)


@change
def an_attribute_of_a_function():
    def helper():
        pass

    helper.factor = 2.0  # type: ignore[attr-defined]
    return lambda x: scaled(x, helper.factor), lambda: setattr(helper, "factor", 3.0)  # type: ignore[attr-defined]


@change
def a_list_in_a_list_in_a_table():
    table = {"factors": [[1.0], [2.0]]}
    return lambda x: scaled(x, table["factors"][1][0]), lambda: table["factors"][1].__setitem__(0, 3.0)


@change
def a_list_that_holds_itself():
    cycle: list[Any] = [2.0]
    cycle.append(cycle)
    return lambda x: scaled(x, cycle[1][0]), lambda: cycle.__setitem__(0, 3.0)


@change
def a_set():
    factors = {2.0}
    return lambda x: scaled(x, sum(factors)), lambda: factors.add(3.0)


@change
def the_type_of_a_key():
    counts = {1: 0}
    factors = {int: 2.0, bool: 3.0}

    def swap():
        counts.clear()
        counts[True] = 0

    return lambda x: scaled(x, factors[type(next(iter(counts)))]), swap


@change
def what_an_enum_stands_for():
    class Factor(Enum):
        one = [2.0]  # noqa: RUF012

    return lambda x: scaled(x, Factor.one.value[0]), lambda: Factor.one.value.__setitem__(0, 3.0)


@change
def a_list_in_a_partial():
    factors = [2.0]
    kernel = functools.partial(lambda x, factors: scaled(x, factors[0]), factors=factors)
    return kernel, lambda: factors.__setitem__(0, 3.0)


@change
def a_keyword_of_a_partial():
    helper = functools.partial(scaled, factor=2.0)
    return lambda x: helper(x), lambda: helper.keywords.update(factor=3.0)


@change
def a_list_of_a_jitted_kernel_with_a_schedule():
    factors = [2.0]
    helper = nki.jit(lambda x: scaled(x, factors[0])).with_schedule([])
    return lambda x: helper(x), lambda: factors.__setitem__(0, 3.0)


def _kernel_with_a_cell(filled: bool) -> tuple[Any, Any]:
    factor = 2.0

    def kernel(x):
        try:
            return scaled(x, factor)
        except NameError:
            return scaled(x, 7.0)

    cell = next(cell for cell in kernel.__closure__ or () if cell.cell_contents == 2.0)
    if not filled:
        del cell.cell_contents
    return kernel, cell


@change
def a_closure_that_loses_its_value():
    kernel, cell = _kernel_with_a_cell(filled=True)
    return kernel, lambda: delattr(cell, "cell_contents")


@change
def a_closure_that_gets_its_value():
    kernel, cell = _kernel_with_a_cell(filled=False)
    return kernel, lambda: setattr(cell, "cell_contents", 3.0)


@pytest.mark.parametrize("session", [contextlib.nullcontext, ReplayCache.session], ids=["", "sessions"])
@by_name(CHANGES)
def test_a_change_around_a_kernel_is_never_served_by_a_stale_program(cache, make, session) -> None:
    kernel, becomes_another = make()
    with session(cache):
        first, again = launched(kernel, X), launched(kernel, X)
    assert cache.report.hits == 1
    becomes_another()
    with session(cache):
        changed = launched(kernel, X)
    assert (cache.report.hits, cache.report.dropped) == (1, 1)
    assert np.array_equal(first, again) and not np.array_equal(first, changed)
    assert np.array_equal(changed, launched(kernel, X, mode=simulate.Mode.eager))


# -- sessions -------------------------------------------------------------------------------------------------------


def test_guards_are_checked_once_in_a_session(cache, monkeypatch) -> None:
    checks: list[Guards] = []
    unchanged = Guards.unchanged
    launched(scaled, X)
    monkeypatch.setattr(Guards, "unchanged", lambda guards: checks.append(guards) or unchanged(guards))
    for launches, session in (
        (3, contextlib.nullcontext),
        (1, ReplayCache.session),
        (1, ReplayCache.session),
    ):
        checks.clear()
        with session(cache):
            for _ in range(3):
                launched(scaled, X)
        assert len(checks) == launches
    assert cache.report.hits == 9


class ChangesAfterALaunch(Observer):
    """Adds a factor at the end of every launch."""

    def __init__(self, factors: list[float]) -> None:
        self._factors = factors

    def ended(self, launch: simulate.Launch, streams: Any) -> None:
        self._factors.append(3.0)


@pytest.mark.parametrize("who", ["an eager kernel", "an observer"])
def test_a_change_in_a_session_is_never_served_by_a_stale_program(cache, who) -> None:
    factors = [2.0]

    def changing(x):
        factors.append(3.0)
        return scaled(x)

    def kernel(x):
        return scaled(x, factors[-1])

    for _ in range(2):
        launched(kernel, X)
    with cache.session():
        assert np.array_equal(launched(kernel, X), 2 * X)
        if who == "an observer":
            with observing(ChangesAfterALaunch(factors)):
                launched(kernel, X)
        else:
            launched(changing, X)
        assert np.array_equal(launched(kernel, X), 3 * X)
    assert cache.report.dropped == 1


# -- arguments that are equal and mean something else ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen(nl.NKIObject):
    factor: Any = 1


class EqualToAll(nl.NKIObject):
    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


def by_type(x, value):
    return scaled(x, {int: 2.0, bool: 3.0, float: 4.0}[type(value)])


@pair
def one_and_true():
    return by_type, 1, True


@pair
def one_and_one_point_zero():
    return by_type, 1, 1.0


@pair
def zero_and_minus_zero():
    return lambda x, value: scaled(x, np.copysign(2.0, value)), 0.0, -0.0


@pair
def a_key_of_one_and_a_key_of_true():
    return lambda x, table: by_type(x, next(iter(table))), {1: None}, {True: None}


@pair
def fields_of_one_and_true():
    return lambda x, config: by_type(x, config.factor), Frozen(1), Frozen(True)


@pair
def fields_of_zero_and_minus_zero():
    return lambda x, config: scaled(x, np.copysign(2.0, config.factor)), Frozen(0.0), Frozen(-0.0)


@pair
def a_frozen_object_with_a_list():
    return lambda x, config: scaled(x, config.factor[0]), Frozen([2.0]), Frozen([3.0])


@pair
def objects_that_say_they_are_equal():
    return lambda x, config: scaled(x, config.factor), EqualToAll(2.0), EqualToAll(3.0)


@pair
def named_tuples_with_other_names():
    first, second = (collections.namedtuple("Pair", names) for names in ("a b", "b a"))
    return lambda x, value: scaled(x, value.a), first(2.0, 3.0), second(2.0, 3.0)


@pair
def numpy_scalars_of_two_widths():
    return lambda x, value: scaled(x, value.dtype.itemsize), np.float32(1), np.float64(1)


@pair
def ranges_that_are_equal():
    return lambda x, value: scaled(x, value.start + 2.0), range(0), range(1, 1)


@by_name(PAIRS)
def test_equal_arguments_of_another_meaning_are_another_program(cache, make) -> None:
    kernel, one, other = make()
    first, again = launched(kernel, X, one), launched(kernel, X, one)
    assert cache.report.hits == 1, cache.report.refusals
    second = launched(kernel, X, other)
    assert cache.report.hits == 1
    assert np.array_equal(first, again) and not np.array_equal(first, second)
    assert np.array_equal(second, launched(kernel, X, other, mode=simulate.Mode.eager))


def test_a_changed_class_of_an_argument_is_never_served_by_a_stale_program(cache) -> None:
    class Config(nl.NKIObject):
        def __init__(self, scale):
            self.scale = scale

        def factor(self):
            return self.scale

    class Factor(Enum):
        one = [2.0]  # noqa: RUF012

    for kernel, value, becomes_another in (
        (
            lambda x, config: scaled(x, config.factor()),
            Config(2.0),
            lambda: setattr(Config, "factor", lambda s: 3.0),
        ),
        (lambda x, factor: scaled(x, factor.value[0]), Factor.one, lambda: Factor.one.value.append(0.0)),
        (lambda x, cls: scaled(x, cls.scale), Config, lambda: setattr(Config, "scale", 3.0)),
    ):
        Config.scale = 2.0  # type: ignore[attr-defined]
        for _ in range(2):
            launched(kernel, X, value)
        hits = cache.report.hits
        becomes_another()
        after = launched(kernel, X, value)
        assert (hits, cache.report.hits) == (1, 1)
        assert np.array_equal(after, launched(kernel, X, value, mode=simulate.Mode.eager))
        cache.report.hits = 0


# -- kernels that are launched eagerly every time -------------------------------------------------------------------


@refusal("the kernel changes what it depends on")
def counts_in_its_closure():
    count = 0

    def kernel(x):
        nonlocal count
        count += 1
        return scaled(x, count)

    return kernel


@refusal("the kernel changes what it depends on")
def counts_in_a_list():
    calls: list[int] = []

    def kernel(x):
        calls.append(1)
        return scaled(x, len(calls))

    return kernel


@refusal("the closure of <lambda> is a range_iterator, which may change unseen")
def takes_the_next():
    numbers = iter(range(1, 9))
    return lambda x: scaled(x, next(numbers))


@refusal("the closure of <lambda> is a builtin_function_or_method, which may change unseen")
def takes_the_last():
    pop = [4.0, 3.0, 2.0].pop
    return lambda x: scaled(x, pop())


@refusal("the module random may give something else at every call")
def draws_random_numbers():
    return lambda x: scaled(x, random.random())


@refusal("random numbers were drawn while the kernel ran")
def draws_random_numbers_of_numpy():
    return lambda x: scaled(x, np.random.rand())  # noqa: NPY002


@refusal("the module time may give something else at every call")
def reads_the_clock():
    return lambda x: scaled(x, time.perf_counter())


@refusal("<lambda> calls globals")
def asks_for_its_globals():
    return lambda x: scaled(x, globals()["X"][0, 1])


@refusal("kernel imports json while it runs")
def imports_while_it_runs():
    def kernel(x):
        import json

        return scaled(x, json.loads("2.0"))

    return kernel


@refusal("kernel calls print")
def prints_what_is_constant():
    def kernel(x):
        print("launched")
        return scaled(x, 2.0)

    return kernel


@refusal("the kernel is a method, which may change unseen")
def is_a_method():
    class Own:
        factor = 2.0

        def kernel(self, x):
            return scaled(x, self.factor)

    return Own().kernel


@refusal("the kernel is a Own, which may change unseen")
def is_an_object():
    @dataclasses.dataclass
    class Own:
        factor: float = 2.0

        def __call__(self, x):
            return scaled(x, self.factor)

    return Own()


@refusal("the closure of <lambda> is a ndarray, which may change unseen")
def captures_an_array():
    factors = np.array([2.0])
    return lambda x: scaled(x, factors[0])


@refusal("the closure of <lambda> is a SimpleNamespace, which may change unseen")
def captures_an_object():
    config = SimpleNamespace(factor=2.0)
    return lambda x: scaled(x, config.factor)


@refusal("the kernel returns a Frozen")
def returns_an_object():
    return lambda x: Frozen(scaled(x, 2.0))


@pytest.mark.parametrize(("make", "reason"), REFUSALS, ids=lambda make: getattr(make, "__name__", ""))
def test_a_kernel_that_may_do_otherwise_next_time_is_launched_eagerly(cache, make, reason) -> None:
    kernel = make()
    for _ in range(2):
        launched(kernel, X)
    assert cache.report.refusals == {reason: 2}
    assert (cache.report.hits, cache.report.recorded) == (0, 0)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (Frozen(X), "an argument is a Frozen that holds arrays"),
        (type("Text", (str,), {})("a"), "an argument is a Text"),
        (type("Table", (dict,), {})(), "an argument is a Table"),
        (SimpleNamespace(), "an argument is a SimpleNamespace"),
        (X.astype(">f4"), "an array has another byte order"),
        (X[:, ::2], "an array is not contiguous"),
    ],
    ids=[
        "arrays in an object",
        "a string of its own",
        "a dict of its own",
        "an object",
        "big-endian",
        "strided",
    ],
)
def test_an_argument_that_cannot_be_compared_is_no_error(cache, argument, reason) -> None:
    for _ in range(2):
        assert np.array_equal(launched(lambda x, other: scaled(x, 2.0), X, argument), 2 * X)
    assert cache.report.refusals == {reason: 2}


def test_a_kernel_that_changes_its_arguments_is_launched_eagerly(cache) -> None:
    def kernel(x, calls):
        calls.append(1)
        return scaled(x, len(calls))

    for _ in range(2):
        calls: list[int] = []
        assert np.array_equal(launched(kernel, X, calls), X)
        assert calls == [1]
    assert cache.report.refusals == {"the kernel changes its arguments": 2}


def test_a_long_chain_of_values_is_watched_to_its_end(cache) -> None:
    last: list[Any] = [2.0]
    first = last
    for _ in range(5000):
        first = [first]

    def kernel(x):
        current: Any = first
        while isinstance(current, list):
            current = current[0]
        return scaled(x, current)

    for factor in (2.0, 2.0, 3.0):
        last[0] = factor
        assert np.array_equal(launched(kernel, X), factor * X)
    assert (cache.report.hits, cache.report.dropped) == (1, 1)


def test_an_array_of_another_byte_order_is_read_as_the_numbers_it_holds() -> None:
    for value in (1.0, 2.0):
        array = np.full((4, 4), value, ">f4")
        assert np.array_equal(launched(scaled, array, 3.0), np.full((4, 4), 3 * value))


def test_a_kernel_returns_a_named_tuple_however_it_is_launched(cache) -> None:
    Pair = collections.namedtuple("Pair", "a b")

    def kernel(x):
        return Pair(scaled(x, 2.0), scaled(x, 3.0))

    for step in range(2):
        pair = launched(kernel, X + step)
        assert isinstance(pair, Pair)
        assert np.array_equal(pair.a, 2 * (X + step)) and np.array_equal(pair.b, 3 * (X + step))
    assert cache.report.hits == 1


def test_a_partial_is_a_kernel_with_its_arguments() -> None:
    for mode in (simulate.Mode.eager, simulate.Mode.replay, simulate.Mode.replay):
        assert np.array_equal(launched(functools.partial(scaled, factor=3.0), X, mode=mode), 3 * X)
