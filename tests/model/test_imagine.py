"""`nkw imagine`: files of images, reports, and what the command refuses."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from model.commands.imagine.png import arrange_grid
from model.errors import ModelError
from model.runners import rank_memory
from model.runners.component import count_activation_bytes
from model.runners.denoise import ImageRunner
from model.runners.pipelines import open_pipeline
from nkw.commands import main
from tests.model.pipeline_oracles import LATENT_SHAPE, draw_noise
from tests.model.test_denoise import folders  # noqa: F401

PROMPT = "a red circle above a blue square"


@pytest.fixture
def model(folders: dict[str, Path]) -> list[str]:  # noqa: F811
    """Return the options of a tiny model and few steps in NumPy."""
    return ["--model", str(folders["flow"]), "--steps", "2", "--backend", "numpy"]


def read_image(path: Path) -> np.ndarray:
    """Return the pixels of a PNG file."""
    with Image.open(path) as image:
        return np.asarray(image)


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line that refuses a command."""
    try:
        status = main(["imagine", *words])
    except SystemExit as exit_of_parser:
        status = exit_of_parser.code
    assert status == 2
    *_, line = capsys.readouterr().err.strip().split("\n")
    return line


def test_writes_an_image_with_its_settings(model: list[str], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    assert main(["imagine", PROMPT, *model, "--seed", "7", "--guidance", "3", "--out", str(path)]) == 0
    with Image.open(path) as image:
        assert image.size == (16, 16) and image.mode == "RGB"
        assert image.info["prompt"] == PROMPT
        assert "steps: 2" in image.info["settings"] and "seed: 7" in image.info["settings"]
        assert "guidance: 3.0" in image.info["settings"]


def test_settings_make_the_same_image(model: list[str], tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.png" for name in "abc")
    for path, seed in ((first, "1"), (second, "1"), (third, "2")):
        assert main(["imagine", PROMPT, *model, "--seed", seed, "--out", str(path)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert (read_image(first) != read_image(third)).any()


def test_kernels_are_compared_and_timed(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "images.json"
    words = ["imagine", PROMPT, *model, "--backend", "simulate", "--tp", "2", "--json", str(document)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "numpy model" in text and "predicted on 2 cores" in text and "images/s" in text
    contents = json.loads(document.read_text())
    assert contents["difference"]["bytes"] <= 1
    assert [entry["target"] for entry in contents["predictions"]] == ["trn1", "inf2", "trn2"]
    passes = {entry["component"]: entry["passes"] for entry in contents["passes"]}
    assert passes == {"text_encoder": 1, "denoiser": 2, "autoencoder": 1}
    assert max(map(len, text.splitlines())) <= 80


def test_profiles_list_kernels_and_layers_of_each_component(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands print the same times for the same passes."""
    words = ["--steps", "2", "--dtype", "bfloat16", "--profile"]
    drawing = [*model[:2], *words, "--no-check", "--lnc", "1"]
    reports = []
    for command in (
        ["imagine", PROMPT, *drawing],
        ["plan", model[1], *words, "--instance", "trn2.48xlarge", "--lnc", "1"],
    ):
        assert main(command) == 0
        _, profile = capsys.readouterr().out.split("where the time goes on trn2 (program reading)")
        reports.append(profile)
    profile, planned_profile = reports
    assert profile == planned_profile
    for label in ("text encoder, a pass of 2: ", "denoiser, a pass of 2: ", "autoencoder, a pass: "):
        assert label in profile
    _, denoiser = profile.split("denoiser, a pass of 2")
    assert "modulation" in denoiser and "layer 0" in denoiser
    assert "needs the simulate backend; numpy" in refuse(capsys, *model, "--profile")


def test_several_images_are_numbered_or_a_grid(model: list[str], tmp_path: Path) -> None:
    words = ["imagine", PROMPT, "a green cross", *model, "--images", "2"]
    assert main([*words, "--out", str(tmp_path / "p.png")]) == 0
    files = sorted(path.name for path in tmp_path.glob("*.png"))
    assert files == ["p-1.png", "p-2.png", "p-3.png", "p-4.png"]
    assert main([*words, "--grid", "--out", str(tmp_path / "grid.png")]) == 0
    grid = read_image(tmp_path / "grid.png")
    assert grid.shape == (2 * 16 + 2, 2 * 16 + 2, 3)
    np.testing.assert_array_equal(grid[:16, :16], read_image(tmp_path / "p-1.png"))
    np.testing.assert_array_equal(grid[18:, 18:], read_image(tmp_path / "p-4.png"))


def test_saves_every_step(model: list[str], tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    last = tmp_path / "last.png"
    assert main(["imagine", PROMPT, *model, "--save-steps", str(steps), "--out", str(last)]) == 0
    assert sorted(path.name for path in steps.iterdir()) == ["step-001.png", "step-002.png"]
    np.testing.assert_array_equal(read_image(steps / "step-002.png"), read_image(last))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ModelError])
@pytest.mark.parametrize("adds_file", [False, True])
def test_a_failure_leaves_no_steps_and_keeps_other_files(
    failure: type[BaseException],
    adds_file: bool,
    model: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, decode = tmp_path / "steps", ImageRunner.decode

    def fail_at_second(runner: ImageRunner, latents: np.ndarray) -> np.ndarray:
        if (steps / "step-001.png").exists():
            if adds_file:
                (steps / "step-009.png").write_text("of the user")
            raise failure("stopped")
        return decode(runner, latents)

    monkeypatch.setattr(ImageRunner, "decode", fail_at_second)
    words = ["imagine", PROMPT, *model, "--save-steps", str(steps)]
    with suppress(KeyboardInterrupt):
        assert main(words) != 0
    remaining = [path.name for path in steps.iterdir()] if steps.exists() else None
    assert remaining == (["step-009.png"] if adds_file else None)


def test_begins_with_given_latents(model: list[str], tmp_path: Path) -> None:
    noise, path = tmp_path / "noise.npy", tmp_path / "p.png"
    np.save(noise, draw_noise()[:1])
    assert main(["imagine", PROMPT, *model, "--latents", str(noise), "--out", str(path)]) == 0
    first_image = read_image(path)
    np.save(noise, draw_noise()[1:])
    assert main(["imagine", PROMPT, *model, "--latents", str(noise), "--out", str(path)]) == 0
    assert (read_image(path) != first_image).any()


def test_a_grid_fills_its_last_row_with_white() -> None:
    images = np.zeros((3, 2, 2, 3), np.uint8)
    grid = arrange_grid(images, 2)
    assert grid.shape == (6, 6, 3)
    assert (grid[4:, 4:] == 255).all() and (grid[:2, :2] == 0).all() and (grid[2:4] == 255).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "'0' is not a positive whole number"),
        (["--steps", "1001"], "steps 1001"),
        (["--guidance", "-1"], "guidance -1 must be between 0 and 1000"),
        (["--guidance", "nan"], "nan"),
        (["--size", "16"], "'16' is not like 512x512"),
        (["--size", "17x16"], "17x16 pixels is no size of this model; its sizes are 16x16"),
        (["--grid"], "--grid writes one image: give its file with --out"),
        (["--seed", "-1"], "'-1'"),
        (["--tp", "3"], "3 ranks"),
        (["--backend", "neuron"], "neuron"),
    ],
)
def test_refuses_options(
    words: list[str], message: str, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refuse(capsys, PROMPT, *model, *words)


def test_refuses_files(model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read: No such file" in refuse(capsys, *model, "--latents", str(tmp_path / "x.npy"))
    text = tmp_path / "text.npy"
    text.write_text("noise")
    assert "it is no .npy file of numbers" in refuse(capsys, *model, "--latents", str(text))
    np.save(text, np.zeros((1, *LATENT_SHAPE), np.int32))
    assert "has no floating-point numbers" in refuse(capsys, *model, "--latents", str(text))
    np.save(text, np.zeros((2, *LATENT_SHAPE), np.float32))
    assert "latents of shape [2, 4, 8, 8]" in refuse(capsys, *model, "--latents", str(text))
    assert "it is a folder" in refuse(capsys, *model, "--out", str(tmp_path))
    assert "it writes a new folder" in refuse(capsys, *model, "--save-steps", str(tmp_path))
    weights = Path(model[1]) / "vae" / "diffusion_pytorch_model.safetensors"
    assert "this command reads that file" in refuse(capsys, *model, "--out", str(weights))


@pytest.mark.parametrize(("spare", "is_refused"), [(-1, True), (0, False), (1, False)])
def test_images_are_drawn_if_hbm_holds_them(
    spare: int,
    is_refused: bool,
    model: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [PROMPT, *model[:2], "--steps", "1", "--guidance", "1", "--no-check"]
    pipeline = open_pipeline(Path(model[1]))
    weight_bytes = rank_memory.RankMemory.measure(pipeline.components, "trn2").weight_bytes
    pass_bytes = count_activation_bytes(pipeline.autoencoder)
    sizes = {"trn2": weight_bytes + pass_bytes + spare, "trn1": weight_bytes, "inf2": 2**30}
    monkeypatch.setattr(rank_memory, "chip", lambda target: SimpleNamespace(hbm_bytes_per_core=sizes[target]))
    if is_refused:
        assert "a pass of the autoencoder over a batch of 1 takes" in refuse(capsys, *words)
        return
    assert main(["imagine", *words]) == 0
    assert "trn1, HBM too small" in (report := capsys.readouterr().out) and "inf2, HBM" not in report


def test_a_folder_of_texts_names_the_commands_for_it(
    folders: dict[str, Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refuse(capsys, PROMPT, "--model", "stories")
    assert "has no model_index.json" in line and "nkw generate continues texts" in line
    line = refuse(capsys, PROMPT, "--model", str(folders["flow"] / "transformer"))
    assert "is one component of a diffusion model: give the folder above it" in line
    line = refuse(capsys, PROMPT, "--model", str(tmp_path))
    assert "has no model_index.json; a diffusion model is a folder in the layout of diffusers" in line


@pytest.mark.parametrize(
    "words",
    [["generate"], ["chat", "--quick", PROMPT], ["transcribe", "talk.wav"]],
)
def test_commands_of_texts_name_the_command_that_draws(
    words: list[str],
    folders: dict[str, Path],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*words, "--model", str(folders["flow"])]) == 2
    assert "has a diffusion model: nkw imagine draws its images" in capsys.readouterr().err
