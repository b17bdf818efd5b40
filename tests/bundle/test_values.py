"""Comparing outputs: tiles, elements, ulps, bounds; and who is blamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nkw.terminal import rendered
from simulate.bundle.blame import Comparison, Fault, compare_cases
from simulate.bundle.compare import make_report
from simulate.bundle.manifest import Bundle, Output, Tolerance, load_bundle
from simulate.bundle.result import CaseResult, Environment, Result, Times, Values
from simulate.bundle.run import digest_tiles, split_tiles
from simulate.bundle.values import Agreement, compare_arrays, ulps_between

BOUND = Tolerance(0.75, 0.25, 1.0, 1, 1, "float32")


def output(array: np.ndarray, tolerance: Tolerance | None = BOUND) -> Output:
    return Output("output-0", "", array.shape, array.dtype.name, (128, 512), tolerance)


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3]
)
def test_neighbours_are_one_ulp_apart_over_all_values_of_a_dtype(dtype: type) -> None:
    bits = np.dtype(dtype).itemsize * 8
    every = np.arange(2**bits, dtype=f"uint{bits}").view(dtype)
    with np.errstate(invalid="ignore"):
        values = np.unique(every.astype(np.float64)[np.isfinite(every.astype(np.float64))])
    ordered = values.astype(dtype)
    assert np.all(ulps_between(ordered[1:], ordered[:-1]) == 1)
    assert ulps_between(np.zeros(1, dtype), -np.zeros(1, dtype))[0] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ulps_are_counted_as_nextafter_steps(dtype: type) -> None:
    values = np.array([0.0, 1.0, -1.0, 1e-45, -3e38], dtype)
    shifted = values
    for steps in range(4):
        assert np.all(ulps_between(values, shifted) == steps)
        shifted = np.nextafter(shifted, np.array(np.inf, dtype))


@pytest.mark.parametrize(
    ("change", "agreement"),
    [(0.0, Agreement.equal), (0.99, Agreement.within), (1.0, Agreement.within), (1.01, Agreement.wrong)],
)
def test_the_allowed_difference_is_bound_and_error_together(change: float, agreement: Agreement) -> None:
    expected = np.zeros((4, 4))
    seen = expected.copy()
    seen[2, 3] += change
    comparison = compare_arrays(output(expected), seen, expected)
    assert (comparison.agreement, comparison.allowed) == (agreement, 1.0)
    assert comparison.error == change
    assert (comparison.first.index if comparison.first else None) == ((2, 3) if change else None)


def test_the_first_tile_comes_before_the_first_row() -> None:
    """Tiles are looked at row by row: the one at (0, 0) before that at (0, 1), whichever has the lower row."""
    expected = np.zeros((200, 600), np.float32)
    seen = expected.copy()
    seen[100, 3] = seen[1, 599] = seen[130, 2] = 9.0
    comparison = compare_arrays(output(expected), seen, expected)
    assert comparison.first is not None and comparison.first.index == (100, 3)
    assert (comparison.tile, comparison.wrong_tiles, comparison.tiles, comparison.beyond) == ((0, 0), 3, 4, 3)


def test_an_element_beyond_the_bound_comes_before_one_within() -> None:
    expected = np.zeros((2, 4), np.float32)
    seen = expected.copy()
    seen[0, 0], seen[1, 1] = 0.5, 7.0
    comparison = compare_arrays(output(expected), seen, expected)
    assert comparison.first is not None and comparison.first.index == (1, 1)
    assert (comparison.beyond, comparison.differing) == (1, 2)


@pytest.mark.parametrize(("seen", "ulps"), [(np.nan, None), (np.inf, None), (3.0, 12582912)])
def test_nan_and_infinities_are_beyond_every_bound(seen: float, ulps: int | None) -> None:
    expected = np.ones((1, 1), np.float32)
    comparison = compare_arrays(output(expected), np.full((1, 1), seen, np.float32), expected)
    assert comparison.agreement is Agreement.wrong
    assert comparison.first is not None and comparison.first.ulps == ulps


def test_nan_in_the_same_place_is_equal_only_with_the_same_bits() -> None:
    expected = np.array([[np.nan]], np.float32)
    other = expected.view(np.uint32) ^ np.uint32(1)
    assert compare_arrays(output(expected), expected, expected).agreement is Agreement.equal
    assert compare_arrays(output(expected), other.view(np.float32), expected).agreement is Agreement.within


def test_integers_have_no_bound_and_unreferenced_floats_no_judgement() -> None:
    integers = np.zeros((2, 2), np.int32)
    assert compare_arrays(output(integers), integers + 1, integers).agreement is Agreement.wrong
    floats = integers.astype(np.float32)
    comparison = compare_arrays(output(floats, None), floats + 1, floats)
    assert (comparison.agreement, comparison.allowed, comparison.differing) == (Agreement.unbounded, None, 4)


@pytest.mark.parametrize(
    ("shape", "origins"),
    [
        ((), [(0, 0)]),
        ((5,), [(0, 0), (0, 4)]),
        ((3, 4), [(0, 0), (2, 0)]),
        ((2, 2, 4), [(0, 0), (2, 0)]),
        ((0, 4), []),
    ],
)
def test_tiles_take_leading_dims_as_rows(shape: tuple[int, ...], origins: list[tuple[int, int]]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found_tiles = list(split_tiles(array, 2, 4))
    assert [(row, column) for row, column, _ in found_tiles] == origins
    assert sum(tile.size for *_, tile in found_tiles) == array.size
    assert len(digest_tiles(array, 2, 4)) == len(origins)


# -- who is blamed ---------------------------------------------------------------------------------------------------


class Story:
    """A result of the bundle `travelling`, to be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundle: Bundle = load_bundle(folder)
        self.cases = {case.name: _equal(case) for case in self.bundle.cases}
        self.nki = "0.7.0"
        self.more: dict[str, object] = {}

    def wrong(self, *names: str) -> Story:
        """Return something else from these cases: an array of another shape."""
        for name in names:
            case = self.cases[name]
            first, *remaining = case.outputs
            self.cases[name] = replace(case, outputs=(replace(first, shape=(1,), tiles=None), *remaining))
        return self

    def timed(self, **times_ns: float) -> Story:
        """Set times of cases on the device."""
        for name, ns in times_ns.items():
            self.cases[name] = replace(self.cases[name], times=Times(0, (ns,), ns, 0.0, "device"))
        return self

    def failed(self, name: str, stage: str, error_type: str = "RuntimeError") -> Story:
        """Set a case that failed."""
        case = self.cases[name]
        self.cases[name] = replace(
            case, status="failed", stage=stage, error=(error_type, "it says"), outputs=()
        )
        return self

    def with_findings(self, name: str, *codes: str) -> Story:
        """Set what nkw check had found when the bundle was made."""
        cases = tuple(
            replace(case, findings=codes) if case.name == name else case for case in self.bundle.cases
        )
        self.bundle = replace(self.bundle, cases=cases)
        return self

    def told(self) -> Comparison:
        """Return the comparison."""
        environment = Environment("3.11", "Linux", {"nki": self.nki}, None, (), {})
        result = Result(
            self.bundle.digest, "trn2", "", "then", environment, "nki", tuple(self.cases.values()), ()
        )
        return compare_cases(self.folder, self.bundle, replace(result, **self.more), True)  # type: ignore[arg-type]

    def blamed(self) -> list[tuple[Fault, int, tuple[str, ...]]]:
        """Return fault, rule and cases."""
        told = self.told()
        assert told.agrees == (not told.likely)
        assert all(
            f"(rule {blame.rule})" in " ".join(rendered(make_report(told)).split()) for blame in told.likely
        )
        return [(blame.fault, blame.rule, blame.cases) for blame in told.likely]


