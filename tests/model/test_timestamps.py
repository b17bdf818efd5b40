"""Timestamps of `nkw transcribe`: which times may follow, where segments end, and the command, all as transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.errors import ModelError
from model.families import SPEECH, load_config
from model.speech.rules import Rules, read_rules
from model.speech.spectrum import HOP, log_mel
from model.speech.timestamps import Segment, Timestamps, split_into_segments
from model.speech.wav import read_wav
from nkw.commands import main
from tests.model.test_transcribe import WINDOW, speech, write_wav
from tests.model.whisper_folders import FIELDS, write_whisper

END, ZERO, VOCABULARY = 270, 279, FIELDS["vocab_size"]
FIELDS_TIMED: dict[str, Any] = dict(
    eos_token_id=END, pad_token_id=END, bos_token_id=END, decoder_start_token_id=271
)
TIMED: dict[str, Any] = FIELDS_TIMED | dict(
    forced_decoder_ids=[[1, None], [2, 274]],
    lang_to_id={"<|en|>": 272, "<|de|>": 273},
    task_to_id={"transcribe": 274, "translate": 275},
    no_timestamps_token_id=ZERO - 1,
    suppress_tokens=[5, 6, *range(271, ZERO - 1)],
    begin_suppress_tokens=[7, END],
    max_initial_timestamp_index=4,
    is_multilingual=True,
)


def timed(folder: Path, seed: int, **changes: Any) -> Path:
    """Return a Whisper whose vocabulary ends with 21 times: of a window of 0.4 s."""
    return write_whisper(folder, seed=seed, generation=TIMED | changes, **FIELDS_TIMED)


def sentence(random: np.random.Generator, most: int) -> list[int]:
    """Return texts between non-decreasing times, alone and in pairs, as a window may begin with."""
    ids, now = [], ZERO + int(random.integers(0, 3))
    while len(ids) < most:
        ids += [now] * int(random.integers(1, 3)) + list(random.integers(20, 200, random.integers(0, 4)))
        now = min(now + int(random.integers(1, 4)), VOCABULARY - 1)
    return [int(token) for token in ids[: int(random.integers(0, most + 1))]]


@pytest.mark.parametrize("latest", [None, 0, 4])
def test_what_may_follow_is_what_transformers_lets_follow(latest: int | None) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    transformers = pytest.importorskip("transformers", reason="an extra of development (dev)")
    config = transformers.GenerationConfig(eos_token_id=END, no_timestamps_token_id=ZERO - 1)
    config.max_initial_timestamp_index = latest
    processor = transformers.generation.logits_process.WhisperTimeStampLogitsProcessor(config, begin_index=3)
    random, timestamps = np.random.default_rng(7), Timestamps(ZERO, latest, END)
    decided = {True: 0, False: 0}
    for trial in range(400):
        written = sentence(random, 9)
        logits = random.standard_normal(VOCABULARY).astype(np.float32) * 2
        logits[ZERO:] += np.float32(random.uniform(-6, 3))
        logits[list(random.integers(0, VOCABULARY, 20))] = -np.inf
        scores = torch.from_numpy(logits[None].copy())
        expected = processor(torch.tensor([[271, 272, 274, *written]]), scores)[0].numpy()
        timestamps.allow(logits, written)
        assert np.array_equal(logits, expected), (trial, written)
        decided[bool(np.isfinite(logits[:ZERO]).any())] += 1
    assert min(decided.values()) > 50


@pytest.mark.parametrize("columns", [40, 39, 1])
def test_segments_are_those_of_transformers(columns: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    whisper = pytest.importorskip("transformers").WhisperForConditionalGeneration
    random = np.random.default_rng(11)
    several = 0
    for begins in (0, 7, 125):
        for _ in range(150):
            ids = sentence(random, 12)
            if not ids:
                continue
            expected, offset = whisper._retrieve_segment(
                seek_sequence=torch.tensor(ids),
                seek_outputs=[None],
                time_offset=torch.tensor([begins]).to(torch.float64) * 0.02 / 2,
                timestamp_begin=ZERO,
                seek_num_frames=torch.tensor([columns]),
                time_precision=0.02,
                time_precision_features=0.01,
                input_stride=2,
                prev_idx=0,
                idx=0,
                return_token_timestamps=False,
                decoder_input_ids=torch.zeros(1, 3),
            )
            segments, later = split_into_segments(ids, ZERO, begins, columns)
            assert later == int(offset)
            assert [list(segment.ids) for segment in segments] == [
                segment["tokens"].tolist() for segment in expected
            ]
            for segment, other in zip(segments, expected):
                assert (segment.start, segment.end) == (float(other["start"]), float(other["end"]))
            several += len(segments) > 1
    assert several > 50


def test_a_window_without_times_is_a_segment() -> None:
    assert split_into_segments([20, 21], ZERO, 100, 40) == ([Segment(1.0, 1.4, (20, 21))], 40)
    assert split_into_segments([], ZERO, 0, 31) == ([Segment(0.0, 0.3, ())], 31)
    assert split_into_segments([ZERO, 20], ZERO, 0, 60)[0][0].end == 0.6  # which float32 makes 0.58


def rules(folder: Path, timestamps: bool = True) -> Rules:
    return read_rules(folder, load_config(folder, SPEECH), "en", timestamps)


def test_a_transcription_with_times_begins_without_the_token_that_says_none(tmp_path: Path) -> None:
    folder = timed(tmp_path / "timed", 0)
    assert rules(folder).prompt == (271, 272, 274)
    assert rules(folder).timestamps == Timestamps(ZERO, 4, END)
    assert rules(folder, timestamps=False).prompt == (271, 272, 274, ZERO - 1)
    assert rules(folder, timestamps=False).timestamps is None
    forced = dict(forced_decoder_ids=[[1, 272], [2, 274], [3, ZERO - 1]])
    assert rules(timed(tmp_path / "forced", 0, **forced)).prompt == (271, 272, 274)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(no_timestamps_token_id=VOCABULARY - 1), "this model's vocabulary has no times"),
        (dict(no_timestamps_token_id=None), "this model's vocabulary has no times"),
        (dict(max_initial_timestamp_index=-1), "-1 is not a whole number from 0 on"),
        (dict(max_initial_timestamp_index="1"), "'1' is not a whole number from 0 on"),
    ],
)
def test_refuses_a_vocabulary_without_times(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    last = timed(tmp_path / "last", 0, no_timestamps_token_id=VOCABULARY - 2, max_initial_timestamp_index=0)
    assert rules(last).timestamps == Timestamps(VOCABULARY - 1, 0, END)
    settings = {key: value for key, value in (TIMED | changes).items() if value is not None}
    folder = write_whisper(tmp_path / "without", generation=settings, **FIELDS_TIMED)
    with pytest.raises(ModelError, match=message):
        rules(folder)


def by_transformers(folder: Path, samples: np.ndarray, most: int) -> list[dict[str, Any]]:
    """Return the segments of transformers, which is given the spectrum."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    model.generation_config.forced_decoder_ids = None
    filled = np.pad(samples, (0, max(0, WINDOW - len(samples))))
    spectrum = torch.from_numpy(log_mel(filled, FIELDS["num_mel_bins"]))[None]
    named = dict(language="en", task="transcribe", max_new_tokens=most)
    generated = model.eval().generate(spectrum, return_timestamps=True, return_segments=True, **named)
    segments: list[dict[str, Any]] = generated["segments"][0]
    return segments


