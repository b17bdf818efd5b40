"""Entry of `nkw chat`: reads messages, prints answers as they arrive, and says when the context is full."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing

from model.commands.chat.partners import Partner, Piece, open_partner
from model.errors import ModelError
from model.loading.chat import Message
from nkw.errors import shown
from nkw.terminal import error, show_lines

_EXIT, _RESET = "/exit", "/reset"


def chat_command(options: argparse.Namespace) -> int:
    """Answer the message of --quick, or messages of stdin until /exit or its end, and return the exit status 0.

    Raises:
        ModelError: Options are refused, a server does not answer, or the message of --quick has no answer.
    """
    with closing(open_partner(options)) as partner:
        conversation = Conversation(partner, options)
        if options.quick is not None:
            conversation.say(options.quick)
        else:
            _converse(conversation)
    return 0


def _converse(conversation: Conversation) -> None:
    """Read messages of stdin and answer each, until /exit or the end of stdin; /reset forgets the conversation."""
    if sys.stdin.isatty():
        show_lines(f"{_RESET} starts a new conversation, {_EXIT} ends this one", sys.stderr)
    while True:
        try:
            message = input("> ")
        except EOFError:
            return
        if message.strip() == _EXIT:
            return
        if message.strip() == _RESET:
            conversation.reset()
        elif message.strip():
            _say_or_explain(conversation, message)


def _say_or_explain(conversation: Conversation, message: str) -> None:
    """Print the answer to a message; if there is none, or Ctrl-C ends it, print why.

    A message without an answer is not kept in the conversation.

    Raises:
        KeyboardInterrupt: The process is terminated (SIGTERM).
    """
    try:
        conversation.say(message)
    except ModelError as refused:
        error(refused.message)
        show_lines(f"the message was not kept; {_RESET} starts a new conversation", sys.stderr)
    except KeyboardInterrupt as stopped:
        if type(stopped) is not KeyboardInterrupt:  # a termination
            raise
        print(flush=True)
        show_lines("the answer was stopped; the message was not kept", sys.stderr)


class Conversation:
    """Messages of a chat so far. A message and its answer are kept once the answer has ended."""

    def __init__(self, partner: Partner, options: argparse.Namespace) -> None:
        self._partner = partner
        self._options = options
        self._messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget all messages except that of --system-prompt."""
        system = self._options.system_prompt
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, message: str) -> None:
        """Print the answer to a message as it arrives, and keep both; reasoning is printed in <think> tags only.

        Raises:
            ModelError: There is no answer; nothing is kept then.
        """
        messages = [*self._messages, {"role": "user", "content": message}]
        start, first, text, ending = time.perf_counter(), None, "", Piece("", 0)
        is_reasoning = False
        with closing(self._partner.answer(messages)) as pieces:
            for piece in pieces:
                if piece.text and first is None:
                    first = time.perf_counter()
                if piece.text and piece.is_reasoning is not is_reasoning:
                    print("<think>" if piece.is_reasoning else "\n</think>")
                    is_reasoning = piece.is_reasoning
                print(_escape(piece.text), end="", flush=True)
                text += "" if piece.is_reasoning else piece.text
                ending = Piece("", piece.tokens, piece.finish_reason or ending.finish_reason)
        print("\n</think>" if is_reasoning else "", flush=True)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        if ending.finish_reason == "length":
            self._explain_length(ending.tokens)
        if self._options.stats and first is not None:
            seconds = time.perf_counter() - start
            show_lines(f"TTFT: {1e3 * (first - start):.2f} ms")
            show_lines(
                f"TPS:  {ending.tokens / seconds:.2f} tokens/s ({ending.tokens} tokens in {seconds:.2f}s)"
            )

    def _explain_length(self, tokens: int) -> None:
        """Print on stderr why an answer was cut: by --max-tokens, or because the context is full.

        Args:
            tokens: Number of tokens of the answer.
        """
        limit = self._options.max_tokens
        if limit is not None and tokens >= limit:
            show_lines(f"the answer has the {limit} tokens of --max-tokens", sys.stderr)
        else:
            show_lines(f"the context is full: {_RESET} starts a new conversation", sys.stderr)


def _escape(text: str) -> str:
    """Return a text, with its control characters escaped if stdout is a terminal."""
    return shown(text, len(text)) if sys.stdout.isatty() else text