def _equal(case: object) -> CaseResult:
    """Return a case whose digests are those expected."""
    from simulate.bundle.manifest import Case

    assert isinstance(case, Case)
    return CaseResult(case.name, "ran", None, None, None, (), None, None)


@pytest.fixture
def story(bundle: Path) -> Story:
    """All four cases ran and are equal: their digests are."""
    told = Story(bundle)
    for case in told.bundle.cases:
        values = []
        for output in case.outputs:
            digests = digest_tiles(np.load(bundle / output.file), *output.tile)
            values.append(Values(output.name, output.dtype, output.shape, None, tuple(digests)))
        told.cases[case.name] = replace(told.cases[case.name], outputs=tuple(values))
    return told


def test_equal_digests_agree(story: Story) -> None:
    assert story.blamed() == []
    assert rendered(make_report(story.told())).startswith("all 4 cases are equal")


def test_two_wrong_kernels_with_an_instruction_of_their_own_blame_its_model(story: Story) -> None:
    assert story.wrong("scaled", "shifted").blamed() == [(Fault.simulator, 6, ("scaled", "shifted"))]


def test_wrong_kernels_without_a_common_instruction_are_taken_one_by_one(story: Story) -> None:
    told = story.wrong("scaled", "doubled").blamed()
    assert told == [(Fault.kernel, 7, ("scaled",)), (Fault.simulator, 8, ("doubled",))]