@pytest.mark.parametrize("samples", [WINDOW // 2, 3 * WINDOW + 5 * HOP + 9])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_recording_has_the_segments_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, samples: int
) -> None:
    folder = timed(tmp_path / "whisper", seed)
    recording = write_wav(tmp_path / "speech.wav", speech(seed, samples))
    options = [
        "--model",
        str(folder),
        "--language",
        "en",
        "--max-new-tokens",
        "9",
        "--timestamps",
        "--json",
        "-",
    ]
    assert main(["transcribe", str(recording), *options, "--backend", "numpy"]) == 0
    captured = capsys.readouterr()
    segments = json.loads(captured.out)["segments"]
    expected = by_transformers(folder, read_wav(recording), 9)
    assert [segment["ids"] for segment in segments] == [segment["tokens"].tolist() for segment in expected]
    for segment, other in zip(segments, expected):
        assert (segment["start"], segment["end"]) == (float(other["start"]), float(other["end"]))
        assert (
            f"[{segment['start']:.2f} s to {segment['end']:.2f} s] {segment['text'].strip()}\n"
            in captured.err
        )
    assert len(segments) >= 2


@pytest.mark.slow
def test_the_kernels_write_the_segments_of_the_numpy_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = timed(tmp_path / "whisper", 2)
    recording = write_wav(tmp_path / "speech.wav", speech(2, 3 * WINDOW // 2))
    options = [
        "transcribe",
        str(recording),
        "--model",
        str(folder),
        "--language",
        "en",
        "--max-new-tokens",
        "9",
    ]
    documents = []
    for backend in ("simulate", "numpy"):
        assert main([*options, "--timestamps", "--json", "-", "--backend", backend]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    ours, reference = documents
    assert ours["segments"] == reference["segments"]
    assert [generation["prompt"] for generation in ours["generations"]] == [
        generation["prompt"] for generation in reference["generations"]
    ]
    assert all(generation["checks"]["differences"] == [] for generation in ours["generations"])
    assert main([*options, "--backend", "numpy", "--json", "-"]) == 0
    assert "segments" not in json.loads(capsys.readouterr().out)


def test_a_spectrum_is_the_same_however_many_columns_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = speech(1, 100 * HOP + 1)
    spectrum = log_mel(samples, 80)
    assert spectrum.shape == (80, 100)
    monkeypatch.setattr("model.speech.spectrum._CHUNK", 7)
    assert np.abs(log_mel(samples, 80) - spectrum).max() <= np.spacing(np.float32(2))
