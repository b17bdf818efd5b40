"""Windows of speech in the engine: encoded with their prompts, held in slots, transcribed together as each alone."""

from __future__ import annotations

from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from model import LLM, SamplingParams
from model.commands.compile.command import launch_all, list_engine_graphs
from model.device import SimulatedDevice
from model.engine import Batch, Request, Scheduler, SchedulerOptions
from model.engine.buckets import SIZES_ONLY, Buckets
from model.engine.inputs import ModelInputs
from model.engine.sampler import require_logits
from model.errors import ModelError
from model.families import SPEECH, load_config
from model.layers.launch import Phase
from model.llm.engine_args import EngineArgs, make_engine, set_up_engine
from model.loading.checkpoint import open_checkpoint
from model.loading.weights import shard_weights
from model.runners.paged import PagedModel
from model.runners.reference import ReferenceModel
from model.speech.rules import Rules, TranscriptionRule
from model.speech.spectrum import HOP, log_mel, split_into_windows
from model.speech.timestamps import Timestamps
from model.state import PagePool, WindowPool
from tests.model.oracle import Oracle
from tests.model.test_transcribe import speech
from tests.model.test_whisper import IDS, folder, oracle  # noqa: F401 - a fixture
from tests.model.whisper_folders import FIELDS, spectrum, write_whisper

WINDOW = 2 * FIELDS["max_source_positions"] * HOP
TEXTS = ((1, 5), (2, 1), (1, 7), (2, 6))
"""The spectrum of each request, and how many of the ids are its prompt."""


@cache
def wanted(seed: int, prompt: int) -> Oracle:
    """Return the oracle of a prompt's length: transformers after the prompt and each later token."""
    return Oracle(oracle(seed).model, IDS, prompt)


def logits_of_requests(
    path: Path, ranks: int, dtype: str, pages: int, slots: int
) -> tuple[list[np.ndarray], list[Request], int]:
    """Return every request's logits, and the largest number of requests that ran together."""
    config = load_config(path, SPEECH)
    options = SchedulerOptions(4, 16).for_windows(40)
    scheduler = Scheduler(PagePool(pages, 4), options, WindowPool(slots, 4, 4))
    shards = shard_weights(config, open_checkpoint(path, config), ranks, dtype=dtype)
    buckets = Buckets.powers(4, 40, 40)
    cache = scheduler.cache
    model = PagedModel(
        config, shards, SimulatedDevice("trn2", ranks), cache.pools, buckets, slots=cache.slots
    )
    requests = [
        Request(str(n), IDS[:prompt], len(IDS) - prompt + 1, inputs=ModelInputs(spectrum(seed)))
        for n, (seed, prompt) in enumerate(TEXTS)
    ]
    rows: dict[Request, list[np.ndarray]] = {request: [] for request in requests}
    most = 0
    for request in requests:
        scheduler.submit(request)
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        most = max(most, len(scheduler.running))
        fed = {}
        for request, (output,) in model.step(batch).items():
            rows[request].append(require_logits(output.logits))
            fed[request] = IDS[len(request.tokens) : len(request.tokens) + 1]
        scheduler.complete_step(batch, fed)
        for request, token in fed.items():
            if not token:
                scheduler.end(request)
    assert cache.free == cache.count
    return [np.stack(rows[request]) for request in requests], requests, most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")]
)
def test_windows_of_many_requests_get_what_they_get_alone(folder: Path, ranks: int, dtype: str) -> None:  # noqa: F811
    """Prompts of several lengths, one of a single token, which is no step of decoding."""
    rows, requests, most = logits_of_requests(folder, ranks, dtype, pages=12, slots=4)
    assert most == 4 and not any(request.preemptions for request in requests)
    for row_logits, (seed, prompt) in zip(rows, TEXTS):
        assert np.abs(row_logits - wanted(seed, prompt).logits).max() <= wanted(seed, prompt).bound(dtype)


@pytest.mark.slow
def test_a_preempted_request_encodes_its_window_again(folder: Path) -> None:  # noqa: F811
    rows, requests, _ = logits_of_requests(folder, 1, "float32", pages=4, slots=4)
    assert any(request.preemptions for request in requests)
    for row_logits, (seed, prompt) in zip(rows, TEXTS):
        assert np.abs(row_logits - wanted(seed, prompt).logits).max() <= wanted(seed, prompt).bound()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_request_waits_for_a_slot(slots: int) -> None:
    options = SchedulerOptions(4, 16).for_windows(40)
    scheduler = Scheduler(PagePool(40, 4), options, WindowPool(slots, 4, 4))
    requests = [Request(str(n), IDS[:3], 2, inputs=ModelInputs(spectrum(1))) for n in range(3)]
    for request in requests:
        scheduler.submit(request)
    sizes = []
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        starting = [request for request, chunk in batch.chunks.items() if chunk.num_computed_tokens == 0]
        assert len(starting) <= 1 and (not starting or len(batch.chunks) == 1)
        sizes.append(len(scheduler.running))
        scheduler.complete_step(batch, dict.fromkeys(batch.chunks, (7,)))
        for request in requests:
            if len(request.tokens) == 5:
                scheduler.end(request)
    assert max(sizes) == slots


