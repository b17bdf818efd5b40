"""`time --sweep` and `memory --sweep`: rows, pictures, and the size at which capacity ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

from simulate.cli import main
from simulate.hardware import hardware
from simulate.occupancy import sweep
from simulate.occupancy.bars import Bar, Bars, draw_bars, draw_bars_svg
from simulate.occupancy.sweep import CapacityEnd, Trial, find_capacity_end
from simulate.run.launch import Launch
from simulate.run.observers import Observer, observing
from tests.timing import kernels

Capture = pytest.CaptureFixture[str]
KERNEL = """import nki, nki.isa as nisa, nki.language as nl

@nki.jit
def held(x, rows=128):
    assert x.shape[1] != 3000, "3000 columns are never taken"
    if x.shape[1] == 7:
        raise RuntimeError("seven")
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    twice = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=twice, data1=tile, data2=tile, op=nl.add)
    nisa.dma_copy(dst=out, src=twice)
    return out
"""
MOST = hardware("trn2").sbuf_usable_bytes_per_partition // (2 * 4)  # columns of two float32 tiles at once
LARGEST = hardware("trn2").sbuf_usable_bytes_per_partition // 4  # of one tile


@pytest.fixture(autouse=True)
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "k.py").write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def swept(command: str, sizes: str, *more: str, shape: str = "f32[128,N]") -> int:
    return main([command, "k.py:held", shape, "--sweep", f"N={sizes}", *more])


def rows(out: str) -> dict[int, list[str]]:
    """Return the rows of the table by their size, in words."""
    table = out.split("\n\n")[1].splitlines()[1:]
    return {int(row.split()[0].replace(",", "")): row.split()[1:] for row in table}


def test_times_of_a_sweep_are_those_of_single_launches(capsys: Capture) -> None:
    assert swept("time", "64,512,64,1024") == 0
    rows_by_size = rows(capsys.readouterr().out)
    assert [*rows_by_size] == [64, 512, 1024]
    for size, (length, floor, _, _, bound, sbuf, psum) in rows_by_size.items():
        assert main(["time", "k.py:held", f"f32[128,{size}]"]) == 0
        out = capsys.readouterr().out
        assert f": {length} us (program reading)" in out
        assert re.search(rf"^roofline: {floor} us \({bound} bound\)", out, re.MULTILINE)
        assert (bound, sbuf, psum) == ("memory", f"{2 * 4 * size:,}", "0")


@pytest.mark.parametrize("command", ["time", "memory"])
def test_the_size_at_which_capacity_ends_is_exact(command: str, capsys: Capture) -> None:
    assert swept(command, f"1,{LARGEST + 1}") == 0
    out = capsys.readouterr().out
    assert f"capacity ends: N={MOST:,} fits, N={MOST + 1:,} does not (in steps of 1)\n" in out
    assert swept(command, f"{MOST - 1},{MOST},{MOST + 1}") == 0
    out = capsys.readouterr().out
    assert [" ".join(row).find("does not fit") >= 0 for row in rows(out).values()] == [False, False, True]
    assert f"N={MOST + 1:,}: [NKW-CAPACITY] 2 live tiles take" in out
    assert swept(command, f"{MOST - 1},{MOST}") == 0
    out = capsys.readouterr().out
    assert f"capacity does not end here: N={MOST:,} fits\n" in out
    assert "does not fit" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_one_tile_that_is_too_large_is_a_matter_of_capacity_too(capsys: Capture) -> None:
    assert swept("memory", f"{LARGEST},{LARGEST + 1}") == 0
    out = capsys.readouterr().out
    assert [row[-3:] for row in rows(out).values()] == [["does", "not", "fit"]] * 2
    assert f"N={LARGEST + 1:,}: [NKW-TILE-SIZE] shape" in out
    assert f"capacity ends: N={LARGEST:,} does not fit, nor was a smaller size tried that fits\n" in out


@pytest.mark.parametrize("command", ["time", "memory"])
def test_what_a_kernel_refuses_is_a_row_with_its_reason(command: str, capsys: Capture) -> None:
    assert swept(command, "7,2000,3000") == 0
    out = capsys.readouterr().out
    assert [row.count("refused") for row in rows(out).values()] == [1, 0, 1]
    words = " ".join(out.split())
    assert (
        "N=7: [NKW-KERNEL-ERROR] RuntimeError: seven N=3,000: [NKW-KERNEL-CALL] k.py:held does not take"
        in words
    )
    assert "3000 columns are never taken capacity does not end here: N=2,000 fits" in words
    assert swept(command, "7,3000") == 2
    assert "no size could be launched\n" in capsys.readouterr().out


def trial(size: int, most: int, refuses: Callable[[int], bool] = lambda size: False) -> Trial:
    """Return a launch that fits up to a size, without one that takes time."""
    if refuses(size):
        return Trial(size, None, "NKW-KERNEL-CALL", "refused")
    fits = kernels.dry(kernels.matmul_exp, kernels.zeros(128, 128), kernels.zeros(128, 512))
    return Trial(size, fits) if size <= most else Trial(size, None, "NKW-TILE-SIZE", "too large")


@pytest.mark.parametrize(
    ("sizes", "most", "capacity_end"),
    [
        ((1, 4, 8, 16), 16, None),
        ((1, 4, 8, 16), 15, CapacityEnd(15, 16, 1)),
        ((1, 4, 8, 16), 8, CapacityEnd(8, 9, 1)),
        ((1, 4, 8, 16), 1, CapacityEnd(1, 2, 1)),
        ((1, 4, 8, 16), 0, CapacityEnd(None, 1, 1)),
        ((128, 256, 1024), 700, CapacityEnd(640, 768, 128)),
        ((128, 256, 1024), 767, CapacityEnd(640, 768, 128)),
        ((128, 256, 1024), 768, CapacityEnd(768, 896, 128)),
        ((5,), 4, CapacityEnd(None, 5, 5)),
    ],
)
def test_bisection_finds_the_last_that_fits(
    sizes: tuple[int, ...], most: int, capacity_end: CapacityEnd | None
) -> None:
    assert (
        find_capacity_end([trial(size, most) for size in sizes], lambda size: trial(size, most))
        == capacity_end
    )


def test_bisection_stops_at_a_size_that_is_refused_for_another_reason() -> None:
    def refuses(size: int) -> bool:
        return 9 <= size <= 12

    tried = [trial(size, 8, refuses) for size in (1, 8, 10, 16)]
    capacity_end = find_capacity_end(tried, lambda size: trial(size, 8, refuses))
    assert capacity_end == CapacityEnd(8, 16, 1, Trial(12, None, "NKW-KERNEL-CALL", "refused"))


def test_a_size_has_its_place_in_every_shape_and_argument(capsys: Capture) -> None:
    assert main(["time", "k.py:held", "x=f32[N, N]", "rows=N", "--sweep", "N=64,128"]) == 0
    assert [*rows(capsys.readouterr().out)] == [64, 128]


def test_ranks_take_part_in_a_sweep(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKW_RANKS", "1")
    words = ["nki_kernels:all_reduce", "group", "--ranks", "2"]
    assert main(["memory", *words[:1], "f32[N,512]", *words[1:], "--sweep", "N=128"]) == 0
    assert "group on trn2, 2 ranks\n" in capsys.readouterr().out
    assert main(["time", *words[:1], "f32[N,512]", *words[1:], "--sweep", "N=128"]) == 0
    length = rows(capsys.readouterr().out)[128][0]
    assert main(["time", *words[:1], "f32[128,512]", *words[1:]]) == 0
    assert f": {length} us (program reading)" in capsys.readouterr().out


def test_progress_names_the_size_also_while_the_end_of_capacity_is_sought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []

    @contextmanager
    def working(describe: Callable[[], str]) -> Iterator[None]:
        class Told(Observer):
            def ran(self, launch: Launch) -> None:
                told.append(describe())

        with observing(Told()):
            yield

    monkeypatch.setattr(sweep, "working", working)
    assert swept("memory", f"{MOST - 2},{MOST + 1}") == 0
    assert told == [
        f"N={MOST - 2:,}, size 1 of 2: 3 instructions",
        f"N={MOST + 1:,}, size 2 of 2: 3 instructions",
        f"N={MOST - 1:,}, search for the end of capacity: 3 instructions",
        f"N={MOST:,}, search for the end of capacity: 3 instructions",
    ]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["k.py:held", "f32[128,64]", "--sweep", "N=1,2"], "the size N stands in no argument"),
        (["k.py:held", "f32[128,NN]", "--sweep", "N=1,2"], "the size N stands in no argument"),
        (
            ["--sweep", "N=1,2", "k.py", "f32[N]"],
            "--sweep takes a kernel, k.py names none; give FILE.py:NAME or MODULE:NAME",
        ),
        (["k.py:held", "f32[128,N]", "--sweep", "N=1", "--trace", "t"], "--trace takes one launch"),
        (["k.py:held", "f32[128,N]", "--sweep", "N=1", "--against", "p.json"], "--against takes one launch"),
    ],
)
def test_a_sweep_of_nothing_is_refused(words: list[str], why: str, capsys: Capture) -> None:
    assert main(["time", *words]) == 2
    assert f"[NKW-SWEEP] {why}" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["N", "N=", "N=0", "N=1,", "N=-1", "N=1.5", "=3", "2=3", "N=1e3"])
def test_what_is_no_sweep_is_refused(wrong: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main(["memory", "k.py:held", "f32[128,N]", f"--sweep={wrong}"])
    assert left.value.code == 2
    assert (
        f"{wrong!r} is no sweep; give a name and 1 to 64 sizes, such as B=1,4,8,16" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("count", "status"), [(63, 0), (64, 0), (65, 2)])
def test_a_sweep_has_at_most_64_sizes(count: int, status: int, capsys: Capture) -> None:
    sizes = ",".join(str(8 + number) for number in range(count))
    if status:
        with pytest.raises(SystemExit) as left:
            swept("memory", sizes)
        assert left.value.code == status
    else:
        assert swept("memory", sizes) == status
        assert len(rows(capsys.readouterr().out)) == count


def test_a_sweep_writes_a_page_a_picture_and_a_document(capsys: Capture) -> None:
    outputs = ["--html", "page.html", "--json", "sweep.json"]
    assert swept("time", f"512,{LARGEST + 1}", *outputs) == 0
    assert capsys.readouterr().out == "page: page.html\n"
    page = Path("page.html").read_text()
    assert "<title>k.py:held f32[128,N] on trn2 (program reading)</title>" in page
    assert f"capacity ends: N={MOST:,} fits, N={MOST + 1:,} does not" in page
    picture = page[page.index("<svg") : page.index("</svg>") + 6]
    titles = [
        element.text for element in ElementTree.fromstring(picture).iter() if element.get("class") == "title"
    ]
    assert titles == ["time by N", "SBUF, bytes per partition by N"]
    document = json.loads(Path("sweep.json").read_text())
    assert (document["command"], document["sweep"]["name"]) == ("time", "N")
    assert [size["verdict"] for size in document["sweep"]["sizes"]] == ["fits", "does not fit"]
    assert document["sweep"]["capacity_end"] == {"fits": MOST, "misfits": MOST + 1, "step": 1}
    assert swept("memory", "512", "--svg", "memory.svg") == 0
    assert capsys.readouterr().out == "picture: memory.svg\n"
    assert ElementTree.parse("memory.svg").getroot().get("role") == "img"


def test_bars_are_as_long_as_what_they_show() -> None:
    bars = (Bar("1", (0.0, 0.0), "none"), Bar("16", (23.0, 0.0), "half"), Bar("256", (0.001, 45.999), "all"))
    assert draw_bars(Bars("time", ("floor", "rest"), bars), 80) == [
        "time: # floor, - rest",
        "  1" + 48 * " " + "none",
        " 16 " + 23 * "#" + 24 * " " + "half",
        "256 #" + 45 * "-" + " all",
    ]
    limited = Bars("SBUF", ("live",), (Bar("1", (11.5,), "fits"), Bar("2", (46.0,), "no")), 23.0)
    for columns, half in ((80, 23), (55, 23), (20, 6)):
        assert draw_bars(limited, columns) == [
            "SBUF: # live, | limit 23",
            "1 " + (half + 1) // 2 * "#" + half // 2 * " " + "|" + (half + 1) * " " + "fits",
            "2 " + half * "#" + "|" + half * "#" + " no",
        ]


def test_bars_of_the_picture_have_the_same_scale() -> None:
    chart = Bars(
        "SBUF", ("live",), (Bar("1", (50.0,), ""), Bar("<2>", (200.0,), ""), Bar("3", (0.0,), "")), 100.0
    )
    root = ElementTree.fromstring(draw_bars_svg([chart]))
    assert (
        len([element for element in root.iter() if element.get("fill")]) == 3
    )  # the legend's, and bars longer than nothing
    widths = [float(element.get("width", 0)) for element in root.iter() if element.get("fill")][1:]
    assert widths[1] == 4 * widths[0] > 0
    (limit,) = (element for element in root.iter() if element.get("class") == "limit")
    bars = [element for element in root.iter() if element.get("fill")][1:]
    assert "limit 100" in [element.text for element in root.iter()]
    assert float(limit.get("x1", 0)) == float(bars[1].get("x", 0)) + widths[1] / 2
    assert [element.text for element in root.iter() if element.get("class") == "axis end"] == [
        "1",
        "<2>",
        "3",
    ]
