"""`nkw tune`: its report, what it finds and refuses, how it ends, and the table that it fills."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from simulate.cli import main
from simulate.hardware import hardware
from simulate.run.launch import unwrap_kernel
from simulate.tune.measuring import Bench, Outcome, Subject
from simulate.tune.parameters import read_declaration
from simulate.tune.search import Proposals, search
from simulate.tune.workers import Here
from tests.interruptible import ROOT, started, stopped

Capture = pytest.CaptureFixture[str]
PAGE = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BUCKET = """

def doubled_bucket(x, tuning=None):
    return f"{x.dtype} {x.shape[1]}"
"""
WORDS = ["tune", "doubled.py:doubled", "f32[128,65536]"]
SMALL = ["tune", "doubled.py:doubled", "f32[128,4096]"]
ENTRY = "doubled gen3 float32 4096"


@pytest.fixture(autouse=True)
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubled.py").write_text(PROGRAM + BUCKET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def changed(old: str, new: str) -> None:
    """Replace a text of the kernel's file."""
    text = Path("doubled.py").read_text()
    assert text.count(old) == 1
    Path("doubled.py").write_text(text.replace(old, new))


def search_document(capsys: Capture, *words: str) -> dict[str, Any]:
    """Return the document of a search that has its way."""
    assert main([words[0], "--json", "-", *words[1:]]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


@pytest.mark.slow
def test_the_example_of_the_page_prints_what_stands_below_it(capsys: Capture) -> None:
    commands = re.findall(r"^nkw (tune doubled\.py:.*)$", PAGE, re.MULTILINE)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert main(commands[0].replace('"', "").split()) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.slow
def test_all_candidates_are_tried_once_and_the_fastest_is_the_best(capsys: Capture) -> None:
    document = search_document(capsys, *WORDS, "--jobs", "1")
    tried = document["tried"]
    values = [(trial["values"]["columns"], trial["values"]["engine"]) for trial in tried]
    domains = [parameter["domain"] for parameter in document["parameters"]]
    assert sorted(values) == sorted((columns, engine) for columns in domains[0] for engine in domains[1])
    times = [max(trial["program_ns"], trial["scheduled_ns"]) for trial in tried if not trial["code"]]
    assert document["best_ns"] == min(times) < document["default_ns"] == times[0]
    assert document["gain"] == pytest.approx(1 - min(times) / times[0])
    # One tile of 65,536 float32 is more than a partition has.
    assert hardware("trn2").sbuf_usable_bytes_per_partition < 65536 * 4
    assert {trial["values"]["columns"] for trial in tried if trial["code"]} == {65536}
    assert {trial["code"] for trial in tried} == {"", "NKW-TILE-SIZE"}


@pytest.mark.parametrize("reading", ["program", "scheduled"])
def test_the_time_of_a_candidate_is_that_of_a_launch_with_its_values(reading: str, capsys: Capture) -> None:
    document = search_document(capsys, *SMALL, "--jobs", "1", "--reading", reading)
    (other,) = {"program_ns", "scheduled_ns"} - {f"{reading}_ns"}
    assert all(trial[other] is None for trial in document["tried"])
    tuning = f"tuning={document['best']}"
    assert main(["time", "--json", "-", "--reading", reading, *SMALL[1:], tuning]) == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert document["best_ns"] == profile["length_ns"]


@pytest.mark.slow
def test_a_seed_tries_the_same_candidates_in_this_process_and_in_others(capsys: Capture) -> None:
    words = ["tune", "nki_kernels:matmul", "bf16[128,128]", "bf16[128,512]", "--trials", "20"]
    documents = [search_document(capsys, *words, "--jobs", jobs) for jobs in ("1", "3")]
    assert documents[0] == documents[1]
    assert search_document(capsys, *words, "--jobs", "1", "--seed", "1")["tried"] != documents[0]["tried"]


@pytest.mark.slow
def test_a_search_finds_the_best_of_many_candidates_in_few_trials() -> None:
    """A time with one minimum: the search is nearer to it than as many random candidates are."""
    rows = tuple((name, 0, tuple(range(8))) for name in "abcd")

    def plain_kernel(tuning: object = None) -> None:
        raise AssertionError("is never launched")

    plain_kernel.__globals__["PARAMETERS"] = rows
    try:
        kernel = read_declaration(plain_kernel)
    finally:
        del plain_kernel.__globals__["PARAMETERS"]

    class Formula:
        def measure(self, batch, until):
            for index, candidate in reversed(list(enumerate(batch))):  # in any order
                yield index, time_of(candidate)

        def close(self) -> None:
            """Do nothing: nothing is under way."""

    def time_of(candidate) -> Outcome:
        return Outcome(1000.0 + sum((candidate[name] - 5) ** 2 for name in "abcd"))

    best = search(kernel, time_of(kernel.default), Formula(), trials=120)
    assert len(best.trials) == 120 < kernel.candidates == 8**4
    assert len({tuple(trial.candidate.values()) for trial in best.trials}) == 120
    # 3 % of all candidates are that near to the minimum or nearer, one of 4,096 is it.
    assert best.best.outcome.length_ns <= 1002.0
    assert best.importance.keys() == {"a", "b", "c", "d"}


@pytest.mark.slow
def test_a_candidate_that_the_kernel_refuses_or_that_ends_its_process_is_refused(capsys: Capture) -> None:
    changed(
        "    out = nl",
        '    assert columns != 512, "never 512"\n    if columns == 2048:\n        end_process()\n    out = nl',
    )
    changed("@nki.jit", "def end_process():\n    import os\n    os._exit(3)\n\n\n@nki.jit")
    document = search_document(capsys, *WORDS, "--jobs", "2")
    reasons = {trial["values"]["columns"]: (trial["code"], trial["why"]) for trial in document["tried"]}
    assert reasons[512] == ("NKW-KERNEL-CALL", "doubled.py:doubled does not take these arguments: never 512")
    assert reasons[2048] == ("process", "the process of this candidate ended with status 3")
    assert reasons[128] == reasons[8192] == ("", "")
    assert len(document["tried"]) == 10


@pytest.mark.slow
def test_seconds_end_a_search_with_a_candidate_under_way(capsys: Capture) -> None:
    changed(
        "    out = nl", "    if columns == 8192:\n        import time\n        time.sleep(600)\n    out = nl"
    )
    document = search_document(capsys, *SMALL, "--jobs", "2", "--seconds", "3")
    assert document["complete"] is True
    assert {trial["values"]["columns"] for trial in document["tried"]}.isdisjoint({8192})
    assert document["tried"][0]["number"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_keeps_the_best_so_far(jobs: str, tmp_path: Path) -> None:
    wait = "import os, time\n        os.write(1, b'ready\\n')\n        time.sleep(600)"
    changed("    out = nl", f"    if columns == 65536:\n        {wait}\n    out = nl")
    (tmp_path / "tuned.py").write_text("TUNED = {}\n")
    words = [str(tmp_path / "doubled.py:doubled"), "f32[128,4096]", "--jobs", jobs, "--write"]
    outputs = ["--json", str(tmp_path / "found.json"), "--html", str(tmp_path / "found.html")]
    status, err = stopped(started("-m", "nkw", "tune", "--target", "trn2", *words, *outputs))
    assert (status, err) == (130, "target trn2\n\nnkw: interrupted\n")  # candidates run in other processes
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["complete"] is False
    assert document["tried"][0]["values"] == {"columns": 128, "engine": "vector"}
    assert document["best_ns"] <= document["default_ns"]
    assert "interrupted: this is the best so far" in (tmp_path / "found.html").read_text()
    assert (tmp_path / "tuned.py").read_text() == "TUNED = {}\n"


def test_the_page_is_one_file_with_the_report_and_a_curve_that_never_rises(capsys: Capture) -> None:
    assert main([*SMALL, "--jobs", "1", "--html", "found.html"]) == 0
    report = capsys.readouterr().out.partition("page: ")[0]
    page = Path("found.html").read_text()
    assert report.splitlines()[4].strip() in page
    assert not re.search(r"https?:|<script|<link|src=", page)
    (path,) = re.findall(r'<path class="best" d="([^"]+)"', page)
    heights = [float(height) for height in re.findall(r"(?:M[\d.]+ |V)([\d.]+)", path)]
    assert len(heights) == page.count("<circle") == 10
    assert heights == sorted(heights)  # down is more


@pytest.mark.slow
def test_a_table_gets_entries_keeps_others_and_loses_those_that_are_no_faster(capsys: Capture) -> None:
    other = {"other gen2 float32 8": {"arguments": "f32[8]", "values": {"rows": 8, "engine": "scalar"}}}
    Path("tuned.py").write_text(f'"""Values."""\n\nTUNED = {other}\nAFTER = 1\n')
    assert main([*SMALL, "--jobs", "1", "--write"]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"{ENTRY} is in tuned.py"
    text = Path("tuned.py").read_text()
    assert text.startswith('"""Values."""\n\nTUNED = {\n') and text.endswith("\n}\nAFTER = 1\n")
    table = table_of(text)
    assert table.keys() == {ENTRY, *other} and table["other gen2 float32 8"] == other["other gen2 float32 8"]
    assert table[ENTRY]["arguments"] == "f32[128,4096]"
    best = table[ENTRY]["values"]
    # The entry is tried again, however few candidates are.
    assert search_document(capsys, *SMALL, "--jobs", "1", "--trials", "1", "--write")["best"] == best
    changed('("columns", 128,', f'("columns", {best["columns"]},')
    changed('("engine", "vector",', f'("engine", "{best["engine"]}",')
    assert main([*SMALL, "--jobs", "1", "--write"]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"{ENTRY} saves less than 1 % and is not in tuned.py"
    assert table_of(Path("tuned.py").read_text()) == other


def table_of(text: str) -> Any:
    (node,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "TUNED"
    )
    return ast.literal_eval(node.value)


@pytest.mark.parametrize("text", [None, "", "TUNED = table()\n", "TUNED = {'a': 1}\n", "TUNED = {\n"])
def test_refuses_to_write_where_there_is_no_table(text: str | None, capsys: Capture) -> None:
    if text is not None:
        Path("tuned.py").write_text(text)
    assert main([*SMALL, "--jobs", "1", "--write"]) == 2
    assert "[NKW-TUNE-TABLE] tuned.py holds no table" in capsys.readouterr().err
    assert (Path("tuned.py").read_text() if text is not None else None) == text


def test_refuses_to_write_for_a_kernel_without_buckets(capsys: Capture) -> None:
    changed("def doubled_bucket", "def another_bucket")
    Path("tuned.py").write_text("TUNED = {}\n")
    assert main([*SMALL, "--jobs", "1", "--write"]) == 2
    assert "has no function doubled_bucket" in capsys.readouterr().err
    assert search_document(capsys, *SMALL, "--jobs", "1")["entry"] is None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("PARAMETERS = ", "SETTINGS = ", "the file of doubled declares no parameters"),
        ("x, tuning=None):\n    col", "x):\n    tuning = {}\n    col", "doubled has no argument `tuning`"),
        ('"columns", 128,', '"columns", 100,', "is not (name, default, domain)"),
        ('"columns", 128,', '"columns", 128, 3,', "is not (name, default, domain)"),
        ("(128, 512,", "(128, 128,", "is not (name, default, domain)"),
        ('"engine", ', '"columns", ', "has two rows with the same name"),
    ],
)
def test_refuses_what_is_no_declaration(old: str, new: str, why: str, capsys: Capture) -> None:
    before = Path("doubled.py").read_text()
    first = before.index(old)
    Path("doubled.py").write_text(before[:first] + new + before[first + len(old) :])
    assert main(SMALL) == 2
    err = capsys.readouterr().err
    assert "error: [NKW-TUNE-PARAMETERS]" in err and why in err


def test_refuses_a_script_given_values_and_what_is_no_count(capsys: Capture) -> None:
    assert main(["tune", "doubled.py"]) == 2
    assert "doubled.py names no kernel" in capsys.readouterr().err
    assert main([*SMALL, "tuning={}"]) == 2
    assert "the arguments set tuning=, which the search chooses; leave it out" in capsys.readouterr().err
    for option in ("--trials=0", "--seconds=0", "--jobs=none", "--seed=-1"):
        with pytest.raises(SystemExit) as left:
            main([*SMALL, option])
        assert left.value.code == 2
    assert main([*SMALL, "--trials=1", "--seconds=9", "--jobs=1", "--seed=0"]) == 0


def test_a_kernel_that_fails_with_its_defaults_is_no_search(capsys: Capture) -> None:
    changed("    out = nl", "    raise RuntimeError('never')\n    out = nl")
    assert main(SMALL) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and "RuntimeError: never" in captured.err


def test_without_the_extras_one_sentence_names_them(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main([*SMALL, "--jobs", "1"]) == 2
    message = "error: [NKW-TUNE-EXTRA] tune needs optuna, which is not installed; pip install 'nki-workbench[tune]'\n"
    assert capsys.readouterr().err.endswith(message)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*SMALL, "--cluster", "local"]) == 2
    message = (
        "error: [NKW-TUNE-EXTRA] --cluster needs Ray, which is not installed; "
        "pip install 'nki-workbench[cluster]'\n"
    )
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.slow
def test_what_a_kernel_prints_stays_out_of_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    changed("    out = nl", "    print('by the kernel')\n    out = nl")
    assert main([*SMALL, "--jobs", "2", "--target", "trn2"]) == 0
    captured = capfd.readouterr()
    assert "by the kernel" not in captured.out
    assert captured.err == "target trn2\nby the kernel\n"  # of the launch before the search


def test_proposals_are_all_candidates_once() -> None:
    bench = Bench(Subject.from_arguments("doubled.py:doubled", ["f32[128,512]"], "program"))
    kernel = read_declaration(unwrap_kernel(bench.kernel))
    proposals = Proposals(kernel.parameters, 0)
    candidates = [proposals.read_candidate(proposals.propose()) for _ in range(kernel.candidates)]
    assert len({tuple(candidate.items()) for candidate in candidates}) == kernel.candidates
    workers = Here(bench)
    assert [index for index, _ in workers.measure(candidates, float("inf"))] == list(range(kernel.candidates))
    assert list(workers.measure(candidates, 0.0)) == []


@pytest.mark.deep
def test_a_ray_cluster_of_two_workers_finds_what_this_process_finds(capsys: Capture) -> None:
    pytest.importorskip("ray")
    words = ["tune", "nki_kernels:matmul", "bf16[128,128]", "bf16[128,512]", "--trials", "20"]
    local = search_document(capsys, *words, "--jobs", "1")
    assert search_document(capsys, *words, "--jobs", "2", "--cluster", "local") == local
    changed("    out = nl", "    if columns == 2048:\n        import os\n        os._exit(3)\n    out = nl")
    document = search_document(capsys, *SMALL, "--jobs", "2", "--cluster", "local")
    assert {trial["values"]["columns"] for trial in document["tried"] if trial["code"] == "process"} == {2048}
    assert main([*SMALL, "--cluster", "127.0.0.1:1"]) == 2
    assert "[NKW-TUNE-CLUSTER] no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err
