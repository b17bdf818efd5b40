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
    """Return a value that a JSON document may hold instead of the right one."""
    choice = draw.randrange(6)
    if choice == 0:
        return draw.choice(NUMBERS)
    if choice == 1:
        return draw.choice(FLOATS)
    if choice == 2:
        return draw.choice(WORDS)
    if choice == 3:
        return draw.choice((None, True, False))
    if choice == 4:
        return [value(draw) for _ in range(draw.randrange(4))]
    return {draw.choice(WORDS): value(draw) for _ in range(draw.randrange(3))}


def document(draw: random.Random, tree: Any) -> bytes:
    """Return a JSON document with one to three values changed, left out or doubled, or other text."""
    tree = copy.deepcopy(tree)
    literal = None
    for _ in range(draw.randint(1, 3)):
        parent, key = _somewhere(draw, tree)
        if parent is None:
            tree = value(draw)
            break
        how = draw.randrange(5)
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[draw.choice(WORDS)] = parent[key]
        elif how == 2:
            parent[key], literal = _PLACEHOLDER, draw.choice(LITERALS)
        elif how == 3 and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
            parent[key] = draw.choice((*NUMBERS, *FLOATS))
        else:
            parent[key] = value(draw)
    text = json.dumps(tree, ensure_ascii=draw.random() < 0.5)
    if literal is not None:
        text = text.replace(f'"{_PLACEHOLDER}"', literal)
    raw = text.encode(errors="surrogatepass")
    return content(draw, raw) if draw.random() < 0.15 else raw


def _somewhere(draw: random.Random, tree: Any) -> tuple[Any, Any]:
    """Return a random entry of a document: the object or list that contains it, and its key."""
    parent, key, inner = None, None, tree
    while isinstance(inner, (dict, list)) and inner:
        if parent is not None and draw.random() < 0.3:
            break
        parent = inner
        key = draw.choice(list(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        inner = parent[key]
    return parent, key


def content(draw: random.Random, raw: bytes) -> bytes:
    """Return bytes after a random cut, insertion, doubling or flip."""
    offset = draw.randrange(len(raw) + 1)
    how = draw.randrange(6)
    if how == 0:
        return raw[:offset]
    if how == 1:
        return raw + draw.randbytes(draw.choice((1, 7, 4096)))
    if how == 2:
        return raw[:offset] + draw.randbytes(draw.randint(1, 8)) + raw[offset:]
    if how == 3:
        return raw[:offset] + raw[offset + draw.randint(1, 64) :]
    if how == 4:
        return raw[:offset] + raw
    flipped = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        if flipped:
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def safetensors(draw: random.Random, raw: bytes) -> bytes:
    """Return a .safetensors file with a changed header, a wrong length of it, or other bytes."""
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
        field = draw.choice(("shape", "data_offsets", "dtype"))
        if field == "dtype":
            entry[field] = draw.choice(("F64", "I8", "F4", "BF16", "F16", "f32", ""))
        elif field == "shape":
            entry[field] = draw.choice(
                ([], [0], [1] * 65, [10**30], [2**40, 2**40], [1, *entry[field]], entry[field][::-1])
            )
        else:
            shift = draw.choice((-4, -1, 1, 4, 10**6, 2**63))
            entry[field] = (
                [number + shift for number in entry[field]] if draw.random() < 0.5 else entry[field][::-1]
            )
        changed = json.dumps(header).encode()
    elif how == 4:
        data = data + b"\0" * draw.choice((1, 4)) if draw.random() < 0.5 else data[: -draw.choice((1, 4))]
        changed = json.dumps(header).encode()
    else:
        changed = document(draw, header)
    return struct.pack("<Q", len(changed)) + changed + data


def source(draw: random.Random, text: str) -> bytes:
    """Return a Python file with an expression too long or too deep, a changed word, or other bytes."""
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
            [text, "def deep(x):", *(" " + line for line in lines), " " * 200 + "nl.load(x)"]
        ).encode()
    words = text.split(" ")
    for _ in range(draw.randint(1, 5)):
        words[draw.randrange(len(words))] = draw.choice(
            (*WORDS, "(", ")", ":", "lambda", "await", "\n", "None", "-1")
        )
    return " ".join(words).encode(errors="surrogatepass")
