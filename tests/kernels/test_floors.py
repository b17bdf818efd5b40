"""The stored tables of benchmarks/kernels: predicted times of the kernels against what the chips allow."""

from __future__ import annotations

import pytest

from benchmarks.kernels.__main__ import TARGETS, main
from benchmarks.kernels.measure import Bench
from benchmarks.kernels.public import best_public
from benchmarks.kernels.table import stored, text
from benchmarks.kernels.works import works


def test_there_are_208_works_with_titles_of_their_own() -> None:
    assert len({work.title for work in works()}) == 208


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_stored_table_is_what_the_kernels_take(target: str) -> None:
    """`python -m benchmarks.kernels --write` stores it anew; the diff shows which works became slower."""
    bench = Bench(target)
    assert text(target, map(bench.measure, works())) == stored(target).read_text()


def test_a_floor_is_the_larger_of_operations_and_bytes_on_the_peaks() -> None:
    """By hand, for trn2: 2 * 2048^3 FLOP at 78.6 TFLOP/s; weights and activations of 2 bytes at 358 GB/s."""
    rows = {work.title: work for work in works()}
    bench = Bench("trn2")
    product = bench.measure(rows["matmul aT.b, 2048^3"])
    assert (product.bound.value, product.floor_us) == ("compute", pytest.approx(2 * 2048**3 / 78.6432e6))
    decode = bench.measure(rows["decode norm + qkv, 8B tp8, B=1"])
    moved = 2 * (4096 * 768 + 4096 + 768)
    assert (decode.bound.value, decode.floor_us) == ("bandwidth", pytest.approx(moved / 358e3))
    assert product.least_share == product.floor_us / max(product.times_us.values())


def test_public_kernels_need_a_clone_and_a_work_they_do() -> None:
    rows = {work.title: work for work in works()}
    assert best_public(rows["matmul a.b, 2048^3"], "trn2", {}) == "no clone of awslabs/nki-autotune"
    assert best_public(rows["decode layer, 8B tp8, B=1 S=1024"], "trn2", {}) == "no public kernel"


def test_what_is_stored_are_whole_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", "--write", "--only", "matmul"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "leave --only and --sources out" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["kernels", "--target", "trn2", "--only", "matmul a.b"])
    assert main() == 0
    head, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("# trn2: ") and head.endswith(" of 2 rows reach 80% of their floor; times in us")
    assert rows == [row for row in stored("trn2").read_text().splitlines() if row.startswith("matmul a.b")]
