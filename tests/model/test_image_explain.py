"""`nkw imagine --explain`: residuals and attention of diffusers, guidance, and what the command shows and refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.commands.imagine.explain import PassRecorder, PassTrace
from model.runners.backends import KernelBackend, ReferenceBackend
from model.runners.denoise import Guidance, ImageRequest, ImageRunner, Sampling
from model.runners.pipelines import open_pipeline
from nkw.commands import main
from tests.model.explain_oracles import CASES, PASS, QUANTITIES, STORED, record
from tests.model.pipeline_folders import write_pipelines
from tests.model.pipeline_oracles import NEGATIVE_PROMPT, PROMPTS, draw_noise, read_recordings
from tests.model.test_imagine import refuse

RECORDINGS = read_recordings(STORED)
ROUNDING = 2**-13
"""Relative difference of residuals and attention weights whose sums have another order.

A sum of some 2^7 products differs by at most 2^-17 of its parts, in some 2^3 layers in a row by 2^-14. Weights are
exponentials of scores of up to some 2.
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of a tiny pipeline with random weights for each family of denoisers, and return their paths."""
    return write_pipelines(tmp_path_factory.mktemp("pipelines"))


def trace_pass(
    name: str,
    folders: dict[str, Path],
    ranks: int = 0,
    number: int = PASS,
    mode: Guidance = Guidance.batched,
) -> list[PassTrace]:
    """Return the traces of both prompts in the recorded case: drawn by NumPy for 0 ranks, else by kernels."""
    from model.device import SimulatedDevice

    module, case_name = CASES[name]
    case = module.CASES[case_name]
    noise = case.draw_noise() if name == "flux" else draw_noise(module.LATENT_SHAPE)
    pipeline = open_pipeline(folders[name]).resize(*noise.shape[2:])
    prompts = case.prompts if name == "pixart" else PROMPTS
    negative_prompt = "" if name == "flux" else NEGATIVE_PROMPT
    requests = [ImageRequest(prompt, seed, negative_prompt) for seed, prompt in enumerate(prompts)]
    sampling = Sampling(case.steps, case.guidance, mode)
    backend = KernelBackend(SimulatedDevice("trn2", ranks)) if ranks else ReferenceBackend()
    recorder = PassRecorder(backend, pipeline, sampling, number)
    ImageRunner(pipeline, recorder).draw(requests, sampling, noise)
    return list(recorder.trace(requests, max(ranks, 1)))


def collect_quantities(traces: list[PassTrace]) -> dict[str, np.ndarray]:
    """Return what `explain_oracles.record` records of the traces, but for weights of rows of padding."""
    layers = [trace.layers for trace in traces]
    return {
        "norms": np.array(
            [[trace.embedding_norm, *(layer.norm for layer in trace.layers)] for trace in traces]
        ),
        "shares": np.array([[layer.text_share for layer in image] for image in layers]),
        "positions": np.array(
            [[[head.position for head in layer.heads] for layer in image] for image in layers]
        ),
        "weights": np.array([[[head.weight for head in layer.heads] for layer in image] for image in layers]),
    }


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_residuals_and_attention_are_those_of_diffusers(
    name: str, ranks: int, folders: dict[str, Path]
) -> None:
    traces = trace_pass(name, folders, ranks)
    for quantity, array in collect_quantities(traces).items():
        np.testing.assert_allclose(array, RECORDINGS[f"{name} {quantity}"], rtol=ROUNDING, err_msg=quantity)
    for trace, rows in zip(traces, RECORDINGS[f"{name} rows"]):
        positions = [piece.position for piece in trace.pieces]
        np.testing.assert_allclose(
            [piece.attention for piece in trace.pieces], rows[positions], rtol=ROUNDING
        )
        assert trace.padding_rows == len(rows) - len(positions)
        padding = np.delete(rows, positions).sum()
        assert trace.padding_attention == pytest.approx(padding, rel=ROUNDING)
        assert (padding == 0) == (name == "pixart")  # the only denoiser that does not see padding


@pytest.mark.deep
@pytest.mark.parametrize("name", CASES)
def test_recordings_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    recorded = record(name, tmp_path)
    assert tuple(recorded) == QUANTITIES
    for quantity, array in recorded.items():
        np.testing.assert_allclose(array, RECORDINGS[f"{name} {quantity}"], rtol=ROUNDING)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("guidance", [3.0, 1.0])
def test_magnitudes_are_those_of_the_step(number: int, guidance: float, folders: dict[str, Path]) -> None:
    """A step of Euler's method on a flow changes latents by the guided prediction times the change of noise levels."""
    pipeline, steps = open_pipeline(folders["sd3"]).resize(8, 8), 2
    sampling, requests = Sampling(steps, guidance), [ImageRequest(PROMPTS[0], 3, NEGATIVE_PROMPT)]
    recorder = PassRecorder(ReferenceBackend(), pipeline, sampling, number)
    latents = [np.random.Generator(np.random.Philox(3)).standard_normal((16, 8, 8), np.float32)]
    ImageRunner(pipeline, recorder).draw(
        requests, sampling, None, lambda done, array: latents.append(array[0])
    )
    (trace,) = recorder.trace(requests, 1)

    def measure(array: np.ndarray) -> float:
        return float(np.sqrt((array.astype(np.float64) ** 2).mean()))

    before, after = latents[number - 1 : number + 1]
    prediction = (after - before) / (trace.next_sigma - trace.sigma)
    magnitudes = trace.magnitudes
    assert magnitudes["latents"] == pytest.approx(measure(before), rel=1e-6)
    names = ["latents", "conditioned", "unconditioned", "difference", "guided"]
    assert list(magnitudes) == (names if guidance > 1 else names[:2])
    # Latents are rounded to 2^-24 of numbers up to 4, changes are some 0.1.
    assert magnitudes[list(magnitudes)[-1]] == pytest.approx(measure(prediction), rel=2**-14)
    if guidance > 1:
        assert 0 < magnitudes["difference"] < magnitudes["conditioned"] + magnitudes["unconditioned"]


