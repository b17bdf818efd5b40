"""Printing of generated texts with their prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nkw.errors import shown


def format_prompt(prompt: str, options: argparse.Namespace) -> str:
    """Return the text to print before a continuation: the prompt, or an empty text with --chat."""
    return "" if options.chat else prompt


def escape_text(text: str) -> str:
    """Return a text, with its control characters escaped if stdout is a terminal."""
    return shown(text, len(text)) if sys.stdout.isatty() else text


def print_texts(
    prompts: Sequence[str], continuations: Sequence[str], options: argparse.Namespace, noun: str = "prompt"
) -> None:
    """Print the prompt and the continuation of several texts, each after its number; `noun` is what is numbered."""
    for number, (prompt, continuation) in enumerate(zip(prompts, continuations), 1):
        print(f"{noun} {number} of {len(continuations)}")
        print(f"{escape_text(format_prompt(prompt, options))}{escape_text(continuation)}\n")
