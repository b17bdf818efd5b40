"""Launches, profiles, occupancies and tiles as `print` and a notebook show them, and the functions of kernels."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import nki_kernels
import simulate
from nkw.errors import InvalidArgument, NkwError, RuleViolation
from nkw.report import Hanging, Name, Noted, as_html, draw_verbatim, table
from nkw.terminal import rendered
from simulate.isa.book import CallError
from simulate.memory import MemoryRegion
from simulate.occupancy import Occupancy, occupancies, verdict
from simulate.occupancy import text as memory_text
from simulate.profile import Profile
from simulate.profile import profile as profile_of_streams
from simulate.profile import text as profile_text
from simulate.timing import Reading

X = np.ones((128, 512), np.float32)
WEIGHT = np.ones((1, 512), np.float32)
NORM = (nki_kernels.rmsnorm, X, WEIGHT, 1e-5)

TRACKS = "track", "busy us", "busy", "idle us", "slices"


class Cells(HTMLParser):
    """The words of HTML that a browser shows; those of the cells of its tables as well, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open  # every element is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.words += data.split()
        if {"td", "th"} & {*self._open}:
            self.rows[-1][-1] += data


def words_of(page: str) -> list[str]:
    """Return the words that a browser shows of HTML."""
    return Cells(page).words