def test_one_pass_after_another_gives_the_same_trace(folders: dict[str, Path]) -> None:
    batched, separate = (
        [asdict(trace) for trace in trace_pass("pixart", folders, mode=mode)] for mode in Guidance
    )
    assert batched == separate


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, Any]]:
    """Return the report and the document of a command."""
    assert main(["imagine", *words, "--json", "-"]) == 0
    captured = capsys.readouterr()
    return captured.err, json.loads(captured.out)


def test_the_command_explains_a_pass_of_each_image(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PROMPTS, "--model", str(folders["sd3"]), "--steps", "3", "--backend", "numpy", "--seed", "5"]
    report, document = explained(capsys, *words, "--explain", "2")
    assert max(map(len, report.splitlines())) <= 80
    text = " ".join(report.split())
    for index, (prompt, entry) in enumerate(zip(PROMPTS, document["explained"], strict=True)):
        assert set(entry) == set(PassTrace.__dataclass_fields__)
        assert (entry["number"], entry["passes"], entry["prompt"]) == (2, 3, prompt)
        assert entry["seed"] == 5 + index
        shown = f"how pass 2 of 3 for {prompt!r} (seed {5 + index}) came about, by the numpy reference"
        assert shown in text
        attention = sum(piece["attention"] for piece in entry["pieces"]) + entry["padding_attention"]
        shares = [layer["text_share"] for layer in entry["layers"]]
        assert attention == pytest.approx(sum(shares) / len(shares))
        words_of_clip = "".join(piece["text"].replace("</w>", " ") for piece in entry["pieces"][1:])
        assert words_of_clip.startswith(prompt)
    assert "guided prediction" in text and "rows of padding" in text and "other tokens" in text
    first, without = explained(capsys, *words, "--explain"), explained(capsys, *words)
    assert [entry["number"] for entry in first[1]["explained"]] == [1, 1]
    assert without[1]["explained"] == [] and "came about" not in without[0]


@pytest.mark.parametrize("words", ["--tp 2 --quantization fp8", "--dp 2 --dtype bfloat16 --no-check"])
def test_kernels_and_numpy_explain_alike(
    words: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The numpy model computes the pass again from what the backend gave the denoiser."""
    drawing = ["a red circle", "--model", str(folders["pixart"]), "--steps", "2", *words.split()]
    by_kernels, by_numpy = (
        explained(capsys, *drawing, "--backend", backend, "--explain", "2")[1]["explained"][0]
        for backend in ("simulate", "numpy")
    )
    # Rows of bfloat16, of 2^-9, differ in the first pass; all sums of float32 differ by their order.
    tolerance = 2**-6 if "bfloat16" in words else ROUNDING
    for mine, expected in zip(by_kernels["layers"], by_numpy["layers"], strict=True):
        assert mine["norm"] == pytest.approx(expected["norm"], rel=tolerance)
    assert by_kernels["pieces"][0]["attention"] == pytest.approx(
        by_numpy["pieces"][0]["attention"], rel=tolerance
    )


def test_a_pass_beyond_the_last_is_refused(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folders["pixart"]), "--steps", "2", "--backend", "numpy", "--explain"]
    assert "--explain 3: --steps 2 takes 2 passes of the denoiser" in refuse(capsys, *words, "3")
    assert "'0' is not a positive whole number" in refuse(capsys, *words, "0")
    assert main(["imagine", *words, "2"]) == 0
