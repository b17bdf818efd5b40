"""Tables of kernel tests: a `KernelCase` lists what a kernel is tried with, and `KernelTests` runs it.

Settings are keyword arguments from which a case draws a kernel's arguments; a row of a table is one dict of settings.

class TestRouter(KernelTests):
    case = KernelCase(
        kernels.router,
        arguments,
        values=[*vary(tokens=[1, 127, 128, 129]), dict(scoring="sigmoid")],
        refusals=[refuse("top_k is 1 to 10, the number of experts, not 0", top_k=0)],
        limits=[limit("experts", 512, "at most 512 experts, not 513")],
    )
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from types import FunctionType
from typing import Any

import ml_dtypes
import nki.isa as nisa
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels
import simulate
from nkw.errors import NkwError
from tests.kernels.accuracy import (
    TARGETS,
    as_tuple,
    compare_all,
    copied,
    find_faults,
    in_every_way,
    undrawn,
)

F32 = np.float32
BF16 = ml_dtypes.bfloat16
DTYPES = (F32, BF16)
SMALLEST = TARGETS[0]
"""The chip with the smallest SBUF."""
GEN3_ON = TARGETS[1:]
"""Chips whose Tensor engine transposes without a product, so that an undefined row of few stays in its row."""

CHANGE_NO_VALUE = {
    ("nki_kernels.dma", "queue_for"),
    ("nki_kernels.projection.row_groups", "choose_vector_share"),
    ("nki_kernels.tuning", "find_generation"),
}
"""Functions that ask for the chip to choose a queue, an engine that copies, or tuned sizes, which are tested to give
the same bytes."""

Settings = Mapping[str, Any]
"""What a case changes of its kernel's arguments, by name; see `KernelCase.arguments`."""


def vary(**settings: Any) -> list[Settings]:
    """Return a row for each combination of settings.

    A list has the values to try, anything else is the same in all rows.
    """
    choices = [value if isinstance(value, list) else [value] for value in settings.values()]
    return [dict(zip(settings, chosen)) for chosen in product(*choices)]


def together(names: str, *rows: Sequence[Any], **settings: Any) -> list[Settings]:
    """Return a row for each combination of settings and of `rows`, each of which has a value for each of some names.

    names: setting names separated by spaces.
    """
    return [{**dict(zip(names.split(), row)), **setting} for row in rows for setting in vary(**settings)]


MIXED_DTYPES = ((F32, BF16), (BF16, BF16), (BF16, F32))
"""Of activations and weights."""


@dataclass(frozen=True)
class Slow:
    """A row of a table whose test takes more than about a second; `slow` creates it."""

    row: Any


def slow(*rows: Any) -> list[Slow]:
    """Return rows marked as slow, whose tests take more than about a second."""
    return [Slow(row) for row in rows]


@dataclass(frozen=True)
class Refusal:
    """Settings that a kernel must refuse with a message, and nearly equal settings that it must accept."""

    message: str
    refused: Settings
    accepted: Settings
    cores: int = 1

    @property
    def chips(self) -> Sequence[str]:
        """Chips on which a logical core can have that many physical cores.

        For one core, a chip is chosen by the row's index.
        """
        return GEN3_ON[:1] if self.cores > 1 else ()


def refuse(message: str, accepted: Settings | None = None, cores: int = 1, **changes: Any) -> Refusal:
    """Return the refusal of `accepted` settings with some changes.

    The test checks that `accepted` alone is not refused.

    Args:
        message: Text of the refusal.
        accepted: Settings that are accepted; the case's defaults if not given.
        cores: Physical cores per rank.
        **changes: Settings that are refused.
    """
    accepted = accepted or {}
    return Refusal(message, {**accepted, **changes}, accepted, cores)


