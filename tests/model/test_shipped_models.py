"""The shipped models by name: tokens of transformers, in kernels and in the engine, and how large they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model import LLM, SamplingParams
from model.families import load_config
from model.loading.checkpoint import open_checkpoint
from model.loading.shipped import SHIPPED
from model.loading.tokenizer import Tokenizer
from model.runners.reference import ReferenceModel
from nkw.commands import main

NEW_TOKENS = 24
WRITERS = ("stories", "stories-moe")
PROMPT = "Lily had a dog"
MOST_BYTES = 10 * 10**6


def continued(folder: Path) -> str:
    """Return what the numpy reference writes behind the prompt, greedily."""
    config = load_config(folder)
    tokenizer, model = (
        Tokenizer(folder, config.vocab_size),
        ReferenceModel(config, open_checkpoint(folder, config)),
    )
    ids = tokenizer.encode(PROMPT)
    (step,) = model.prefill([ids])
    new = []
    while len(new) < NEW_TOKENS:
        new.append(step.likeliest)
        (step,) = model.decode([new[-1]], [len(ids) + len(new) - 1])
    return tokenizer.decode(new)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_text_is_that_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra of development (dev)")
    transformers = pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED[name], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED[name])
    ids = tokenizer("<|endoftext|>" + PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == continued(SHIPPED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_kernels_and_engine_write_the_same(name: str, capsys: Any) -> None:
    wanted = continued(SHIPPED[name])
    options = ["--model", name, "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS)]
    assert main(["generate", *options]) == 0
    report = capsys.readouterr().out
    assert report.startswith(PROMPT + wanted)
    assert f"{NEW_TOKENS} of {NEW_TOKENS} tokens equal" in report
    engine = LLM(name, max_num_seqs=2, max_model_len=64, num_pages=8)
    (output,) = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=NEW_TOKENS), use_tqdm=False)
    assert output.outputs[0].text == wanted


@pytest.mark.parametrize("name", SHIPPED)
def test_a_model_is_smaller_than_ten_megabytes(name: str) -> None:
    pattern = "**/*" if name == "shapes" else "*"
    assert sum(file.stat().st_size for file in SHIPPED[name].glob(pattern) if file.is_file()) < MOST_BYTES
