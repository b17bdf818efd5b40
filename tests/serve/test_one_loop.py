"""One prompt, seed and temperature give one text: by `nkw generate`, by `LLM` and by the server."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra serve")

from model import LLM, SamplingParams
from nkw.commands import main
from tests.serve.conftest import Served, serving

PROMPTS = [
    *("Once upon a time", "The sun was", "Tom had a red ball and", "Lily", "Once upon a time there was"),
    *(
        "A dog ran",
        "She said",
        "The big tree",
        "One day, a cat",
        "It was raining",
        "Ben and Mia",
        "He was sad",
    ),
    *("The bird", "They went to the park", "Mom made", "In the forest", "A little fish", "The king", "Sam"),
    "I want to play",
]
SEEDS = (0, 3, 41)
TEMPERATURES = (0.0, 0.8, 1.2)
TOKENS = 8
FEW = (PROMPTS[0], PROMPTS[2])
SAMPLES = {"few": (FEW, (3,), (0.0, 0.8)), "all": (PROMPTS, SEEDS, TEMPERATURES)}


@cache
def llm(ranks: int) -> LLM:
    return LLM(tensor_parallel_size=ranks, max_model_len=128)


def generated(
    prompts: tuple[str, ...], seed: int, temperature: float, ranks: int, folder: Path, *options: str
) -> list[str]:
    """Return the texts of `nkw generate`: contiguous caches, all prompts in one batch."""
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    words += ["--seed", str(seed), "--temperature", str(temperature), "--max-new-tokens", str(TOKENS)]
    document = folder / "generated.json"
    words += ["--tp", str(ranks), "--json", str(document), "--no-check", *options]
    assert main(["generate", *words]) == 0
    return [generation["text"] for generation in json.loads(document.read_text())["generations"]]


def served(server: Served, prompts: tuple[str, ...], seed: int, temperature: float) -> list[str]:
    """Return the texts that HTTP requests get."""
    answer = server.client().completions.create(
        model="stories", prompt=list(prompts), max_tokens=TOKENS, temperature=temperature, seed=seed
    )
    return [choice.text for choice in answer.choices]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sample", ["few", pytest.param("all", marks=pytest.mark.deep)])
def test_generate_llm_and_server_give_one_text(sample: str, ranks: int, tmp_path: Path) -> None:
    prompts, seeds, temperatures = SAMPLES[sample]
    prompts = tuple(prompts)
    with serving("--tp", str(ranks), "--max-model-len", "128") as server:
        for seed, temperature in product(seeds, temperatures):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS)
            outputs = llm(ranks).generate(list(prompts), params, use_tqdm=False)
            texts = [output.outputs[0].text for output in outputs]
            assert generated(prompts, seed, temperature, ranks, tmp_path) == texts
            assert served(server, prompts, seed, temperature) == texts


def test_seeds_and_temperatures_differ(tmp_path: Path) -> None:
    """Else the texts above would be equal whatever the samplers do; the numpy model draws the same tokens."""
    numpy = "--backend", "numpy"
    drawn = [generated(FEW, seed, 0.8, 1, tmp_path, *numpy) for seed in SEEDS]
    assert len({text for texts in drawn for text in texts}) == len(FEW) * len(SEEDS)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=TOKENS)
    outputs = llm(1).generate(list(FEW), params, use_tqdm=False)
    assert drawn[1] == [output.outputs[0].text for output in outputs]
