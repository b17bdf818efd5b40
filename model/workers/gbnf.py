"""Grammars in llama.cpp's notation (GBNF), rewritten in Lark's notation, which llguidance reads.

    root  ::= "yes" | item{2,4}    # a comment
    item  ::= [a-z]+ ("," | ";")

The reader takes time linear in the length of the text and keeps its own stack, so no nesting is too deep for it. Rules
that refer to no rule, except to others of that kind, become terminals: llguidance matches them by its lexer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import count

from model.errors import ModelError

_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[\w-]+")
_DEFINES = re.compile(r"::=")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_CLASS = re.compile(r"\[(\^?)((?:[^\]\\]|\\.)*)\]", re.DOTALL)
_REPETITION = re.compile(r"[*+?]|\{\s*([0-9]{1,9})\s*(?:(,)\s*([0-9]{1,9})?\s*)?\}")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\"\\\[\]nrt^-]))|(\\.?)", re.DOTALL
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_PLAIN = re.compile("[0-9A-Za-z]")


@dataclass
class _Rule:
    """Rule of a grammar.

    | field | meaning |
    |---|---|
    | `number`, `name` | index and name in the grammar |
    | `text` | the right side in Lark's notation, in pieces |
    | `references` | pairs of an index in `text` and the name of the rule whose Lark name belongs there |
    | `is_terminal` | whether it is a terminal, which llguidance matches by its lexer |
    """

    number: int
    name: str
    text: list[str] = field(default_factory=list)
    references: list[tuple[int, str]] = field(default_factory=list)
    is_terminal: bool = False

    @property
    def lark_name(self) -> str:
        """Name of the rule in Lark's notation, unique by its number; in capitals for a terminal."""
        if self.name == "root":
            return "start"
        name = re.sub(r"[^a-z0-9_]", "_", f"r{self.number}_{self.name}".lower())
        return name.upper() if self.is_terminal else name


def convert_gbnf_to_lark(text: str) -> str:
    """Return a grammar in Lark's notation from one in GBNF.

    Raises:
        ModelError: The text is not GBNF (the message has the line), a name has no rule, or there is no rule `root`.
    """
    rules = _Reader(text).read()
    if "root" not in rules:
        raise ModelError(
            "structured outputs: the grammar has no rule named root; every text begins with it: add one"
        )
    _find_terminals(rules)
    lines = ["%llguidance {}"]
    for rule in rules.values():
        for index, name in rule.references:
            rule.text[index] = rules[name].lark_name
        lines.append(f"{rule.lark_name}: {' '.join(rule.text)}")
    return "\n".join(lines)


def _find_terminals(rules: dict[str, _Rule]) -> None:
    """Set `is_terminal` of the rules that refer to terminals only, or to no rule; never of recursive rules or `root`.

    Raises:
        ModelError: A rule refers to a name without a rule.
    """
    users: dict[str, list[_Rule]] = {name: [] for name in rules}
    missing: dict[str, int] = {}
    for rule in rules.values():
        names = {name for _, name in rule.references}
        for name in names:
            if name not in rules:
                raise ModelError(
                    f"structured outputs: the grammar has no rule named {name:.60}, which rule {rule.name:.60} uses: "
                    "add one"
                )
            users[name].append(rule)
        missing[rule.name] = len(names)
    ready = [rule for rule in rules.values() if not missing[rule.name] and rule.name != "root"]
    while ready:
        rule = ready.pop()
        rule.is_terminal = True
        for user in users[rule.name]:
            missing[user.name] -= 1
            if not missing[user.name] and user.name != "root":
                ready.append(user)


