"""The stored tables of benchmarks/kernels: predicted times of the kernels against what the chips allow."""

from __future__ import annotations

from dataclasses import replace

import nki
import nki.isa as nisa
import nki.language as nl
import pytest

from benchmarks.kernels.__main__ import TABLES, list_works, main, measure_works
from benchmarks.kernels.behind import REASONS, behind
from benchmarks.kernels.measure import READINGS, Bench, Floor, Measured, Refused
from benchmarks.kernels.public import best_public
from benchmarks.kernels.speech import speech_works
from benchmarks.kernels.summary import summary
from benchmarks.kernels.table import line, stored, text
from benchmarks.kernels.works import dense_works, divided_works, works
from model.layers.joint import join_launches
from model.plan.roofline import Bound


def test_there_are_332_works_with_titles_of_their_own_and_76_of_two_cores() -> None:
    assert len({work.title for work in list_works(1)}) == 332
    assert len({work.title for work in divided_works()}) == 76


def test_works_of_two_cores_launch_what_a_model_launches_on_them() -> None:
    """A kernel that divides its work is launched whole; `decoder_layer_decode`, which uses one core, is not."""
    works_by_title, divided_by_title = (
        {work.title: work for work in rows()} for rows in (works, divided_works)
    )
    for title, work in divided_by_title.items():
        launches = list(works_by_title[title].launches)
        if title.startswith("decode layer"):
            launches = [launch for joint in launches for launch in join_launches(joint.fused, lnc=2)]
        assert list(work.launches) == launches, title
    kernels = [launch.kernel for launch in divided_by_title["decode layer, 70B tp32, B=4 S=1024"].launches]
    assert kernels == ["attention_block_decode", "mlp"]


def test_an_attention_block_on_two_cores_is_faster_than_on_one_and_than_separate_kernels() -> None:
    """4 sequences of 1024 positions: the three kernels one after another move q, k, v and o through HBM."""
    title = "decode attention block, 70B tp32, B=4 S=1024"
    (divided,) = (work for work in divided_works() if work.title == title)
    (block,) = divided.launches
    bench = Bench("trn2", cores=2)
    times = bench.measure(divided).times_us
    separate = bench.measure(replace(divided, launches=block.fused)).times_us
    alone = Bench("trn2").measure(divided).times_us
    for reading in READINGS:
        assert times[reading] < 0.85 * separate[reading] and times[reading] < alone[reading], reading


@pytest.mark.parametrize(("target", "cores"), TABLES)
def test_a_stored_table_has_one_head_and_a_row_for_each_work(target: str, cores: int) -> None:
    head, names, *rows = stored(target, cores).read_text().splitlines()
    titles = [work.title for work in list_works(cores)]
    assert f" of {len(titles)} rows reach " in head and names.startswith("work ")
    assert [row[: max(45, len(title))].rstrip() for row, title in zip(rows, titles, strict=True)] == titles


@pytest.mark.deep
@pytest.mark.parametrize(("target", "cores"), TABLES)
def test_the_stored_table_is_what_the_kernels_take(target: str, cores: int) -> None:
    """`python -m benchmarks.kernels --write` stores it anew; the diff shows which works became slower."""
    rows = measure_works(target, cores, list_works(cores))
    assert text(target, rows, cores=cores) == stored(target, cores).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "target", "cores"), [(index, *table) for index, table in enumerate(TABLES)]
)
def test_every_32nd_row_of_a_stored_table_is_what_the_kernel_takes(
    number: int, target: str, cores: int
) -> None:
    """Each table has other works here; `make deep` compares them all."""
    every = stored(target, cores).read_text().splitlines()[2:]
    assert len(every) == len(list_works(cores))
    rows = measure_works(target, cores, list_works(cores)[8 * number :: 32])
    assert [line(row) for row in rows] == every[8 * number :: 32]


def test_a_floor_is_the_larger_of_operations_and_bytes_on_the_peaks() -> None:
    """By hand, for trn2: 2 * 2048^3 FLOP at 78.6 TFLOP/s; weights and activations of 2 bytes at 358 GB/s."""
    rows = {work.title: work for work in works()}
    bench = Bench("trn2")
    product = bench.measure(rows["matmul aT.b, 2048^3"])
    assert (product.floor.bound.value, product.floor.time_us) == (
        "compute",
        pytest.approx(2 * 2048**3 / 78.6432e6),
    )
    decode = bench.measure(rows["decode norm + qkv, 8B tp8, B=1"])
    moved = 2 * (4096 * 768 + 4096 + 768)
    assert (decode.floor.bound.value, decode.floor.time_us) == ("bandwidth", pytest.approx(moved / 358e3))
    assert product.least_share == product.floor.time_us / max(product.times_us.values())


