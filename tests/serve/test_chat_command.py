"""`nkw chat`: a conversation with a server's model, or with a folder's in this process."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from model import SamplingParams
from model.commands.chat import command, partners
from model.commands.chat.partners import LocalPartner, Piece, ServerPartner, open_partner
from model.errors import ModelError
from nkw.commands import build_parser, main
from tests.serve.conftest import MODEL, Served
from tests.serve.test_ends import wait_until

Capture = pytest.CaptureFixture[str]


def options_of(*words: str) -> argparse.Namespace:
    return build_parser(["chat"]).parse_args(["chat", *words])


class Scripted:
    """A partner that answers with given pieces, and keeps the conversations that it was asked."""

    def __init__(self, *answers: Sequence[Piece] | BaseException) -> None:
        self._answers = iter(answers)
        self.conversations: list[list[Any]] = []

    def answer(self, messages: Sequence[Any]) -> Generator[Piece, None, None]:
        self.conversations.append(list(messages))
        answer = next(self._answers)
        if isinstance(answer, BaseException):
            raise answer
        yield from answer

    def close(self) -> None:
        self.is_closed = True


def build_pieces(text: str, reason: str = "stop", tokens: int = 3) -> list[Piece]:
    return [Piece(text, 1), Piece("", tokens, reason)]


def talk(monkeypatch: pytest.MonkeyPatch, partner: Any, lines: Sequence[str], *words: str) -> int:
    """Run `nkw chat WORDS` with these lines on stdin and return its exit status."""
    remaining = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(command, "open_partner", lambda options: partner)
    monkeypatch.setattr("builtins.input", read)
    return main(["chat", *words])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_grows_until_it_is_reset(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    partner = Scripted(build_pieces("one"), build_pieces("two"), build_pieces("three"))
    lines = ["a", "b", "", "/reset", "c", "/exit", "d"]
    assert talk(monkeypatch, partner, lines, "--system-prompt", "be short") == 0
    system = {"role": "system", "content": "be short"}
    assert partner.conversations == [
        [system, user("a")],
        [system, user("a"), assistant("one"), user("b")],
        [system, user("c")],
    ]
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_the_end_of_stdin_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    partner = Scripted(build_pieces("one"))
    assert talk(monkeypatch, partner, ["a"]) == 0
    assert partner.is_closed


def test_a_full_context_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert talk(monkeypatch, Scripted(build_pieces("one", "length")), ["a"]) == 0
    assert capsys.readouterr().err == "the context is full: /reset starts a new conversation\n"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(5, "the answer has the 5 tokens of --max-tokens\n"), (4, "the context is full: /reset starts a new ")],
)
def test_an_answer_of_max_tokens_is_no_full_context(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tokens: int, message: str
) -> None:
    partner = Scripted(build_pieces("one", "length", tokens))
    assert talk(monkeypatch, partner, ["a"], "--max-tokens", "5") == 0
    assert capsys.readouterr().err.startswith(message)


def test_a_refused_message_is_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    partner = Scripted(build_pieces("one"), ModelError("the prompt is too long"), build_pieces("two"))
    assert talk(monkeypatch, partner, ["a", "b", "c"]) == 0
    assert partner.conversations[2] == [user("a"), assistant("one"), user("c")]
    assert capsys.readouterr().err == (
        "error: the prompt is too long\nthe message was not kept; /reset starts a new conversation\n"
    )


def test_an_interrupt_ends_the_answer_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    partner = Scripted(KeyboardInterrupt(), build_pieces("two"))
    assert talk(monkeypatch, partner, ["a", "b"]) == 0
    assert partner.conversations[1] == [user("b")]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("\ntwo\n", "the answer was stopped; the message was not kept\n")


def test_reasoning_is_marked_and_not_sent_back(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    thinks = [Piece("hm", 1, is_reasoning=True), Piece("so", 2), Piece("", 2, "stop")]
    partner = Scripted(thinks, build_pieces("two"))
    assert talk(monkeypatch, partner, ["a", "b"]) == 0
    assert capsys.readouterr().out == "<think>\nhm\n</think>\nso\ntwo\n"
    assert partner.conversations[1] == [user("a"), assistant("so"), user("b")]


def test_statistics_are_printed_on_demand(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert talk(monkeypatch, Scripted(build_pieces("one")), [], "--quick", "a", "--stats") == 0
    text, first, rate = capsys.readouterr().out.splitlines()
    assert text == "one"
    assert first.startswith("TTFT: ")
    assert rate.endswith(" tokens/s (3 tokens in 0.00s)")


def test_a_quick_message_without_an_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert talk(monkeypatch, Scripted(ModelError("the prompt is too long")), [], "-q", "a") == 2
    assert capsys.readouterr().err == "nkw: error: the prompt is too long\n"


def collect(partner: Any, *messages: dict[str, str]) -> tuple[str, str | None, int]:
    """Return text, finish reason and tokens of an answer."""
    pieces = list(partner.answer(messages))
    reasons = [piece.finish_reason for piece in pieces if piece.finish_reason]
    return "".join(piece.text for piece in pieces), reasons[0], pieces[-1].tokens


WORDS = ("--temperature", "0", "--max-tokens", "4")


@pytest.fixture(scope="module")
def local() -> LocalPartner:
    """Return the default model in this process."""
    return LocalPartner(options_of("--model", "stories", *WORDS))


@pytest.fixture
def remote(server: Served, key_file: Path) -> Iterator[ServerPartner]:
    """Yield the default model behind a server."""
    partner = ServerPartner(options_of("--url", server.url, "--api-key-file", str(key_file), *WORDS))
    yield partner
    partner.close()


def test_a_server_and_a_folder_answer_what_the_engine_makes(
    local: LocalPartner, remote: ServerPartner
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    (output,) = local._llm.chat([user("Tom")], params, use_tqdm=False)
    for partner in (local, remote, local):
        assert collect(partner, user("Tom")) == (output.outputs[0].text, "length", 4)
    assert remote.name == MODEL
    assert remote._client.key == "first-key-of-clients"


def test_both_refuse_a_message_that_fills_the_context(local: LocalPartner, remote: ServerPartner) -> None:
    for partner in (local, remote):
        with pytest.raises(ModelError, match="leave no room"):
            list(partner.answer([user("Tom " * 300)]))


def test_an_answer_that_is_left_is_cancelled(
    server: Served, local: LocalPartner, remote: ServerPartner
) -> None:
    for partner in (local, remote):
        pieces = partner.answer([user("Tom")])
        next(pieces)
        pieces.close()
    assert not local._llm.engine.busy
    wait_until(lambda: not server.engine.busy)


def test_an_interrupt_of_a_step_comes_at_its_end() -> None:
    done = []

    def step() -> None:
        with partners._deferring_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("step")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == ["step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_server_and_a_folder_exclude_each_other(capsys: Capture) -> None:
    with pytest.raises(ModelError, match="give one of them"):
        open_partner(options_of("--url", "http://127.0.0.1:1", "--model", "stories"))
    with pytest.raises(
        ModelError, match=r"does not answer: .*; start nkw serve, or give --url URL or --model DIR$"
    ):
        open_partner(options_of("--url", "http://127.0.0.1:1"))


def test_control_characters_of_a_server_are_escaped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert command._escape("a\x1b[2Jb\n") == "a\\x1b[2Jb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert command._escape("a\x1b[2Jb") == "a\x1b[2Jb"