class _Reader:
    """Parser of a grammar in GBNF, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def read(self) -> dict[str, _Rule]:
        """Return all rules by name; a later rule replaces a rule of the same name.

        Raises:
            ModelError: The text is not GBNF.
        """
        rules: dict[str, _Rule] = {}
        numbers = count()
        self._skip(_BLANKS_AND_LINES)
        while self._position < len(self._text):
            rule = self._read_rule(next(numbers))
            rules[rule.name] = rule
            self._skip(_BLANKS_AND_LINES)
        return rules

    def _read_rule(self, number: int) -> _Rule:
        name = self._take(_NAME, "the name of a rule")[0]
        self._skip(_BLANKS)
        self._take(_DEFINES, "::=")
        self._skip(_BLANKS_AND_LINES)
        rule, depth, can_repeat, is_empty = _Rule(number, name), 0, False, True
        text = rule.text
        while True:
            start = self._position
            letter = self._text[start : start + 1]
            if letter == "" or (letter in "\r\n" and not depth):
                break
            if can_repeat and (repetition := _REPETITION.match(self._text, start)):
                self._position = repetition.end()
                text.append(_convert_repetition(repetition))
                can_repeat = False
            elif letter == '"':
                text.append(self._read_literal())
                can_repeat, is_empty = True, False
            elif letter == "[":
                text.append(self._read_class())
                can_repeat, is_empty = True, False
            elif letter == ".":
                self._position += 1
                text.append("/./")
                can_repeat, is_empty = True, False
            elif letter == "(":
                self._position += 1
                self._skip(_BLANKS_AND_LINES)
                text.append("(")
                depth, can_repeat, is_empty = depth + 1, False, True
            elif letter == ")" and depth:
                self._position += 1
                text += ['""', ")"] if is_empty else [")"]
                depth, can_repeat, is_empty = depth - 1, True, False
            elif letter == "|":
                self._position += 1
                self._skip(_BLANKS_AND_LINES)
                text += ['""', "|"] if is_empty else ["|"]
                can_repeat, is_empty = False, True
            else:
                rule.references.append((len(text), self._take(_NAME, "a symbol")[0]))
                text.append("")
                can_repeat, is_empty = True, False
            self._skip(_BLANKS_AND_LINES if depth else _BLANKS)
        if depth:
            raise self._make_error("a closing parenthesis")
        if is_empty:
            text.append('""')
        return rule

    def _read_literal(self) -> str:
        start = self._position + 1
        inner = self._take(_LITERAL, "the end of a literal")[1]
        return json.dumps(
            "".join(text for text, _ in self._read_characters(inner, start)), ensure_ascii=False
        )

    def _read_class(self) -> str:
        start = self._position + 1
        matched = self._take(_CLASS, "the end of a character class")
        characters = self._read_characters(matched[2], start + len(matched[1]))
        if not characters:
            self._position = start
            raise self._make_error("a character in a class")
        last = len(characters) - 1
        shown = [
            "-" if text == "-" and not is_escaped and 0 < index < last else _escape_class_character(text)
            for index, (text, is_escaped) in enumerate(characters)
        ]
        return f"/[{matched[1]}{''.join(shown)}]/"

    def _read_characters(self, inner: str, start: int) -> list[tuple[str, bool]]:
        """Return the characters of a literal or class, each with whether it was written as an escape.

        Args:
            inner: The text between the delimiters.
            start: Its index in the grammar, for errors.

        Raises:
            ModelError: An escape is unknown or stands for no character.
        """
        characters: list[tuple[str, bool]] = []
        position = 0
        for matched in _ESCAPE.finditer(inner):
            characters += [(text, False) for text in inner[position : matched.start()]]
            position = matched.end()
            digits = matched[1] or matched[2] or matched[3]
            code = int(digits, 16) if digits else 0
            if matched[5] or code > 0x10FFFF or 0xD800 <= code < 0xE000:
                self._position = start + matched.start()
                raise self._make_error("an escape such as \\n or \\x41")
            characters.append((chr(code) if digits else _CONTROLS.get(matched[4], matched[4]), True))
        return characters + [(text, False) for text in inner[position:]]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        matched = pattern.match(self._text, self._position)
        assert matched is not None, "blanks may be empty"
        self._position = matched.end()

    def _take(self, pattern: re.Pattern[str], wanted: str) -> re.Match[str]:
        matched = pattern.match(self._text, self._position)
        if matched is None:
            raise self._make_error(wanted)
        self._position = matched.end()
        return matched

    def _make_error(self, wanted: str) -> ModelError:
        line = self._text.count("\n", 0, self._position) + 1
        seen = self._text[self._position : self._position + 20]
        return ModelError(f"structured outputs: the grammar needs {wanted} in line {line}, before {seen!r}")


def _convert_repetition(matched: re.Match[str]) -> str:
    """Return a repetition (*, +, ? or braces) in Lark's notation, from a match of GBNF's."""
    least, comma, most = matched.groups()
    if least is None:
        return matched[0]
    return f"{{{least},{most or ''}}}" if comma else f"{{{least},{least}}}"


def _escape_class_character(text: str) -> str:
    """Return a character as it is written in a class of a regular expression, escaped unless a letter or digit."""
    return text if _PLAIN.match(text) else f"\\u{{{ord(text):x}}}"