def test_continuations_of_a_window_share_its_slot(tmp_path: Path) -> None:
    engine = make_engine(EngineArgs(write_whisper(tmp_path / "whisper"), max_num_seqs=3))
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=6, ignore_eos=True)
    output = engine.submit("0", [3, 5, 7, 9], params, inputs=ModelInputs(spectrum(1)))
    slots, occupied = engine.scheduler.cache.slots, set()
    assert slots is not None
    while engine.busy:
        engine.step()
        occupied.add(slots.count - slots.free)
    texts = [tuple(output.token_ids) for output in output.outputs]
    assert occupied == {0, 1} and len(set(texts)) == 3
    again = engine.submit("1", [3, 5, 7, 9], params, inputs=ModelInputs(spectrum(1)))
    other = engine.submit("2", [3, 5, 7, 9], params, inputs=ModelInputs(spectrum(2)))
    while engine.busy:
        engine.step()
    assert [tuple(output.token_ids) for output in again.outputs] == texts
    assert [tuple(output.token_ids) for output in other.outputs] != texts


def test_every_part_with_speech_has_a_shape_of_the_list(tmp_path: Path) -> None:
    config = load_config(write_whisper(tmp_path / "whisper"), SPEECH)
    buckets = Buckets.powers(4, 40, 40).for_model(config, SIZES_ONLY)
    shapes = set(buckets.shapes())
    prompts = [step for step in shapes if step.phase is Phase.prefill]
    assert {(step.sequences, step.prefix, step.decoding) for step in prompts} == {(1, 0, None)}
    options = SchedulerOptions(4, 16).for_windows(40)
    scheduler = Scheduler(PagePool(6, 4), options, WindowPool(4, 4, 4))
    draw = np.random.default_rng(1)
    for number in range(40):
        scheduler.submit(Request(str(number), [5] * int(draw.integers(1, 15)), int(draw.integers(1, 9))))
    seen = set()
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        for padded in buckets.pad(batch):
            assert padded.step in shapes
            begins = any(chunk.num_computed_tokens == 0 for chunk in padded.chunks)
            assert padded.step.phase is (Phase.prefill if begins else Phase.decode)
            seen.add(padded.step)
        scheduler.complete_step(batch, dict.fromkeys(batch.chunks, (7,)))
        for request in batch.chunks:
            if len(request.tokens) > request.max_positions:
                scheduler.end(request)
    assert len(seen) > 3


def greedy(path: Path, features: np.ndarray, prompt: list[int], count: int) -> list[int]:
    """Return the likeliest tokens by the reference alone."""
    config = load_config(path, SPEECH)
    model, ids = ReferenceModel(config, open_checkpoint(path, config)), list[int]()
    model.encode([features])
    output = model.prefill([prompt])[0]
    while len(ids) < count:
        ids.append(output.likeliest)
        output = model.decode([ids[-1]], [len(prompt) + len(ids) - 1])[0]
    return ids


