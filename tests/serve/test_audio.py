"""`/v1/audio/…`: the server transcribes as `nkw transcribe` does with the numpy model."""

from __future__ import annotations

import io
import json
import math
import re
import socket
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from model.families import SPEECH, load_config
from model.loading.checkpoint import open_checkpoint
from model.runners.reference import ReferenceModel
from model.serve.openai.audio.answers import SUBTITLES, SpokenSegment, StrippedText, compute_compression_ratio
from model.serve.openai.fields import KNOWN_FIELDS
from model.speech.recording import Recording
from model.speech.wav import read_wav
from nkw.commands import main
from tests.model.test_timestamps import END, TIMED, ZERO, timed
from tests.model.test_transcribe import WINDOW, speech, write_wav
from tests.model.whisper_folders import FIELDS
from tests.serve.conftest import Served, serving
from tests.serve.test_ends import metric, wait_until
from tests.serve.test_fuzz import fuzz
from tests.serve.test_refusals import posted
from tests.serve.test_replicas import process

openai = pytest.importorskip("openai", reason="openai is an extra of development (dev)")

NAME, TOKENS, START, LANGUAGES = "whisper", 6, 271, {"en": 272, "de": 273}
PREVIOUS = 277
SHAPE = FIELDS["num_mel_bins"], 2 * FIELDS["max_source_positions"]


def tokenizer_of_characters() -> tokenizers.Tokenizer:
    """Return a tokenizer with one character for each ordinary token, so that texts differ where tokens do."""
    vocabulary = {chr(32 + id): id for id in range(END)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Whisper whose windows last 0.4 s and return its folder."""
    path = timed(tmp_path_factory.mktemp("served") / NAME, 29, prev_sot_token_id=PREVIOUS)
    tokenizer_of_characters().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def hearing(folder: Path) -> Iterator[Served]:
    """Yield a server of the Whisper with nine places."""
    with serving("--model", str(folder), "--max-num-seqs", "4", "--max-queue", "5") as served:
        yield served


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write recordings of parts of a window and of several windows."""
    path = tmp_path_factory.mktemp("recordings")
    sizes = (WINDOW // 2, WINDOW, 3 * WINDOW // 2, 4 * WINDOW + 9)
    return [write_wav(path / f"{n}.wav", speech(n, size)) for n, size in enumerate(sizes)]


def by_command(folder: Path, recording: Path, *options: str) -> dict[str, Any]:
    """Return the transcription of the command with the numpy model."""
    output = io.StringIO()
    command = ("--model", str(folder), "--max-new-tokens", str(TOKENS), "--backend", "numpy", "--json", "-")
    with redirect_stdout(output):
        assert main(["transcribe", str(recording), *command, *options]) == 0
    document: dict[str, Any] = json.loads(output.getvalue())
    return document


def request_transcription(client: Any, recording: Any, **fields: Any) -> Any:
    """Return a transcription of few tokens by a server."""
    fields = {"language": "en", "extra_body": {"max_completion_tokens": TOKENS}} | fields
    return client.audio.transcriptions.create(file=recording, model=NAME, **fields)


@pytest.mark.slow
def test_texts_are_those_of_the_command(hearing: Served, folder: Path, recordings: list[Path]) -> None:
    client = hearing.client()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda recording: request_transcription(client, recording), recordings))
    texts = []
    for answer, recording in zip(answers, recordings):
        windows = by_command(folder, recording, "--language", "en")["generations"]
        texts.append("".join(window["text"] for window in windows).strip())
        seconds = len(read_wav(recording)) / 16000
        assert (answer.text, answer.usage.seconds) == (texts[-1], math.ceil(seconds))
    assert len(set(texts)) == len(texts) and all(texts)
    other = request_transcription(client, recordings[3], language="de")
    windows = by_command(folder, recordings[3], "--language", "de")["generations"]
    assert other.text == "".join(window["text"] for window in windows).strip() != texts[3]
    assert request_transcription(client, recordings[0], response_format="text") == f"{texts[0]}\n"