def test_one_wrong_kernel_whose_instructions_are_right_elsewhere_is_blamed(story: Story) -> None:
    assert story.wrong("scaled").blamed() == [(Fault.kernel, 7, ("scaled",))]


def test_one_wrong_kernel_with_an_instruction_of_its_own_blames_the_model(story: Story) -> None:
    assert story.wrong("doubled").blamed() == [(Fault.simulator, 8, ("doubled",))]


def test_findings_of_check_blame_the_kernel(story: Story) -> None:
    told = story.wrong("doubled").with_findings("doubled", "NKW-RACE").blamed()
    assert told == [(Fault.kernel, 5, ("doubled",))]


def test_nothing_right_leaves_it_undecided(story: Story) -> None:
    story.cases = {"doubled": story.cases["doubled"]}
    assert story.wrong("doubled").blamed() == [(Fault.undecided, 9, ("doubled",))]


def test_another_release_is_blamed_before_kernels_and_instructions(story: Story) -> None:
    story.nki = "0.6.1"
    assert story.blamed() == []  # it agrees all the same
    assert story.wrong("doubled", "scaled").blamed() == [(Fault.environment, 3, ("scaled", "doubled"))]


@pytest.mark.parametrize("stage", ["compile", "run"])
def test_a_refusal_blames_the_kernel_with_findings_else_the_simulator(story: Story, stage: str) -> None:
    assert story.failed("doubled", stage).blamed() == [(Fault.simulator, 4, ("doubled",))]
    assert story.with_findings("doubled", "NKW-RACE").blamed() == [(Fault.kernel, 4, ("doubled",))]


@pytest.mark.parametrize(
    ("stage", "error_type"), [("import", "ImportError"), ("run", "Crash"), ("compile", "Timeout")]
)
def test_imports_crashes_and_hangs_blame_the_environment(story: Story, stage: str, error_type: str) -> None:
    assert story.failed("doubled", stage, error_type).blamed() == [(Fault.environment, 2, ("doubled",))]


@pytest.mark.parametrize(
    "more",
    [{"bundle": "another"}, {"target": "trn1"}, {"finished": None}],
    ids=lambda change: next(iter(change)),
)
def test_a_run_of_other_files_or_cut_short_blames_the_environment(
    story: Story, more: dict[str, object]
) -> None:
    story.more = more
    assert story.blamed() == [(Fault.environment, 1, ())]


@pytest.mark.parametrize(("share", "inside"), [(0.999, False), (1.0, True)])
def test_the_bracket_ends_at_the_shortest_reading(story: Story, share: float, inside: bool) -> None:
    low = story.bundle.cases[2].predicted.bracket_ns[0]
    assert story.timed(doubled=low * share).told().cases[2].inside is inside


@pytest.mark.parametrize(("more_ns", "inside"), [(0.0, True), (1.0, False)])
def test_the_bracket_ends_at_the_longest_reading_with_the_overhead(
    story: Story, more_ns: float, inside: bool
) -> None:
    predicted = story.bundle.cases[2].predicted
    high = max(predicted.bracket_ns) + predicted.overhead_ns
    assert story.timed(doubled=high + more_ns).told().cases[2].inside is inside


def test_times_blame_the_costs_of_an_instruction_or_the_schedule(story: Story) -> None:
    fits = {case.name: sum(case.predicted.bracket_ns) / 2 for case in story.bundle.cases}
    assert story.timed(**fits).blamed() == []
    assert story.timed(scaled=1e9, shifted=1e9).blamed() == [(Fault.simulator, 10, ("scaled", "shifted"))]
    story.timed(
        **fits,
    )
    assert story.timed(doubled=1e9).blamed() == [(Fault.simulator, 10, ("doubled",))]
    story.timed(**dict.fromkeys(fits, 1e9))
    assert {fault for fault, *_ in story.blamed()} == {Fault.undecided}
