"""A model folder that says what it is told: after one of some words comes a text, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.model.folders import TINY, byte_tokenizer, random_weights

END = 2
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for each in messages %}{{ '' if loop.first else '\n' }}"
    "{{ each.role }}{{ each.tool_call_id or '' }}: {% if each.tool_calls %}{{ each.tool_calls | tojson }}{% endif %}"
    "{{ each.content }}{% endfor %}{{ mood or '' }}"
)
"""A conversation whose last word is the last message's."""


def write_scripted(folder: Path, scripts: Mapping[str, Sequence[str]], note: str = "") -> Path:
    """Write a folder whose model, after the word `word`, says the tokens `scripts[word]` and ends.

    Layers add nothing to the residual stream, embeddings are the unit vectors, and the head is a permutation. The
    tokens of all scripts differ. `note` stands in the chat template as a comment.
    """
    words = [token for word, continuation in scripts.items() for token in (word, *continuation)]
    assert len(set(words)) == len(words), "a token stands twice"
    tokenizer = byte_tokenizer(add_bos=False)
    first = tokenizer.get_vocab_size()
    assert tokenizer.add_tokens(words) == len(words), "a byte is no token of a script"
    config = TINY | {"vocab_size": first + len(words), "hidden_size": 64, "max_position_embeddings": 1024}
    weights = random_weights(config)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            weight[:] = 0
    weights["model.norm.weight"][:] = 1
    numbers = {word: number for number, word in enumerate(words)}
    weights["model.embed_tokens.weight"][first:, : len(words)] = np.eye(len(words))
    for word, continuation in scripts.items():
        chain = [word, *continuation]
        for before, after in pairwise(chain):
            weights["lm_head.weight"][first + numbers[after], numbers[before]] = 1
        weights["lm_head.weight"][END, numbers[chain[-1]]] = 1
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(f"{{# {note} #}}{TEMPLATE}", encoding="utf-8")
    return folder
