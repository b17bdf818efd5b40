"""The loop: where it stops, what it streams, and how it counts agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from model.commands.generate.generation import (
    Generation,
    StopReason,
    generate,
)
from model.commands.generate.prompts import encode_prompt
from model.commands.generate.report import Run, build_document, summarise
from model.config import ModelConfig
from model.engine import SamplingParams
from model.engine.stop_strings import StopStrings
from model.errors import ModelError
from model.families import load_config
from model.loading.tokenizer import Tokenizer
from model.mesh import Mesh
from model.runners.bucket_length import count_positions_needed
from model.runners.comparison import Difference
from model.runners.reference import ReferenceSequence
from model.sampling import StepOutput
from nkw.report import Part
from nkw.terminal import rendered

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


class Script:
    """A backend that says given tokens one after the other, and remembers what it was asked."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self.calls: list[tuple[object, ...]] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
        (ids,) = prompts
        self.calls.append(("prefill", *ids))
        return [self._next()]

    def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
        self.calls.append((*tokens, *positions))
        return [self._next()]

    def _next(self) -> StepOutput:
        logits = np.zeros(300, np.float32)
        logits[self._tokens.pop(0)] = 1
        return StepOutput(logits)

    def start(self, features: None = None) -> ReferenceSequence:
        return ReferenceSequence()

    def extend(self, sequence: ReferenceSequence, ids: Sequence[int]) -> StepOutput:
        self.calls.append(tuple(ids))
        sequence.ids += ids
        sequence.output = self._next()
        return sequence.output


@pytest.fixture
def model(write_model) -> tuple[Tokenizer, ModelConfig]:
    folder = write_model(max_position_embeddings=16)
    config = load_config(folder)
    return Tokenizer(folder, config.vocab_size), config


def run(
    model: tuple[Tokenizer, ModelConfig],
    backend: Script,
    prompt: str,
    new: int,
    stop: Sequence[str] = (),
    **options,
) -> Generation:
    tokenizer, config = model
    params = SamplingParams(temperature=0.0, max_tokens=new, stop=stop)
    (done,) = generate(backend, tokenizer, config, [tokenizer.encode(prompt)], params, **options)
    return done


def shown(sections: Sequence[Part]) -> list[str]:
    return rendered(sections).splitlines()


def ids_of(model: tuple[Tokenizer, ModelConfig], text: str) -> list[int]:
    return model[0].encode(text)[1:]


def test_stops_at_the_length_asked_for(model) -> None:
    story = ids_of(model, "abcdef")
    for count in (1, 2, 3):
        backend = Script(story)
        done = run(model, backend, "x", count)
        assert done.generated_ids == tuple(story[:count])
        assert (done.text, done.stopped_by) == ("abc"[:count], StopReason.length)
        assert len(backend.calls) == count  # the last token is never fed back


def test_feeds_every_token_at_its_position(model) -> None:
    story = ids_of(model, "abc")
    backend = Script(story)
    run(model, backend, "xy", 3)
    assert backend.calls == [("prefill", 1, *ids_of(model, "xy")), (story[0], 3), (story[1], 4)]


def test_stops_at_an_end_token_which_has_no_text(model) -> None:
    story = [*ids_of(model, "ab"), 2, *ids_of(model, "cd")]
    done = run(model, Script(story), "x", 10)
    assert (done.generated_ids, done.text, done.stopped_by) == (tuple(story[:3]), "ab", StopReason.end_token)


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(14, 2), (15, 1)])
def test_stops_where_the_context_ends(model, prompt_tokens, fits) -> None:
    done = run(model, Script(ids_of(model, "a" * 10)), "x" * (prompt_tokens - 1), 10)
    assert (len(done.generated_ids), done.stopped_by) == (fits, StopReason.context)
    exact = run(model, Script(ids_of(model, "a" * 10)), "x" * (prompt_tokens - 1), fits)
    assert exact.stopped_by is StopReason.length


def test_streams_whole_characters(model) -> None:
    pieces: list[str] = []
    story = ids_of(model, "é🙂!")
    done = run(model, Script(story), "x", len(story), emit=lambda number, text: pieces.append(text))
    assert pieces == ["é", "🙂", "!"]
    assert done.text == "é🙂!"