@pytest.mark.slow
def test_segments_are_those_of_the_command(hearing: Served, folder: Path, recordings: list[Path]) -> None:
    client = hearing.client()
    for recording in recordings[2:]:
        segments = by_command(folder, recording, "--language", "en", "--timestamps")["segments"]
        transcription = request_transcription(
            client, recording, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert [
            (segment.start, segment.end, segment.tokens, segment.text) for segment in transcription.segments
        ] == [(segment["start"], segment["end"], segment["ids"], segment["text"]) for segment in segments]
        assert [segment.id for segment in transcription.segments] == list(range(len(segments))) and len(
            segments
        ) > 1
        assert (transcription.language, transcription.task) == ("en", "transcribe")
        assert transcription.duration == len(read_wav(recording)) / 16000
        assert transcription.text == "".join(segment["text"] for segment in segments).strip()
        for segment in transcription.segments:
            assert segment.avg_logprob < 0 and segment.compression_ratio == compute_compression_ratio(
                segment.text
            )
            assert segment.seek <= 100 * segment.start + 1e-6
        subtitles = request_transcription(client, recording, response_format="srt")
        assert len(re.findall(r"^\d+\n[\d:,]+ --> [\d:,]+$", subtitles, re.M)) == len(segments)
        assert request_transcription(client, recording, response_format="vtt").startswith("WEBVTT\n\n00:00:")


def test_log_probabilities_of_a_segment_are_those_of_the_model(
    hearing: Served, folder: Path, recordings: list[Path]
) -> None:
    """Of the first window, by the numpy model: before any token was forbidden."""
    segments = request_transcription(hearing.client(), recordings[0], response_format="verbose_json").segments
    window_segments = [segment for segment in segments if segment.seek == 0]
    config = load_config(folder, SPEECH)
    model = ReferenceModel(config, open_checkpoint(folder, config))
    model.encode([Recording(read_wav(recordings[0]), SHAPE, True).cut_window(0)[0]])
    steps, ids = (
        [model.prefill([[271, 272, 274]])[0]],
        [id for segment in window_segments for id in segment.tokens],
    )
    for position, id in enumerate(ids):
        steps.append(model.decode([id], [3 + position])[0])
    first = 0
    for segment in window_segments:
        sums = []
        for id, step in zip(segment.tokens, steps[first:]):
            logits = np.asarray(step.logits, np.float64)
            sums.append(logits[id] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        first += len(segment.tokens)
        assert segment.avg_logprob == pytest.approx(np.mean(sums), abs=1e-3)


@pytest.mark.slow
def test_a_stream_has_the_text_in_pieces(hearing: Served, recordings: list[Path]) -> None:
    client = hearing.client()
    for recording in recordings:
        events = list(request_transcription(client, recording, stream=True))
        full_text = request_transcription(client, recording).text
        assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + [
            "transcript.text.done"
        ]
        assert "".join(event.delta for event in events[:-1]) == full_text == events[-1].text
        usage = events[-1].usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0
    assert len(events) > 3


def test_usage_grows_with_each_event_of_a_stream(hearing: Served, recordings: list[Path]) -> None:
    options = {"stream_include_usage": True, "stream_continuous_usage_stats": True}
    client = hearing.client()
    for body_fields, counted in ((options, True), ({"stream_include_usage": True}, False)):
        *deltas, done = request_transcription(client, recordings[-1], stream=True, extra_body=body_fields)
        counts = [delta.usage["output_tokens"] for delta in deltas if getattr(delta, "usage", None)]
        assert len(counts) == (len(deltas) if counted else 0) and counts == sorted(counts)
        assert all(count <= done.usage.output_tokens for count in counts)


def test_fields_without_an_effect_are_ignored(hearing: Served) -> None:
    ignored = {name: "any" for name, known in KNOWN_FIELDS["transcriptions"].items() if not known.refusal}
    assert sent(hearing, form(content(100), use_beam_search="false", **ignored)) == (200, {})


@pytest.mark.slow
def test_the_language_is_found_where_none_is_given(
    hearing: Served, folder: Path, recordings: list[Path]
) -> None:
    config = load_config(folder, SPEECH)
    model = ReferenceModel(config, open_checkpoint(folder, config))
    for recording in recordings:
        model.encode([Recording(read_wav(recording), SHAPE).cut_window(0)[0]])
        logits = model.prefill([[START]])[0].logits
        assert logits is not None
        wanted = max(LANGUAGES, key=lambda name: float(logits[LANGUAGES[name]]))
        answer = request_transcription(hearing.client(), recording, language=openai.omit)
        assert answer.text == request_transcription(hearing.client(), recording, language=wanted).text
        verbose = request_transcription(
            hearing.client(), recording, language=openai.omit, response_format="verbose_json"
        )
        assert verbose.language == wanted


def first_window(folder: Path, recording: Path, prompt: list[int]) -> list[int]:
    """Return the tokens of the first window behind a prompt, by the numpy model and the folder's rules."""
    config = load_config(folder, SPEECH)
    model, ids = ReferenceModel(config, open_checkpoint(folder, config)), list[int]()
    model.encode([Recording(read_wav(recording), SHAPE).cut_window(0)[0]])
    logits = model.prefill([prompt])[0].logits
    while len(ids) < TOKENS and END not in ids:
        assert logits is not None
        logits[[*TIMED["suppress_tokens"], *([] if ids else TIMED["begin_suppress_tokens"])]] = -np.inf
        ids.append(int(logits.argmax()))
        logits = model.decode([ids[-1]], [len(prompt) + len(ids) - 1])[0].logits
    return ids


@pytest.mark.slow
def test_translations_and_prompts_go_before_the_window(
    hearing: Served, folder: Path, recordings: list[Path]
) -> None:
    client, recording = hearing.client(), recordings[0]
    (service,) = [hearing.engine]
    decode = service._tokenizer.decode
    translated = client.audio.translations.create(
        file=recording,
        model=NAME,
        response_format="verbose_json",
        extra_body={"language": "de", "max_completion_tokens": TOKENS},
    )
    assert translated.language == "en"
    plain = client.audio.translations.create(
        file=recording, model=NAME, extra_body={"language": "de", "max_completion_tokens": TOKENS}
    )
    start = [START, LANGUAGES["de"], 275, ZERO - 1]
    assert plain.text == decode(first_window(folder, recording, start)).strip()
    before = service._tokenizer.encode(" Tom", special_tokens=False)
    transcription = request_transcription(client, recording, prompt=" Tom ", language="de")
    start = [PREVIOUS, *before, START, LANGUAGES["de"], 274, ZERO - 1]
    assert transcription.text == decode(first_window(folder, recording, start)).strip()
    long = request_transcription(client, recording, prompt="x" * 500, language="de")
    start = [PREVIOUS, *service._tokenizer.encode("x" * 19, special_tokens=False), *start[-4:]]
    assert long.text == decode(first_window(folder, recording, start)).strip()


def test_a_client_that_leaves_frees_its_windows(hearing: Served, recordings: list[Path]) -> None:
    cache = hearing.engine.scheduler.cache
    aborted = 'nkw_request_success_total{finished_reason="abort"'
    before = metric(hearing, aborted)
    stream = hearing.client().audio.transcriptions.create(
        file=recordings[3], model=NAME, language="en", stream=True
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: cache.free == cache.count and not hearing.engine.busy)
    assert metric(hearing, aborted) > before
    body = form(recordings[3].read_bytes(), model=NAME, language="en", response_format="srt")
    header = f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", hearing.port)) as leaves:
        leaves.sendall(
            f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\n{header}\r\n".encode() + body
        )
        wait_until(lambda: hearing.engine.busy)
    wait_until(lambda: cache.free == cache.count and not hearing.engine.busy)


@pytest.mark.slow
def test_steps_with_windows_are_predicted(hearing: Served, recordings: list[Path]) -> None:
    """Each shape once, in the background, after it was first seen; those of other tests may come first."""
    request_transcription(hearing.client(), recordings[1])
    wait_until(lambda: metric(hearing, "nkw_unpredicted_step_parts") == 0)
    assert metric(hearing, "nkw_predicted_step_seconds_total") > 0


def content(samples: int, rate: int = 16000, channels: int = 1) -> bytes:
    """Return a WAV file of silence."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"\0\0" * samples * channels)
    return made.getvalue()


def form(recording: bytes | None, **fields: str) -> bytes:
    """Return a body with the boundary `b`."""
    body_parts = [
        f'content-disposition: form-data; name="{name}"\r\n\r\n{text}' for name, text in fields.items()
    ]
    made = [body_part.encode() for body_part in body_parts]
    if recording is not None:
        head = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        made.append(head + recording)
    return b"".join(b"--b\r\n" + encoded + b"\r\n" for encoded in made) + b"--b--\r\n"


def sent(
    server: Served, body: bytes, content_type: str = "multipart/form-data; boundary=b"
) -> tuple[int, dict[str, Any]]:
    return posted(server, "/v1/audio/transcriptions", body, content_type=content_type)


REFUSED: list[tuple[bytes, int, str]] = [
    (form(None, model=NAME), 400, "the form needs exactly one file"),
    (form(None, file="text"), 400, "the form needs exactly one file"),
    (
        form(b"no recording"),
        400,
        "the file is not a WAV file of PCM samples: file does not start with RIFF id",
    ),
    (
        form(content(100, rate=44100)),
        400,
        "the file has 44,100 samples a second; a recording has 16,000: resample",
    ),
    (form(content(100, channels=2)), 400, "the file has 2 channels; a recording has 1: mix them first"),
    (form(content(0)), 400, "the file has no samples"),
    (form(content(10 * WINDOW)), 400, "the recording has 10 windows; 9 at most are computed at once"),
    (form(content(100), model="other"), 404, "the model does not exist; this server has whisper"),
    (form(content(100), language="fr"), 400, "the language is not known; this model knows de, en"),
    (form(content(100), response_format="xml"), 400, "response_format: Input should be 'json', 'text'"),
    (form(content(100), temperature="warm"), 400, "temperature: Input should be a valid number"),
    (form(content(100), temperature="nan"), 400, "temperature is nan; it must be between 0 and 1e+06"),
    (form(content(100), best_of="2"), 400, "nkw serve does not take the argument best_of"),
    (form(content(100), use_beam_search="true"), 400, "use_beam_search: beams are not searched"),
    (
        form(content(100), stream_include_usage="true"),
        400,
        "stream_include_usage and stream_continuous_usage_stats need stream to be true",
    ),
    (
        form(content(100), stream="true", response_format="srt"),
        400,
        "a stream has no response_format",
    ),
    (
        form(content(100), **{"timestamp_granularities[]": "segment"}),
        400,
        "timestamp_granularities[] needs the",
    ),
    (
        form(content(100), response_format="verbose_json", **{"timestamp_granularities[]": "word"}),
        400,
        "times of words are not computed",
    ),
]


@pytest.mark.parametrize(("body", "status", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_recording_that_cannot_be_read_is_refused(
    hearing: Served, body: bytes, status: int, message: str
) -> None:
    status_code, error = sent(hearing, body)
    assert (status_code, error["message"].startswith(message)) == (status, True), error
    assert error["type"] == "invalid_request_error"


@pytest.mark.slow
def test_the_longest_recordings_are_transcribed(hearing: Served) -> None:
    more = {"language": "en", "max_completion_tokens": "1"}
    for samples in (1, 9 * WINDOW):
        assert sent(hearing, form(content(samples), **more)) == (200, {})
    timed_ = more | {"response_format": "verbose_json", "timestamp_granularities[]": "segment"}
    assert sent(hearing, form(content(10 * WINDOW), **timed_)) == (200, {})


def test_a_body_that_is_no_form_is_refused(hearing: Served) -> None:
    body = form(content(100), language="en", max_completion_tokens="1")
    assert sent(hearing, body) == (200, {})
    assert sent(hearing, body, "application/json")[0] == 415
    for content_type in (
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=other",
    ):
        status, error = sent(hearing, body, content_type)
        assert (status, error["code"]) == (400, "invalid_form")
    assert sent(hearing, body[:-5])[1]["code"] == "invalid_form"
    assert sent(hearing, b"")[1]["code"] == "invalid_form"


def test_texts_and_recordings_have_models_of_their_own(hearing: Served, server: Served) -> None:
    for path, body in (
        ("/v1/completions", {"model": NAME, "prompt": "a"}),
        ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "a"}]}),
    ):
        status, error = posted(hearing, path, body)
        assert (status, error["code"]) == (400, "unsupported")
        assert (
            error["message"] == "this model transcribes speech: send recordings to /v1/audio/transcriptions"
        )
    assert posted(hearing, "/tokenize", {"prompt": "ab"}) == (200, {})
    for path in ("transcriptions", "translations"):
        content_type = "multipart/form-data; boundary=b"
        status, error = posted(server, f"/v1/audio/{path}", form(content(100)), content_type=content_type)
        assert (status, error["code"]) == (400, "unsupported")
        assert error["message"] == (
            "this model continues texts and transcribes no recordings: send texts to /v1/completions or "
            "/v1/chat/completions"
        )


@pytest.mark.slow
def test_a_full_queue_answers_429(start: Callable[..., Any], folder: Path, recordings: list[Path]) -> None:
    """A recording of a hundred windows has all places."""
    with start("--model", str(folder), "--max-num-seqs", "1", "--max-queue", "99") as served:
        stream = request_transcription(
            served.client(), ("long.wav", content(100 * WINDOW)), stream=True, extra_body={}
        )
        wait_until(lambda: served.engine.busy)
        with pytest.raises(openai.RateLimitError) as refused:
            request_transcription(served.client(), recordings[0])
        assert int(refused.value.response.headers["retry-after"]) > 0
        with pytest.raises(
            openai.RateLimitError
        ):  # the first window of several that are asked for one by one
            request_transcription(served.client(), recordings[0], response_format="verbose_json")
        stream.close()
        assert request_transcription(served.client(max_retries=5), recordings[0]).text


@pytest.mark.slow
def test_recordings_may_be_larger_than_texts(
    start: Callable[..., Any], folder: Path, hearing: Served
) -> None:
    large = form(content(6 * WINDOW), language="en", max_completion_tokens="1", prompt="x" * 2**20)
    assert len(large) > 2**20 and sent(hearing, large) == (200, {})
    with start("--model", str(folder), "--max-num-seqs", "1", "--max-body", "5000") as served:
        least = len(form(content(0), language="en", max_completion_tokens="1"))
        for more, status in ((0, 200), (1, 413)):
            samples = (5000 - least) // 2
            body = form(content(samples), language="en", max_completion_tokens="1")
            body = body + b"\n" * (5000 - len(body) + more)
            assert sent(served, body)[0] == status


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("examples", [5, pytest.param(1000, marks=pytest.mark.deep)])
def test_answers_are_those_of_the_schema(hearing: Served, mode: str, examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is an extra of development (dev)")
    api = schemathesis.openapi.from_url(f"http://127.0.0.1:{hearing.port}/openapi.json")
    operations = [result.ok() for result in api.include(path_regex="/v1/audio/").get_all_operations()]
    assert len(operations) == 2

    def noted(body: dict[str, Any]) -> None:
        body |= {"file": content(WINDOW), "max_completion_tokens": 2}

    for operation in operations:
        fuzz(operation, mode, examples, noted, NAME)


@pytest.mark.deep
def test_replicas_hear_as_one_server_does(hearing: Served, folder: Path, recordings: list[Path]) -> None:
    expected = [request_transcription(hearing.client(), recording).text for recording in recordings]
    with process("--model", str(folder), "--max-num-seqs", "4") as replicas:
        with ThreadPoolExecutor(4) as pool:
            texts = list(
                pool.map(
                    lambda recording: request_transcription(replicas.client(), recording).text, recordings
                )
            )
        assert texts == expected
        routed = replicas.numbers("nkw_routed_requests_total")
        assert sum(routed.values()) == len(recordings) and len(routed) == 2
        events = list(request_transcription(replicas.client(), recordings[3], stream=True))
        assert events[-1].text == expected[3]


def test_subtitles() -> None:
    def segment(start: float, end: float, text: str) -> SpokenSegment:
        same: dict[str, Any] = dict(
            id=0, seek=0, tokens=[], temperature=0, avg_logprob=0, compression_ratio=1
        )
        return SpokenSegment(start=start, end=end, text=text, **same)

    segments = [segment(0, 1.5, " One\n\ntwo"), segment(3599.9996, 3661.002, " a --> b")]
    assert SUBTITLES["srt"](segments) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne two\n\n2\n01:00:00,000 --> 01:01:01,002\na -> b\n\n"
    )
    assert SUBTITLES["vtt"](segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne two\n\n01:00:00.000 --> 01:01:01.002\na -> b\n\n"
    )


def test_blanks_around_a_text_are_taken_away_as_it_comes() -> None:
    outer = StrippedText()
    pieces = [outer.push(piece) for piece in (" ", " a", "b ", "", " ", "c d", "  ")]
    assert pieces == ["", "a", "b", "", "", "  c d", ""]
    assert outer.text == "ab  c d"