def test_keys_and_values_of_short_heads_are_written_while_later_heads_are_computed() -> None:
    """Cross attention of 4 tokens, 20 heads of 1500 keys: with later writes it reached 22 % of its floor."""
    assert Bench("trn2").measure(next(speech_works())).least_share > 0.24


@nki.jit
def rows_of_a(a, b, a_transposed=False, tuning=None):
    """Copy the rows of `a`, of each core those of its part: all of them where there is one core."""
    y = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    rows = a.shape[0] // nl.num_programs()
    first = nl.program_id() * rows
    nisa.dma_copy(dst=y[first : first + rows, :], src=a[first : first + rows, :])
    return y


@nki.jit
def all_rows_of_a(a, b, a_transposed=False, tuning=None):
    """Copy the rows of `a`, all of them on each core."""
    y = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=y[:, :], src=a[:, :])
    return y


@nki.jit
def refusing(a, b, a_transposed=False, tuning=None):
    """Refuse all but one core."""
    assert nl.num_programs() == 1, "this kernel takes one core"
    return a


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (rows_of_a, None),
        (all_rows_of_a, "matmul does not divide its work: each core writes all of y"),
        (refusing, "this kernel takes one core"),
    ],
)
def test_two_cores_have_half_of_a_floor_each_and_a_kernel_divides_its_work_or_has_no_time(
    kernel, reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the kernel that divides is that of half of the rows: each core has its own 358 GB/s."""
    (work,) = (work for work in divided_works() if work.title == "matmul a.b, 4096^3")
    monkeypatch.setattr("nki_kernels.matmul", kernel)
    two = Bench("trn2", cores=2).measure_if_divided(work)
    assert two.floor.time_us == pytest.approx(4096**3 / 78.6432e6)
    assert isinstance(two, Refused if reason else Measured)
    if isinstance(two, Refused):
        assert two.reason == reason
    else:
        one = Bench("trn2").measure(work)
        moved_us = 2 * 2 * 4096**2 / 358e3
        for reading, time_us in one.times_us.items():
            assert time_us - two.times_us[reading] == pytest.approx(moved_us / 2, rel=0.05)
        assert two.busiest == one.busiest


def test_public_kernels_need_a_clone_and_a_work_they_do() -> None:
    rows = {work.title: work for work in works()}
    assert best_public(rows["matmul a.b, 2048^3"], "trn2", {}) == "no clone of awslabs/nki-autotune"
    assert best_public(rows["decode layer, 8B tp8, B=1 S=1024"], "trn2", {}) == "no public kernel"


def test_a_row_behind_the_best_public_kernel_has_its_reason() -> None:
    """From the stored tables; 5 % are allowed."""
    rows = behind("trn2")
    assert {row.work for row in rows} <= set(REASONS), [(row.title, row.times) for row in rows]
    furthest = rows[0]
    assert (furthest.title, furthest.public_us) == (
        "prefill output projection, 70B tp64, T=8192",
        pytest.approx(404.4),
    )
    assert furthest.times == pytest.approx(furthest.time_us / 404.4)


@pytest.mark.slow
def test_what_is_stored_are_whole_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", "--write", "--only", "matmul"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "leave --only out" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["kernels", "--target", "trn2", "--cores", "1", "--only", "matmul a.b"])
    assert main() == 0
    head, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("# trn2: ") and head.endswith(" of 2 rows reach 80% of their floor; times in us")
    assert rows == [row for row in stored("trn2").read_text().splitlines() if row.startswith("matmul a.b")]


def test_the_summary_counts_unrounded_shares_of_the_slower_reading() -> None:
    """79.96 % is below 80 %, and so is a row that one reading alone lifts above it."""
    dense = list(dense_works())
    floor = Floor(80.0, Bound.bandwidth)
    times = [(99.0, 100.0), (100.05, 90.0), (90.0, 100.1)]
    rows = [
        Measured(work, dict(zip(READINGS, pair)), floor, "Tensor", 1.0) for work, pair in zip(dense, times)
    ]
    other = next(work for work in list_works(1) if work.title not in {row.title for row in dense})
    assert summary("trn2", [*rows, Refused(other, floor, "one core")]).splitlines() == [
        "trn2: 1 of 3 rows of matmuls, dense decoder layers and heads reach 80% of their floor, "
        "1 of 4 of all rows",
        f"  79.96%  {dense[1].title}",
        f"  79.92%  {dense[2].title}",
    ]
    assert len(dense) == 208


def test_the_summary_is_printed_in_place_of_the_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["kernels", "--target", "trn2", "--cores", "1", "--only", "matmul a.b, 2048^3", "--summary"]
    monkeypatch.setattr("sys.argv", chosen)
    assert main() == 0
    expected = "trn2: 1 of 1 rows of matmuls, dense decoder layers and heads reach 80% of their floor, "
    assert capsys.readouterr().out == expected + "1 of 1 of all rows\n"
    monkeypatch.setattr("sys.argv", [*chosen, "--write"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