def wide(record: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of a report in which nothing is cut."""
    monkeypatch.setattr("nkw.terminal.COLUMNS", 1000)
    return str(record).split()


def tall(x: Any, columns: int) -> Any:
    """Fill, then store two tiles that live together, of `columns` float32 columns in all."""
    out = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    left = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    right = nl.ndarray((128, columns - 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=left, value=1.0)
    nisa.memset(dst=right, value=1.0)
    nisa.dma_copy(dst=out[:, 0:128], src=left)
    nisa.dma_copy(dst=out[:, 128:columns], src=right)
    return out


def test_profile_of_a_kernel_is_that_of_its_dry_launch() -> None:
    profiled = simulate.profile(*NORM, target="trn1", reading=Reading.serial)
    launch = simulate.World("trn1").launch(NORM[0], [(NORM[1:], {})], simulate.Mode.dry)
    other = profile_of_streams(launch.streams, launch.hardware, "rmsnorm on trn1", Reading.serial)
    assert isinstance(profiled, Profile)
    assert (profiled.title, profiled.length_ns, profiled.traffic) == (
        other.title,
        other.length_ns,
        other.traffic,
    )
    assert profiled.calling_lines and not other.calling_lines  # callers are kept without asking


def test_profile_and_occupancy_take_keywords_of_the_kernel_and_trip_counts() -> None:
    by_name = simulate.profile(nki_kernels.rmsnorm, X, weight=WEIGHT, eps=1e-5)
    assert by_name.length_ns == simulate.profile(*NORM).length_ns
    assert simulate.occupancy(nki_kernels.rmsnorm, X, weight=WEIGHT, eps=1e-5) == simulate.occupancy(*NORM)
    with pytest.raises(InvalidArgument, match="NKW-TRIPS"):
        simulate.profile(*NORM, trips=-1)


def test_the_target_is_that_of_the_environment_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    assert (simulate.profile(*NORM).hardware.name, simulate.occupancy(*NORM).chip) == ("trn1", "trn1")
    assert simulate.profile(*NORM, target="trn3").hardware.name == "trn3"


def test_occupancy_of_a_kernel_is_that_of_its_launch_with_callers() -> None:
    occupied = simulate.occupancy(*NORM, target="trn1")
    with simulate.recorded(calls=True):
        launch = simulate.World("trn1").launch(NORM[0], [(NORM[1:], {})], simulate.Mode.dry)
    assert isinstance(occupied, Occupancy)
    assert (occupied,) == occupancies(launch)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_occupancy_shows_also_what_does_not_fit(more: int) -> None:
    usable = simulate.occupancy(*NORM).sbuf.usable_bytes
    occupied = simulate.occupancy(tall, X, usable // 4 + more)
    assert occupied.sbuf.peak_bytes == usable + 4 * more
    assert ("does not fit" in str(occupied)) == (more > 0)
    if more > 0:
        with pytest.raises(RuleViolation, match="NKW-CAPACITY"):
            simulate.profile(tall, X, usable // 4 + more)


def test_occupancy_of_a_kernel_that_is_refused_on_its_way_is_that_refusal() -> None:
    def unwritten(x: Any) -> Any:
        return nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.sbuf)

    with pytest.raises(RuleViolation, match="NKW-OUTPUT-MEMORY"):
        simulate.occupancy(unwritten, X)


def test_occupancy_of_two_cores_is_that_of_the_fuller_one() -> None:
    def uneven(x: Any) -> Any:
        out = nl.ndarray((2, 128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
        columns = 64 * (1 + nl.program_id(0))
        tile = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[:, 0:columns])
        nisa.dma_copy(dst=out[nl.program_id(0), :, 0:columns], src=tile)
        return out

    occupied = simulate.occupancy(uneven, X, cores=2)
    assert (occupied.core, occupied.sbuf.peak_bytes) == (1, 4 * 128)


REFUSED: list[tuple[Callable[[], object], type[NkwError], str]] = [
    (
        lambda: simulate.profile(3),
        InvalidArgument,
        "[NKW-KERNEL] simulate.profile got int as its first argument; ",
    ),  # type: ignore[arg-type]
    (
        lambda: simulate.occupancy([X]),
        InvalidArgument,
        "[NKW-KERNEL] simulate.occupancy got list as its first ",
    ),
    (
        lambda: simulate.profile(*NORM, target="trn9"),
        InvalidArgument,
        "[NKW-TARGET] 'trn9' is no known target; ",
    ),
    (
        lambda: simulate.occupancy(*NORM, target="trn9"),
        InvalidArgument,
        "[NKW-TARGET] 'trn9' is no known target; ",
    ),
    (lambda: simulate.profile(*NORM, cores=3), InvalidArgument, "[NKW-LNC]"),
    (
        lambda: simulate.profile(*NORM, reading="program"),
        InvalidArgument,
        "[NKW-TIMING-READING] 'program' is no",
    ),  # type: ignore[arg-type]
    (
        lambda: simulate.profile(nki_kernels.rmsnorm, X),
        CallError,
        "[NKW-KERNEL-CALL] rmsnorm() missing 2 required",
    ),
    (
        lambda: simulate.occupancy(nki_kernels.rmsnorm),
        CallError,
        "[NKW-KERNEL-CALL] rmsnorm() missing 3 required",
    ),
]


@pytest.mark.parametrize(
    ("call", "error_type", "words"),
    REFUSED,
    ids=lambda argument: argument if isinstance(argument, str) else "",
)
def test_bad_input_is_a_typed_error(
    call: Callable[[], object], error_type: type[NkwError], words: str
) -> None:
    with pytest.raises(error_type) as refusal:
        call()
    assert str(refusal.value).startswith(words)


def test_a_package_and_the_function_of_its_name_are_both_there() -> None:
    import simulate.occupancy
    import simulate.profile
    from simulate.profile import text

    assert callable(simulate.profile) and callable(simulate.occupancy) and callable(text)


def test_html_has_the_words_of_the_text_and_escapes_them() -> None:
    rows = [(Name("<i>/a.py:7", "op "), "1 < 2"), ("b & c", "3")]
    noted = Noted(table("na<me|number", rows), ["x < y", ""])
    report = [Hanging("<b> & 'c'", style="bold"), "", "a < b", noted, draw_verbatim(["+-> ", "  |<"])]
    page = as_html(report)
    assert words_of(page) == rendered(report).split()
    assert Cells(page).rows == [["na<me", "number"], ["op <i>/a.py:7", "1 < 2"], ["x < y"], ["b & c", "3"]]
    assert page.count("<table>") == 1 and '<p class="bold">&lt;b&gt;' in page
    assert "<script" not in page and "http" not in page
    assert "<pre>+-&gt; \n  |&lt;</pre>" in page  # as it was drawn


def test_a_profile_shows_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = simulate.profile(*NORM)
    assert (
        repr(profiled)
        == f"<profile of rmsnorm on trn2: {profiled.length_ns / 1000:.3f} us (program reading)>"
    )
    assert f"{profiled}\n" == profile_text(profiled)
    page = profiled._repr_html_()
    assert words_of(page) == wide(profiled, monkeypatch)
    rows = Cells(page).rows
    busy = f"{profiled.timeline.busy_ns['Vector'] / 1000:.3f}"
    assert ["Vector", busy] in [row[:2] for row in rows[rows.index([*TRACKS]) :]]


def test_an_occupancy_shows_its_picture_and_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    occupied = simulate.occupancy(*NORM, target="trn1")
    peak, usable, psum = occupied.sbuf.peak_bytes, occupied.sbuf.usable_bytes, occupied.psum.peak_bytes
    assert f"SBUF {peak:,} of {usable:,}, PSUM {psum:,} of" in repr(occupied)
    assert f"{occupied}\n" == memory_text(occupied)
    picture, report = occupied._repr_html_().split("<details>")
    assert "<svg" in picture and f"SBUF: {verdict(occupied.sbuf)}" in picture
    report = report.replace("<summary>as text</summary>", "").replace("</details>", "")
    assert words_of(report) == wide(occupied, monkeypatch)


def test_a_launch_shows_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    world = simulate.World("trn1", ranks=2)
    launch = world.launch(NORM[0], [(NORM[1:], {})] * 2)
    total = sum(map(len, launch.streams))
    assert repr(launch) == f"<launch of rmsnorm on trn1: eager, 2 ranks, 2 cores, {total} instructions>"
    shown = str(launch)
    copies = sum(event.op == "dma_copy" for stream in launch.streams for event in stream)
    assert f"\ndma_copy                  {copies}\n" in shown
    assert "   1       0  (128, 512) float32\n" in shown
    assert f"{launch.high_water_bytes(MemoryRegion.sbuf):,}" in shown
    page = launch._repr_html_()
    assert words_of(page) == wide(launch, monkeypatch)
    assert ["dma_copy", f"{copies}"] in Cells(page).rows


def test_the_warnings_of_a_launch_are_shown_escaped() -> None:
    def partly(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="a<b")
        nisa.dma_copy(dst=out[0:64, :], src=x[0:64, :])
        return out

    launch = simulate.World().launch(partly, [((X,), {})])
    assert len(launch.warnings) == 1
    assert "warning: " in str(launch) and "a<b" in str(launch)
    assert "a<b" not in launch._repr_html_() and "a&lt;b" in launch._repr_html_()


def test_a_launch_of_many_results_and_instructions_keeps_to_some_rows() -> None:
    for count in (11, 12, 13):
        launch = simulate.World().launch(many, [((X, count), {})])
        assert (f"and {count - 12} more" in str(launch)) == (count > 12)


def many(x: Any, count: int) -> Any:
    """Return `count` copies of an array."""
    outs = [nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(count)]
    for out in outs:
        nisa.dma_copy(dst=out, src=x)
    return tuple(outs)


@pytest.mark.parametrize("mode", [simulate.Mode.eager, simulate.Mode.dry])
def test_a_tile_shows_its_values_where_it_has_any(mode: simulate.Mode) -> None:
    seen: list[tuple[str, str]] = []

    def looked_at(x: Any) -> Any:
        out = nl.ndarray((2, 3), dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((2, 3), dtype=x.dtype, buffer=nl.sbuf, name="a<b")
        nisa.dma_copy(dst=tile[:, 0:2], src=x[0:2, 0:2])
        seen.append((repr(tile), tile._repr_html_()))
        nisa.dma_copy(dst=tile, src=x[0:2, 0:3])
        seen.append((repr(tile), tile._repr_html_()))
        nisa.dma_copy(dst=out, src=tile)
        return out

    simulate.World().launch(looked_at, [((X * 7.5,), {})], mode)
    for (text, page), last in zip(seen, ("undefined", "7.5")):
        assert "a&lt;b (2, 3) float32 in sbuf (allocated at " in page
        if mode is simulate.Mode.dry:
            assert "dry run: no values" in text and "no values: the launch is dry" in page
            assert Cells(page).rows == []
        else:
            assert ("not fully written" in text) == (last == "undefined")
            head, *values = Cells(page).rows
            assert head == ["partition", "0", "1", "2"]
            assert values == [["0", "7.5", "7.5", last], ["1", "7.5", "7.5", last]]


@pytest.mark.parametrize(("columns", "cut"), [(7, False), (8, False), (9, True)])
def test_of_many_values_the_first_and_the_last_are_shown(columns: int, cut: bool) -> None:
    seen: list[list[list[str]]] = []

    def looked_at(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        seen.extend(Cells(tensor._repr_html_()).rows for tensor in (tile, x, tile[100:104]))
        nisa.dma_copy(dst=out, src=tile)
        return out

    values = np.arange(128 * columns, dtype=np.int32).reshape(128, columns)
    simulate.World().launch(looked_at, [((values,), {})])
    tile, argument, rows = seen
    shown = [*range(4), None, *range(columns - 4, columns)] if cut else [*range(columns)]
    assert tile[0] == ["partition", *("…" if column is None else str(column) for column in shown)]
    assert argument[0][0] == "row" and tile[1:] == argument[1:]
    assert [row[0] for row in tile[1:]] == ["0", "1", "2", "3", "…", "124", "125", "126", "127"]
    assert tile[-1][1:] == ["…" if column is None else str(values[127, column]) for column in shown]
    assert rows[1][1] == str(values[100, 0]) and len(rows) == 5