@pytest.mark.slow
def test_llm_takes_audio_as_vllm_takes_it(tmp_path: Path) -> None:
    path = write_whisper(tmp_path / "whisper")
    llm = LLM(path, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    sounds = [speech(1, WINDOW), speech(2, 1700), speech(3, 3000)]
    prompts = [
        {"prompt_token_ids": [3, 5, 7, 9], "multi_modal_data": {"audio": (sound, 16000)}} for sound in sounds
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, sound in zip(outputs, sounds):
        features = log_mel(split_into_windows(sound, 40)[0], FIELDS["num_mel_bins"])
        assert output.outputs[0].token_ids == greedy(path, features, [3, 5, 7, 9], 4)
    text = {"prompt": "ab", "multi_modal_data": {"audio": (sounds[0], 16000)}}
    (by_text,) = llm.generate(text, params, use_tqdm=False)
    assert by_text.prompt_token_ids == llm.get_tokenizer().encode("ab", special_tokens=False)


def test_refuses_audio_that_is_none_and_prompts_without(tmp_path: Path) -> None:
    path = write_whisper(tmp_path / "whisper")
    llm, texts = LLM(path), LLM()
    params = SamplingParams(temperature=0, max_tokens=1)

    def refused(model: LLM, **prompt_fields: object) -> str:
        with pytest.raises(ModelError) as caught:
            model.generate({"prompt_token_ids": [3, 5]} | prompt_fields, params, use_tqdm=False)
        return caught.value.message

    def audio(samples: object, rate: object = 16000) -> dict[str, object]:
        return {"multi_modal_data": {"audio": (samples, rate)}}

    sound = np.ones(WINDOW, np.float32)
    assert llm.generate({"prompt_token_ids": [3]} | audio(sound), params, use_tqdm=False)[0].finished
    assert refused(llm) == "this model transcribes speech: a prompt comes with audio"
    assert refused(texts, **audio(sound)) == "this model continues texts: a prompt comes without audio"
    assert refused(llm, **audio(np.ones(WINDOW + 1))).startswith("audio has samples of the shape [6401]")
    assert refused(llm, **audio([])).startswith("audio has samples of the shape [0]")
    assert refused(llm, **audio(np.ones((2, 5)))).startswith("audio has samples of the shape [2, 5]")
    assert refused(llm, **audio(sound, 8000)).startswith("audio has 8000 samples a second; 16,000 are taken")
    assert refused(llm, **audio(["a"])) == "audio has samples that are no numbers; give floats from -1 to 1"
    sentence = "audio has samples that are not finite; give floats from -1 to 1"
    assert refused(llm, **audio([0.0, np.nan])) == sentence
    assert refused(llm, multi_modal_data={"image": 1}).startswith("multi_modal_data is {'image': 1}; it must")
    assert refused(llm, multi_modal_data={"audio": sound}).startswith("audio is of type ndarray; it must be")
    with pytest.raises(ModelError, match="drafts are for texts; a whisper transcribes speech"):
        LLM(path, speculative_config={"num_speculative_tokens": 2})


@pytest.mark.parametrize("times", [None, Timestamps(9, 8, 2)])
def test_rules_forbid_suppressed_tokens_and_times(times: Timestamps | None) -> None:
    """The mask and what logits decide forbid the same tokens, after every written text."""
    rules = Rules((1,), (3, 4), (2, 5), times)
    draw, size = np.random.default_rng(2), 40
    for _ in range(50):
        transcription_rule, written = TranscriptionRule(rules, size), list[int]()
        for _ in range(8):
            logits = (6 * draw.standard_normal(size)).astype(np.float32)
            expected = logits.copy()
            expected[[3, 4] if written else [3, 4, 2, 5]] = -np.inf
            if times is not None:
                times.allow(expected, written)
            allowed_logits = np.where(transcription_rule.allowed(), logits, -np.inf).astype(np.float32)
            if transcription_rule.by_logits is not None:
                transcription_rule.by_logits(allowed_logits)
            assert np.array_equal(allowed_logits, expected)
            assert (transcription_rule.by_logits is None) is (times is None)
            token = int(expected.argmax())
            allowed = transcription_rule.allowed()[11]
            assert transcription_rule.for_drafts().accept(11) == allowed
            assert transcription_rule.accept(token)
            written.append(token)


def test_nothing_waits_behind_windows(tmp_path: Path) -> None:
    """Whoever decodes gets a token after as many windows in a row as there are places."""
    scheduler = Scheduler(PagePool(400, 4), SchedulerOptions(2, 16).for_windows(40), WindowPool(2, 4, 4))
    for number in range(9):
        scheduler.submit(Request(str(number), IDS[:3], 4))
    step_kinds = []
    while scheduler.waiting or scheduler.running:
        batch: Batch = scheduler.schedule()
        step_kinds.append(
            "".join("w" if chunk.num_computed_tokens == 0 else "d" for chunk in batch.chunks.values())
        )
        scheduler.complete_step(batch, dict.fromkeys(batch.chunks, (7,)))
        for request in list(batch.chunks):
            if len(request.tokens) > request.max_positions:
                scheduler.end(request)
    assert set(step_kinds) <= {"w", "d", "dd"}
    assert "www" not in "".join(chain.from_iterable(step_kinds))


@pytest.mark.slow
def test_an_encoder_is_a_graph_that_prompts_launch(tmp_path: Path) -> None:
    """Every graph of an engine of speech: launched with padding alone, no token or window of a request changes."""
    engine_parts = set_up_engine(EngineArgs(write_whisper(tmp_path / "whisper"), max_num_seqs=1, buckets=FEW))
    graphs = list_engine_graphs(engine_parts)
    assert [str(graph) for graph in graphs].count("1 window of speech encoded") == 1
    assert not any("slot" in str(graph) for graph in graphs)
    assert all(graph.launches for graph in graphs)
    encoder = next(graph for graph in graphs if graph.step == "encoder")
    assert [launch.kernel for launch in encoder.launches].count("conv1d") == 2
    launch_all(engine_parts)


FEW = "sequences=1 tokens=64 context=128"
