"""Where the predicted time of a prompt and of a token goes, by kernel and by layer."""

from __future__ import annotations

import json
import re

import pytest

from model.commands.generate.profile import describe_passes
from model.device import DryDevice, Pass, write_page
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from nkw.commands import main
from nkw.terminal import rendered
from simulate.hardware import hardware

LAYER = "decoder_layer_decode"


def passes(folder, ranks: int = 1) -> list[tuple[str, Pass]]:
    config = load_config(folder)
    device = DryDevice("trn2", ranks)
    weights = shard_weights(config, open_checkpoint(folder, config), ranks)
    model = KernelModel(config, weights, device, 64, progress=device.layer_done)
    model.prefill([[1, 2, 3]])
    prompt = device.take_pass()
    model.decode([5], [3])
    return [("prompt", prompt), ("token", device.take_pass())]


def test_every_launch_belongs_to_a_layer_or_stands_alone(write_model) -> None:
    (_, _), (_, token) = passes(write_model())
    launches = [(kernel_time.section, kernel_time.kernel) for kernel_time in token.kernel_times()]
    assert launches == [
        ("embedding", "embedding"),
        ("layer 0", LAYER),
        ("layer 1", LAYER),
        ("lm_head", "lm_head"),
    ]


def test_times_of_the_launches_add_up_to_the_prediction(write_model) -> None:
    for _, done in passes(write_model(), ranks=2):
        total = sum(kernel_time.length_ns for kernel_time in done.kernel_times())
        assert done.overhead_ns + total == pytest.approx(done.prediction().program_ns, rel=1e-12)
        for launch in done.launches:
            handed_over = launch.launch.hardware.kernel_handover_ns
            assert launch.program_ns == launch.timeline.length_ns + handed_over
            assert handed_over <= launch.dataflow_ns <= launch.program_ns <= launch.serial_ns
        for kernel_time in done.kernel_times():
            assert 0.0 < kernel_time.busiest_share <= 1.0
            assert not kernel_time.busiest.startswith("rank")


def test_text_has_both_passes_by_kernel_and_by_layer(write_model) -> None:
    both = passes(write_model())
    lines = rendered(describe_passes("trn2", both)).splitlines()
    assert lines[0] == "where the time goes on trn2 (program reading)"
    assert max(map(len, lines)) <= 80
    for label, done in both:
        times = done.kernel_times()
        (head,) = [line for line in lines if line.startswith(f"{label}: ")]
        assert head.startswith(f"{label}: {done.prediction().program_ns / 1000:,.3f} us")
        table = lines[lines.index(head) + 2 :]
        rows = table[: table.index("")]
        assert {row.split()[0] for row in rows} == {kernel_time.kernel for kernel_time in times}
        shown = [float(row.split()[2]) for row in rows]
        assert shown == sorted(shown, reverse=True)
        kernel = "mlp" if label == "prompt" else LAYER
        (kernel_row,) = [row.split() for row in rows if row.startswith(f"{kernel} ")]
        assert (kernel_row[1], float(kernel_row[2])) == (
            "2",
            round(
                sum(kernel_time.length_ns for kernel_time in times if kernel_time.kernel == kernel) / 1000, 3
            ),
        )
    layers = [line for line in lines if line.startswith("layers 0 to 1 ")]
    assert [line.split()[4] for line in layers] == ["4", "1"]


@pytest.mark.slow
def test_page_has_every_launch_in_order_and_each_distinct_one_once(write_model, tmp_path) -> None:
    both = passes(write_model())
    for name in ("a.html", "b.html"):
        write_page(tmp_path / name, "tiny on trn2", both)
    match = re.search(r'id="data">(.*?)</script>', (tmp_path / "a.html").read_text(), re.DOTALL)
    assert match
    data = json.loads(match[1])
    assert [names for names, _ in data["steps"]] == [
        [label, kernel_time.section, kernel_time.kernel]
        for label, done in both
        for kernel_time in done.kernel_times()
    ]
    for (names, part_index), kernel_time in zip(
        data["steps"], [kernel_time for _, done in both for kernel_time in done.kernel_times()]
    ):
        handed_over_ns = hardware(
            "trn2"
        ).kernel_handover_ns  # the page shows a launch, a pass hands over as well
        assert data["parts"][part_index]["length"] == pytest.approx(
            kernel_time.length_ns - handed_over_ns, abs=0.051
        )
        assert data["parts"][part_index]["title"].endswith(names[-1])
    assert len(data["parts"]) < len(data["steps"])
    assert sorted({part_index for _, part_index in data["steps"]}) == list(range(len(data["parts"])))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


@pytest.mark.slow
def test_generate_prints_the_profile_and_writes_the_page(write_model, tmp_path, capsys) -> None:
    html = tmp_path / "out" / "page.html"
    html.parent.mkdir()
    arguments = ["generate", "--model", str(write_model(eos_token_id=None)), "--prompt", "ab"]
    arguments += ["--max-new-tokens", "3", "--target", "trn2", "--profile", "--html", str(html)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"page: {html}" in out.splitlines()
    assert "\nwhere the time goes on trn2 (program reading)\n" in out
    assert re.search(r"^prompt of 3 tokens: [\d.,]+ us", out, re.MULTILINE)
    assert re.search(r"^token at position 4: [\d.,]+ us", out, re.MULTILINE)
    assert [path.name for path in html.parent.iterdir()] == ["page.html"]
    assert "model on 1 core of trn2</title>" in html.read_text()


@pytest.mark.parametrize("option", [["--profile"], ["--html", "page.html"]])
def test_a_backend_without_times_has_no_profile(write_model, capsys, option) -> None:
    arguments = ["generate", "--model", str(write_model()), "--backend", "numpy", *option]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"nkw: error: {option[0]} needs the simulate backend; numpy predicts no timeline\n"
    )


def test_a_page_that_cannot_be_written_is_refused_before_the_first_token(
    write_model, tmp_path, capsys
) -> None:
    nowhere = tmp_path / "nowhere" / "page.html"
    assert main(["generate", "--model", str(write_model()), "--html", str(nowhere)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"nkw: error: the page cannot be written to {nowhere}: No such file or directory\n"