def test_unfinished_character_is_flushed_at_the_end(model) -> None:
    pieces: list[str] = []
    run(model, Script(ids_of(model, "a🙂")), "x", 3, emit=lambda number, text: pieces.append(text))
    assert pieces == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_counts_agreement_on_the_tokens_that_were_chosen(model) -> None:
    story, other = ids_of(model, "abcdef"), ids_of(model, "abXdeY")
    reference = Script(other)
    done = run(model, Script(story), "x", 6, reference=reference)
    assert (done.tokens_compared, done.tokens_equal) == (6, 4)
    assert [call[0] for call in reference.calls[1:]] == story[:5]


def test_a_token_that_differs_is_named_with_how_far_the_logits_lie_apart(model) -> None:
    """The reference's scores are 0 but for its own choice; those of the backend are 2 and 1.75 for two tokens."""

    class Candidates(Script):
        def __init__(self, tokens: Sequence[int], alternatives: Sequence[int]) -> None:
            super().__init__(tokens)
            self._alternatives = list(alternatives)

        def _next(self) -> StepOutput:
            logits = np.zeros(300, np.float32)
            logits[self._alternatives.pop(0)] = 1.75
            logits[self._tokens.pop(0)] = 2.0
            return StepOutput(logits)

    chosen, other, unknown = (ids_of(model, text) for text in ("abc", "aXc", "aYZ"))
    for seconds, apart in ((other, 0.25), (unknown, 2.0)):
        done = run(model, Candidates(chosen, seconds), "x", 3, reference=Script(other))
        assert done.differences == (Difference(2, chosen[1], "b", other[1], "X", apart, 1.0),)


def test_what_is_not_finite_has_no_distance() -> None:
    step = StepOutput(np.array([1.0, -np.inf, 0.5], np.float32))
    assert (step.compute_logit_gap(0, 1), step.compute_logit_gap(0, 2)) == (None, 0.5)


def test_the_report_names_the_first_tokens_that_differ_in_eighty_columns(model) -> None:
    run_of = Run("m", ("x",), "simulate", "trn2", Mesh(), "float32", GREEDY, None)
    story, other = ids_of(model, "abcdefgh"), ids_of(model, "aXcXXXXX")
    done = run(model, Script(story), "x", 8, reference=Script(other))
    lines = shown(summarise(run_of, [done], []))
    assert lines[:3] == [
        "2 of 8 tokens equal to the numpy reference",
        "token 2 is 'b', by the reference 'X'",
        "  their logits lie apart by 1 here, 1 in the reference",
    ]
    assert lines[-1] == "tokens that differ besides: 1"
    assert len(lines) == 1 + 2 * 5 + 1
    drawn = replace(run_of, sampling=SamplingParams(temperature=1.0))
    message = "tokens are drawn at random; rounding moves the bounds between candidates"
    assert shown(summarise(drawn, [done], [])) == [*lines, message]
    assert message not in shown(summarise(drawn, [replace(done, differences=())], []))
    long = replace(done.differences[0], text="\x1b" * 200, reference_text="y" * 200, logits_apart=None)
    lines = shown(summarise(run_of, [replace(done, differences=(long,))], []))
    assert lines[0].startswith("7 of 8")
    assert max(map(len, lines)) <= 80 and "\x1b" not in "".join(lines)
    assert lines[2] == "  their logits lie apart by 1 in the reference"
    assert len(build_document(run_of, [done], [])["generations"][0]["checks"]["differences"]) == 6


def test_nothing_is_compared_without_a_reference(model) -> None:
    done = run(model, Script(ids_of(model, "ab")), "x", 2)
    assert (done.tokens_compared, done.tokens_equal) == (0, 0)


def test_refuses_no_new_tokens(model) -> None:
    with pytest.raises(ModelError, match="max_tokens is 0"):
        run(model, Script([]), "x", 0)


@pytest.mark.parametrize("tokens", [15, 16, 17])
def test_refuses_a_prompt_that_leaves_no_room(model, tokens) -> None:
    tokenizer, config = model
    if tokens < 16:
        assert len(encode_prompt("x" * (tokens - 1), tokenizer, config)) == tokens
        return
    with pytest.raises(ModelError, match=f"has {tokens} tokens; the context of 16 leaves no room"):
        encode_prompt("x" * (tokens - 1), tokenizer, config)


