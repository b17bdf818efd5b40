"""Layers with weights of 4 bits: one launch of a decode step, and requests of a batch get what they get alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model import LLM, SamplingParams
from model.loading.shipped import PRETRAINED
from nkw.commands import main

FIRST = np.random.default_rng(3).integers(3, 259, 40).tolist()
TEXTS = (FIRST[:30], [*FIRST[:17], 9, 11, 10], FIRST[20:29])
"""The second text shares four pages of four tokens with the first."""
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def create_llm(**changes: object) -> LLM:
    options = dict(block_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64)
    return LLM(PRETRAINED, quantization="int4", **{**options, **changes})


@pytest.mark.slow
def test_batched_and_chunked_requests_get_the_tokens_of_requests_alone() -> None:
    alone = create_llm(max_num_seqs=1, enable_prefix_caching=False)
    expected = [
        list(alone.generate({"prompt_token_ids": text}, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)
        for text in TEXTS
    ]
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    outputs = create_llm().generate(prompts, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.slow
@pytest.mark.parametrize("quantised_folder", [False, True])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_stories_of_4_bits_are_those_of_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: str, quantised_folder: bool
) -> None:
    """Quantised on loading, and written by `nkw quantize`."""
    words = ["--quantization", "int4"]
    if quantised_folder:
        folder = tmp_path / "int4"
        assert main(["quantize", str(PRETRAINED), "--scheme", "int4", "--out", str(folder)]) == 0
        words = ["--model", str(folder)]
    arguments = ["generate", *words, "--prompt", "Once upon a time", "--max-new-tokens", "6", "--tp", ranks]
    assert main(arguments) == 0
    assert "6 of 6" in capsys.readouterr().out
