"""Text to ids and back, and a stream that gives out complete characters only."""

from __future__ import annotations

import json
import os
import random

import pytest
import tokenizers

from model.errors import ModelError
from model.loading.tokenizer import Tokenizer

TEXTS = [
    "plain words",
    "héllo wörld",
    "日本語 and 中文",
    "🙂👩‍👩‍👧🏳️‍🌈",
    " blanks  around ",
    "line\nbreak\ttab",
    "a\N{REPLACEMENT CHARACTER}b",
    "e\u0301 combining",
]


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Return BPE with byte fallback, as in Llama 2: blanks become ▁, decoding drops a leading blank."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture(params=["bytes", "byte fallback"])
def tokenizer(request, tmp_path, byte_tokenizer) -> Tokenizer:
    made = byte_tokenizer() if request.param == "bytes" else sentencepiece_like()
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path, 300)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(tokenizer, text) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_the_same_text_in_whole_characters(tokenizer, text) -> None:
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    last_piece = stream.finish()
    assert "".join([*pieces, last_piece]) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece or piece in text for piece in pieces)
    assert last_piece in ("", "\N{REPLACEMENT CHARACTER}")


def test_stream_continues_a_prompt(tokenizer) -> None:
    ids = tokenizer.encode("once é upon 🙂 time")
    for cut in range(1, len(ids)):
        stream = tokenizer.stream(ids[:cut])
        text = "".join(stream.push(token) for token in ids[cut:]) + stream.finish()
        before = tokenizer.decode(ids[:cut])
        if "\N{REPLACEMENT CHARACTER}" not in before:
            assert before + text == tokenizer.decode(ids)


def test_a_character_appears_with_its_last_token(tokenizer) -> None:
    stream = tokenizer.stream(tokenizer.encode("x"))
    ids = tokenizer.encode("x🙂")[len(tokenizer.encode("x")) :]
    assert [stream.push(token) for token in ids] == ["", "", "", "🙂"]


def test_unfinished_character_comes_out_as_replacement(tokenizer) -> None:
    stream = tokenizer.stream(tokenizer.encode("x"))
    ids = tokenizer.encode("x🙂")[len(tokenizer.encode("x")) :]
    assert [stream.push(token) for token in ids[:3]] == ["", "", ""]
    assert set(stream.finish()) == {"\N{REPLACEMENT CHARACTER}"}


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(25, marks=pytest.mark.deep)])
def test_random_texts_stream_to_themselves(tokenizer, count) -> None:
    chooser = random.Random(0)
    ranges = [(0x20, 0x7E), (0xC0, 0x24F), (0x4E00, 0x9FFF), (0x1F300, 0x1F5FF)]
    for _ in range(count):
        text = "".join(chr(chooser.randint(*chooser.choice(ranges))) for _ in range(chooser.randrange(1, 20)))
        stream = tokenizer.stream()
        assert "".join(stream.push(token) for token in tokenizer.encode(text)) == text
        assert stream.finish() == ""


def test_special_tokens_are_added_as_the_file_says(tmp_path, byte_tokenizer) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with_bos = Tokenizer(tmp_path, 300)
    assert with_bos.encode("") == [1]
    assert with_bos.decode([1, 2]) == ""
    byte_tokenizer(add_bos=False).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path, 300).encode("") == []


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path, byte_tokenizer) -> None:
    made = byte_tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path, 300).encode("twelve bytes")) == 13
    assert len(Tokenizer(tmp_path, 300).encode("a")) == 2


@pytest.mark.parametrize("vocab_size", [299, 300, 301])
def test_refuses_ids_beyond_the_models_vocabulary(tmp_path, byte_tokenizer, vocab_size) -> None:
    byte_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    if vocab_size >= 300:
        assert Tokenizer(tmp_path, vocab_size).encode("a")
        return
    with pytest.raises(ModelError, match=r"has token id 299; config\.json has a vocab_size of 299"):
        Tokenizer(tmp_path, vocab_size)


def test_refuses_a_missing_or_damaged_file(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path, 300)
    for text in ("{", "{}", "", json.dumps({"version": "1.0", "model": {"type": "unheard of"}})):
        path.write_text(text)
        with pytest.raises(ModelError, match="is not a tokenizer"):
            Tokenizer(tmp_path, 300)


SPOILT = {
    "no unknown token": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
    "no id for it": {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}},
    "template token that is not there": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<nope>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "bad charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAA="}},
    "chunks of nothing": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT)
def test_errors_and_panics_of_the_library_are_one_sentence(tmp_path, byte_tokenizer, capfd, change) -> None:
    document = {**json.loads(byte_tokenizer().to_str()), **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelError) as refused:
        Tokenizer(tmp_path, 300).encode("Once upon a time")
    assert refused.value.code == "NKW-MODEL-TOKENIZER"
    assert str(refused.value).startswith(f"{tmp_path / 'tokenizer.json'} ")
    assert len(str(refused.value)) <= 420
    assert capfd.readouterr().err == ""  # panics print themselves, with 50 lines of where they were


def test_a_panic_while_decoding_is_one_sentence(tmp_path, byte_tokenizer, capfd) -> None:
    decoder = {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}
    document = {**json.loads(byte_tokenizer().to_str()), "decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer(tmp_path, 300)
    assert tokenizer.decode(tokenizer.encode("bc")) == "bc"
    with pytest.raises(ModelError, match="cannot decode its ids"):
        tokenizer.decode(tokenizer.encode("a"))
    assert capfd.readouterr().err == ""


def test_a_library_that_aborts_or_never_ends_is_one_sentence(tmp_path, byte_tokenizer, monkeypatch) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", staticmethod(lambda text: os.kill(os.getpid(), 9)))
    with pytest.raises(
        ModelError, match="the tokenizers library aborts, or takes too long or too much memory"
    ):
        Tokenizer(tmp_path, 300)


@pytest.mark.parametrize("number", [298, 299, 300, 2**32 - 1])
def test_ids_that_a_template_adds_lie_in_the_models_vocabulary(tmp_path, byte_tokenizer, number) -> None:
    template = {"type": "BertProcessing", "sep": ["a", number], "cls": ["b", 1]}
    document = {**json.loads(byte_tokenizer().to_str()), "post_processor": template}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer(tmp_path, 300)
    if number < 300:
        assert tokenizer.encode("a")[-1] == number
        return
    with pytest.raises(ModelError, match=f"has token id {number}; config.json has a vocab_size of 300"):
        tokenizer.encode("a")


def test_refuses_a_prompt_that_is_not_unicode(tokenizer) -> None:
    with pytest.raises(
        ModelError, match="the prompt is not Unicode text: surrogates not allowed at character 2"
    ):
        tokenizer.encode("ab\udc80")