@dataclass(frozen=True)
class Limit:
    """The largest size that a kernel accepts.

    The test checks that the next smaller size is accepted, that values at the limit are right, and that the next
    larger size is refused. A dry limit is only planned and scheduled, without values.
    """

    name: str
    last: int
    message: str
    settings: Settings
    step: int = 1
    dry: bool = False

    def settings_at(self, steps: int) -> Settings:
        """Return the settings of a size that is some steps larger than the limit; negative steps are smaller."""
        return {**self.settings, self.name: self.last + steps * self.step}


def limit(name: str, last: int, message: str, step: int = 1, dry: bool = False, **settings: Any) -> Limit:
    """Return the limit of a setting.

    Args:
        name: Name of the setting.
        last: Largest accepted value.
        message: Text of the refusal of the next value.
        step: Difference of neighbouring values.
        dry: Whether to leave out values.
        **settings: Other settings.
    """
    return Limit(name, last, message, settings, step, dry)


Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Undefined:
    """Elements of arguments that are undefined, and the parts of the outputs that must not depend on them.

    Attributes:
        elements: Index of the elements by the name of their argument, or a function that finds it from the arguments.
        settings: Settings of the launch.
        value: Value written to the elements.
        rows: Rows of every output that may depend on the value, and of the first output must; a list for all outputs,
            or a function that returns one for each.
        kept: Function that returns the parts of the outputs that must not change; all of them by default.
        chips: Chips to try; those of the case by default.
    """

    elements: Mapping[str, Any]
    settings: Settings = field(default_factory=dict)
    value: float = np.nan
    rows: Sequence[int] | Callable[[Arguments], Sequence[Any]] = ()
    kept: Callable[[Arguments, Sequence[np.ndarray]], Sequence[np.ndarray]] | None = None
    chips: Sequence[str] = ()

    def poison(self, arguments: Arguments) -> dict[str, Any]:
        """Return copies of the arguments with the value written to the elements."""
        poisoned = dict(zip(arguments, copied(tuple(arguments.values()))))
        for name, index in self.elements.items():
            poisoned[name][index(arguments) if callable(index) else index] = self.value
        return poisoned

    def compare(self, arguments: Arguments, clean: Sequence[Any], reached: Sequence[Any]) -> None:
        """Assert that the value changed its rows of the first output, and no other row of any output.

        clean and reached: outputs without and with the value.
        """
        for row in self.rows(arguments)[0] if callable(self.rows) else self.rows:
            assert not np.isfinite(reached[0][row].astype(F32)).all()
        rows = self.rows(arguments) if callable(self.rows) else [self.rows] * len(clean)
        if self.kept is not None:
            clean, reached = self.kept(arguments, clean), self.kept(arguments, reached)
        for expected, output, excluded in zip(clean, reached, rows):
            assert np.array_equal(np.delete(expected, excluded, axis=0), np.delete(output, excluded, axis=0))


@dataclass(frozen=True)
class Ranks:
    """A launch whose arguments are divided over ranks, with the outputs of one rank that has all of them.

    Attributes:
        count: Number of ranks.
        axes: Axis by the name of each argument that is divided.
        settings: Settings of the launch on one rank.
        extra_arguments: Arguments that only launches on several ranks get.
        joined: Whether the ranks' outputs are joined along the rows; otherwise each rank returns all of them.
        alike: Whether all ranks return the same bytes, even if sums are added in other orders.
        seeds: Number of schedules of each rank's two physical cores that must agree; 0 for one core.
        chips: Chips to try; one by default.
    """

    count: int
    axes: Mapping[str, int]
    settings: Settings = field(default_factory=dict)
    extra_arguments: Settings = field(default_factory=dict)
    joined: bool = False
    alike: bool = True
    seeds: int = 0
    chips: Sequence[str] = ()

    def shards(self, arguments: Arguments) -> list[tuple[Any, ...]]:
        """Return the arguments of each rank."""
        group = ReplicaGroup([list(range(self.count))])
        all_arguments = {**arguments, "replica_group": group, **self.extra_arguments}
        slices = [
            {
                name: np.split(all_arguments[name], self.count, axis)[rank].copy()
                for name, axis in self.axes.items()
            }
            for rank in range(self.count)
        ]
        return [tuple((all_arguments | rank_slices)[name] for name in arguments) for rank_slices in slices]

    def join_outputs(self, outputs: Sequence[Any]) -> list[tuple[np.ndarray, ...]]:
        """Return outputs to compare with those of one rank: the joined ones, or each rank's."""
        outputs = [as_tuple(output) for output in outputs]
        if self.joined:
            return [tuple(np.concatenate(shards) for shards in zip(*outputs))]
        for output in outputs if self.alike else ():
            assert all(map(np.array_equal, output, outputs[0]))
        return outputs[:1] if self.alike else outputs


