"""`nkw transcribe`: recordings, log-mel spectra, what a transcription begins with, and the command."""

from __future__ import annotations

import json
import random
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.errors import ModelError
from model.families import SPEECH, load_config
from model.loading.checkpoint import open_checkpoint
from model.runners.reference import ReferenceModel
from model.speech.rules import Rules, TranscriptionRule, read_rules
from model.speech.spectrum import HOP, log_mel, split_into_windows
from model.speech.wav import decode_wav, read_wav
from nkw.commands import main
from tests.model.folders import write_folder
from tests.model.whisper_folders import FIELDS, GENERATION, write_whisper

WINDOW = 2 * FIELDS["max_source_positions"] * HOP


def write_wav(path: Path, samples: np.ndarray, width: int = 2, rate: int = 16000, channels: int = 1) -> Path:
    """Write samples from -1 to 1 as a WAV file of integers of `width` bytes."""
    wide = np.clip(
        np.round(samples * 2.0 ** (8 * width - 1)), -(2.0 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1
    )
    content = (wide + (128 if width == 1 else 0)).astype("<i8")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return path


def speech(seed: int, samples: int) -> np.ndarray:
    """Return samples of tones that swell and fade, over a little noise."""
    generator, seconds = np.random.default_rng(seed), np.arange(samples) / 16000
    tones = sum(np.sin(2 * np.pi * pitch * seconds) for pitch in generator.uniform(80, 4000, 6)) / 8
    return (tones * np.sin(3 * seconds) ** 2 + 0.01 * generator.standard_normal(samples)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(tmp_path: Path, width: int) -> None:
    """Exact at the ends of the range, else within half a step of the width, and of float32."""
    samples = np.concatenate([[-1.0, 0.0, 0.5], speech(1, 1000)])
    decoded = read_wav(write_wav(tmp_path / "speech.wav", samples, width))
    assert decoded.dtype == np.float32
    assert np.array_equal(decoded[:3], [-1.0, 0.0, 0.5])
    step = max(2.0 ** (1 - 8 * width), 2.0**-24)
    assert np.abs(decoded - samples).max() <= step / 2 + 2.0**-25


def test_refuses_what_is_no_recording(tmp_path: Path) -> None:
    samples = speech(1, 16)
    assert len(read_wav(write_wav(tmp_path / "mono.wav", samples))) == 16
    (tmp_path / "text.wav").write_text("not a recording, though its name says so")
    (tmp_path / "short.wav").write_bytes((tmp_path / "mono.wav").read_bytes()[:10])
    other = (tmp_path / "mono.wav").read_bytes()
    (tmp_path / "float.wav").write_bytes(other[:20] + b"\x07\x00" + other[22:])
    for path, message in (
        (write_wav(tmp_path / "stereo.wav", samples, channels=2), "has 2 channels; a recording has 1"),
        (
            write_wav(tmp_path / "slow.wav", samples, rate=15999),
            "has 15,999 samples a second; a recording has 16,000",
        ),
        (write_wav(tmp_path / "none.wav", samples[:0]), "has no samples"),
        (tmp_path / "text.wav", "is not a WAV file of PCM samples: file does not start with RIFF id"),
        (tmp_path / "short.wav", "is not a WAV file"),
        (tmp_path / "float.wav", "is not a WAV file of PCM samples: unknown format: 7"),
        (tmp_path / "absent.wav", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(ModelError, match=message):
            read_wav(path)


FORMAT = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)
SAMPLES = b"data" + struct.pack("<I", 4) + bytes(4)
EMPTY = b"junk" + struct.pack("<I", 0)


def riff(chunks: bytes, size: int | None = None) -> bytes:
    """Return a WAV file of some chunks whose header says `size` bytes; by default as many as there are."""
    return b"RIFF" + struct.pack("<I", len(chunks) + 4 if size is None else size) + b"WAVE" + chunks


@pytest.mark.parametrize(
    ("chunks", "size", "message"),
    [
        (b"junk" + struct.pack("<I", 2**31) + FORMAT + SAMPLES, 40, "a chunk is longer than the file says"),
        (b"junk" + struct.pack("<I", 30) + FORMAT + SAMPLES, 20, "a chunk is longer than the file says"),
        (FORMAT + b"data" + struct.pack("<I", 4), None, "has no samples"),
        (FORMAT, None, "fmt chunk and/or data chunk missing"),
        (SAMPLES + FORMAT, None, "data chunk before fmt chunk"),
        (EMPTY * 999 + FORMAT + SAMPLES, None, "it has more than 1,000 chunks before its samples"),
        (EMPTY * 10**6 + FORMAT + SAMPLES, None, "it has more than 1,000 chunks before its samples"),
    ],
)
def test_broken_chunks_are_refused(chunks: bytes, size: int | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decode_wav(riff(chunks, size), "the file")


def test_further_chunks_before_the_samples_are_skipped() -> None:
    assert len(decode_wav(riff(EMPTY * 100 + FORMAT + SAMPLES), "the file")) == 2


def test_spoilt_recordings_are_read_or_refused() -> None:
    draw = random.Random(7)
    recording = riff(FORMAT + b"LIST" + struct.pack("<I", 4) + b"INFO" + SAMPLES)
    read, codes = 0, set()
    for _ in range(3000):
        content = bytearray(recording)
        for _ in range(draw.randrange(1, 4)):
            start = draw.randrange(len(content))
            content[start : start + draw.randrange(5)] = draw.choice(
                [b"", b"\xff" * 4, bytes(4), draw.randbytes(4)]
            )
        try:
            read += len(decode_wav(bytes(content), "the file")) > 0
        except ModelError as error:
            codes.add(error.code)
    assert codes == {"NKW-MODEL-AUDIO"}
    assert 100 < read < 2900


@pytest.mark.parametrize(("bands", "samples"), [(80, 480_000), (128, 480_000), (80, 31_000)])
def test_spectra_are_those_of_transformers(bands: int, samples: int) -> None:
    """Its numpy way is float64 rounded once, ours too; its torch way, in float32, is as far from both."""
    pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    transformers = pytest.importorskip("transformers", reason="an extra of development (dev)")
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    (window,) = split_into_windows(speech(bands, samples), 3000)
    spectrum = log_mel(window, bands)
    exact = extractor._np_extract_fbank_features(window[None], "cpu")[0]
    by_torch = extractor(window, sampling_rate=16000, return_tensors="np").input_features[0]
    assert spectrum.shape == exact.shape == (bands, 3000)
    spacing = 4 * float(np.spacing(np.float32(np.abs(exact).max())))
    assert np.abs(spectrum - exact).max() <= spacing
    assert np.abs(spectrum - by_torch).max() <= np.abs(exact - by_torch).max() + spacing


def test_windows_follow_one_another_and_the_last_is_filled_up() -> None:
    for count, windows in ((1, 1), (WINDOW - 1, 1), (WINDOW, 1), (WINDOW + 1, 2), (2 * WINDOW, 2)):
        samples = speech(1, count)
        joined = np.concatenate(split_into_windows(samples, 40))
        assert len(joined) == windows * WINDOW
        assert np.array_equal(joined[:count], samples)
        assert not joined[count:].any()


def rules(folder: Path, language: str | None = None) -> Rules:
    return read_rules(folder, load_config(folder, SPEECH), language)


def test_a_transcription_begins_with_what_the_folder_says(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path / "many")
    assert rules(folder, "de") == Rules((3, 6, 7, 9), tuple(range(3, 30)), (2, 40))
    with pytest.raises(ModelError, match="names no language or task of a transcription; give --language"):
        rules(folder)
    with pytest.raises(ModelError, match="--language fr: this model knows de, en"):
        rules(folder, "fr")
    later = {key: value for key, value in GENERATION.items() if key != "forced_decoder_ids"}
    assert rules(write_whisper(tmp_path / "later", generation=later), "en").prompt == (3, 5, 7, 9)
    old = {"forced_decoder_ids": [[1, 5], [2, 7], [3, 9]], "suppress_tokens": [12]}
    folder = write_whisper(tmp_path / "old", generation={}, **old)
    assert rules(folder) == Rules((3, 5, 7, 9), (12,), ())
    english = write_whisper(tmp_path / "english", generation={"no_timestamps_token_id": 9})
    assert rules(english).prompt == (3, 9)
    with pytest.raises(ModelError, match="--language en: this model knows none"):
        rules(english, "en")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(forced_decoder_ids=[[2, 7]]), "does not have the positions 1, 2, 3 and so on, in this order"),
        (dict(forced_decoder_ids=[1, 2]), r"is not a list of pairs \[position, token id\]"),
        (dict(forced_decoder_ids=[[1, 300]]), "300 is not a token of a vocabulary of 300"),
        (dict(lang_to_id=[5]), "is not an object of token ids"),
        (
            dict(forced_decoder_ids=[[position, 7] for position in range(1, 40)]),
            "begins with 41 tokens; the context has 40",
        ),
    ],
)
def test_refuses_rules_that_make_no_beginning(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    most = [[position, 7] for position in range(1, 38)]
    folder = write_whisper(tmp_path / "most", generation=GENERATION | {"forced_decoder_ids": most})
    assert len(rules(folder).prompt) == 39
    folder = write_whisper(tmp_path / "whisper", generation=GENERATION | changes)
    with pytest.raises(ModelError, match=message):
        rules(folder)


def test_suppressed_tokens_are_never_chosen() -> None:
    rule = TranscriptionRule(Rules((0,), (1,), (2,)), 4)
    assert rule.allowed().tolist() == [True, False, False, True]
    assert rule.accept(3) and rule.allowed().tolist() == [True, False, True, True]


def expected(folder: Path, samples: np.ndarray, most: int) -> list[list[int]]:
    """Return the tokens of every window, by the reference alone."""
    config = load_config(folder, SPEECH)
    model = ReferenceModel(config, open_checkpoint(folder, config))
    window_ids: list[list[int]] = []
    for window in split_into_windows(samples, 40):
        model.encode([log_mel(window, FIELDS["num_mel_bins"])])
        logits, ids = model.prefill([[3, 5, 7, 9]])[0].logits, []
        while len(ids) < most and 2 not in ids:
            never = [*range(3, 30), *([2, 40] if not ids else [])]
            logits[never] = -np.inf
            ids.append(int(logits.argmax()))
            logits = model.decode([ids[-1]], [3 + len(ids)])[0].logits
        window_ids.append(ids)
    return window_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--tp", "2", "--dtype", "bfloat16", "--target", "trn2", "--lnc", "2"]]
)
def test_a_recording_is_transcribed_window_after_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    folder, samples = write_whisper(tmp_path / "whisper"), speech(4, 3 * WINDOW // 2)
    recording = write_wav(tmp_path / "speech.wav", samples)
    result = tmp_path / "out.json"
    arguments = ["--model", str(folder), "--language", "en", "--max-new-tokens", "5", "--json", str(result)]
    assert main(["transcribe", str(recording), *arguments, *options]) == 0
    printed = capsys.readouterr().out
    assert "window 1 of 2, 0 s to 0.4 s" in printed and "window 2 of 2, 0.4 s to 0.6 s" in printed
    assert "tokens equal to the numpy reference" in printed and "predicted on" in printed
    assert max(map(len, printed.splitlines())) <= 80
    document = json.loads(result.read_text())
    assert (document["command"], document["recording"]) == ("transcribe", str(recording))
    generations = document["generations"]
    assert [generation["prompt"] for generation in generations] == ["0 s to 0.4 s", "0.4 s to 0.6 s"]
    lnc = {target: times["per_token"]["lnc"] for target, times in document["predictions"].items()}
    assert lnc == {"trn1": 1, "inf2": 1, "trn2": 2 if options else 1}
    assert f"trn2 (LNC {lnc['trn2']})" in printed
    if not options:
        ids = [generation["generated_ids"] for generation in generations]
        assert ids == expected(folder, read_wav(recording), 5)
        assert ids[0] != ids[1]
        assert all(
            generation["checks"]["tokens_equal"] == len(generation["generated_ids"])
            for generation in generations
        )


def test_the_numpy_backend_writes_the_same_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_whisper(tmp_path / "whisper")
    recording = write_wav(tmp_path / "speech.wav", speech(4, WINDOW))
    options = ["--model", str(folder), "--language", "en", "--max-new-tokens", "3", "--json", "-"]
    assert main(["transcribe", str(recording), *options, "--backend", "numpy"]) == 0
    document = json.loads(capsys.readouterr().out)
    ids = [generation["generated_ids"] for generation in document["generations"]]
    assert ids == expected(folder, read_wav(recording), 3)
    assert document["predictions"] == {}


def test_refuses_other_models_and_too_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, llama = write_whisper(tmp_path / "whisper"), write_folder(tmp_path / "llama")
    recording = str(write_wav(tmp_path / "speech.wav", speech(1, 800)))

    def refused(*arguments: str) -> str:
        assert main([*arguments]) == 2
        return capsys.readouterr().err

    assert "a llama continues texts" in refused("transcribe", recording, "--model", str(llama))
    assert "nkw transcribe and nkw serve do that" in refused("generate", "--model", str(folder))
    assert "one run takes 32 ranks at most" in refused(
        "transcribe", recording, "--model", str(folder), "--tp", "33"
    )
    assert "leave --pp out" in refused("plan", str(folder), "--pp", "2")
    assert "leave --sp out" in refused("plan", str(folder), "--sp", "--tp", "2")


@pytest.mark.slow
def test_a_plan_predicts_the_encoder_with_the_prompt(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And by hand what it says of speech: a window takes the first token and 127 steps, with engine time."""
    config = "whisper-tiny"
    result = tmp_path / "plan.json"
    assert main(["plan", config, "--dtype", "bfloat16", "--batch", "2", "--json", str(result)]) == 0
    text = capsys.readouterr().out
    assert "Times are dry runs of this project's kernels" in text
    assert "rooflines, because" not in text
    for kernel in (
        "encoder: conv1d, spectrum",
        "encoder: attention_prefill",
        "encoder: qkv_projection, decoder's keys",
        "attention_prefill, to the encoder",
        "attention_decode, to the encoder",
    ):
        assert text.count(f"\n{kernel} ") == 1
    assert max(map(len, text.splitlines())) <= 80
    document = json.loads(result.read_text())
    assert (document["prompt"], document["generate"]) == (4, 128)
    heard, first, alone = document["speech"], document["first_token"], document["batches"][0]
    encoder = [kernel for kernel in first["kernels"] if kernel["kernel"].startswith("encoder: ")]
    assert heard["window_s"] == 30
    assert heard["encoder"]["program_ns"] == pytest.approx(sum(kernel["program_ns"] for kernel in encoder))
    terms = document["stack"]["terms"]

    def engine_ns(phase: str, sequences: int) -> float:
        """Return the time of the engine beside the launches of a phase."""
        return 1e6 * (terms[phase]["base_ms"] + sequences * terms[phase]["slot_ms"])

    first_ns = first["program_ns"] + engine_ns("prompt_engine", 1)
    total_ns = first_ns + 127 * (alone["program_ns"] + engine_ns("step_engine", 1))
    assert heard["whole"]["program_ns"] == pytest.approx(total_ns)
    assert heard["real_time_factor"] == pytest.approx(total_ns / 30e9)
    both_ns = document["batches"][1]["program_ns"] + engine_ns("step_engine", 2)
    together = 2 * first_ns + 127 * both_ns
    assert heard["speech_per_s"] == pytest.approx(document["copies"] * 2 * 30e9 / together)
    report = " ".join(text.split())
    assert "a window of 30 s: its encoder takes" in report and "s of speech in a second" in report


def test_a_plan_of_rooflines_knows_no_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    config = "whisper-tiny"
    assert main(["plan", config, "--accelerator", "h100", "--json", "-"]) == 0
    heard = json.loads(capsys.readouterr().out)["speech"]
    assert heard["encoder"] is None and heard["whole"]["program_ns"] > 0
    other = "llama-3.2-1b"
    assert main(["plan", other, "--accelerator", "h100", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["speech"] is None