def test_refuses_an_empty_prompt_unless_the_tokenizer_begins_one(model, byte_tokenizer, tmp_path) -> None:
    tokenizer, config = model
    assert encode_prompt("", tokenizer, config) == [1]
    byte_tokenizer(add_bos=False).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="the prompt has no tokens"):
        encode_prompt("", Tokenizer(tmp_path, 300), config)


def test_positions_are_prompt_and_new_tokens_within_the_context(model) -> None:
    assert [count_positions_needed(5, new, model[1]) for new in (1, 10, 11, 12)] == [6, 15, 16, 16]


def test_a_stop_string_ends_the_text_before_it(model) -> None:
    pieces: list[str] = []
    story = ids_of(model, "abXcXYZd")
    options = {"stop": ["XYZ", "q"], "emit": lambda number, text: pieces.append(text)}
    done = run(model, Script(story), "x", 8, **options)
    assert (done.text, done.stopped_by) == ("abXc", StopReason.stop_string)
    assert done.generated_ids == tuple(story[:7])
    assert "".join(pieces) == "abXc"


def test_what_only_begins_a_stop_string_is_given_out_at_the_end(model) -> None:
    done = run(model, Script(ids_of(model, "abXY")), "x", 4, stop=["XYZ"])
    assert (done.text, done.stopped_by) == ("abXY", StopReason.length)
    ended = run(model, Script([*ids_of(model, "X"), 2]), "x", 4, stop=["XYZ"])
    assert (ended.text, ended.stopped_by) == ("X", StopReason.end_token)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1, 1), (2, 3, 2), (7,), (3, 4)])
def test_the_first_stop_string_counts_however_the_text_is_cut(sizes) -> None:
    text, offset, emitted = "aabaabb", 0, ""
    stops = StopStrings(["aabb", "abb"])
    for size in sizes:
        emitted += stops.push(text[offset : offset + size])
        offset += size
    assert (emitted, stops.matched) == ("aab", "aabb")


def test_refuses_an_empty_stop_string(model) -> None:
    with pytest.raises(ModelError, match="a stop string is empty; every text begins with it"):
        run(model, Script([]), "x", 1, stop=["a", ""])


def test_each_prompt_of_a_batch_ends_by_itself_and_draws_as_alone(model) -> None:
    """The logits depend on the token and its position only, so a sequence alone is a reference for one in a batch."""
    tokenizer, config = model

    class Drawn:
        def __init__(self) -> None:
            self.requested_tokens: list[Sequence[int | None]] = []

        def prefill(self, prompts: Sequence[Sequence[int]]) -> list[StepOutput]:
            return [self._build_output(ids[-1], len(ids) - 1) for ids in prompts]

        def decode(self, tokens: Sequence[int | None], positions: Sequence[int]) -> list[StepOutput]:
            self.requested_tokens.append(tokens)
            return [self._build_output(*pair) for pair in zip(tokens, positions)]

        def start(self, features: None = None) -> ReferenceSequence:
            return ReferenceSequence()

        def extend(self, sequence: ReferenceSequence, ids: Sequence[int]) -> StepOutput:
            sequence.ids += ids
            sequence.output = self._build_output(sequence.ids[-1], len(sequence.ids) - 1)
            return sequence.output

        def _build_output(self, token: int | None, position: int) -> StepOutput:
            if token is None:
                return StepOutput()
            logits = np.random.default_rng([token, position]).standard_normal(300).astype(np.float32)
            return StepOutput(logits * 4)

    prompts = [tokenizer.encode(text) for text in ("x", "a long one", "xyz", "12345678901234")]
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=6)
    backend = Drawn()
    batch = generate(backend, tokenizer, config, prompts, sampling, reference=Drawn())
    assert batch == [
        generate(Drawn(), tokenizer, config, [ids], sampling, reference=Drawn())[0] for ids in prompts
    ]
    assert batch[3].stopped_by is StopReason.context
    assert [None in tokens for tokens in backend.requested_tokens] == [True] * len(backend.requested_tokens)
    assert all(
        generation.differences == () and generation.tokens_compared == len(generation.generated_ids)
        for generation in batch
    )
