"""One run against another: the causes add up to the difference, and lines are matched as an edit leaves them."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from nkw.terminal import rendered
from simulate.hardware import TARGETS, hardware
from simulate.profile import profile
from simulate.profile.comparison.compare import Comparison, match_lines
from simulate.profile.comparison.measured import Measured, PathPart, SourceLine, sum_profiles
from simulate.profile.comparison.text import format_verdict, make_report
from simulate.profile.document import make_document
from simulate.run import Mode
from simulate.timing import Reading
from simulate.world import World
from tests.timing import kernels
from tests.timing.streams import random_streams
from tools.timelines import cases


def adds_up(comparison: Comparison) -> None:
    """Assert that every grouping of the causes has the difference of the lengths as its sum.

    Each length is a sum over the moments of its path: every part of it rounds by at most half a unit in the last place
    of the longer length, and so does every addition.
    """
    now, against = comparison.now, comparison.against
    terms = len(now.path) + len(against.path) + 8
    most = 4 * terms * float(np.spacing(max(now.length_ns, against.length_ns, 1.0)))
    for causes in (comparison.lines, comparison.engines, comparison.phases):
        assert abs(math.fsum(cause.change for cause in causes) - comparison.change_ns) <= most
        assert abs(math.fsum(cause.now for cause in causes) - now.length_ns) <= most
        assert abs(math.fsum(cause.against for cause in causes) - against.length_ns) <= most
        sizes = [abs(cause.change) for cause in causes]
        assert sizes == sorted(sizes, reverse=True)
    moved = [sum(read + written for _, read, written in run.traffic) for run in (against, now)]
    assert sum(tensor.change for tensor in comparison.tensors) == moved[1] - moved[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_causes_between_stored_kernels_add_up(target: str) -> None:
    runs = []
    for case in cases():
        done = World(target, ranks=case.ranks).launch(
            case.kernel, [(case.arguments, {})] * case.ranks, mode=Mode.dry
        )
        runs.append(sum_profiles([profile(done.streams, done.hardware, case.name)], [0]))
    changes = 0
    for against, now in [*pairwise(runs), (runs[-1], runs[0])]:
        adds_up(Comparison(now, against))
        changes += now.length_ns != against.length_ns
    assert changes == len(runs)


@pytest.mark.parametrize("reading", Reading)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_causes_between_random_streams_add_up(reading: Reading, ranks: int) -> None:
    chip = hardware("trn2")
    runs = [
        sum_profiles([profile(random_streams(seed, ranks=ranks), chip, "random", reading)], [0])
        for seed in range(12)
    ]
    for against, now in pairwise(runs):
        adds_up(Comparison(now, against))


def test_launches_are_added_up_as_often_as_they_ran() -> None:
    done = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    launch_profile = profile(done.streams, done.hardware, "matmul_exp")
    once, thrice = sum_profiles([launch_profile], [0]), sum_profiles([launch_profile], [0, 0, 0])
    adds_up(Comparison(thrice, once))
    assert thrice.length_ns == 3 * once.length_ns
    assert thrice.floor_ns == 3 * once.floor_ns
    assert Comparison(thrice, once).tensors[0].now == 3 * Comparison(thrice, once).tensors[0].against


def test_the_document_has_the_parts_of_the_path() -> None:
    done = kernels.dry(kernels.matmul_exp, kernels.zeros(256, 128), kernels.zeros(256, 512))
    document = json.loads(json.dumps(make_document(profile(done.streams, done.hardware)), allow_nan=False))
    texts = {row["text"] for row in document["path"]}
    assert "nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, accumulate=k > 0)" in texts
    assert math.isclose(math.fsum(row["ns"] for row in document["path"]), document["length_ns"], rel_tol=1e-9)


def lines(file: str, *texts: str, first: int = 1) -> list[SourceLine]:
    return [SourceLine(file, number, "kernel", text) for number, text in enumerate(texts, first)]


def numbers(pairs: list[tuple[SourceLine | None, SourceLine | None]]) -> list[tuple[int | None, int | None]]:
    """Return the pairs as line numbers, in order of the new ones."""
    line_numbers = [(one and one.line, other and other.line) for one, other in pairs]
    return sorted(line_numbers, key=lambda pair: (pair[1] is None, pair[1] or pair[0]))


def test_lines_of_an_equal_file_match_by_number() -> None:
    one = lines("k.py", "load(x)", "load(x)", "add()", "store()")
    assert numbers(match_lines([one[0], one[2], one[3]], [one[1], one[2]])) == [(1, 2), (3, 3), (4, None)]
    assert numbers(match_lines(one, one)) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_lines_of_an_edited_file_match_by_text_in_order() -> None:
    before = lines("k.py", "load(x)", "load(x)", "add()", "store()")
    shifted = lines("k.py", "load(x)", "load(x)", "add()", "store()", first=2)
    assert numbers(match_lines(before, shifted)) == [(1, 2), (2, 3), (3, 4), (4, 5)]
    edited = lines("k.py", "load(y)", "load(x)", "load(x)", "multiply()", "store()")
    assert numbers(match_lines(before, edited)) == [(None, 1), (1, 2), (2, 3), (None, 4), (4, 5), (3, None)]


def test_lines_of_different_files_match_by_text_also_where_they_moved() -> None:
    before = lines("one.py", "load(x)", "add()", "multiply()", "store()")
    after = lines("other.py", "multiply()", "load(x)", "add()", "store()")
    assert numbers(match_lines(before, after)) == [(3, 1), (1, 2), (2, 3), (4, 4)]


def test_a_line_without_a_text_is_known_by_its_function() -> None:
    before, after = [SourceLine("one.py", 3, "kernel", "")], [SourceLine("other.py", 9, "kernel", "")]
    assert match_lines(before, after) == [(before[0], after[0])]
    other = [SourceLine("other.py", 9, "helper", "")]
    assert match_lines(before, other) == [(None, other[0]), (before[0], None)]


def run(length_ns: float, line: SourceLine | None = None, title: str = "run") -> Measured:
    path_part = PathPart(
        line or SourceLine("k.py", 3, "kernel", "add()"), "tensor_tensor", "Vector", "issue", length_ns
    )
    return Measured(title, "program", length_ns, 50.0, "memory", (path_part,), (("x", 2_000_000, 0),))


@pytest.mark.parametrize(
    ("against_ns", "share", "limit_ns"),
    [(1000.0, "1/4", 1250.0), (1024.0, "0", 1024.0), (0.0, "2", 0.0), (3.0, "1/3", 4.0)],
)
def test_only_a_time_above_the_limit_is_too_slow(against_ns: float, share: str, limit_ns: float) -> None:
    below, above = math.nextafter(limit_ns, -math.inf), math.nextafter(limit_ns, math.inf)
    verdicts = [
        Comparison(run(length_ns), run(against_ns)).slower_by_more_than(Fraction(share))
        for length_ns in (below, limit_ns, above)
    ]
    assert verdicts == [False, False, True]


def test_a_comparison_says_which_lines_only_one_run_has() -> None:
    added, removed = SourceLine("new.py", 5, "kernel", "exp()"), SourceLine("old.py", 7, "kernel", "add()")
    report = rendered(make_report(Comparison(run(2500.0, added, "now"), run(2000.0, removed, "before"))))
    assert report == (
        "now: 2.500 us (program reading)\n"
        "against before: 2.000 us\n"
        "change: 0.500 us, 25.0 % slower\n"
        "roofline: 0.050 us (memory bound), 2.0 % of the length; against 0.050 us\n"
        "  (memory bound), 2.5 % of the length\n"
        "\n"
        "critical path, by line         against us     us  change us\n"
        "tensor_tensor new.py:5 (new)        0.000  2.500     +2.500\n"
        "  exp()\n"
        "tensor_tensor old.py:7 (gone)       2.000  0.000     -2.000\n"
        "  add()\n"
        "all                                 2.000  2.500     +0.500\n"
        "\n"
        "critical path, by engine or queue  against us     us  change us\n"
        "Vector                                  2.000  2.500     +0.500\n"
        "all                                     2.000  2.500     +0.500\n"
        "\n"
        "critical path, by phase  against us     us  change us\n"
        "issue                         2.000  2.500     +0.500\n"
        "all                           2.000  2.500     +0.500\n"
        "\n"
        "HBM tensor  against MB     MB  change MB\n"
        "1 more           2.000  2.000     +0.000\n"
        "all              2.000  2.000     +0.000\n"
    )


@pytest.mark.parametrize(
    ("now_ns", "verdict"),
    [
        (2000.0, "no difference"),
        (2000.25, "less than 0.001 us"),
        (2001.0, "0.001 us, 0.1 % slower"),
        (1500.0, "0.500 us, 25.0 % faster"),
    ],
)
def test_the_verdict_says_how_much(now_ns: float, verdict: str) -> None:
    assert format_verdict(Comparison(run(now_ns), run(2000.0))) == verdict


def test_more_causes_than_rows_are_one_row() -> None:
    source_lines = lines("k.py", *(f"step({number})" for number in range(12)))
    path = [PathPart(line, "activation", "Scalar", "issue", 100.0 * line.line) for line in source_lines]
    measured = Measured("many", "program", 7800.0, 1.0, "compute", tuple(path), ())
    none = Measured("none", "program", 0.0, 0.0, "memory", (), ())
    rows = rendered(make_report(Comparison(measured, none), rows=3)).splitlines()
    assert [row.split()[-1] for row in rows if " k.py:" in row] == ["+1.200", "+1.100", "+1.000"]
    assert any(row.split() == ["9", "more", "0.000", "4.500", "+4.500"] for row in rows)
    assert rows[2] == "change: 7.800 us slower"
