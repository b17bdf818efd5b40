"""Mutations of documents, bytes and words: seeded, and biased towards the values that have broken programs before."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 7, 127, 129, 10**5, 10**6, 2**31 - 1, 2**31, 10**15, 2**63, 10**30, 10**400)
FLOATS = (0.0, -0.0, 1e-320, 1e-45, 1e-30, 1.0000000000000002, 1e38, 1e39, 1e308, -1e308)
WORDS = (
    "",
    " ",
    "\x1b[31mred",
    "\u202eturned",
    "\x00",
    "a" * 300,
    "x" * 100_000,
    "../up",
    "é",
    "nan",
    "1e5",
    "[",
    "%s",
)
LITERALS = ("NaN", "Infinity", "-Infinity", "1e999", "[" * 5000, '"\\ud800"', "9" * 5000)
_PLACEHOLDER = "a literal stands here"


def value(draw: random.Random) -> Any:
    """A value that a JSON document may hold in a place where another one belongs."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice(NUMBERS)
    if kind == 1:
        return draw.choice(FLOATS)
    if kind == 2:
        return draw.choice(WORDS)
    if kind == 3:
        return draw.choice((None, True, False))
    if kind == 4:
        return [value(draw) for _ in range(draw.randrange(4))]
    return {draw.choice(WORDS): value(draw) for _ in range(draw.randrange(3))}


def document(draw: random.Random, whole: Any) -> bytes:
    """A JSON document with one to three of its values changed, left out or doubled; at times not JSON at all."""
    whole = copy.deepcopy(whole)
    literal = None
    for _ in range(draw.randint(1, 3)):
        place, key = _somewhere(draw, whole)
        if place is None:
            whole = value(draw)
            break
        how = draw.randrange(5)
        if how == 0:
            del place[key]
        elif how == 1 and isinstance(place, dict):
            place[draw.choice(WORDS)] = place[key]
        elif how == 2:
            place[key], literal = _PLACEHOLDER, draw.choice(LITERALS)
        elif how == 3 and isinstance(place[key], (int, float)) and not isinstance(place[key], bool):
            place[key] = draw.choice((*NUMBERS, *FLOATS))
        else:
            place[key] = value(draw)
    text = json.dumps(whole, ensure_ascii=draw.random() < 0.5)
    if literal is not None:
        text = text.replace(f'"{_PLACEHOLDER}"', literal)
    raw = text.encode(errors="surrogatepass")
    return content(draw, raw) if draw.random() < 0.15 else raw


def _somewhere(draw: random.Random, whole: Any) -> tuple[Any, Any]:
    """A random entry of a document, as the object or list that holds it and its key there."""
    place, key, inner = None, None, whole
    while isinstance(inner, (dict, list)) and inner:
        if place is not None and draw.random() < 0.3:
            break
        place = inner
        key = draw.choice(list(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        inner = place[key]
    return place, key


def content(draw: random.Random, raw: bytes) -> bytes:
    """Bytes that were cut, lengthened, doubled or flipped somewhere."""
    at = draw.randrange(len(raw) + 1)
    how = draw.randrange(6)
    if how == 0:
        return raw[:at]
    if how == 1:
        return raw + draw.randbytes(draw.choice((1, 7, 4096)))
    if how == 2:
        return raw[:at] + draw.randbytes(draw.randint(1, 8)) + raw[at:]
    if how == 3:
        return raw[:at] + raw[at + draw.randint(1, 64) :]
    if how == 4:
        return raw[:at] + raw
    flipped = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        if flipped:
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def safetensors(draw: random.Random, raw: bytes) -> bytes:
    """A .safetensors file with a changed header, a wrong length of it, or other bytes."""
    how = draw.randrange(6)
    if how == 0:
        return content(draw, raw)
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if how == 1:
        stated = draw.choice((0, length - 1, length + 1, length + 8, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", stated) + raw[8:]
    if how == 2:
        name = draw.choice(list(header))
        header[draw.choice((*WORDS, "model.norm.weight"))] = header.pop(name)
        changed = json.dumps(header).encode()
    elif how == 3:
        entry = header[draw.choice(list(header))]
        part = draw.choice(("shape", "data_offsets", "dtype"))
        if part == "dtype":
            entry[part] = draw.choice(("F64", "I8", "F4", "BF16", "F16", "f32", ""))
        elif part == "shape":
            entry[part] = draw.choice(
                ([], [0], [1] * 65, [10**30], [2**40, 2**40], [1, *entry[part]], entry[part][::-1])
            )
        else:
            shift = draw.choice((-4, -1, 1, 4, 10**6, 2**63))
            entry[part] = [each + shift for each in entry[part]] if draw.random() < 0.5 else entry[part][::-1]
        changed = json.dumps(header).encode()
    elif how == 4:
        data = data + b"\0" * draw.choice((1, 4)) if draw.random() < 0.5 else data[: -draw.choice((1, 4))]
        changed = json.dumps(header).encode()
    else:
        changed = document(draw, header)
    return struct.pack("<Q", len(changed)) + changed + data


def source(draw: random.Random, text: str) -> bytes:
    """A Python file with an expression too long or too deep, a changed word, or other bytes."""
    how = draw.randrange(5)
    if how == 0:
        return content(draw, text.encode())
    depth = draw.choice((50, 90, 500, 3000, 30_000))
    if how == 1:
        long = draw.choice(
            ("1" + "+1" * depth, "x" + ".y" * depth, "f(" * depth + ")" * depth, "-" * depth + "1")
        )
        return f"{text}\n@nki.jit\ndef long(x, f, y):\n    a = {long}\n    nl.load(a)\n".encode()
    if how == 2:
        lines = [f"{' ' * level}if x:" for level in range(min(depth, 120))]
        return "\n".join(
            [text, "def deep(x):", *(" " + each for each in lines), " " * 200 + "nl.load(x)"]
        ).encode()
    words = text.split(" ")
    for _ in range(draw.randint(1, 5)):
        words[draw.randrange(len(words))] = draw.choice(
            (*WORDS, "(", ")", ":", "lambda", "await", "\n", "None", "-1")
        )
    return " ".join(words).encode(errors="surrogatepass")