def exactly(outputs: Sequence[np.ndarray], reference: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Assert that dtypes and values equal the reference's; used as the tolerance of kernels that only move numbers."""
    for output, expected in zip(outputs, as_tuple(reference(*copied(arguments))), strict=True):
        assert output.dtype == expected.dtype and np.array_equal(output, expected, equal_nan=True)


@dataclass(frozen=True)
class KernelCase:
    """One kernel and all that its tests try.

    Values are computed on one chip for each case, chosen by the case's index, in `make test` for some of the cases.
    `make deep` computes all, and those of `every_chip` on all chips. A kernel has the latter if and only if it asks for
    the chip: what it computes, or the order of a sum, depends on `nisa.get_nc_version`. Questions of `CHANGE_NO_VALUE`
    do not count. Both directions are checked in every run.

    Attributes:
        kernel: A kernel of the package.
        draw: Draws its arguments, in their order; every parameter has a default.
        values: Settings whose outputs are compared with the reference.
        every_chip: Settings whose outputs are compared with the reference on one chip, and by `make deep` on all.
        refusals: Settings that are refused, with accepted twins.
        limits: Last sizes that are taken; on the chip with the smallest SBUF.
        fits: Settings that are planned and placed without computing numbers, on the chip with the smallest SBUF.
        undefined: Elements that do not reach results; on all chips if the kernel asks for the chip.
        two_cores: Settings that a logical core of two physical ones computes with the bytes of one.
        two_sums: Settings that two physical cores compute with sums in another order than one.
        ranks: Launches over ranks, without findings.
        tolerance: Compares outputs with a reference of arguments.
        reference: Computes the outputs in numpy; that of the package by default.
        seeds: Schedules of two physical cores that have to agree, and no launch may have findings; by default findings
            are not looked for.
        undivided: Outputs of `two_sums` that have the bytes of one core.
        replays: Whether launches are replayed as well; not where written bytes depend on data, or where programs are
            long ones of what other cases replay.
    """

    kernel: Any
    draw: Callable[..., Sequence[Any]]
    values: Sequence[Any] = ()
    every_chip: Sequence[Any] = ()
    refusals: Sequence[Refusal] = ()
    limits: Sequence[Limit] = ()
    fits: Sequence[Any] = ()
    undefined: Sequence[Undefined] = ()
    two_cores: Sequence[Any] = ()
    two_sums: Sequence[Any] = ()
    ranks: Sequence[Any] = ()
    tolerance: Callable[..., None] = compare_all
    reference: Callable[..., Any] | None = None
    seeds: int | None = None
    undivided: Sequence[int] = ()
    replays: bool = True

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """Return the kernel's arguments by name, drawn for some settings.

        An array or a function replaces the argument of its name; a function gets the drawn argument. Another setting
        is passed to `draw` if `draw` has a parameter of its name, and replaces an argument otherwise.
        """
        names = inspect.signature(self.draw).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        parameters = inspect.signature(self.kernel).parameters
        drawn = {
            name: value
            for name, value in settings.items()
            if (takes_all or name in names) and not isinstance(value, np.ndarray | FunctionType)
        }
        bound = inspect.signature(self.kernel).bind_partial(*self.draw(**drawn))
        bound.apply_defaults()
        for name in settings.keys() - drawn.keys():
            assert name in parameters, f"{name} is a parameter of neither the draw nor the kernel"
            value = settings[name]
            bound.arguments[name] = value(bound.arguments[name]) if isinstance(value, FunctionType) else value
        return {name: bound.arguments[name] for name in parameters}

    def compare(self, outputs: Any, arguments: Arguments) -> None:
        """Assert that the outputs of a launch are within the tolerance of the reference."""
        reference = self.reference or getattr(nki_kernels, f"{self.kernel.__name__}_reference")
        self.tolerance(as_tuple(outputs), reference, tuple(arguments.values()))

    def check(self, settings: Settings, target: str) -> None:
        """Launch a kernel eagerly and by replay, and compare the values with the reference.

        Fails too if the kernel asks for the chip and the case has no `every_chip`, or the other way round.
        """
        arguments = self.arguments(settings)
        with asking() as askers:
            if self.replays:
                ways = in_every_way(self.kernel, tuple(arguments.values()), target)[:2]
            else:
                ways = [self.run(arguments, target)]
        for outputs in ways:
            self.compare(outputs, arguments)
        assert not askers or self.every_chip, f"{sorted(askers)} ask for the chip: move cases to every_chip"

    def dry(self, settings: Settings, target: str) -> None:
        """Plan and schedule a launch without computing values."""
        with undrawn():
            arguments = self.arguments(settings)
        world = simulate.World(target)
        world.launch(self.kernel, [(tuple(arguments.values()), {})], mode=simulate.Mode.dry)

    def run(self, arguments: Arguments, target: str = "trn2", cores: int = 1) -> tuple[Any, ...]:
        """Return the outputs of an eager launch; assert that it changes no argument that the kernel does not update."""
        inputs, launches = copied(tuple(arguments.values())), []
        world = simulate.World(target, logical_core_size=cores)

        def launch() -> None:
            launches.append(world.launch(self.kernel, [(inputs, {})]))

        if self.seeds is None:
            launch()
        else:
            assert find_faults(launch, seeds=self.seeds if cores > 1 else 0) == []
        outputs = as_tuple(launches[0].outputs[0])
        for before, after in zip(arguments.values(), inputs):
            if isinstance(after, np.ndarray) and not any(after is output for output in outputs):
                assert before.tobytes() == after.tobytes()
        return outputs


@contextmanager
def asking() -> Iterator[set[tuple[str, str]]]:
    """Yield a set that collects the (module, function) pairs that ask for the chip.

    Those of CHANGE_NO_VALUE are removed at the end of the block.
    """
    askers, answer = set(), nisa.get_nc_version

    def get_nc_version() -> Any:
        frame = sys._getframe(1)
        askers.add((frame.f_globals["__name__"], frame.f_code.co_name))
        return answer()

    nisa.get_nc_version = get_nc_version
    try:
        yield askers
    finally:
        nisa.get_nc_version = answer
        askers -= CHANGE_NO_VALUE


USUAL, QUICK = 3, 9
"""Steps in which `make test` and `make test-fast` take the rows of a table; `make deep` takes all."""
TABLES = "values every_chip refusals limits fits undefined two_cores two_sums ranks".split()


class KernelTests:
    """The tests of a `KernelCase`, which each subclass has in `case`."""

    case: KernelCase

    def __init_subclass__(cls) -> None:
        """Remove the tests for which the case has no rows."""
        for name in TABLES:
            if not getattr(cls.case, name):
                setattr(cls, f"test_{name}", None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise a test with the rows of the case's table, and with the chips of each row."""
        table, rows = metafunc.function.__name__.removeprefix("test_"), []
        for index, row in enumerate(getattr(self.case, table)):
            is_quick = table == "refusals" or index % QUICK == 0
            marks = [] if is_quick and not isinstance(row, Slow) else [pytest.mark.slow]
            row = row.row if isinstance(row, Slow) else row
            for target in getattr(row, "chips", ()) or self.chips(table, index):
                is_deep = table == "every_chip" and target != TARGETS[index % len(TARGETS)]
                is_deep |= table not in ("refusals", "limits") and index % USUAL > 0
                deep = [pytest.mark.deep] if is_deep else []
                name = f"{target}-{describe(row)}"
                rows.append(pytest.param(row, target, marks=[*marks, *deep], id=name))
        metafunc.parametrize(["row", "target"], rows)

    def chips(self, table: str, index: int) -> Sequence[str]:
        """Return the chips on which row `index` of a table runs."""
        if table in ("two_cores", "two_sums", "ranks"):
            return [TARGETS[1 + index % 2]]
        if table in ("limits", "fits"):
            return [SMALLEST]
        every = table == "every_chip" or (table == "undefined" and self.case.every_chip)
        return TARGETS if every else [TARGETS[index % len(TARGETS)]]

    def test_values(self, row: Settings, target: str) -> None:
        self.case.check(row, target)

    def test_every_chip(self, row: Settings, target: str) -> None:
        with asking() as askers:
            self.case.run(self.case.arguments(row), target)
        assert askers, "the kernel does not ask for the chip: move this case to values"
        self.case.check(row, target)

    def test_refusals(self, row: Refusal, target: str) -> None:
        self.case.run(self.case.arguments(row.accepted), target, row.cores)
        with pytest.raises((AssertionError, NkwError)) as refused:
            self.case.run(self.case.arguments(row.refused), target, row.cores)
        assert row.message in str(refused.value)

    def test_limits(self, row: Limit, target: str) -> None:
        self.case.dry(row.settings_at(-1), target)
        self.case.dry(row.settings_at(0), target) if row.dry else self.case.check(row.settings_at(0), target)
        with pytest.raises((AssertionError, NkwError)) as refused:
            self.case.dry(row.settings_at(1), target)
        assert row.message in str(refused.value)

    def test_fits(self, row: Settings, target: str) -> None:
        self.case.dry(row, target)

    def test_undefined(self, row: Undefined, target: str) -> None:
        arguments = self.case.arguments(row.settings)
        clean, reached = (self.case.run(inputs, target) for inputs in (arguments, row.poison(arguments)))
        self.case.compare(clean, arguments)
        row.compare(arguments, clean, reached)

    def test_two_cores(self, row: Settings, target: str) -> None:
        arguments = self.case.arguments(row)
        for one, both in zip(*(self.case.run(arguments, target, cores) for cores in (1, 2)), strict=True):
            assert one.dtype == both.dtype and one.tobytes() == both.tobytes()

    def test_two_sums(self, row: Settings, target: str) -> None:
        arguments = self.case.arguments(row)
        both = self.case.run(arguments, target, 2)
        self.case.compare(both, arguments)
        if self.case.undivided:
            one = self.case.run(arguments, target)
            assert all(one[number].tobytes() == both[number].tobytes() for number in self.case.undivided)

    def test_ranks(self, row: Ranks, target: str) -> None:
        arguments = self.case.arguments(row.settings)
        world, outputs = simulate.World(target, row.count, 2 if row.seeds else 1), []
        shards = row.shards(arguments)

        def launch() -> None:
            outputs.append(world.launch(self.case.kernel, [(copied(shard), {}) for shard in shards]).outputs)

        assert find_faults(launch, orders=2 * row.alike, seeds=row.seeds) == []
        for output in row.join_outputs(outputs[0]):
            self.case.compare(output, arguments)


def describe(row: Any) -> str:
    """Return a row's settings as text: the id of its test."""
    if isinstance(row, Refusal):
        return row.message.replace("::", ":")
    if isinstance(row, Limit):
        return f"{row.name}-{row.last}"
    if isinstance(row, Ranks):
        return f"{row.count}-{describe(row.settings)}"
    settings = {**row.elements, **row.settings} if isinstance(row, Undefined) else row
    words = []
    for name, value in settings.items():
        if isinstance(value, type):
            value = np.dtype(value).name
        plain = value is None or isinstance(value, str | int | float | tuple)
        words.append(f"{name}={value}" if plain else name)
    return "-".join(words).replace(" ", "") or "base"
